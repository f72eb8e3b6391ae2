"""Figures of one inspection of fc: histogram, row and column norms, spectrum, energy by block, difference to another.

Every function takes plain numbers and returns a `Plot` with the plotted rows. Series differ in colour, in dashes or
hatches, and in their label, so that a grey print still tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.publish import Plot
from eagle3lab.plots.style import DASHES, HATCHES, MARKERS, colour, new_figure, styled

DARK = "#111111"
MOST_MARKS = 600
"""Columns drawn one by one; more are drawn as the band and the median of neighbours."""
MOST_ROWS = 120
"""The same for rows, where the lines of the points lie over each other."""


def weight_histogram(edges: Sequence[float], series: Sequence[Mapping[str, Any]], *, title: str, log: bool) -> Plot:
    """Density of weights, one step line a series, the first one filled.

    Args:
        edges: [B + 1] bin edges, shared by all series.
        series: each with `label` and `density` [B] (1/weight).
        log: logarithmic density axis; it shows tails beyond the bound of a uniform start.
    """
    if not series or any(len(s["density"]) != len(edges) - 1 for s in series):
        raise UsageError(f"{len(series)} series on {len(edges) - 1} bins", rule="at least one, one density a bin")
    x = np.asarray(edges, dtype=np.float64)
    with styled():
        figure, (axis,) = new_figure(width=6.4, height=3.8)
        for index, one in enumerate(series):
            values = np.asarray(one["density"], dtype=np.float64)
            shown = np.where(values > 0, values, np.nan) if log else values
            axis.stairs(values if not log else np.nan_to_num(shown, nan=0.0), x, fill=index == 0,
                        color=colour(0) if index == 0 else DARK, alpha=0.5 if index == 0 else 1.0,
                        linestyle=DASHES[index % len(DASHES)], linewidth=1.4, label=one["label"])  # fmt: skip
        if log:
            positive = np.concatenate([np.asarray(one["density"], dtype=np.float64) for one in series])
            positive = positive[positive > 0]
            axis.set_yscale("log")
            axis.set_ylim(bottom=float(positive.min()) / 2 if positive.size else 1e-3)
        else:
            axis.set_ylim(bottom=0)
        axis.set(title=title, xlabel="weight", ylabel="density")
        axis.legend(fontsize=8)
    rows = [
        {"low": low, "high": high, **{one["label"]: one["density"][i] for one in series}}
        for i, (low, high) in enumerate(pairwise(edges))
    ]
    names = ", ".join(one["label"] for one in series)
    return Plot(figure, rows, title, f"{title}: densities of {names} from {edges[0]:.4g} to {edges[-1]:.4g}.")


def norm_maps(
    rows: Sequence[Sequence[float]], columns: Sequence[float], *, points: Sequence[str],
    marked_rows: Sequence[int] = (), marked_columns: Sequence[int] = (), start: float | None = None,
) -> Plot:  # fmt: skip
    """Root mean square of every row (by block, left) and of every column (right), in index order.

    Args:
        rows: [P][R] root mean squares; columns: [C].
        points: names of the blocks, which divide the columns equally.
        marked_rows, marked_columns: indices to point at (reached by training, or zero).
        start: std of the initial family, drawn as a line, or None.
    """
    drawn: list[dict[str, Any]] = []
    with styled():
        figure, axes = new_figure(2, width=9.6, height=3.8)
        for index, (point, values) in enumerate(zip(points, rows, strict=True)):
            drawn += _band(axes[0], np.asarray(values), 0, index, f"point {point}", "row", MOST_ROWS)
        width = len(columns) // len(points)
        for index, point in enumerate(points):
            part = np.asarray(columns[index * width : (index + 1) * width])
            drawn += _band(axes[1], part, index * width, index, f"point {point}", "column", MOST_MARKS)
            if index:
                axes[1].axvline(index * width, color=DARK, linewidth=0.8)
        flat = np.max(np.asarray(rows), axis=0)
        _marks(axes[0], marked_rows, flat)
        _marks(axes[1], marked_columns, np.asarray(columns))
        for axis, what in zip(axes, ("row", "column"), strict=True):
            if start is not None:
                axis.axhline(start, color=DARK, linestyle=":", linewidth=1.2, label="std at the start")
            axis.set(title=f"Norm of every {what}", xlabel=what, ylabel="root mean square")
            axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.15)
            axis.legend(fontsize=8, ncols=2, loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    alt = (
        f"Root mean square of {len(flat):,} rows and {len(columns):,} columns of fc. "
        f"{len(marked_rows)} rows and {len(marked_columns)} columns are marked."
    )
    return Plot(figure, drawn, "Row and column norms of fc", alt)


def _band(
    axis: Any, values: np.ndarray, offset: int, index: int, label: str, kind: str, most: int
) -> list[dict[str, Any]]:
    """Median line and range of groups of neighbours; one value a group when there are few."""
    group = max(1, math.ceil(len(values) / most))
    parts = [values[i : i + group] for i in range(0, len(values), group)]
    x = offset + np.arange(len(parts)) * group
    low, middle, high = (np.array([f(p) for p in parts]) for f in (np.min, np.median, np.max))
    if group > 1:
        axis.fill_between(x, low, high, color=colour(index), alpha=0.25, linewidth=0)
    axis.plot(x, middle, color=colour(index), linestyle=DASHES[index % len(DASHES)], linewidth=0.9, label=label)
    return [
        {"kind": kind, "series": label, "from": int(start), "count": len(part), "low": float(a), "median": float(b),
         "high": float(c)}
        for start, part, a, b, c in zip(x, parts, low, middle, high, strict=True)
    ]  # fmt: skip


def _marks(axis: Any, indices: Sequence[int], values: np.ndarray) -> None:
    if len(indices):
        at = np.asarray(indices)
        axis.plot(at, values[at], linestyle="none", marker="v", markersize=5, markerfacecolor="none", color=DARK,
                  label="marked", zorder=3)  # fmt: skip


def spectrum(spectra: Sequence[Mapping[str, Any]]) -> Plot:
    """Share of singular values below x, one line a block, beside the law of independent entries.

    Args:
        spectra: each with `point`; `nodes` and `weights` [K] (quadrature, or all values with equal weights); `shape`;
            `std`; `low`, `high`: edges of the law; `outliers`: singular values above it.
    """
    if not spectra:
        raise UsageError("0 spectra", rule="at least one", fix="eagle3lab inspect CHECKPOINT --spectrum")
    drawn: list[dict[str, Any]] = []
    with styled():
        figure, axes = new_figure(len(spectra), width=max(4.2, 3.1 * len(spectra)), height=3.8)
        for index, (axis, one) in enumerate(zip(axes, spectra, strict=True)):
            order = np.argsort(one["nodes"])
            x, share = np.asarray(one["nodes"])[order], np.cumsum(np.asarray(one["weights"])[order])
            axis.step(x, share, where="post", color=colour(index), linewidth=1.6, label="fc")
            law_x, law = marchenko_pastur(one["shape"], one["std"])
            axis.plot(law_x, law, color=DARK, linestyle="--", linewidth=1.2, label="independent entries")
            for edge in (one["low"], one["high"]):
                axis.axvline(edge, color=DARK, linestyle=":", linewidth=0.9)
            outliers = np.asarray(one["outliers"])
            if outliers.size:
                axis.plot(outliers, np.full(len(outliers), 1.03), linestyle="none", marker="v", color=DARK,
                          markersize=5, label=f"{len(outliers)} outliers")  # fmt: skip
            axis.set(title=f"{one['point']}", xlabel="singular value", ylim=(0, 1.09))
            axis.legend(fontsize=8, loc="lower right")
            drawn += [{"point": one["point"], "singular_value": float(v), "share_below": float(s)}
                      for v, s in zip(x, share, strict=True)]  # fmt: skip
        axes[0].set_ylabel("share of singular values below")
    told = "; ".join(f"{one['point']}: {len(one['outliers'])} above the edge {one['high']:.4g}" for one in spectra)
    return Plot(
        figure, drawn, "Spectrum of fc", f"Singular values of fc against the law of independent entries. {told}."
    )


def marchenko_pastur(shape: Sequence[int], std: float, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """(singular values, share below them) of an [m, n] matrix of independent entries, m <= n rows counted.

    Density of an eigenvalue l of W W^T / n, with r = m / n and a, b = s^2 (1 -+ sqrt r)^2:
    sqrt((b - l)(l - a)) / (2 pi r s^2 l).
    """
    m, n = min(shape), max(shape)
    ratio = m / n
    low, high = std**2 * (1 - math.sqrt(ratio)) ** 2, std**2 * (1 + math.sqrt(ratio)) ** 2
    # Square-root singularities at both ends: an arc-sine grid resolves them.
    t = np.linspace(0, math.pi, count)
    value = (low + high) / 2 - (high - low) / 2 * np.cos(t)
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.sqrt(np.maximum((high - value) * (value - low), 0)) / (2 * math.pi * ratio * std**2 * value)
        step = density * (high - low) / 2 * np.sin(t)
    step = np.nan_to_num(step, nan=0.0, posinf=0.0)
    share = np.concatenate(([0.0], np.cumsum((step[1:] + step[:-1]) / 2 * np.diff(t))))
    return np.sqrt(np.maximum(value, 0) * n), share / share[-1]


def block_energy(blocks: Sequence[Mapping[str, Any]]) -> Plot:
    """Share of fc's energy by point (left) and implied size of the update (right), with intervals over rows.

    Args:
        blocks: each with `point`, `share`, `share_interval`; `update` and `update_interval`, None where no start is
            known.
    """
    with styled():
        known = [b for b in blocks if b.get("update") is not None]
        figure, axes = new_figure(2 if known else 1, width=8.4 if known else 4.4, height=3.6)
        _bars(axes[0], blocks, "share", "share_interval")
        axes[0].axhline(1 / len(blocks), color=DARK, linestyle=":", label="equal shares")
        axes[0].set(title="Energy of fc by point", xlabel="point", ylabel="share of the squared norm")
        axes[0].set_ylim(0, 1.25 * max(b["share_interval"][1] for b in blocks))
        axes[0].legend(fontsize=8)
        if known:
            _bars(axes[1], known, "update", "update_interval")
            axes[1].axhline(0, color=DARK, linewidth=0.8)
            axes[1].set(title="Implied update", xlabel="point", ylabel="update / start (RMS, from std)")
    rows = [
        {"point": b["point"], "share": b["share"], "share_low": b["share_interval"][0],
         "share_high": b["share_interval"][1], "update": b.get("update"),
         "update_low": (b.get("update_interval") or (None, None))[0],
         "update_high": (b.get("update_interval") or (None, None))[1]}
        for b in blocks
    ]  # fmt: skip
    told = ", ".join(f"point {b['point']} {b['share']:.1%}" for b in blocks)
    return Plot(figure, rows, "Energy of fc by point", f"Share of the squared norm of fc: {told}.")


def _bars(axis: Any, blocks: Sequence[Mapping[str, Any]], key: str, interval: str) -> None:
    for index, block in enumerate(blocks):
        value, (low, high) = block[key], block[interval]
        axis.bar(index, value, color=colour(index), hatch=HATCHES[index % len(HATCHES)], alpha=0.8, width=0.65)
        axis.errorbar(index, value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=DARK, capsize=4)
    axis.set_xticks(range(len(blocks)), [str(block["point"]) for block in blocks])


def difference(
    blocks: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[float]], columns: Sequence[Sequence[float]], *,
    against: str,
) -> Plot:  # fmt: skip
    """How far fc lies from another fc: by block (left), and over sorted rows and columns of each block.

    Args:
        blocks: each with `point`, `relative` (|difference| / |other|) and `cosine`.
        rows: [P][R], columns: [P][W]: relative difference of every row and column of a block.
        against: what it was compared with.
    """
    drawn: list[dict[str, Any]] = []
    share = np.linspace(0, 1, 101)
    with styled():
        figure, axes = new_figure(3, width=11.0, height=3.6)
        for index, block in enumerate(blocks):
            axes[0].bar(index, block["relative"], color=colour(index), hatch=HATCHES[index % len(HATCHES)], alpha=0.8)
            axes[0].annotate(f"cos {block['cosine']:.3f}", (index, block["relative"]), ha="center", va="bottom",
                             fontsize=8)  # fmt: skip
            drawn.append({"kind": "block", "point": block["point"], "share": None, "relative": block["relative"]})
            for axis, kind, values in ((axes[1], "row", rows[index]), (axes[2], "column", columns[index])):
                quantiles = np.quantile(np.asarray(values), share)
                axis.plot(share, quantiles, color=colour(index), linestyle=DASHES[index % len(DASHES)],
                          marker=MARKERS[index % len(MARKERS)], markevery=20, markersize=4,
                          label=f"point {block['point']}")  # fmt: skip
                drawn += [{"kind": kind, "point": block["point"], "share": float(s), "relative": float(q)}
                          for s, q in zip(share, quantiles, strict=True)]  # fmt: skip
        axes[0].set_xticks(range(len(blocks)), [str(block["point"]) for block in blocks])
        axes[0].set(title=f"Against {against}", xlabel="point", ylabel="|difference| / |other|")
        axes[0].margins(y=0.15)
        for axis, kind in ((axes[1], "rows"), (axes[2], "columns")):
            axis.set(title=f"Sorted {kind}", xlabel=f"share of {kind} that moved less", ylabel="relative difference")
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=8)
    told = ", ".join(f"point {b['point']} by {b['relative']:.3g} (cosine {b['cosine']:.3f})" for b in blocks)
    return Plot(figure, drawn, f"Difference of fc to {against}", f"fc differs from {against}: {told}.")
