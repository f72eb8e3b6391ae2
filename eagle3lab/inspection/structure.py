"""Dead, constant and duplicated rows and columns of fc.

A zero column is an input feature that nothing reads; a zero row an output that carries nothing of the states.
Duplicates are found by their sums and confirmed by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eagle3lab.inspection.layout import FcLayout
from eagle3lab.inspection.scan import AxisSums, Scan

NEAR_DEAD = 1e-3
"""A norm below this share of the median norm."""
MOST_CANDIDATES = 256
"""Rows or columns whose bytes are compared; more candidates than this are reported as not checked."""


@dataclass(frozen=True)
class AxisStructure:
    """Indices along one axis. zero: all entries 0. near_dead: tiny norm. constant: one value throughout, not 0.
    duplicates: groups with identical entries. unchecked: suspected duplicates beyond `MOST_CANDIDATES`."""

    zero: list[int] = field(default_factory=list)
    near_dead: list[int] = field(default_factory=list)
    constant: list[int] = field(default_factory=list)
    duplicates: list[list[int]] = field(default_factory=list)
    unchecked: int = 0


@dataclass(frozen=True)
class Structure:
    """What is wrong with single rows and columns."""

    rows: AxisStructure
    columns: AxisStructure

    def repeated(self, rows: int) -> int:
        """Rows in the largest group of identical ones, when that is most of all `rows`; else 0."""
        largest = max((len(group) for group in self.rows.duplicates), default=0)
        return largest + self.rows.unchecked if largest + self.rows.unchecked > rows / 2 else 0

    def lines(self) -> list[str]:
        """One evidence line for every kind that occurs."""
        out = []
        for axis, found in (("row", self.rows), ("column", self.columns)):
            for kind, items in (("zero", found.zero), ("near-dead", found.near_dead), ("constant", found.constant)):
                if items:
                    out.append(f"{len(items)} {kind} {axis}{'s' * (len(items) > 1)}: {shown(items)}")
            for group in found.duplicates[:4]:
                out.append(f"identical {axis}s: {shown(group)}")
        return out


def shown(items: list[int], most: int = 12) -> str:
    """`3, 17, 240` or the first of many."""
    text = ", ".join(map(str, items[:most]))
    return text if len(items) <= most else f"{text}, ... ({len(items)} in all)"


# Sums of weights above 1e19 leave float32; comparisons with such unknowns are false, which is the right answer.
@np.errstate(invalid="ignore", over="ignore")
def find_structure(scan: Scan) -> Structure:
    """Look at every row and column of a scanned fc whose entries are finite."""
    rows = AxisSums(scan.rows.first.sum(axis=1), scan.rows.second.sum(axis=1), scan.rows.fourth.sum(axis=1),
                    scan.rows.peak.max(axis=1), scan.rows.count.sum(axis=1))  # fmt: skip
    return Structure(_axis(scan.layout, rows, axis=0), _axis(scan.layout, scan.columns, axis=1))


def _axis(layout: FcLayout, sums: AxisSums, axis: int) -> AxisStructure:
    norm = np.sqrt(sums.second)
    zero = sums.peak == 0
    median = float(np.median(norm[~zero])) if (~zero).any() else 0.0
    mean = sums.first / sums.count
    # Sums carry a relative error of 1e-6, so the spread of a constant row comes out as at most 1e-3 of its mean.
    flat = ~zero & (sums.std() < 2e-3 * np.abs(mean))
    flat = _confirmed_flat(layout, np.flatnonzero(flat), axis)
    pairs = _suspects(sums, norm, ~zero)
    members = np.unique(pairs)
    unchecked = max(0, len(members) - MOST_CANDIDATES)
    groups = _identical(layout, members[:MOST_CANDIDATES], axis)
    near = ~zero & (norm < NEAR_DEAD * median)
    return AxisStructure(np.flatnonzero(zero).tolist(), np.flatnonzero(near).tolist(), flat, groups, unchecked)


def _suspects(sums: AxisSums, norm: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Index pairs [N, 2] whose sum, norm and peak agree to the accuracy of the sums."""
    index = np.flatnonzero(live)
    order = index[np.argsort(sums.first[index], kind="stable")]
    found = []
    for step in range(1, 9):
        a, b = order[:-step], order[step:]
        close = np.abs(sums.first[a] - sums.first[b]) <= 2e-6 * np.sqrt(sums.count[a]) * norm[a]
        close &= np.abs(norm[a] - norm[b]) <= 2e-6 * norm[a]
        close &= sums.peak[a] == sums.peak[b]
        if not close.any():
            break
        found.append(np.stack([a[close], b[close]], axis=1))
    return np.concatenate(found) if found else np.zeros((0, 2), dtype=np.int64)


def gather(layout: FcLayout, indices: np.ndarray, axis: int) -> np.ndarray:
    """float32 rows (axis 0) or columns (axis 1) of fc, [len(indices), length], in one pass over its tiles."""
    out = np.zeros((len(indices), layout.shape[1 - axis]), dtype=np.float32)
    for _, rows, columns, raw in layout.storage_tiles():
        span, other = (rows, columns) if axis == 0 else (columns, rows)
        inside = np.flatnonzero((indices >= span.start) & (indices < span.stop))
        if inside.size:
            values = layout.weights(rows, columns, raw)
            picked = indices[inside] - span.start
            out[inside, other] = values[picked] if axis == 0 else values[:, picked].T
    return out


def _confirmed_flat(layout: FcLayout, indices: np.ndarray, axis: int) -> list[int]:
    if not indices.size:
        return []
    values = gather(layout, indices[:MOST_CANDIDATES], axis)
    return indices[:MOST_CANDIDATES][(values == values[:, :1]).all(axis=1)].tolist()


def _identical(layout: FcLayout, indices: np.ndarray, axis: int) -> list[list[int]]:
    if not indices.size:
        return []
    groups: dict[bytes, list[int]] = {}
    for index, values in zip(indices.tolist(), gather(layout, indices, axis), strict=True):
        groups.setdefault(values.tobytes(), []).append(index)
    return [group for group in groups.values() if len(group) > 1]
