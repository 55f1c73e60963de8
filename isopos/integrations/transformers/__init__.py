"""Models of Hugging Face's transformers with any scheme (extra ``hf``), and ours as one of them.

`patch`, `unpatch`, `patched` and `load` put a scheme into a model of theirs, and `rotary_scheme` is the one that it has.
`over` runs one over a group of processes. `IsoposForCausalLM` is a model of ours, which their Auto classes know, and
`from_decoder` makes it of a trained `isopos.Decoder`. `converted`, `distances` and `transferred` are for the way from
softmax to linear attention, by schemes of `linear_scheme`. `convert_layout` and `absorb` are the functions of `isopos.nn`
for a whole checkpoint. The first use of a name imports transformers, which takes seconds, and makes our attention and our
model known to it.
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
    importlib.import_module(f"{__name__}.attention").register()
    known = {
        name: getattr(part, name)
        for part in (importlib.import_module(f"{__name__}.{own}") for own in _PARTS)
        for name in part.__all__
    }
    return known[name]
