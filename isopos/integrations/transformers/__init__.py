"""Models of Hugging Face's transformers with any scheme (extra ``hf``), and ours as one of them.

`patch`, `unpatch`, `patched` and `load` put a scheme into a model of theirs; `IsoposForCausalLM` is one of ours, which their
Auto classes know, and `from_decoder` makes it of a trained `isopos.Decoder`. The first use of a name imports transformers,
which takes seconds, and makes our attention and our model known to it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isopos.integrations.transformers.model import IsoposConfig, IsoposForCausalLM, StateLayer, from_decoder
    from isopos.integrations.transformers.patching import load, patch, patched, unpatch

__all__ = ["IsoposConfig", "IsoposForCausalLM", "StateLayer", "from_decoder", "load", "patch", "patched", "unpatch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attention, model, patching = (
        importlib.import_module(f"{__name__}.{part}") for part in ("attention", "model", "patching")
    )
    attention.register()
    known = {name: getattr(part, name) for part in (patching, model) for name in part.__all__}
    return known[name]
