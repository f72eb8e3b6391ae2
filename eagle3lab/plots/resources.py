"""What is there and what is needed: memory and disk before anything starts; where the time of a run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import colour, new_figure, styled


def needed_and_there(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Bars of what a run needs beside what the machine has, in GB.

    Args:
        rows: `resource`, `needed_gb`, `there_gb` (None: unknown).
    """
    if not rows:
        raise UsageError("0 resources", rule="at least one is compared")
    with styled():
        figure, (axis,) = new_figure(height=0.7 * len(rows) + 1.5)
        for place, row in enumerate(rows):
            if row["there_gb"] is not None:
                axis.barh(place - 0.18, row["there_gb"], 0.32, color=colour(4), label="there" if place == 0 else None)
                axis.annotate(f" {row['there_gb']:.1f}", (row["there_gb"], place - 0.18), va="center", fontsize=9)
            axis.barh(
                place + 0.18,
                row["needed_gb"],
                0.32,
                color=colour(1),
                hatch="//",
                label="needed" if place == 0 else None,
            )
            axis.annotate(f" {row['needed_gb']:.1f}", (row["needed_gb"], place + 0.18), va="center", fontsize=9)
        axis.set_yticks(range(len(rows)), [row["resource"] for row in rows])
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set(title="Needed and there", xlabel="GB")
        axis.legend()
    told = []
    for row in rows:
        there = "unknown" if row["there_gb"] is None else f"{row['there_gb']:.1f} GB"
        told.append(f"{row['resource']}: {row['needed_gb']:.1f} GB needed, {there} there")
    return Plot(figure, list(rows), "Needed and there", "; ".join(told) + ".")


def bars(rows: Sequence[Mapping[str, Any]], *, name: str, value: str, title: str, unit: str) -> Plot:
    """Horizontal bars of one number a name; `name` and `value` are the keys in `rows`."""
    if not rows:
        raise UsageError(f"{title}: 0 rows", rule="at least one bar")
    with styled():
        figure, (axis,) = new_figure(height=0.34 * len(rows) + 1.3)
        axis.barh([str(row[name]) for row in rows], [row[value] for row in rows], color=colour(0), height=0.6)
        for place, row in enumerate(rows):
            axis.annotate(f" {row[value]:,.4g}", (row[value], place), va="center", fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set(title=title, xlabel=unit)
    alt = f"{title} in {unit}: " + ", ".join(f"{row[name]} {row[value]:,.4g}" for row in rows) + "."
    return Plot(figure, list(rows), title, alt)
