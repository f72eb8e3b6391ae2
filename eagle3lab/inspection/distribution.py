"""The distribution of one set of weights over the cells of its number format, and how far it is from a family's.

Distances are effect sizes on bins a sixteenth of a standard deviation wide: total variation (half the summed
difference of shares). At 154 million entries every test rejects something, so no p-value is computed; `noise` is the
distance that sampling alone is expected to give at this size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from eagle3lab.inspection.families import Family
from eagle3lab.inspection.formats import grid
from eagle3lab.inspection.moments import Moments, moments
from eagle3lab.inspection.scan import Scan

BINS_PER_STD = 16
SPAN = 8.0
"""Bins reach this many standard deviations to each side; the outermost take the rest."""
SMALLEST_SHRINK = 0.6
"""Weight decay that leaves less of the start than this is not told from another start."""
LARGEST_RATIO = 3.0
"""std over the family's above which no update is fitted."""


@dataclass(frozen=True)
class Distribution:
    """values, counts [G] ascending; edges [G + 1]; moments of what is counted; dropped: entries left out on purpose."""

    values: np.ndarray
    counts: np.ndarray
    edges: np.ndarray
    moments: Moments
    dropped: int = 0

    @property
    def n(self) -> int:
        """Entries counted."""
        return int(self.counts.sum())

    def above(self, bound: float) -> int:
        """Entries with a magnitude larger than `bound`."""
        return int(self.counts[np.abs(self.values) > bound].sum())

    def distinct(self) -> int:
        """Number of different values."""
        return int(np.count_nonzero(self.counts))

    def bins(self) -> Bins:
        """Coarse bins whose edges are edges of the grid, so that a rounded null has exact probabilities."""
        s = self.moments.std
        if not s > 0:
            raise ValueError("a constant distribution has no bins")
        marks = np.linspace(-SPAN * s, SPAN * s, int(2 * SPAN * BINS_PER_STD) + 1)
        cut = np.searchsorted(marks, self.values)
        starts = np.flatnonzero(np.concatenate(([True], np.diff(cut) > 0)))
        edges = np.concatenate((self.edges[starts], self.edges[-1:]))
        return Bins(edges, np.add.reduceat(self.counts, starts), starts)


@dataclass(frozen=True)
class Bins:
    """edges [K + 1], counts [K], starts [K]: first cell of the grid in each bin."""

    edges: np.ndarray
    counts: np.ndarray
    starts: np.ndarray

    def distance(self, probability: np.ndarray) -> float:
        """Total variation between the observed shares and `probability` [K]."""
        return 0.5 * float(np.abs(self.counts / self.counts.sum() - probability).sum())

    def noise(self) -> float:
        """Expected total variation of a sample of this size from its own distribution."""
        share = self.counts / self.counts.sum()
        return 0.5 * float(np.sqrt(2 * share * (1 - share) / (math.pi * self.counts.sum())).sum())


def distribution(scan: Scan, block: int | None = None, *, diagonal: bool = True, dead: bool = True) -> Distribution:
    """Distribution of a point block, or of the whole matrix.

    Args:
        diagonal: False leaves out the entries w[i, start + i] of the block.
        dead: False leaves out rows and columns that are zero throughout: they say nothing about the rest.
    """
    g = grid(scan.grid_fmt)
    values, counts = scan.cells(block)
    blocks = range(len(scan.layout.widths)) if block is None else [block]
    gone: list[np.ndarray] = []
    if not diagonal:
        gone += [scan.diagonal[b, : min(scan.shape[0], scan.layout.widths[b])] for b in blocks]
    if not dead:
        gone += [np.zeros(_dead_entries(scan, b), dtype=np.float32) for b in blocks]
    removed = np.concatenate(gone) if gone else np.zeros(0, dtype=np.float32)
    removed = removed[np.isfinite(removed)]
    edges = g.edges * scan.scale
    if removed.size:
        cell = np.searchsorted(edges, removed.astype(np.float64), side="right") - 1
        counts = counts - np.bincount(cell, minlength=len(counts))
    if scan.exact:
        found = moments(values, counts)
    elif removed.size:
        found = scan.block_sums(block).without(removed).moments()
    else:
        found = scan.block_moments(block) if block is not None else scan.pooled_moments()
    return Distribution(values, counts, edges, found, dropped=int(removed.size))


