"""Measurements on rows of hidden states: finite, zero, clipped, repeated. No findings in here.

Columns of `aux` come in blocks of H, one a capture point in ascending order.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FLOAT_MAX = {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38, "F8_E4M3": 448.0}
CLIPPED = ("F16", "F8_E4M3")
"""Dtypes whose maximum real activations reach: a value exactly there was most likely clipped."""
LISTED = 100
"""Rows and places that a report lists; counts are always complete."""
CELLS = 2_000_000
PART = 120
"""Characters of one part of a recipe."""


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


def agreement(argmax: Sequence[int], tokens: Sequence[int]) -> float | None:
    """Share of rows whose argmax under the target's head is the next token; None when there is no next token."""
    pairs = list(zip(argmax, tokens[1:], strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


_NUMBERS = r"(?:last|[\d,\s]|\band\b|\.\.|\bto\b|-(?=\d))+?"
_ROWS_ALL = re.compile(
    rf"^(?:(?:the|all|in)\s+)*(?:rows?\s+)?(?P<rows>{_NUMBERS})(?:\s*rows?)?"
    rf"(?:[\s,]+(?:in\s+)?columns?\s+(?P<early>{_NUMBERS}))?\s*(?:\b(?:is|are|all|to)\b|[=:\s])+\s*"
    rf"(?P<value>[-+]?[\w.]+)(?:[\s,]+(?:in\s+)?columns?\s+(?P<late>{_NUMBERS}))?"
    r"(?:[\s,]+(?:in|at)\s+point\s+(?P<point>\d+))?$",
    re.IGNORECASE,
)
_NORMAL = re.compile(r"^normal\(\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)$")
_PLACE = re.compile(r"^\[\s*(\d+(?:\s*\.\.\s*\d+)?|:)\s*,\s*(\d+(?:\s*\.\.\s*\d+)?|:)\s*\]\s*(?:=|is)\s*([^\s,]+)")
_COPIES = re.compile(r"rows?\s+([\d,\sand]+?)\s+(?:is|are)\s+(?:an?\s+)?bit-equal\s+cop(?:y|ies)\s+of\s+row\s+(\d+)")
_WORDS = {"zero": 0.0, "zeros": 0.0, "one": 1.0, "ones": 1.0, "infinite": math.inf, "halves": 0.5}


def from_recipe(recipe: str, shape: Sequence[int], *, points: Sequence[int] = (), block: int = 0) -> np.ndarray | None:
    """Array of a recipe such as `ones; row 2 all NaN; [1, 0..4] = 65504`; None when a part is not understood.

    points, block: ids of the column blocks and their width, for `row 1 all zero in point 30`.
    """
    if len(shape) != 2 or any(size < 0 for size in shape) or shape[0] * shape[1] > CELLS:
        return None
    first, *rest = [" ".join(part.split()) for part in recipe.split(";")]
    if max(map(len, rest), default=0) > PART:
        return None
    values = _base(first, shape)
    if values is None:
        return None
    for part in rest:
        whole_rows, place = _ROWS_ALL.match(part), _PLACE.match(part)
        if place:
            rows, columns = _listed(place[1], shape[0]), _listed(place[2], shape[1])
            value = _number(place[3])
        elif whole_rows:
            rows, value = _listed(whole_rows["rows"], shape[0]), _number(whole_rows["value"])
            columns = _listed(whole_rows["early"] or whole_rows["late"] or ":", shape[1])
            if whole_rows["point"]:
                columns = _block(int(whole_rows["point"]), points, block, shape[1])
        else:
            return None
        if value is None or not rows or not columns:
            return None
        values[np.ix_(rows, columns)] = value
    return values


def _listed(text: str, size: int) -> list[int]:
    """`2`, `1 and 3`, `0..4`, `2 to 5`, `last` or `:` as places below size; [] when one is outside."""
    text = text.replace("last", str(size - 1))
    if text.strip() == ":":
        return list(range(size))
    found: list[int] = []
    for start, stop in re.findall(r"(\d+)(?:\s*(?:\.\.|to|-)\s*(\d+))?", text):
        first, end = int(start), int(stop or start)
        if not first <= end < size:
            return []
        found += range(first, end + 1)
    return found


def _block(point: int, points: Sequence[int], block: int, width: int) -> list[int]:
    """Columns of a point; [] when it is none of the points."""
    if point not in points or not block:
        return []
    start = list(points).index(point) * block
    return list(range(start, start + block)) if start + block <= width else []


def copied_rows(recipe: str) -> list[list[int]]:
    """Groups of equal rows that a recipe names: `rows 3 and 4 are bit-equal copies of row 2` -> [[2, 3, 4]]."""
    groups = ((int(source), re.findall(r"\d+", copies)) for copies, source in _COPIES.findall(recipe))
    return [sorted({source, *(int(row) for row in copies)}) for source, copies in groups]


def from_values(values: Any) -> np.ndarray | None:
    """Rows written out in full, as float32 [rows, width]; None when they are not a table of numbers."""
    try:
        table = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return table if table.ndim == 2 and table.size else None


def _base(text: str, shape: Sequence[int]) -> np.ndarray | None:
    """`ones`, a number, or `normal(mean, std)`."""
    drawn = _NORMAL.match(text)
    if drawn:
        mean, std = _number(drawn[1]), _number(drawn[2])
        if mean is None or std is None or not 0 <= std < 1e30:
            return None
        return np.random.default_rng(0).normal(mean, std, tuple(shape)).astype(np.float32)
    value = _number(text)
    return None if value is None else np.full(tuple(shape), value, dtype=np.float32)


def _number(text: str) -> float | None:
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return float(word)
    except ValueError:
        return None


def longest_shared_prefix(tokens: Sequence[Any], others: Mapping[str, Sequence[Any]]) -> tuple[str, int]:
    """(name, length) of the list that shares the longest prefix with `tokens`; ("", 0) when none shares any."""
    best = ("", 0)
    for name, other in others.items():
        length = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
        length = min(len(tokens), len(other)) if length is None else length
        if length > best[1]:
            best = (name, length)
    return best
