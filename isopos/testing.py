"""Assertions for test suites of other projects."""

from typing import Any

from isopos.audit.run import audit

__all__ = ["assert_positions"]


def assert_positions(model: Any, *args: Any, **options: Any) -> None:
    """Raise AssertionError with the report of an audit unless the positions of a model are sound.

    Args:
        model: As for `isopos.audit`, with the same further arguments.

    Examples:
        >>> import torch
        >>> assert_positions(torch.nn.Linear(4, 4), example=torch.randn(1, 12, 4), checks=["order"])
        Traceback (most recent call last):
            ...
        AssertionError: Linear: positions could not be measured: no check of positions applies
        ...
    """
    report = audit(model, *args, **options)
    if not report.sound:
        raise AssertionError(str(report))
