"""Variables of a shell text that is read without being run: what a branch sets is known only inside of it.

After `if ...; then A=x; fi` the value of A is one of two. Both are the same, or share a beginning that is kept
(`ARGS+=(--debug)` in a branch), or A is unsettled, which is another thing than not set: its default is not taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Value = str | list[str]
UNSETTLED = None
"""Value of a variable that the text sets in more than one way."""


class _Absent:
    """Stands for a variable that the text does not set."""


ABSENT = _Absent()
State = Value | None | _Absent
_PLACE_DEPTH = 20
"""Branches within branches that are told apart: a place is kept for every command."""
Place = tuple[tuple[int, int], ...]
"""The open branches from the outermost, each with the number of its alternative; a subshell's number is below 0."""


def surely_before(earlier: Place, later: Place) -> bool | None:
    """Whether what `earlier` did is in force at `later`; None for perhaps, False in another alternative or subshell."""
    same = next((n for n, pair in enumerate(zip(earlier, later, strict=False)) if pair[0] != pair[1]), len(later))
    own, other = earlier[same:], later[same:]
    if any(number < 0 for number, _ in own) or (own and other and own[0][0] == other[0][0]):
        return False
    return None if own else True


@dataclass
class _Branch:
    """One `if`, `case`, loop, function or `&&` chain that is open.

    Fields:
        kind: the word that opened it. before: values before it, of the names that are set inside.
        ends: values at the end of each alternative so far. whole: one alternative is always taken.
        started: an alternative is open (a `case` has none between `;;` and the next pattern).
        local: names of a function that end with it. number: tells it from the others.
    """

    kind: str
    number: int
    before: dict[str, State] = field(default_factory=dict)
    ends: list[dict[str, State]] = field(default_factory=list)
    whole: bool = False
    started: bool = True
    local: set[str] = field(default_factory=set)


class Variables:
    """Names and their values at one place of the text."""

    def __init__(self, known: dict[str, str] | None = None) -> None:
        self._known: dict[str, Value | None] = dict(known or {})
        self._open: list[_Branch] = []
        self._opened = 0

    def place(self) -> Place:
        """Where in the branches the text is now."""
        around = self._open[:_PLACE_DEPTH]
        return tuple((branch.number, len(branch.ends)) for branch in around if branch.kind != "group")

    def get(self, name: str) -> State:
        """The value; `UNSETTLED`, or `ABSENT` when the text does not set it."""
        return self._known.get(name, ABSENT)

    def settled(self) -> dict[str, str]:
        """Every name whose value is one known text."""
        return {name: value for name, value in self._known.items() if isinstance(value, str)}

    def set(self, name: str, value: State) -> None:
        """Give a value, `UNSETTLED` or (for `unset`) `ABSENT`; the innermost branch remembers what was there."""
        if self._open:
            self._open[-1].before.setdefault(name, self.get(name))
        self._put(name, value)

    def local(self, name: str) -> None:
        """The name ends with the function around it, where there is one."""
        for branch in reversed(self._open):
            if branch.kind == "function":
                branch.local.add(name)
                return

    def _put(self, name: str, value: State) -> None:
        if isinstance(value, _Absent):
            self._known.pop(name, None)
        else:
            self._known[name] = value

    def inside(self, kind: str) -> bool:
        """Whether a branch of that kind is open, at any depth."""
        return any(branch.kind == kind for branch in self._open)

    def innermost(self) -> str:
        """Kind of the innermost branch, empty without one."""
        return self._open[-1].kind if self._open else ""

    def open(self, kind: str) -> None:
        """A branch begins."""
        self._opened += 1
        number = -self._opened if kind == "subshell" else self._opened
        self._open.append(_Branch(kind, number, started=kind != "case"))

    def pattern(self, *, catches_all: bool) -> None:
        """A pattern of a `case`: an alternative begins."""
        branch = self._open[-1]
        branch.started, branch.whole = True, branch.whole or catches_all

    def alternative(self, *, last: bool = False) -> None:
        """`else` (the last one), `elif`, `;;`: what follows begins from the values before the branch."""
        branch = self._open[-1]
        branch.ends.append({name: self.get(name) for name in branch.before})
        for name, value in branch.before.items():
            self._put(name, value)
        branch.started, branch.whole = branch.kind != "case", branch.whole or last

    def close(self) -> None:
        """The innermost branch ends: each name that was set in it has one value now, or is unsettled."""
        branch = self._open[-1]
        if branch.started:
            self.alternative()
        self._open.pop()
        if branch.kind == "subshell":
            outcomes: dict[str, State] = {}
        elif branch.kind == "group":
            outcomes = {name: branch.ends[-1][name] for name in branch.before}
        else:
            outcomes = {name: _merged(name, list(_ways(branch, name))) for name in branch.before.keys() - branch.local}
        for name, value in outcomes.items():
            self.set(name, value)


def _ways(branch: _Branch, name: str) -> Iterable[State]:
    before = branch.before[name]
    yield from (end.get(name, before) for end in branch.ends)
    if not branch.whole:
        yield before


def _merged(name: str, ways: list[State]) -> State:
    """The one value of all ways, their common beginning with a mark for the rest, or `UNSETTLED`."""
    first = ways[0]
    if all(way == first for way in ways):
        return first
    lists = [way for way in ways if isinstance(way, list)]
    texts = [way.split() for way in ways if isinstance(way, str)]
    if len(lists) == len(ways):
        beginning = _beginning(lists)
        return [*beginning, f"${{{name}[@]}}"] if beginning else UNSETTLED
    if len(texts) == len(ways):
        beginning = _beginning(texts)
        return " ".join([*beginning, f"${name}"]) if beginning else UNSETTLED
    return UNSETTLED


def _beginning(ways: list[list[str]]) -> list[str]:
    """The shortest way where all others only add to it, and add no flag that it has; else []."""
    shortest = min(ways, key=len)
    flags = {word.partition("=")[0] for word in shortest if word.startswith("-")}
    for way in ways:
        added = {word.partition("=")[0] for word in way[len(shortest) :]}
        if way[: len(shortest)] != shortest or added & flags:
            return []
    return shortest
