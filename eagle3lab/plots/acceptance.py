"""Acceptance: by draft position with intervals, by set and control, by kind of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import colour, line_style, new_figure, styled


def accept_by_position(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Joint (left) and conditional (right) acceptance by draft position, one line a set of prompts.

    Args:
        rows: one a set and position with `set`, `position` (from 1), and for each of `joint` and `conditional` a value
            and `_low`, `_high` (95 % bootstrap over prompts); None where it was not measured.
    """
    if not rows:
        raise UsageError("acceptance of 0 positions", rule="at least one set was measured")
    sets = list(dict.fromkeys(row["set"] for row in rows))
    with styled():
        figure, axes = new_figure(2, width=7.6)
        for axis, key in zip(axes, ("joint", "conditional"), strict=True):
            for index, name in enumerate(sets):
                chosen = [row for row in rows if row["set"] == name and row[key] is not None]
                # Side by side, so that the bars of the intervals do not hide each other.
                x = [row["position"] + 0.06 * (index - (len(sets) - 1) / 2) for row in chosen]
                axis.plot(x, [row[key] for row in chosen], label=name, **line_style(index))
                known = [(at, row) for at, row in zip(x, chosen, strict=True) if row[f"{key}_low"] is not None]
                if known:
                    axis.vlines(
                        [at for at, _ in known],
                        [row[f"{key}_low"] for _, row in known],
                        [row[f"{key}_high"] for _, row in known],
                        color=colour(index),
                    )
            axis.set_ylim(0, 1)
            places = sorted({row["position"] for row in rows})
            axis.set_xticks(places)
            axis.set_xlim(places[0] - 0.3, places[-1] + 0.3)
            axis.set_xlabel("draft position")
        axes[0].set(title="Joint: this and all before", ylabel="share of verify steps")
        axes[1].set(title="Conditional: given all before", ylabel="share of those that reached it")
        axes[0].legend()
    parts = []
    for name in sets:
        joint = [row["joint"] for row in rows if row["set"] == name and row["joint"] is not None]
        parts.append(f"{name}: joint {', '.join(f'{value:.1%}' for value in joint)}")
    alt = "Acceptance by draft position with 95 % intervals. " + "; ".join(parts) + "."
    return Plot(figure, list(rows), "Acceptance by position", alt)


def accept_lengths(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Accept lengths as points with intervals, one line a measurement: sets, baselines, controls, kinds.

    Args:
        rows: `name`, `accept_length`, `low`, `high` (None: no interval), `group` (its rows share a colour).
    """
    shown = [row for row in rows if row["accept_length"] is not None]
    if not shown:
        raise UsageError("0 accept lengths", rule="at least one was measured")
    groups = list(dict.fromkeys(row["group"] for row in shown))
    with styled():
        figure, (axis,) = new_figure(height=max(2.2, 0.42 * len(shown) + 1.2))
        for place, row in enumerate(shown):
            style = line_style(groups.index(row["group"])) | {"linestyle": "none", "markersize": 7}
            axis.plot([row["accept_length"]], [place], **style)
            if row["low"] is not None:
                axis.hlines(place, row["low"], row["high"], color=style["color"], linewidth=2)
            axis.annotate(
                f"{row['accept_length']:.2f}",
                (row["accept_length"], place),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.axvline(1.0, color="#4D4D4D", linewidth=0.8)
        axis.set_yticks(range(len(shown)), [row["name"] for row in shown])
        axis.margins(x=0.08)
        axis.set_ylim(len(shown) - 0.4, -0.8)
        axis.set(title="Accept length (bonus token in)", xlabel="tokens per verify step; 1 = no draft was accepted")
    alt = "Accept lengths. " + "; ".join(
        f"{row['name']} {row['accept_length']:.2f}"
        + (f" ({row['low']:.2f} to {row['high']:.2f})" if row["low"] is not None else "")
        for row in shown
    )
    return Plot(figure, list(shown), "Accept lengths", alt + ".")
