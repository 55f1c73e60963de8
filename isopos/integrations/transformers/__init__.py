"""Models of Hugging Face's transformers with any scheme (extra ``hf``): `patch`, `unpatch` and `patched`."""

from isopos.integrations.transformers.patching import patch, patched, unpatch

__all__ = ["patch", "patched", "unpatch"]
