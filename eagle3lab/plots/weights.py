"""Distribution of the weights of fc, one panel a capture point, beside the initialisation it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import colour, new_figure, styled


def weight_distribution(blocks: Sequence[Mapping[str, Any]]) -> Plot:
    """Density of the weights of every point block (filled) and of its initialisation (dashed).

    Args:
        blocks: one a point with `point`; `edges` [B + 1]; `density` [B]; `initial` [B] or None where no initialisation
            is known; `family`, its name; `std` and `initial_std`.
    """
    if not blocks:
        raise UsageError("fc with 0 point blocks", rule="at least one")
    with styled():
        figure, axes = new_figure(len(blocks), width=max(4.0, 3.0 * len(blocks)), height=3.2)
        for index, (axis, block) in enumerate(zip(axes, blocks, strict=True)):
            edges = np.asarray(block["edges"])
            axis.stairs(block["density"], edges, fill=True, color=colour(index), alpha=0.55, label="now")
            if block["initial"] is not None:
                axis.stairs(block["initial"], edges, color="#111111", linestyle="--", label=block["family"])
            axis.set_title(f"point {block['point']}")
            axis.set_xlabel("weight")
            axis.locator_params(axis="x", nbins=4)
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
        axes[0].set_ylabel("density")
    rows = [
        {
            "point": block["point"],
            "low": low,
            "high": high,
            "density": block["density"][i],
            "initial_density": None if block["initial"] is None else block["initial"][i],
        }
        for block in blocks
        for i, (low, high) in enumerate(zip(block["edges"][:-1], block["edges"][1:], strict=True))
    ]
    told = "; ".join(
        f"point {block['point']}: std {block['std']:.4g}"
        + ("" if block["initial_std"] is None else f", {block['family']} has {block['initial_std']:.4g}")
        for block in blocks
    )
    return Plot(figure, rows, "Weights of fc by point", f"Distribution of the weights of fc. {told}.")
