"""Measurements on rows of hidden states: finite, zero, clipped, repeated. No findings in here.

Columns of `aux` come in blocks of H, one a capture point in ascending order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FLOAT_MAX = {
    **{"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38},
    **{"F8_E4M3": 448.0, "F8_E5M2": 57344.0},
}
CLIPPED = ("F16", "F8_E4M3", "F8_E5M2")
"""Dtypes whose maximum real activations reach: a value exactly there was most likely clipped."""
LISTED = 100
"""Rows and places that a report lists; counts are always complete."""


@dataclass(kw_only=True)
class RowReport:
    """What was seen in the rows of one shard or sample.

    Fields:
        rows, width: size looked at. nan_rows: rows with any NaN. nan_by_block: block -> NaN values.
        inf_values: how many; inf_at: their [row, column]. zero_rows: row -> blocks that are all zero.
        at_max: values at the dtype's maximum. largest: [|value|, row, column] of the largest finite one.
    """

    rows: int = 0
    width: int = 0
    nan_row_count: int = 0
    nan_rows: list[int] = field(default_factory=list)
    nan_by_block: dict[int, int] = field(default_factory=dict)
    inf_values: int = 0
    inf_at: list[list[int]] = field(default_factory=list)
    zero_row_count: int = 0
    zero_rows: dict[int, list[int]] = field(default_factory=dict)
    at_max: int = 0
    largest: list[float] | None = None

    def add(self, values: np.ndarray, *, block: int, dtype: str) -> None:
        """Add the next rows, float [rows, width]; block: width H of one point."""
        first, (count, self.width) = self.rows, values.shape
        blocks = max(self.width // block, 1) if block else 1
        cut = values[:, : blocks * block].reshape(count, blocks, -1) if block else values[:, None, :]
        finite = np.isfinite(values)
        if not finite.all():
            nan = np.isnan(values)
            rows = np.flatnonzero(nan.any(axis=1))
            self.nan_row_count += len(rows)
            self.nan_rows += [int(row) + first for row in rows[: LISTED - len(self.nan_rows)]]
            for index, total in enumerate(np.isnan(cut).sum(axis=(0, 2))):
                self.nan_by_block[index] = self.nan_by_block.get(index, 0) + int(total)
            places = np.argwhere(np.isinf(values))
            self.inf_values += len(places)
            room = max(LISTED - len(self.inf_at), 0)
            self.inf_at += [[int(row) + first, int(column)] for row, column in places[:room]]
        size = np.where(finite, np.abs(values), 0)
        empty = (cut == 0).all(axis=2)  # [rows, blocks]
        for row in np.flatnonzero(empty.any(axis=1)):
            self.zero_row_count += 1
            if len(self.zero_rows) < LISTED:
                self.zero_rows[int(row) + first] = [int(b) for b in np.flatnonzero(empty[row])]
        if dtype in CLIPPED:
            self.at_max += int((size == FLOAT_MAX[dtype]).sum())
        if size.size:
            top = int(size.argmax())
            y, x = divmod(top, self.width)
            if self.largest is None or size[y, x] > self.largest[0]:
                self.largest = [float(size[y, x]), y + first, x]
        self.rows += count


def equal_rows(rows: Iterable[bytes]) -> list[list[int]]:
    """Groups of two or more bit-equal rows, by place, from the raw bytes of each row."""
    seen: dict[bytes, list[int]] = {}
    for place, raw in enumerate(rows):
        seen.setdefault(hashlib.blake2b(raw, digest_size=16).digest(), []).append(place)
    return [places for places in seen.values() if len(places) > 1]


def agreement(argmax: Sequence[int], tokens: Sequence[int], ahead: int = 1) -> float | None:
    """Share of rows t whose argmax under the target's head is token t + ahead; None when there is no such token."""
    pairs = list(zip(argmax, tokens[ahead:], strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def from_values(values: Any) -> np.ndarray | None:
    """Rows written out in full, as float32 [rows, width]; None when they are not a table of numbers."""
    try:
        table = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return table if table.ndim == 2 and table.size else None


def longest_shared_prefix(tokens: Sequence[Any], others: Mapping[str, Sequence[Any]]) -> tuple[str, int]:
    """(name, length) of the list that shares the longest prefix with `tokens`; ("", 0) when none shares any."""
    best = ("", 0)
    for name, other in others.items():
        length = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
        length = min(len(tokens), len(other)) if length is None else length
        if length > best[1]:
            best = (name, length)
    return best
