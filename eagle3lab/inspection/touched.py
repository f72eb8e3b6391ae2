"""Which rows and columns of fc an update reached.

Two ways, chosen by the family. A bounded start (uniform) cannot have an entry above its bound: a row without one was
not reached, since a reached row of 7168 entries has hundreds. An unbounded start (normal) is judged by the mean square
of each row and column, which sees only updates larger than its standard error (0.5 % of a row's std, 0.8 % of a
column's at Kimi size), with the false-discovery rate held at `FALSE_DISCOVERY`; that list is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from eagle3lab.inspection.families import Family
from eagle3lab.inspection.layout import FcLayout
from eagle3lab.inspection.scan import Scan

FALSE_DISCOVERY = 1e-3
SMALLEST_EFFECT = 0.01
"""Relative change of std below which a row or column of a normal start is not called reached."""
ENOUGH = 8.0
"""Mean entries above the bound that a reached row or column must have before 'none' means 'not reached'."""


@dataclass(frozen=True)
class Outside:
    """Entries with a magnitude above `bound`: `rows` int64 [R, P], `columns` int64 [C]."""

    bound: float
    rows: np.ndarray
    columns: np.ndarray

    @property
    def total(self) -> int:
        """All of them."""
        return int(self.columns.sum())


@dataclass(frozen=True)
class Touched:
    """Rows and columns that were reached, when that is a proper part of fc.

    rows, columns: ascending indices, empty when there is no clean division along that axis. exact: every one of them
    is listed; False when small updates may have escaped.
    """

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    exact: bool = True

    def __bool__(self) -> bool:
        return bool(self.rows or self.columns)


def count_outside(layout: FcLayout, bound: float) -> Outside:
    """Second pass over fc: how many entries of every row (by block) and column exceed `bound`."""
    rows = np.zeros((layout.shape[0], len(layout.widths)), dtype=np.int64)
    columns = np.zeros(layout.shape[1], dtype=np.int64)
    for block, at_rows, at_columns, values in layout.tiles():
        mask = np.abs(values) > np.float32(bound)
        if mask.any():
            rows[at_rows, block] += np.count_nonzero(mask, axis=1)
            columns[at_columns] += np.count_nonzero(mask, axis=0)
    return Outside(bound, rows, columns)


def clean_split(counts: np.ndarray) -> np.ndarray | None:
    """Boolean mask of reached units, or None when the counts do not fall into 'none' and 'many'.

    A weak update that reached everything also leaves some units without an entry above the bound, but then most others
    have only a few: such a continuum is not divided.
    """
    reached = counts > 0
    untouched, touched = int((~reached).sum()), int(reached.sum())
    if not untouched or not touched:
        return None
    rate, mean = counts.sum() / len(counts), counts.sum() / touched
    few = int(((counts > 0) & (counts <= max(2.0, mean / 5))).sum())
    if mean < ENOUGH or few > 0.2 * untouched:
        return None
    # One rate for all would leave exp(-rate) of them without an entry and the others with this mean.
    one_rate = rate / -math.expm1(-rate)
    if mean < 2 * one_rate and untouched <= 3 * len(counts) * math.exp(-rate):
        return None
    return reached


def touched_bounded(scan: Scan, outside: Outside, family: Family, blocks: list[int]) -> Touched:
    """Reached rows and columns among `blocks` (those that are not at init) of a bounded family."""
    starts = scan.layout.starts
    columns: list[int] = []
    rest = 0
    for block in blocks:
        low, high = starts[block], starts[block + 1]
        mask = clean_split(outside.columns[low:high])
        square, count = scan.columns.second[low:high], scan.columns.count[low:high]
        if mask is not None and _like_init(square[~mask].sum(), count[~mask].sum(), family):
            columns += (np.flatnonzero(mask) + low).tolist()
        else:
            rest += 1
    row_counts = outside.rows[:, blocks].sum(axis=1)
    mask = clean_split(row_counts)
    rows: list[int] = []
    if mask is not None:
        square = scan.rows.second[:, blocks].sum(axis=1)
        count = scan.rows.count[:, blocks].sum(axis=1)
        if _like_init(square[~mask].sum(), count[~mask].sum(), family):
            rows = np.flatnonzero(mask).tolist()
    # Columns explain a change only if they do so in every block that changed.
    return Touched(rows=rows, columns=[] if rest else columns)


def touched_unbounded(scan: Scan, family: Family) -> Touched:
    """Reached rows and columns of a normal family, by mean square under false-discovery control."""
    found: list[list[int]] = []
    for sums, axis_count in ((scan.rows.second.sum(axis=1), scan.rows.count.sum(axis=1)),
                             (scan.columns.second, scan.columns.count)):  # fmt: skip
        mask = _discoveries(sums, axis_count, family)
        few = 0 < mask.sum() < 0.5 * len(mask)
        like = few and _like_init(sums[~mask].sum(), axis_count[~mask].sum(), family)
        found.append(np.flatnonzero(mask).tolist() if like else [])
    return Touched(rows=found[0], columns=found[1], exact=False)


def _like_init(square: float, count: float, family: Family) -> bool:
    """Whether the mean square of what is left is the family's (margins as `verdict.MARGINS`)."""
    if count == 0:
        return False
    raw4 = 1.8 if family.kind == "uniform" else 3.0
    ratio = math.sqrt(square / count) / family.std
    return abs(ratio - 1) < 1e-3 + 4 * math.sqrt((raw4 - 1) / (4 * count))


def _discoveries(square: np.ndarray, count: np.ndarray, family: Family) -> np.ndarray:
    """Benjamini-Hochberg on two-sided normal tests of each mean square against the family's variance."""
    variance = square / count / family.std**2
    z = (variance - 1) / np.sqrt(2.0 / count)
    p = np.array([math.erfc(abs(x) / math.sqrt(2)) for x in z])
    order = np.argsort(p)
    passed = p[order] <= FALSE_DISCOVERY * np.arange(1, len(p) + 1) / len(p)
    cut = int(np.flatnonzero(passed).max()) + 1 if passed.any() else 0
    mask = np.zeros(len(p), dtype=bool)
    mask[order[:cut]] = True
    return mask & (np.abs(np.sqrt(variance) - 1) >= SMALLEST_EFFECT)
