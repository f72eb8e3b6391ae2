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

FLOAT_MAX = {
    **{"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38},
    **{"F8_E4M3": 448.0, "F8_E5M2": 57344.0},
}
CLIPPED = ("F16", "F8_E4M3", "F8_E5M2")
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


def agreement(argmax: Sequence[int], tokens: Sequence[int], ahead: int = 1) -> float | None:
    """Share of rows t whose argmax under the target's head is token t + ahead; None when there is no such token."""
    pairs = list(zip(argmax, tokens[ahead:], strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


_LIST = r"(?:\d+|last)(?:(?:\s*(?:,|\.\.|-|\band\b|\bto\b)\s*)+(?:rows?\s+)?(?:\d+|last))*"
_SELECTED = re.compile(
    rf"\b(?:(?:the\s+)?(?P<end>last|first)\s+(?:(?P<count>\d+|two|three|four)\s+)?(?P<some>row|column|point|block)s?"
    rf"|(?:all|every|each)\s+(?:the\s+)?(?P<every>row|column|point|block)s?"
    rf"|(?P<one>row|column|point|block)s?\s+(?P<places>{_LIST}))\b"
)
"""`the last two rows`, `every row`, `columns 3..5`, `point 18`."""
_FILLER = re.compile(r"\b(?:the|all|every|each|in|at|of|is|are|to|set|become|becomes|values?)\b|[=:,]")
_COUNTS = {"1": 1, "two": 2, "three": 3, "four": 4}
_PLACE = re.compile(r"^\[\s*(\d+(?:\s*\.\.\s*\d+)?|:)\s*,\s*(\d+(?:\s*\.\.\s*\d+)?|:)\s*\]\s*(?:=|is)\s*([^\s,]+)")
_DRAWN = re.compile(r"^(normal|uniform)\(\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)$")
_BASE_AND_MORE = re.compile(r"^(\w[\w.]*(?:\([^()]*\))?)\s*,\s*(.+)$")
_COPIES = re.compile(r"\b(?:cop(?:y|ies)|equals?|identical|duplicates?)\b")
_NOT = re.compile(r"\b(?:no|not|never|nor|differ\w*)\b")
_WORDS = {"zero": 0.0, "zeros": 0.0, "one": 1.0, "ones": 1.0, "infinite": math.inf, "halves": 0.5}


def from_recipe(recipe: str, shape: Sequence[int], *, points: Sequence[int] = (), block: int = 0) -> np.ndarray | None:
    """Array of a recipe such as `ones; row 2 all NaN; [1, 0..4] = 65504`; None when a part is not understood.

    points, block: ids of the column blocks and their width, for `row 1 all zero in point 30`.
    """
    if len(shape) != 2 or any(size < 0 for size in shape) or shape[0] * shape[1] > CELLS:
        return None
    first, *rest = [" ".join(part.split()) for part in recipe.lower().split(";")]
    values = _base(first, shape)
    if values is None and (one := _BASE_AND_MORE.match(first)):
        values, rest = _base(one[1], shape), [one[2], *rest]
    if values is None or max(map(len, rest), default=0) > PART:
        return None
    for part in rest:
        place = _PLACE.match(part)
        if place:
            rows, columns = _listed(place[1], shape[0]), _listed(place[2], shape[1])
            value = _number(place[3])
        else:
            rows, columns, value = _selected(part, shape, points, block)
        if value is None or not rows or not columns:
            return None
        values[np.ix_(rows, columns)] = value
    return values


def _selected(
    part: str, shape: Sequence[int], points: Sequence[int], block: int
) -> tuple[list[int], list[int], float | None]:
    """Rows, columns and value of `row 1 is all zero in point 30`; [] for a place that is not there, None for a part
    with other words in it."""
    found = {"row": list(range(shape[0])), "column": list(range(shape[1]))}
    blocks = shape[1] // block if block else 0
    names = {"row": range(shape[0]), "column": range(shape[1]), "block": range(blocks), "point": points}
    matches = list(_SELECTED.finditer(part))
    for match in matches:
        if match["every"]:
            continue
        kind = match["some"] or match["one"]
        places = _places(match, names[kind])
        if kind in ("point", "block"):
            places = [column for one in places for column in range(one * block, (one + 1) * block)]
            kind = "column"
        found[kind] = places if max(places, default=0) < len(found[kind]) else []
    said = _FILLER.sub(" ", _SELECTED.sub(" ", part)).split()
    return found["row"], found["column"], _number(said[0]) if matches and len(said) == 1 else None


def _places(match: re.Match[str], names: Sequence[int]) -> list[int]:
    """Places of what a `_SELECTED` names, among all that there are; [] when one is not there."""
    if match["end"]:
        count = _COUNTS.get(match["count"] or "1") or int(match["count"])
        return list(range(len(names))[-count:] if match["end"] == "last" else range(len(names))[:count])
    if match["one"] != "point" or match["places"] == "last":
        return _listed(match["places"], len(names))
    wanted = [int(number) for number in re.findall(r"\d+", match["places"])]
    return [list(names).index(one) for one in wanted] if set(wanted) <= set(names) else []


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


def copied_rows(recipe: str, rows: int = 0) -> list[list[int]]:
    """Groups of equal rows that a recipe names: `rows 3 and 4 are bit-equal copies of row 2` -> [[2, 3, 4]].

    Args:
        rows: how many there are, for `the last row`.
    """
    groups: list[list[int]] = []
    for part in recipe.lower().split(";"):
        if not _COPIES.search(part) or _NOT.search(part):
            continue
        named: set[int] = set()
        for match in _SELECTED.finditer(part):
            if "row" in (match["one"], match["some"]):
                named.update(_places(match, range(rows or (0 if match["some"] else CELLS))))
        if len(named) > 1:
            groups.append(sorted(named))
    return groups


def from_values(values: Any) -> np.ndarray | None:
    """Rows written out in full, as float32 [rows, width]; None when they are not a table of numbers."""
    try:
        table = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return table if table.ndim == 2 and table.size else None


def _base(text: str, shape: Sequence[int]) -> np.ndarray | None:
    """`ones`, a number, `randn`, `normal(mean, std)` or `uniform(low, high)`."""
    drawn = _DRAWN.match("normal(0, 1)" if text == "randn" else text)
    if drawn:
        first, second = _number(drawn[2]), _number(drawn[3])
        if first is None or second is None or not max(abs(first), abs(second)) < 1e30:
            return None
        random = np.random.default_rng(0)
        if drawn[1] == "uniform":
            return random.uniform(first, second, tuple(shape)).astype(np.float32) if first <= second else None
        return random.normal(first, second, tuple(shape)).astype(np.float32) if second >= 0 else None
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
