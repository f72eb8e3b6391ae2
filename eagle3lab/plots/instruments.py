"""What a training says of itself while it runs: loss, expected accept length, gradient norm, and how fc changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import line_style, new_figure, styled


def training_instruments(history: Sequence[Mapping[str, Any]], points: Sequence[int]) -> Plot:
    """Four panels over optimiser steps.

    Args:
        history: rows with `step`, `loss`, `simulated_accept_length`, `gradient_norm` and `fc_std_ratio_by_point` [P].
        points: names of fc's column blocks, ascending.
    """
    if not history:
        raise UsageError("a training of 0 logged steps", rule="the history has a row")
    steps = [row["step"] for row in history]
    single = {"loss": "Loss", "simulated_accept_length": "Accept length, training", "gradient_norm": "Gradient norm"}
    units = {"loss": "nats", "simulated_accept_length": "bonus in, teacher-forced", "gradient_norm": "before clipping"}
    every = max(1, len(steps) // 12)
    with styled():
        figure, axes = new_figure(4, width=13.0, height=2.9)
        for axis, (name, title) in zip(axes, single.items(), strict=False):
            axis.plot(steps, [row[name] for row in history], **(line_style(0) | {"markevery": every}))
            axis.set(title=title, xlabel="optimiser step", ylabel=units[name])
        axes[1].axhline(1.0, color="#4D4D4D", linewidth=0.8)
        axes[2].set_yscale("log")
        for index, point in enumerate(points):
            ratios = [row["fc_std_ratio_by_point"][index] for row in history]
            axes[3].plot(steps, ratios, label=f"point {point}", **(line_style(index) | {"markevery": every}))
        axes[3].axhline(1.0, color="#4D4D4D", linewidth=0.8)
        axes[3].set(title="Spread of fc's weights", xlabel="optimiser step", ylabel="std / std at the start")
        axes[3].set_yscale("log")
        axes[3].legend()
    rows = [
        {
            "step": row["step"],
            **{name: row[name] for name in single},
            **{f"fc_{point}": row["fc_std_ratio_by_point"][index] for index, point in enumerate(points)},
        }
        for row in history
    ]
    last = history[-1]
    fc = ", ".join(f"{ratio:.2f} at point {p}" for ratio, p in zip(last["fc_std_ratio_by_point"], points, strict=True))
    alt = (
        f"Training after {last['step']} steps: loss {last['loss']:.2f} (it began at {history[0]['loss']:.2f}), accept "
        f"length on training text {last['simulated_accept_length']:.2f}, gradient norm {last['gradient_norm']:.2g}; "
        f"spread of fc's weights against the start {fc}."
    )
    return Plot(figure, rows, "Training instruments", alt)
