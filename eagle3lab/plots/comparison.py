"""Runs side by side: paired differences from a baseline, and what accept length costs in training time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import colour, line_style, new_figure, styled

NAMED = 16
"""Points of the Pareto front that are listed beside the figure; all are in its data."""
WIDE = 5
"""Training times that span more than this factor are drawn on a logarithmic axis."""


def differences(rows: Sequence[Mapping[str, Any]], baseline: str) -> Plot:
    """Accept length minus that of the baseline on the same prompts, one panel a set, one line a run.

    Args:
        rows: `set`, `run`, `difference`, `low`, `high` (95 % paired bootstrap over prompts; None: one common prompt),
            `prompts`.
    """
    if not rows:
        raise UsageError("0 paired differences", rule="at least one run beside the baseline")
    sets = list(dict.fromkeys(row["set"] for row in rows))
    runs = list(dict.fromkeys(row["run"] for row in rows))
    with styled():
        figure, axes = new_figure(len(sets), width=3.4 + 2.9 * len(sets), height=max(2.2, 0.32 * len(runs) + 1.4))
        for axis, name in zip(axes, sets, strict=True):
            for row in (row for row in rows if row["set"] == name):
                place = runs.index(row["run"])
                clear = row["low"] is not None and not row["low"] <= 0 <= row["high"]
                style = line_style(0 if clear else 7) | {"linestyle": "none", "markersize": 6}
                if row["low"] is not None:
                    axis.hlines(place, row["low"], row["high"], color=style["color"], linewidth=2)
                axis.plot([row["difference"]], [place], **style)
            axis.axvline(0.0, color="#4D4D4D", linewidth=0.8)
            axis.set(
                title=f"{name}: minus baseline", xlabel="difference of accept length", ylim=(len(runs) - 0.5, -0.5)
            )
            axis.set_yticks(range(len(runs)), runs if axis is axes[0] else [""] * len(runs))
            axis.margins(x=0.1)
    told = "; ".join(f"{row['set']}, {row['run']}: {_signed(row)}" for row in rows)
    alt = f"Differences of accept length from the baseline {baseline}, paired by prompt. {told}."
    return Plot(figure, list(rows), "Difference from the baseline", alt)


def _signed(row: Mapping[str, Any]) -> str:
    ends = "no interval" if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
    return f"{row['difference']:+.3f} ({ends})"


def cost_and_length(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Accept length against training time; the stairs join the runs that no other beats in both.

    Args:
        rows: `run`, `training_seconds`, `accept_length`, `low`, `high` (None: no interval), `front` (bool).
    """
    if not rows:
        raise UsageError("0 runs with a training time and an accept length", rule="at least one")
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["training_seconds"])
    with styled():
        figure, (axis,) = new_figure(width=8.4, height=4.0)
        for row in rows:
            style = line_style(0 if row["front"] else 7) | {"linestyle": "none", "markersize": 8 if row["front"] else 5}
            if row["low"] is not None:
                axis.vlines(row["training_seconds"], row["low"], row["high"], color=style["color"], linewidth=1.2)
            axis.plot([row["training_seconds"]], [row["accept_length"]], **style)
        axis.plot(
            [row["training_seconds"] for row in front],
            [row["accept_length"] for row in front],
            color=colour(0),
            linewidth=1,
            linestyle="--",
            drawstyle="steps-post",
        )
        for place, row in enumerate(front, 1):
            at = (row["training_seconds"], row["accept_length"])
            axis.annotate(str(place), at, xytext=(5, 5), textcoords="offset points", fontsize=8)
        names = [f"{place}  {row['run']}" for place, row in enumerate(front[:NAMED], 1)]
        names += [f"and {len(front) - NAMED} more"] if len(front) > NAMED else []
        axis.text(1.03, 1.0, "\n".join(names), transform=axis.transAxes, va="top", fontsize=8)
        seconds = [row["training_seconds"] for row in rows]
        if 0 < WIDE * min(seconds) < max(seconds):
            axis.set_xscale("log")
            for which in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
                which(lambda value, _: f"{value:g}")
        axis.margins(x=0.1, y=0.15)
        axis.set(title="Training time and accept length", xlabel="training time (s)", ylabel="accept length (bonus in)")
    told = "; ".join(f"{row['run']}: {row['training_seconds']:.0f} s, {row['accept_length']:.2f}" for row in front)
    alt = f"Accept length against training time of {len(rows)} runs. Not beaten in both: {told}."
    return Plot(figure, list(rows), "Training time and accept length", alt)
