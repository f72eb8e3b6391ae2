"""What the drafter reads: size of the residual stream by depth, norms at the capture points, lengths of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import HATCHES, PALETTE, colour, line_style, new_figure, styled


def residual_by_depth(norms: Sequence[float], points: Sequence[int]) -> Plot:
    """Median norm of the residual stream before every block, the capture points marked.

    Args:
        norms: [n], entry i belongs to `resid_pre[i]`.
        points: `resid_pre` indices that the drafter reads.
    """
    if any(not 0 <= point < len(norms) for point in points):
        raise UsageError(f"points {list(points)} and {len(norms)} norms", rule="0 <= point < blocks")
    with styled():
        figure, (axis,) = new_figure(height=3.4)
        axis.plot(range(len(norms)), norms, color="#4D4D4D", linewidth=1.5, zorder=1)
        for index, point in enumerate(points):
            style = line_style(index) | {"linestyle": "none", "markersize": 9}
            axis.plot([point], [norms[point]], label=f"capture point {point}", **style)
        axis.set(title="Residual stream by depth", xlabel="block i (state before it)", ylabel="median norm")
        axis.set_yscale("log")
        axis.legend()
    rows = [{"block": i, "median_norm": norm, "capture_point": i in points} for i, norm in enumerate(norms)]
    where = ", ".join(f"{norms[point]:.3g} at {point}" for point in points)
    alt = (
        f"Median norm of the residual stream before each of {len(norms)} blocks, from {norms[0]:.3g} at the first to "
        f"{norms[-1]:.3g} at the last. At the capture points: {where}."
    )
    return Plot(figure, rows, "Residual stream by depth", alt)


def capture_norms(points: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Plot:
    """Norms of the captured states at every point (left) and tokens of the replies (right).

    Args:
        points: one row a point with `point`, `p05`, `median`, `p95` of the token norms.
        lengths: [S] tokens of each reply.
    """
    if not points or not lengths:
        raise UsageError(f"{len(points)} points and {len(lengths)} samples", rule="both are there")
    with styled():
        figure, (left, right) = new_figure(2, width=7.4)
        names = [str(row["point"]) for row in points]
        medians = [row["median"] for row in points]
        spread = [[row["median"] - row["p05"] for row in points], [row["p95"] - row["median"] for row in points]]
        bars = left.bar(names, medians, color=PALETTE[: len(names)], edgecolor="#333333", linewidth=0.8)
        for bar, hatch in zip(bars, HATCHES, strict=False):
            bar.set_hatch(hatch)
        left.errorbar(names, medians, yerr=spread, fmt="none", ecolor="#222222", capsize=4)
        left.set(title="Norm of a captured state", xlabel="capture point", ylabel="norm, median and 5 to 95 %")
        left.set_yscale("log")
        right.hist(lengths, bins=min(40, max(5, len(set(lengths)))), color=colour(4), edgecolor="white")
        right.set(title="Length of the replies", xlabel="tokens", ylabel="replies")
    ordered = sorted(lengths)
    middle = ordered[len(ordered) // 2]
    rows = [{"point": str(r["point"]), "p05": r["p05"], "median": r["median"], "p95": r["p95"]} for r in points]
    told = ", ".join(f"{row['point']} {row['median']:.3g}" for row in points)
    alt = (
        f"Left: median norm of a captured state by point: {told}. Right: {len(lengths)} replies of {ordered[0]} to "
        f"{ordered[-1]} tokens, median {middle}."
    )
    return Plot(figure, rows, "Captured states", alt)
