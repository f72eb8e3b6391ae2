"""What the weights of a drafter's `fc` show and what they cannot. Needs numpy alone; functional tests need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3lab.inspection.inspect import inspect_checkpoint
    from eagle3lab.inspection.report import Inspection
    from eagle3lab.inspection.words import answer_number_pair

__all__ = ["Inspection", "answer_number_pair", "inspect_checkpoint"]

_HOME = {
    "Inspection": "eagle3lab.inspection.report",
    "answer_number_pair": "eagle3lab.inspection.words",
    "inspect_checkpoint": "eagle3lab.inspection.inspect",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that importing the package reads nothing else."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
