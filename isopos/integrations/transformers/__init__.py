"""Models of Hugging Face's transformers with any scheme (extra ``hf``): `patch`, `unpatch`, `patched` and `load`.

The first use of a name imports transformers, which takes seconds, and makes our attention known to it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isopos.integrations.transformers.patching import load, patch, patched, unpatch

__all__ = ["load", "patch", "patched", "unpatch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from isopos.integrations.transformers import attention, patching

    attention.register()
    return getattr(patching, name)
