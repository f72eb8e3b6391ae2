"""Places in a table of states, in words or in brackets: `the last two rows`, `columns 3..5`, `point 30`, `[1, 0:5]`.

A place that is not there (row 9 of four) is None: whoever asked says so. Places count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Selector = tuple[str, list[int]]
"""(row | column | point | cell, indices): of rows, of columns (also for a point), of cells counted row by row."""

_COUNTED = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = {word: str(number) for number, word in enumerate(_COUNTED, start=1)}
_ORDERED = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_ORDINALS = {word: number for number, word in enumerate(_ORDERED, start=1)}
_KINDS = {
    **dict.fromkeys(("row", "token", "position", "line"), "row"),
    **dict.fromkeys(("column", "dimension", "dim", "channel", "feature"), "column"),
    **{"point": "point", "layer": "point", "block": "block"},
}
_KIND = "(?:capture )?(?P<{0}>" + "|".join(_KINDS) + ")s?"
_ORDINAL = r"(?:\d+(?:st|nd|rd|th)|" + "|".join(_ORDINALS) + ")"
_UNIT = r"(?!\s+(?:values?|elements?|entries|entry|cells?|numbers?|rows?|columns?|points?|nans|infs)\b|\.\d|e[+-]?\d)"
_ONE = r"(?:\d+|last)\b"
_BETWEEN = r"(?:\s*(?:,|\.{2,3}|-|:|&|\+|\band\b|\bto\b|\bthrough\b|\bup to\b)\s*)+"
_LIST = rf"{_ONE}(?:{_BETWEEN}{_ONE}{_UNIT})*"
_NUMBER = r"(?:\d+|" + "|".join(NUMBERS) + ")"
_ALL = r"(?:all|every|each)\s+(?:the\s+)?"
_WAYS = (
    rf"(?:the\s+)?(?P<end>last|first|final)\s+(?:(?P<count>{_NUMBER})\s+)?" + _KIND.format("some"),
    rf"(?:every|each)\s+(?P<step>other|{_ORDINAL})\s+" + _KIND.format("stepped"),
    r"(?:the\s+|all\s+)?(?P<parity>even|odd|alternate)(?:[ -]numbered)?\s+" + _KIND.format("paired"),
    rf"(?:the\s+)?(?P<ordinal>{_ORDINAL}(?:(?:,|\s+and|,\s+and)\s+(?:the\s+)?{_ORDINAL})*)\s+"
    + _KIND.format("ordered"),
    rf"(?:{_ALL})?" + _KIND.format("after") + r"\s+(?:after|past|beyond)\s+(?:(?:row|number)\s+)?(?P<behind>\d+)",
    rf"(?:{_ALL})?(?:from\s+)?"
    + _KIND.format("open")
    + r"\s+(?:from\s+)?(?P<start>\d+)\s+(?:on(?:wards?)?|and (?:all )?(?:later|after|following))",
    rf"(?:all|every|each|both)\s+(?:of\s+)?(?:the\s+)?(?:{_NUMBER}\s+)?" + _KIND.format("every") + r"(?!\s*[#\d])",
    _KIND.format("one")
    + rf"(?:\s+(?:number|no\.?|(?:with )?index|id|from|between|t\s*=))?\s*[#=]?\s*(?P<places>{_LIST})",
)
SELECTED = re.compile(r"\b(?:" + "|".join(_WAYS) + r")(?!\w)")
"""`the last two rows`, `every second row`, `odd rows`, `the third row`, `all 3 points`, `rows from 2 on`, `row 2`"""
_ITEM = r"[^\[\](),;=a-z]*?(?:(?:to|last|all)[^\[\](),;=a-z]*?)*"
CELL = re.compile(
    rf"(?:\b[a-z_]\w*)?\[\s*(?P<row>{_ITEM})\s*(?:,\s*(?P<column>{_ITEM})\s*)?\]|\(\s*(?P<y>\d+)\s*,\s*(?P<x>\d+)\s*\)"
)
"""`[1, 0..4]`, `[1, 0:5]`, `[2, :]`, `[2]`, `aux[-1, 3]`, `(0, 3)`."""


@dataclass(frozen=True)
class Table:
    """Rows and columns; columns come in blocks of width `block`, one a point."""

    shape: tuple[int, int]
    points: tuple[int, ...] = ()
    block: int = 0


def selected(match: re.Match[str], table: Table) -> list[Selector] | None:
    """What a match of `SELECTED` selects."""
    kind = _KINDS[next(match[name] for name in _NAMES if match[name])]
    names = range(table.shape[0]) if kind == "row" else range(table.shape[1])
    if kind in ("point", "block"):
        blocks = range(table.shape[1] // table.block if table.block else len(table.points))
        found = places(match, table.points if kind == "point" else blocks)
        columns = [column for one in found for column in range(one * table.block, (one + 1) * table.block)]
        return [("point", columns)] if columns and columns[-1] < table.shape[1] else None
    found = places(match, names)
    return [(kind, found)] if found else None


_NAMES = ("some", "stepped", "paired", "ordered", "every", "after", "open", "one")


def places(match: re.Match[str], names: Sequence[int]) -> list[int]:
    """Places of what a match of `SELECTED` names, among all that there are; [] when one is not there."""
    count = len(names)
    whole = list(range(count))
    if match["every"]:
        return whole
    if match["end"]:
        wanted = int(NUMBERS.get(match["count"] or "one", match["count"] or "1"))
        return [] if wanted > count else whole[-wanted:] if match["end"] != "first" else whole[:wanted]
    if match["step"]:
        step = 2 if match["step"] == "other" else _ordinal(match["step"])
        return whole[step - 1 :: step] if step else []
    if match["parity"]:
        return whole[match["parity"] == "odd" :: 2]
    if match["ordinal"]:
        named = [_ordinal(word) - 1 for word in re.findall(_ORDINAL, match["ordinal"])]
        return named if set(named) <= set(whole) else []
    if match["after"]:
        return whole[int(match["behind"]) + 1 :]
    if match["open"]:
        return whole[int(match["start"]) :]
    if _KINDS[match["one"]] != "point" or match["places"] == "last":
        return listed(match["places"], count)
    ids = [int(number) for number in re.findall(r"\d+", match["places"])]
    return [list(names).index(one) for one in ids] if set(ids) <= set(names) else []


def _ordinal(word: str) -> int:
    return _ORDINALS.get(word) or int(re.sub(r"\D", "", word))


def listed(text: str, size: int) -> list[int]:
    """`2`, `1 and 3`, `0..4`, `2 to 5`, `2:5` (5 left out) or `last` as places below size; [] when one is outside."""
    text = text.replace("last", str(size - 1)).replace("up to", "to").replace("through", "to")
    found: list[int] = []
    for start, way, stop in re.findall(r"(\d+)(?:\s*(\.{2,3}|to|-|:)\s*(\d+))?", text):
        first, end = int(start), int(stop or start) - (way == ":")
        if not first <= end < size:
            return []
        found += range(first, end + 1)
    return found


def cells(match: re.Match[str], table: Table) -> list[Selector] | None:
    """The cells of a match of `CELL`; a missing second index is the whole row."""
    rows = _index(match["row"] if match["y"] is None else match["y"], table.shape[0])
    column = match["column"] if match["y"] is None else match["x"]
    columns = _index(":" if column is None else column, table.shape[1])
    if not rows or not columns:
        return None
    return [("cell", [row * table.shape[1] + one for row in rows for one in columns])]


def _index(text: str, size: int) -> list[int]:
    """One index between brackets: `2`, `-1`, `:`, `0..4`, `0-4`, `0:5`, `::2`; [] when it is not there."""
    text = text.strip()
    if text in (":", "...", "*", "all"):
        return list(range(size))
    if re.fullmatch(r"-\d+", text):
        return [size - int(text[1:])] if int(text[1:]) <= size else []
    sliced = re.fullmatch(r"(\d*)\s*:\s*(\d*)(?:\s*:\s*(\d*))?", text)
    if sliced:
        start, stop, step = (int(part) if part else None for part in sliced.groups(default=""))
        inside = (start or 0) < size and (stop is None or stop <= size) and step != 0
        return list(range(size))[start:stop:step] if inside else []
    return listed(text, size) if re.fullmatch(r"(?:\d+|last)(?:\s*(?:\.{2,3}|-|to)\s*(?:\d+|last))?", text) else []


def mask_of(group: Sequence[Selector], table: Table) -> np.ndarray:
    """Cells that all selectors of a group share, bool [rows, columns]."""
    mask = np.ones(table.shape, dtype=bool)
    for kind, found in group:
        one = np.zeros(table.shape, dtype=bool)
        if kind == "row":
            one[found] = True
        elif kind == "cell":
            one.ravel()[found] = True
        else:
            one[:, found] = True
        mask &= one
    return mask
