"""Training curves: loss and accuracy of every TTT step, held-out accept length, and how far fc moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import line_style, new_figure, styled

BY_STEP = ("loss_by_step", "accuracy_by_step")
SMOOTH_SHARE = 28
"""A line's running mean takes this part of its rows."""


def running_mean(values: Sequence[float | None], width: int) -> list[float]:
    """Mean of each value and up to `width` - 1 before it; unknown ones are left out, NaN where all are."""
    windows = ([v for v in values[max(0, i + 1 - width) : i + 1] if v is not None] for i in range(len(values)))
    return [sum(window) / len(window) if window else float("nan") for window in windows]


def training_curves(history: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]] = ()) -> Plot:
    """Loss (left) and accuracy (right) over optimiser steps, one line a TTT step; held-out accept length on the right.

    A row may speak of a single batch, so the lines are running means of some rows, with the rows themselves faint.

    Args:
        history: rows with `step`, `loss_by_step` [K] and `accuracy_by_step` [K]; out-of-vocabulary targets count as
            misses in the accuracy.
        held_out: rows with `step` and `simulated_accept_length` (bonus token in), or none.
    """
    if not history:
        raise UsageError("a training of 0 logged steps", rule="the history has a row")
    steps = [row["step"] for row in history]
    depth = len(history[0]["accuracy_by_step"])
    panels = 3 if held_out else 2
    width = max(1, len(history) // SMOOTH_SHARE)
    losses, accuracies = ([[row[name][k] for row in history] for k in range(depth)] for name in BY_STEP)
    smooth = [[running_mean(values, width) for values in curves] for curves in (losses, accuracies)]
    with styled():
        figure, axes = new_figure(panels, width=3.6 * panels, height=3.4)
        for k in range(depth):
            style = line_style(k) | {"markevery": max(1, len(steps) // 12)}
            label = f"TTT step {k + 1}"
            for axis, raw, means in zip(axes, (losses, accuracies), smooth, strict=False):
                axis.plot(steps, means[k], label=label, **style)
                if width > 1:
                    axis.plot(steps, raw[k], color=style["color"], linewidth=0.5, alpha=0.25)
        axes[0].set(title="Loss on training batches", xlabel="optimiser step", ylabel="loss (nats)")
        axes[1].set(title="Accuracy on training batches", xlabel="optimiser step", ylabel="share of tokens right")
        axes[1].set_ylim(0, max(0.05, *axes[1].get_ylim()))
        axes[0].legend()
        if held_out:
            style = line_style(depth)
            lengths = [row["simulated_accept_length"] for row in held_out]
            axes[2].plot([row["step"] for row in held_out], lengths, **style)
            axes[2].axhline(1.0, color="#4D4D4D", linewidth=0.8)
            axes[2].set(title="Held-out replay", xlabel="optimiser step", ylabel="accept length (bonus in)")
            axes[2].set_ylim(bottom=0.95)
    rows = [
        {
            "step": row["step"],
            **{f"loss_{k + 1}": row["loss_by_step"][k] for k in range(depth)},
            **{f"accuracy_{k + 1}": row["accuracy_by_step"][k] for k in range(depth)},
        }
        for row in history
    ]
    drawn = f", drawn as running means of {width} rows" if width > 1 else ""
    first, last = smooth[1][0], smooth[1][-1]
    alt = (
        f"Training curves over {steps[-1]} steps{drawn}. Accuracy of the first drafted token went from "
        f"{first[0]:.1%} to {first[-1]:.1%}, of token {depth} from {last[0]:.1%} to {last[-1]:.1%}."
    )
    if held_out:
        start, end = held_out[0], held_out[-1]
        alt += (
            f" Replayed on held-out text the accept length went from {start['simulated_accept_length']:.2f} to "
            f"{end['simulated_accept_length']:.2f}."
        )
    return Plot(figure, rows, "Training curves", alt)


def fc_trajectory(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """How far each point block of fc is from its start, over the snapshots of a training.

    Args:
        rows: `step`, `point`, `moved` = |W - W0| / |W0| of that block of columns.
    """
    points = list(dict.fromkeys(row["point"] for row in rows))
    if len({row["step"] for row in rows}) < 2:
        raise UsageError(f"{len(rows)} rows of fc snapshots", rule="at least two snapshots show a way")
    with styled():
        figure, (axis,) = new_figure(height=3.4)
        for index, point in enumerate(points):
            # A block that starts near zero moves by hundreds of times its size: logarithmic, without the start (0).
            chosen = [row for row in rows if row["point"] == point and row["moved"]]
            steps, moved = [row["step"] for row in chosen], [row["moved"] for row in chosen]
            axis.plot(steps, moved, label=f"point {point}", **line_style(index))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set(title="How far fc moved", xlabel="optimiser step", ylabel="change / size at the start")
        axis.legend()
    last = max(row["step"] for row in rows)
    ends = {row["point"]: row["moved"] for row in rows if row["step"] == last}
    told = ", ".join(f"{'unknown' if m is None else f'{m:.3g}'} at point {point}" for point, m in ends.items())
    return Plot(
        figure, list(rows), "How far fc moved", f"Change of fc after {last} steps, over its size at the start: {told}."
    )
