"""Rows that a recipe calls equal: `rows 3 and 4 repeat row 2`, `the last row is a copy of the one before it`."""

from __future__ import annotations

import re

from eagle3lab.doctor.places import SELECTED, places

MANY = 2_000_000
"""Rows that are assumed when their number is not known."""
_OTHER_TOKENS = re.compile(
    r"\b(?:(?:al)?though|even if|while|but|despite|for|under|of|with|at|whose|and)\s+(?:(?:their|the|these|its)\s+)?"
    r"(?:different|differing|other|distinct|various)?\s*"
    r"(?:tokens?|ids?|texts?|words?|positions?)"
    r"(?:\s+(?:\w+\s+)?(?:differ\w*|change|are other ones|are not(?: the same)?))?"
)
"""`for different tokens`, `although their tokens differ`: says that the copies are a fault, not that they are none."""
_COPIES = re.compile(
    r"\b(?:cop(?:y|ies|ied)|clones?|equals?|identical(?:ly)?|duplicat\w*|repeat(?:s|ed|ing)?|repetitions?|same|again|"
    r"match(?:es|ing|ed)?|once more|bit[ -]for[ -]bit|byte[ -]for[ -]byte|(?:bit|byte)[ -]?(?:equal|wise|identical)|"
    r"reus(?:es?|ing)|mirrors?|(?:is|are) rows?\b|(?:written|stored|pasted) (?:again )?(?:in)?to rows?|fills? rows?|"
    r"(?:contain|carry|carries|hold|share|take|have|has|keep|get|receive)s? (?:only |again |all |the )*"
    r"(?:(?:values?|bits?|bytes?|states?|contents?|numbers?) of row|row \d+'s))\b|"
    r"(?:=+|<-)\s*(?:(?:the|aux|last)\s*)?(?:row|\[)"
)
_NOT = re.compile(
    r"\b(?:no|not|never|nor|neither|none|differ\w*|unequal|distinct|unique|n't|cannot|unlike|almost|nearly|roughly|"
    r"about|approximately|similar|close|plus|minus|scaled|times|shifted|negated|noise|noisy|perturbed|except\w*|"
    r"rounded|if|unless|would|or)\b|n't\b"
)
"""Words that make another statement of it: no copies, or near ones."""
_VALUE = re.compile(r"\b(?:nans?|inf|infinit\w+|zero\w*)\b|\bequals? (?:to )?(?:one\b|half\b|-?[\d.]+)")
_SAME = re.compile(
    r"\b(?:(?:are |is )?(?:no|not) different|do(?:es)? not differ|don't differ|cannot be told apart|indistinguishable)"
    r" from\b"
)
"""`do not differ from row 2`: two negations that make a copy."""
_ATTRIBUTE = re.compile(
    r"\b(?:same|equal|identical|matching|repeated|duplicate)\s+(?:in\s+)?(?:\w+\s+)?(?:argmax\w*|tokens?|ids?|norms?|"
    r"sizes?|shapes?|lengths?|widths?|dtypes?|scales?|signs?|masks?|labels?|points?|directions?|samples?|predictions?|"
    r"magnitudes?|types?|columns?|ways?|manner|recipe|rules?|formula|kind|order|source|file|batch)\b"
)
"""What else can be the same in two rows."""
_INDEXED = re.compile(r"\b(?:rows?|last|states?|aux|h)?\s*\[(\d+)\]")
_BEFORE = re.compile(
    r"\b(?:(?:the )?(?:one|1|row)s? (?:(?:right|just|directly|immediately) )?(?:before|above|preceding)"
    r"|(?:previous|preceding|prior) (?:one|1|row)|(?:its|their) predecessor)\b"
)
_NEXT = re.compile(
    r"\b(?:(?:the )?(?:one|1|row)s? (?:(?:right|just|directly|immediately) )?(?:after|below|following)"
    r"(?!\s+(?:row\s+)?\d)"
    r"|(?:next|following|subsequent) (?:one|1|row)|(?:its|their) successor)\b"
)


def copied_rows(recipe: str, rows: int = 0) -> list[list[int]]:
    """Groups of equal rows that a recipe names: `rows 3 and 4 are bit-equal copies of row 2` -> [[2, 3, 4]].

    Args:
        rows: how many there are, for `the last row`.
    """
    found = [copies_in(part, rows) for part in _parts(recipe)]
    return [sorted({*one[0], one[1]}) for one in found if one]


def unclear_copies(recipe: str, rows: int = 0) -> list[str]:
    """Parts that speak of copied rows and do not say which."""
    return [part for part in _parts(recipe) if copies_in(part, rows) == ()]


def _parts(recipe: str) -> list[str]:
    return [part for one in re.split(r";|\n|\.\s", recipe[:5000].lower()) if (part := " ".join(one.split()))]


def copies_in(part: str, rows: int = 0) -> tuple[list[int], int] | tuple[()] | None:
    """(copies, the row that they are equal to) of one part; () when it does not say which, None without such words."""
    part = _SAME.sub("identical to", part)
    part = _INDEXED.sub(r"row \1", _OTHER_TOKENS.sub(" ", part))
    if not _COPIES.search(part) or _NOT.search(part) or _ATTRIBUTE.search(part):
        return None
    if _VALUE.search(part):
        return ()
    named: list[list[int]] = []
    matches = list(SELECTED.finditer(part))
    if any(match["open"] or match["after"] for match in matches):  # `from row 2 on every row is the same`
        matches = [match for match in matches if not match["every"]]
    for match in matches:
        kinds = [match[name] for name in ("one", "some", "ordered", "every", "after", "open", "stepped", "paired")]
        kind = next(kind for kind in kinds if kind)
        if kind not in ("row", "position"):
            return ()
        found = places(match, range(rows or (MANY if match["one"] else 0)))
        if not found:
            return ()
        named.append([int(match["behind"]), *found] if match["after"] else found)
    if named and _BEFORE.search(part):
        named.append([min(min(one) for one in named) - 1])
    if named and _NEXT.search(part):
        named.append([max(max(one) for one in named) + 1])
    group = {row for one in named for row in one}
    if len(group) < 2 or min(group) < 0 or (rows and max(group) >= rows):
        return ()
    source = named[-1][0] if len(named[-1]) == 1 else named[0][0]
    return sorted(group - {source}), source
