"""Deprecated name of `isopos.phases`."""

from isopos.deprecation import renamed

_NAMES = {"Forget": "ForgetGate", "Path": "ContentPhase", "Turn": "SelectiveRotation", "along": "cumulative"}
__getattr__ = renamed(__name__, {old: f"isopos.phases.{new}" for old, new in _NAMES.items()})
