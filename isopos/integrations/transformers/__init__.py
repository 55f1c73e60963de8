"""Models of Hugging Face's transformers with any scheme (extra ``hf``), and ours as one of them.

`patch`, `unpatch`, `patched` and `load` put a scheme into a model of transformers; `rotary_scheme` reads the scheme that a
model already has. `over` runs a model over a group of processes. `IsoposForCausalLM` is our language model as one of
transformers, with support in its Auto classes; `from_decoder` builds it from a trained `isopos.Decoder`. `linear_scheme`,
`converted`, `distances` and `transferred` convert softmax attention to linear attention. `convert_layout` and `absorb` apply
the functions of `isopos.nn` to a whole checkpoint. The first use of a name imports transformers, which takes seconds, and
registers our attention and our model there.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isopos.integrations.transformers.conversion import converted, distances, linear_scheme, transferred
    from isopos.integrations.transformers.layouts import absorb, convert_layout
    from isopos.integrations.transformers.model import IsoposConfig, IsoposForCausalLM, StateLayer, from_decoder
    from isopos.integrations.transformers.native import rotary_scheme
    from isopos.integrations.transformers.patching import load, patch, patched, unpatch
    from isopos.integrations.transformers.sharding import cut_labels, over

_PARTS = ("patching", "native", "layouts", "conversion", "model", "sharding")

__all__ = ["IsoposConfig", "IsoposForCausalLM", "StateLayer", "absorb", "convert_layout", "from_decoder", "load", "patch"]
__all__ += ["converted", "cut_labels", "distances", "linear_scheme", "over", "patched", "rotary_scheme", "transferred"]
__all__ += ["unpatch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.attention").register_attention()
    parts = [importlib.import_module(f"{__name__}.{part}") for part in _PARTS]
    return next(getattr(part, name) for part in parts if hasattr(part, name))