def _dead_entries(scan: Scan, block: int) -> int:
    """Entries in rows (of this block) and columns that are zero throughout."""
    start, stop = scan.layout.starts[block], scan.layout.starts[block + 1]
    rows = int((scan.rows.peak[:, block] == 0).sum())
    columns = int((scan.columns.peak[start:stop] == 0).sum())
    return rows * (stop - start) + columns * scan.shape[0] - rows * columns


@dataclass(frozen=True)
class Fit:
    """How well a family explains a distribution.

    distance: total variation to the untouched family. fitted: the same after shrinking it by `shrink` and adding
    N(0, tau^2). noise: what sampling alone gives. std_ratio: observed over the rounded family's.
    """

    family: Family
    distance: float
    fitted: float
    noise: float
    shrink: float
    tau: float
    std_ratio: float

    @property
    def moved(self) -> float:
        """RMS of the change over the family's RMS, if shrinking and adding is what happened."""
        return math.hypot(1 - self.shrink, self.tau / self.family.std)


def fit(family: Family, found: Distribution) -> Fit:
    """Fit `shrink * family + N(0, tau^2)`, rounded to the grid, by smallest Hellinger distance.

    Shrinking is tried only where it is asked for: the observed std, or the place of the edge, lies below the family's.
    """
    bins = found.bins()
    ratio = found.moments.std / family.std
    # A native draw differs from the cast one in single cells, so those are summed; bins alone would move a whole bin.
    fresh = np.add.reduceat(family.cells(found.edges), bins.starts) if family.native else family.cells(bins.edges)
    untouched = bins.distance(fresh)
    blurred = replace(family, native=False)
    # Far from the family nothing is fitted: the distance says enough.
    options = [(1.0, _best_tau(blurred, bins, 1.0))] if 0.97 < ratio < LARGEST_RATIO else []
    shrink = _shrink(family, found.moments)
    if ratio < LARGEST_RATIO and SMALLEST_SHRINK < shrink < 1.0 - 1e-4:
        options.append((shrink, _best_tau(blurred, bins, shrink)))
    scored = [(bins.distance(blurred.cells(bins.edges, shrink=c, tau=t)), c, t) for c, t in options]
    scored = scored or [(untouched, 1.0, 0.0)]
    best = scored[0]
    if len(scored) > 1 and scored[1][0] < 0.8 * best[0] - 2 * bins.noise():
        best = scored[1]
    return Fit(family, untouched, best[0], bins.noise(), best[1], best[2], ratio)


def fitted_normal(found: Distribution) -> Fit:
    """Distance to the normal distribution of the same std: what nothing but size is known of."""
    bins = found.bins()
    family = Family("normal (fitted std)", "normal", found.moments.std)
    distance = bins.distance(family.cells(bins.edges))
    return Fit(family, distance, distance, bins.noise(), 1.0, 0.0, 1.0)


def _shrink(family: Family, m: Moments) -> float:
    """Scale left of the family: from the fourth cumulant, which added Gaussian noise does not change, or from std."""
    if family.kind == "normal":
        return m.std / family.std
    cumulant = -m.kurtosis * m.std**4 / (1.2 * family.std**4)
    return cumulant**0.25 if cumulant > 0 else 0.0


def _best_tau(family: Family, bins: Bins, shrink: float) -> float:
    """tau >= 0 of the smallest squared Hellinger distance: a coarse scan, then golden section."""
    share = np.sqrt(bins.counts / bins.counts.sum())

    def cost(ratio: float) -> float:
        p = family.cells(bins.edges, shrink=shrink, tau=ratio * family.std)
        return 1.0 - float(share @ np.sqrt(np.maximum(p, 0.0)))

    grid_points = np.concatenate(([0.0], np.geomspace(0.003, 4.0, 24)))
    costs = [cost(float(r)) for r in grid_points]
    i = int(np.argmin(costs))
    low, high = float(grid_points[max(0, i - 1)]), float(grid_points[min(i + 1, len(grid_points) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = cost(a), cost(b)
    for _ in range(18):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = cost(a)
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = cost(b)
    best = (low + high) / 2
    return 0.0 if cost(0.0) <= cost(best) else best * family.std
