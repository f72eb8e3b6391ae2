"""Contents of states told in words: `ones; row 2 all NaN; [1, 0..4] = 65504`. No findings in here.

A recipe is a base (`ones`, `normal(0, 1), seed 0`) and parts after it. A part is cut into clauses at commas and `and`;
a clause names a place (rows, columns, points, cells) and a value. Words that change nothing are dropped, and one word
that is not known makes the whole recipe unknown: what is not understood is said, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from eagle3lab.doctor.places import CELL, NUMBERS, SELECTED, Selector, Table, cells, mask_of, selected
from eagle3lab.doctor.row_copies import copies_in
from eagle3lab.doctor.rows import FLOAT_MAX

CELLS = 2_000_000
RECIPE, PART = 2000, 300
"""Characters of a recipe, and of one part of it."""

_MEAN = (
    r"(?:with |of |, )*mean (?:of )?([^\s,;]+),? (?:and )?(?:an? )?"
    r"(?:std|standard deviation|sd|sigma) (?:of )?([^\s,;]+)"
)
_NO_MORE = (
    r"(?:[,;]\s*(?:and\s+)?|\band\s+)(?:nothing else|(?:all |the )*(?:everything else|rest|others?|other rows?|"
    r"all else|remaining rows?)(?: (?:is|are|stays?|remains?))? "
    r"(?:finite|untouched|unchanged|healthy|fine|ok|okay|intact|good))"
    r"\s*\.?(?=\s*(?:[;,]|$))"
)
_SAME_WORDS = [
    (_MEAN, r"(\1, \2)"),
    (r"\.\s+(?=[a-z])", "; "),
    (r"\]\s*\[", ", "),
    (r"\b(rows|columns|points) [\[{]([\d,\s]+)[\]}]", r"\1 \2"),
    (r"\b(?:np|numpy|torch|math)\.(?=nan|inf)", ""),
    (r"\bfloat\(['\"]?([+-]?\w+)['\"]?\)", r"\1"),
    (r"\b(uniform)(?:ly)? (?:\w+ )?\[([^\[\]]+)[\])]", r"\1(\2)"),
    (_NO_MORE, ""),
    (r"(?<=[a-z])-(?=[a-z])", " "),
    (r"\bnothing but\b", ""),
    (r"\bnot[ -]a[ -]numbers?\b|\bnans\b", "nan"),
    (r"\b(?:minus|negative) inf(?:inity|inities|inite|s)?\b|-\s?infinity\b", "-inf"),
    (r"(?:\b(?:plus|positive) |\+)?\binf(?:inity|inities|inite|s)\b", "inf"),
    (r"\b(?:zero(?:ed|es|s)|blank)\b", "zero"),
    (r"(?:\b(?:minus|negative) (?:the )?|-)(?=max)", "-"),
    (
        r"\b(?:(?:f|fp|bf|float|bfloat)(?:16|32|64)(?:'s)? |dtype(?:'s)? |torch\.|np\.)*"
        r"(?:finfo(?:\([^()]*\))?\.max|max(?:imum|imal)?\b|largest finite\b)"
        r"(?: finite)?(?: values?)?(?: of (?:the )?(?:dtype|type|(?:f|fp|bf|float|bfloat)(?:16|32|64)))?",
        "max",
    ),
    *((rf"\b{word}\b", digit) for word, digit in NUMBERS.items()),
]
"""Spellings of one thing, and what they are read as."""
_VALUE = re.compile(
    r"[+-]?(?:nan\b|inf\b|max\b|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.]*\d))|\b(?:zero|ones|half|halves)\b"
)
_COUNT = re.compile(
    r"(?:\b(?:first\s+)?(\d+)|\ban?|\bsingle)(?:\s+(?:single|lone))?\s+"
    r"(?=[+-]?(?:nan|inf|max)\b|(?:value|element|entr|number|cell)\w*\b)"
)
_SEPARATOR = re.compile(r"[,()/]|\band\b|\bwhile\b|\bplus\b(?=\s+row)")
_WORD = re.compile(r"[a-z][a-z'_]*")
_SILENT = re.compile(r"(?:[\s=:.*]|->)+")
_FILLER = re.compile(
    r"(?:the|a|an|all|every|each|any|in|at|of|is|are|to|on|for|by|as|has|have|having|be|"
    r"been|being|was|were|it|its|which|that|whose|there|both|also|then|now|here|sets?|"
    r"becomes?|became|values?|elements?|entry|entries|cells?|numbers?|only|entirely|completely|"
    r"fully|whole|wholly|entire|exactly|just|everywhere|throughout|across|along|filled|fills?|"
    r"full|made|makes?|put|holds?|holding|contains?|containing|consists?|with|padding|padded|"
    r"stored|replaced|empty|everything|saturates?|overwritten|equals?|lies?|stands?|sits|clipped|clamped|saturated|capped|goes|"
    r"turns|turned|single|lone|stays|overall|within|inside|through|wiped|out)"
)
"""Words that change nothing."""
_REMARK = re.compile(r"^(?:an?|the|as|like|because|since|due|for)\b")
_TURNS = re.compile(r"\b(?:not|no|never|except\w*|but|unless|without|other\w*|apart|save|later|until|fixed|or)\b")
"""Words that may turn what was said: a remark with one of them is none."""
_VALUES = {"zero": 0.0, "ones": 1.0, "half": 0.5, "halves": 0.5}

_OPENING = re.compile(
    r"^(?:(?:(?:all rows|(?:every|each) row|all|the|every|each|everything|values?|entries|entry|elements?|cells?|is|"
    r"are|of|an?|constant(?:ly)?|const|filled|full|fill|with|tensor|array|matrix|drawn|from|samples?|initially|at|base|"
    r"healthy|plain|random(?= (?:standard|normal|gaussian|uniform)))\b|"
    r"np\.random\.|np\.|numpy\.|torch\.|rng\.|[=:])\s*)*"
)
_DRAWN = re.compile(
    r"(?P<kind>(?:(?:standard|unit)[ -])?(?:normal|gaussian)|(?:standard_)?normal|randn\b|rand\b|uniform|n(?=\()|"
    r"random(?= (?:values|numbers)|\s*(?:[^\s\w]|$)))"
    r"(?:ly)?(?:[ -](?:distributed|distribution|noise|values?|numbers?|entries|draws?|rows))*"
    r"(?:\s*\((?P<arguments>[^()]*(?:\([^()]*\))?[^()]*)\))?"
)
_FLAT = re.compile(
    r"(?:(?P<word>zeros?|ones?|half|halves)\b|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?![\w.])"
    r"(?!\s+(?:rows?|columns?|points?|values? of|nan|inf|last|first)\b))"
    r"(?:\s*\([\[(]?[\d,\s]*[\])]?\))?"
)
_AFTER_BASE = re.compile(
    r"^(?:\s*(?:everywhere|throughout|elsewhere|only|overall|values?|tensor|array|in (?:every|all) \w+|"
    r"[,(]?\s*(?:with |and )?(?:rng |random )?seed(?: is)?\s*[=:]?\s*\d+\)?))*"
)
_JOINT = re.compile(
    r"^\s*(?:[,:(/]|-(?=\s)|\s|\b(?:with|but|except(?:ing)?|and|where|in which|only|apart from|aside from|for|that|"
    r"then|whose|while)\b)+"
)
_REST = re.compile(
    r"(?:^|[,;]\s*|\band\s+)(?:in\s+)?(?:all\s+|the\s+)*(?:rest|other rows?|other values?|others?|"
    r"remaining rows?|remainder|everything else|all else|elsewhere|otherwise)(?:\s+of\s+the\s+rows)?"
    r"\s*(?:is|are|=|:|being)?\s*(?P<base>[^;]+)$"
)


def contents(
    recipe: str, shape: Sequence[int], *, points: Sequence[int] = (), block: int = 0, dtype: str = "F32"
) -> tuple[np.ndarray, list[list[int]]] | None:
    """(array, groups of rows that the recipe calls copies); None when a part is not understood.

    A recipe is such as `ones; row 2 all NaN; [1, 0..4] = 65504`.

    points, block: ids of the column blocks and their width, for `row 1 all zero in point 30`. dtype: for `max`.
    """
    if len(shape) != 2 or any(size < 0 for size in shape) or shape[0] * shape[1] > CELLS or len(recipe) > RECIPE:
        return None
    table = Table((shape[0], shape[1]), tuple(points), block)
    split = _base_and_parts(_normalised(recipe), table.shape)
    if split is None:
        return None
    values, parts = split
    top = FLOAT_MAX.get(dtype, FLOAT_MAX["F32"])
    groups = []
    for part in parts:
        assignments = _assignments(part, table, top) if len(part) <= PART else None
        if assignments is not None:
            for mask, value in assignments:
                values[mask] = value
        elif copied := copies_in(part, table.shape[0]):
            values[copied[0]] = values[copied[1]]
            groups.append(sorted([*copied[0], copied[1]]))
        else:
            return None
    return values, groups


def _normalised(recipe: str) -> str:
    text = " ".join(
        recipe.lower().replace("\u2212", "-").replace("\u2013", "-").replace("\u2014", ",").replace("\n", ";").split()
    )
    for spelling, meant in _SAME_WORDS:
        text = re.sub(spelling, meant, text)
    return text


def _base_and_parts(text: str, shape: tuple[int, int]) -> tuple[np.ndarray, list[str]] | None:
    """The array of the base and the parts that change it; `row 2 all NaN, the rest ones` names its base last."""
    first, *parts = (part.strip() for part in text.split(";"))
    parts = [part for part in parts if part]
    found = _base(first, shape)
    if found is not None:
        values, more = found
        return values, [more, *parts] if more else parts
    rest = _REST.search(text)
    found = _base(rest["base"], shape) if rest else None
    if rest is None or found is None or found[1]:
        return None
    return found[0], [part for one in text[: rest.start()].split(";") if (part := one.strip())]


def _base(text: str, shape: tuple[int, int]) -> tuple[np.ndarray, str] | None:
    """(array, what stands after it) of `ones`, `constant 1`, `normal(mean, std), seed 0` or `uniform(low, high)`."""
    opening = _OPENING.match(text)
    start = opening.end() if opening else 0
    drawn, flat = _DRAWN.match(text, start), _FLAT.match(text, start)
    values: np.ndarray | None = None
    if drawn:
        values = _random(drawn["kind"], drawn["arguments"], shape)
    elif flat:
        word = (flat["word"] or "").rstrip("s").replace("halve", "half")
        number = {"zero": 0.0, "one": 1.0, "half": 0.5}[word] if word else float(flat["number"])
        values = np.full(shape, number, dtype=np.float32)
    match = drawn or flat
    if values is None or match is None:
        return None
    after = _AFTER_BASE.sub("", text[match.end() :])
    more = _JOINT.sub("", after).strip(" .")
    return None if more and more == after.strip(" .") else (values, more.rstrip(",: "))


def _random(kind: str, arguments: str | None, shape: tuple[int, int]) -> np.ndarray | None:
    """Drawn values; numbers in parentheses are the two of `normal` and `uniform`, for the others the shape."""
    pair = (0.0, 1.0)
    two = kind in ("normal", "uniform", "gaussian", "n")
    if two and arguments:
        given = re.sub(r"\b(?:mean|std|loc|scale|low|high|mu|sigma|size|seed)\b|=|\([^()]*\)", " ", arguments)
        numbers = [_number(one) for one in re.split(r"[,\s]+", given.strip(" ,")) if one]
        if len(numbers) < 2 or numbers[0] is None or numbers[1] is None:
            return None
        pair = (numbers[0], numbers[1])
    first, second = pair
    if not max(abs(first), abs(second)) < 1e30 or (second < first if kind == "uniform" else two and second < 0):
        return None
    random = np.random.default_rng(0)
    drawn = random.uniform(first, second, shape) if kind in ("uniform", "rand") else random.normal(first, second, shape)
    return drawn.astype(np.float32)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass
class _Clause:
    """What stands between two separators: tokens (kind, content) in their order."""

    tokens: list[tuple[str, Any]] = field(default_factory=list)
    text: str = ""

    def has(self, kind: str) -> bool:
        return any(name == kind for name, _ in self.tokens)

    def selectors(self) -> list[Selector]:
        return [selector for name, found in self.tokens if name == "place" for selector in found]

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.selectors()}

    @property
    def value_first(self) -> bool:
        return next((name for name, _ in self.tokens if name in ("value", "place")), "") == "value"


def _assignments(part: str, table: Table, top: float) -> list[tuple[np.ndarray, float]] | None:
    """(cells, value) of all that one part sets; None when a word, a place or a value in it is not understood."""
    clauses = _clauses(part, table, top)
    found = [] if clauses is None else [_assignment(clause, table) for clause in _inherited(list(_joined(clauses)))]
    whole = [one for one in found if one is not None]
    return whole if whole and len(whole) == len(found) else None


def _clauses(part: str, table: Table, top: float) -> list[_Clause] | None:
    clauses = [_Clause()]
    at = 0
    while at < len(part):
        kind, content, end = _token(part, at, table, top)
        if kind == "unknown" or (kind == "place" and content is None):
            return None
        if kind == "separator":
            clauses.append(_Clause())
        else:
            clauses[-1].text += part[at:end]
            if kind != "silent":
                clauses[-1].tokens.append((kind, content))
        at = end
    return [clause for clause in clauses if clause.tokens]


def _token(part: str, at: int, table: Table, top: float) -> tuple[str, Any, int]:
    """(kind, content, end) of the next token; a place that is not there has content None."""
    if match := _SILENT.match(part, at):
        return "silent", None, match.end()
    if match := CELL.match(part, at):
        return "place", cells(match, table), match.end()
    if match := SELECTED.match(part, at):
        return "place", selected(match, table), match.end()
    if match := _COUNT.match(part, at):
        return "count", int(match[1] or 1), match.end()
    if match := _VALUE.match(part, at):
        word = match[0].lstrip("+-")
        size = _VALUES[word] if word in _VALUES else top if word == "max" else float(word)
        return "value", -size if match[0].startswith("-") else size, match.end()
    if match := _SEPARATOR.match(part, at):
        return "separator", None, match.end()
    if match := _WORD.match(part, at):
        return ("silent" if _FILLER.fullmatch(match[0]) else "word"), match[0], match.end()
    return "unknown", None, at + 1


def _joined(clauses: list[_Clause]) -> Iterator[_Clause]:
    """Clauses that belong together as one: `row 1, column 3 = inf`; a place without a value goes with the next one,
    after `inf at row 0` with the one before. A remark after a whole clause is dropped."""
    done: list[_Clause] = []
    waiting = _Clause()
    for clause in clauses:
        remark = not clause.has("place") and not clause.has("value") and clause.has("word")
        if remark and done and _REMARK.match(clause.text.strip()) and not _TURNS.search(clause.text):
            continue
        if clause.has("value") and (clause.has("place") or waiting.tokens or not done):
            if clause.value_first and clause.has("place") and waiting.tokens and done:
                done[-1].tokens += waiting.tokens
            else:
                clause.tokens = waiting.tokens + clause.tokens
            waiting = _Clause()
            done.append(clause)
        elif done and done[-1].value_first and clause.has("place") and not waiting.tokens:
            done[-1].tokens += clause.tokens
        else:
            waiting.tokens += clause.tokens
    if done:
        done[-1].tokens += waiting.tokens
    yield from done or [waiting]


def _inherited(clauses: list[_Clause]) -> list[_Clause]:
    """`row 1 zero in point 2, NaN in point 30`: the second clause is about row 1 too."""
    for before, clause in pairwise(clauses):
        kinds, others = clause.kinds(), before.kinds()
        if kinds and kinds <= {"column", "point"} and "row" in others and others & {"column", "point"}:
            rows = [one for one in before.selectors() if one[0] == "row"]
            clause.tokens.append(("place", rows))
    return clauses


def _assignment(clause: _Clause, table: Table) -> tuple[np.ndarray, float] | None:
    """The cells of one clause and its value; a count (`five values of row 1`) takes the first cells of its place."""
    values = [content for kind, content in clause.tokens if kind == "value"]
    counts = [content for kind, content in clause.tokens if kind == "count"]
    if clause.has("word") or len(values) != 1 or len(counts) > 1 or not clause.has("place"):
        return None
    masks = [mask_of(group, table) for group in _groups(clause.selectors())]
    if not all(mask.any() for mask in masks):
        return None
    mask = np.logical_or.reduce(masks)
    if counts:
        mask.ravel()[np.flatnonzero(mask)[counts[0] :]] = False
    return mask, values[0]


def _groups(selectors: list[Selector]) -> list[list[Selector]]:
    """`rows 1, 3; columns 0, 1` is one group; `row 1, column 3, row 2, column 5` are two. Groups are joined."""
    groups: list[list[Selector]] = []
    for kind, same in groupby(selectors, key=lambda selector: selector[0]):
        merged = (kind, sorted({place for _, places in same for place in places}))
        if not groups or any(kind == other for other, _ in groups[-1]):
            groups.append([])
        groups[-1].append(merged)
    return groups
