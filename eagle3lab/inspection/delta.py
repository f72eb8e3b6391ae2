"""fc against another checkpoint's fc: what is equal to the bit, how far it is, in which blocks, rows and columns.

The sharpest test there is, because it needs no model of the start: against the checkpoint of step 0 it measures the
update itself. Same lineage gives a cosine above about 0.95; two seeds give 0 within 1/sqrt(entries).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3lab.core.errors import CheckpointError
from eagle3lab.inspection.layout import FcLayout
from eagle3lab.inspection.structure import shown


@dataclass(frozen=True)
class BlockDelta:
    """One point block (`all` for the matrix). equal: share of equal entries. relative: |W - W'|_F / |W'|_F.
    std_ratio: RMS of W over RMS of W'. Unknown (a zero matrix) is NaN."""

    point: str
    equal: float
    relative: float
    cosine: float
    std_ratio: float


@dataclass(frozen=True)
class Delta:
    """W - W'. rows [R, P] and columns [C]: sums of squares of the difference; `*_start`: of W'."""

    blocks: list[BlockDelta]
    rows: np.ndarray
    rows_start: np.ndarray
    columns: np.ndarray
    columns_start: np.ndarray
    mine: FcLayout = field(repr=False)
    other: FcLayout = field(repr=False)

    @property
    def all(self) -> BlockDelta:
        """The whole matrix."""
        return self.blocks[0]

    def changed(self) -> tuple[list[int], list[int]]:
        """(rows, columns) with at least one different entry."""
        return np.flatnonzero(self.rows.sum(axis=1) > 0).tolist(), np.flatnonzero(self.columns > 0).tolist()

    def column_tiles(self) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
        """The difference, as `FcLayout.column_tiles` gives a matrix: its spectrum has no noise of the start."""
        for block, rows, columns, values in self.mine.column_tiles():
            yield block, rows, columns, values - self.other.region(rows, columns)

    def lines(self, name: str) -> list[str]:
        """Evidence lines; `name` is what was compared with."""
        whole = self.all
        if whole.equal == 1.0:
            return [f"against {name}: every entry is equal"]
        out = [
            f"against {name}: {whole.equal:.2%} of entries equal, |difference| / |it| = {whole.relative:.4f}, "
            f"cosine {whole.cosine:.4f}"
        ]
        out += [f"against {name}, {b.point}: moved {b.relative:.4f}, cosine {b.cosine:.4f}" for b in self.blocks[1:]]
        rows, columns = self.changed()
        for axis, found, total in (("rows", rows, len(self.rows)), ("columns", columns, len(self.columns))):
            if len(found) < total:
                out.append(f"against {name}: {len(found)} of {total} {axis} differ: {shown(found)}")
        return out

    def to_json(self) -> dict[str, Any]:
        """Blocks and the numbers of changed rows and columns."""
        rows, columns = self.changed()
        return {
            "blocks": [vars(block) for block in self.blocks],
            "changed_rows": len(rows),
            "changed_columns": len(columns),
        }


def compare_fc(mine: FcLayout, other: FcLayout) -> Delta:
    """Compare two fc of the same shape, whatever their formats and orientations.

    Raises:
        CheckpointError: the shapes differ.
    """
    if mine.shape != other.shape:
        raise CheckpointError(
            f"fc is {list(mine.shape)} here and {list(other.shape)} in the other checkpoint",
            rule="only equal shapes can be compared",
        )
    (height, width), points = mine.shape, len(mine.widths)
    rows, rows_start = np.zeros((height, points)), np.zeros((height, points))
    columns, columns_start = np.zeros(width), np.zeros(width)
    own, equal, size = np.zeros(points), np.zeros(points), np.zeros(points)
    for block, at_rows, at_columns, values in mine.tiles():
        base = other.region(at_rows, at_columns)
        difference = values - base
        equal[block] += difference.size - np.count_nonzero(difference)
        size[block] += difference.size
        for array, by_row, by_column in ((difference, rows, columns), (base, rows_start, columns_start)):
            square = np.square(array, dtype=np.float64) if array.size < 1 << 14 else np.square(array)
            by_row[at_rows, block] += square.sum(axis=1, dtype=np.float64)
            by_column[at_columns] += square.sum(axis=0, dtype=np.float64)
        own[block] += float(np.square(values).sum(dtype=np.float64))
    sums = [("all", slice(None)), *((point, slice(b, b + 1)) for b, point in enumerate(mine.points))]
    blocks = [
        _block(point, equal[at].sum(), size[at].sum(), rows[:, at].sum(), rows_start[:, at].sum(), own[at].sum())
        for point, at in sums
    ]
    return Delta(blocks, rows, rows_start, columns, columns_start, mine, other)


def _block(point: str, equal: float, size: float, moved: float, start: float, own: float) -> BlockDelta:
    """cosine through |W|^2 + |W'|^2 - |W - W'|^2: a difference of near-equal dot products would lose its digits."""
    nan = float("nan")
    cosine = (own + start - moved) / (2 * math.sqrt(own * start)) if own > 0 and start > 0 else nan
    relative, ratio = (math.sqrt(moved / start), math.sqrt(own / start)) if start > 0 else (nan, nan)
    return BlockDelta(point, float(equal / size), relative, float(cosine), ratio)
