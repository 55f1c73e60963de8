"""Models of Hugging Face's transformers with any scheme (extra ``hf``): `patch`, `unpatch`, `patched` and `load`."""

import sys

from isopos.integrations.transformers.attention import register
from isopos.integrations.transformers.patching import load, patch, patched, unpatch

__all__ = ["load", "patch", "patched", "unpatch"]

if "transformers" in sys.modules:  # importing it takes seconds
    register()
