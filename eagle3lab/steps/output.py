"""What a step hands back to the command line and to a notebook: text, JSON and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Outcome(Protocol):
    """Result of a step. `cli.py` prints `as_json()` or `as_text()` and exits with `exit_code`."""

    @property
    def exit_code(self) -> int:
        """0 good, 1 errors found or a gate failed."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Plain data; keys are added over time, never renamed."""
        ...

    def as_text(self) -> str:
        """The same for a terminal, without a final newline."""
        ...


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned plain text columns; None prints as `unknown`."""
    cells = [list(head), *(["unknown" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
