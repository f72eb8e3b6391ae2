"""The command that starts the model server, in a script or behind docker, bash -c, tmux, srun, and its environment.

Only the text is read and nothing is executed. A variable in front of the command or exported before it counts over
one that the server's surroundings set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3lab.doctor.readers import shell
from eagle3lab.doctor.readers.bounded import ReadError
from eagle3lab.doctor.readers.shell_variables import Place, surely_before

ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
SPECULATIVE = re.compile(r"--speculative|--spec[-_](method|model|tokens)\b|-sc(?=[.=]|$)")
MODEL = re.compile(r"--model")
_NAME = re.compile(r"(?:\S*[./])?launch_server(?:\.py)?|vllm\.entrypoints\.[\w.]*|(?:\S*/)?vllm-openai(?:[:@]\S*)?")
MENTIONED = re.compile(r"\b(?:sglang|vllm|launch_server)\b|--speculative-")
_SHELLS = re.compile(r"(?:\S*/)?(?:ba|da|z|k|a|c|tc)?sh|(?:\S*/)?(?:su|runuser|script|busybox)")
_TALKING = re.compile(r"(?:\S*/)?(?:echo|printf|grep|egrep|pgrep|pkill|kill|killall|ps|git|logger|which|cat)")
"""Commands whose words name a server and start none."""
_SETTING = ("declare", "typeset")
_MOST_TEXTS = 200
_DEEPEST = 5
"""Commands within commands: srun bash -c "tmux new 'python3 ...'"."""


@dataclass(frozen=True)
class Server:
    """The server's command.

    Fields:
        words: its words, without the assignments in front of it. env: variables that the text sets for it; None is
            one that it takes away. others: how many other servers the text starts.
        found: a server's name or a flag of speculation or of the model is there; else `words` is the whole text.
        assigned: variables that the text sets and does not export: the server sees those that come from outside.
        alone: nothing comes from outside (`env -i`). cut: see `shell.Command`.
    """

    words: list[str]
    env: Mapping[str, str | None]
    others: int = 0
    found: bool = True
    assigned: Mapping[str, str | None] = field(default_factory=dict)
    alone: bool = False
    cut: str = ""

    def seen(self, outside: Mapping[str, Any]) -> dict[str, Any]:
        """Variables that the server sees where `outside` are set around it; None is one that is taken away."""
        inherited = {} if self.alone else {**outside, **{n: v for n, v in self.assigned.items() if n in outside}}
        return {**inherited, **self.env}


@dataclass
class _Line:
    """A command.

    Fields:
        words: its own. around: words of the commands that it stands in, the outermost first. places: branches around
            each of them and around itself. kept: it stands in a here-document, which may be no more than text.
    """

    words: list[str]
    around: list[list[str]] = field(default_factory=list)
    places: list[Place] = field(default_factory=lambda: [()])
    kept: bool = False
    cut: str = ""


def server(args: Any, variables: dict[str, str] | None = None) -> Server:
    """The server's command of a shell text or of a list of words; `variables` are known from outside.

    Raises:
        ReadError: a quote is not closed, or the variables come to more text than a launch line has.
    """
    known, finder = variables or {}, _Finder()
    try:
        if isinstance(args, str):
            lines = list(finder.lines(args, known))
        else:
            lines = list(finder.unwrapped(_Line([str(word) for word in args or []]), known))
    except shell.TooLong as error:
        raise ReadError(f"the launch line comes to {error}, variables put in", rule="a launch line is short") from error
    except ValueError as error:
        raise ReadError(f"the launch line has an open quote ({error})", rule="quotes come in pairs") from error
    ranks = [rank(line.words, kept=line.kept) for line in lines]
    best = max(ranks, default=0)
    servers = [n for n, one in enumerate(ranks) if one == best]
    if not best:
        return Server([word for line in lines for word in line.words if not line.around], {}, 0, found=False)
    chosen = lines[servers[-1]]
    words, seen = _without_front(chosen.words), _environment(lines[: servers[-1]], chosen)
    if variables and not isinstance(args, str) and not chosen.around:
        words = [shell.expanded(word, variables) for word in words]
    return Server(words, seen.env, len(servers) - 1, assigned=seen.plain, alone=seen.alone, cut=chosen.cut)


def server_at(words: list[str]) -> int | None:
    """Index of the last word of the server's name; None when no server is named."""
    named = None
    for n, word in enumerate(words):
        before = words[n - 1] if n else ""
        if _NAME.fullmatch(word) or (word == "serve" and before != "bench" and not before.startswith("-")):
            named = n
    return named


def rank(words: list[str], *, kept: bool = False) -> int:
    """How much a command looks like the one that starts a server; 0 for not at all."""
    if not words or _TALKING.fullmatch(words[0]):
        return 0
    at = server_at(words)
    named = at is not None and at + 1 < len(words)
    speculative, model = any(map(SPECULATIVE.match, words)), any(map(MODEL.match, words))
    return (8 * named + 4 * speculative + 2 * model) * (1 if kept else 16)


class _Finder:
    """Takes a text apart into its commands and those within their words, up to `_MOST_TEXTS` texts."""

    def __init__(self) -> None:
        self.left = _MOST_TEXTS

    def lines(self, text: str, variables: dict[str, str], outer: _Line | None = None) -> Iterator[_Line]:
        """The commands of a shell text; `outer` is the one whose word the text is."""
        found, after = shell.commands(text, variables)
        around, places, kept = ([*outer.around, outer.words], outer.places, outer.kept) if outer else ([], [], False)
        for command in found:
            line = _Line(command.words, around, [*places, command.place], kept, command.cut)
            yield from self.unwrapped(line, after)
            if MENTIONED.search(command.body):
                yield from self.tried(command.body, after, replace(line, kept=True))

    def tried(self, text: str, variables: dict[str, str], outer: _Line) -> Iterator[_Line]:
        """Commands of a text that may be no shell text."""
        self.left -= 1
        if self.left < 0 or len(outer.around) >= _DEEPEST:
            return
        try:
            found = list(self.lines(text, variables, outer))
        except ValueError:
            return
        yield from found

    def unwrapped(self, line: _Line, variables: dict[str, str]) -> Iterator[_Line]:
        """The command, and those in its words: `bash -lc "python3 ..."`, `tmux new -d "python3 ..."`."""
        yield line
        words = line.words
        if words and _TALKING.fullmatch(words[0]):
            return
        for n, word in enumerate(words):
            if n and re.fullmatch(r"-\w*c", words[n - 1]) and any(map(_SHELLS.fullmatch, words[: n - 1])):
                self.left -= 1
                if self.left >= 0 and len(line.around) < _DEEPEST:
                    yield from self.lines(word, variables, line)
                continue
            if ASSIGNMENT.match(word) and words[n - 1 : n] not in (["-S"], ["--split-string"]):
                continue  # CMD="python3 ..." runs where $CMD stands
            text = word.partition("=")[2] if word.startswith("-") else word  # sbatch --wrap="python3 ..."
            if re.search(r"\s", text) and text.lstrip()[:1] not in ("{", "[", "<") and MENTIONED.search(text):
                yield from self.tried(text, variables, line)


def _clears(front: list[str]) -> int:
    """Index of the option by which `env` takes everything from outside away; 0 for none."""
    at = next((n for n, word in enumerate(front) if word.rpartition("/")[2] == "env"), len(front))
    return next((n for n in range(at, len(front)) if front[n] in ("-i", "-", "--ignore-environment")), 0)


def _without_front(words: list[str]) -> list[str]:
    """The command without the assignments before its first flag."""
    kept: list[str] = []
    flags = False
    if cleared := _clears(words[: server_at(words)]):
        words = words[:cleared] + words[cleared + 1 :]  # what it leaves is told beside the words
    for word in words:
        flags = flags or word.startswith("--")
        if flags or not (ASSIGNMENT.match(word) or (not kept and word in shell.DECLARING)):
            kept.append(word)
    return kept


@dataclass
class _Seen:
    """Variables as the text goes on: exported, set for the shell alone, and whether `set -a` exports all."""

    env: dict[str, str | None] = field(default_factory=dict)
    plain: dict[str, str | None] = field(default_factory=dict)
    all: bool = False
    alone: bool = False

    def put(self, name: str, value: str | None, *, export: bool) -> None:
        """A variable that is exported stays so; what is taken away is gone for the server and for the shell."""
        if export or self.all or self.env.get(name) is not None or value is None:
            self.env[name] = value
            self.plain.pop(name, None)
        else:
            self.plain[name] = value

    def run(self, words: list[str], *, surely: bool) -> None:
        """What a command of assignments alone, a `set -a`, an `export` or an `unset` does."""
        first, rest = words[0], [word for word in words[1:] if word[:1] not in ("-", "+")]
        options = [word for word in words[1:] if word not in rest]
        if first == "set":
            for n, word in enumerate(words[1:], 1):
                if re.fullmatch(r"[-+]\w*a\w*", word) or words[n : n + 2] in (["-o", "allexport"], ["+o", "allexport"]):
                    self.all = word[0] == "-"
        elif first == "unset" or (first == "export" and "-n" in options) or (first in _SETTING and "+x" in options):
            for name in rest:
                self.put(name.partition("=")[0], None, export=True)
        else:
            declared = first in shell.DECLARING
            export = first == "export" or (declared and any(re.match(r"-\w*x", word) for word in options))
            given = rest if declared else words
            if all(ASSIGNMENT.match(word) or (export and word.isidentifier()) for word in given):
                for word in given:
                    name, equals, value = word.partition("=")
                    if equals or name in self.plain:
                        value = value if equals else self.plain[name] or ""
                        self.put(name, value if surely else f"${name}", export=export)


def _environment(before: list[_Line], chosen: _Line) -> _Seen:
    """Variables that the text sets for the server, the last one in force: from the outermost command inwards."""
    seen = _Seen()
    for depth, words in enumerate([*chosen.around, chosen.words]):
        for line in before:
            if line.around != chosen.around[:depth] or line.kept > chosen.kept or not line.words:
                continue
            surely = surely_before(line.places[-1], chosen.places[depth])
            if surely is not False:  # what a branch before it sets is not settled
                seen.run(line.words, surely=bool(surely))
        front = words[: server_at(words)]
        if _clears(front):
            seen = _Seen(alone=True)
        seen.env.update(_given_in_front(words))
    return seen


def _given_in_front(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """`A=b python3`, `env -u A`, docker's `-e A=b`, `-eA=b`, `--env=A=b`, `srun --export=ALL,A=b`, `mpirun -x A=b`."""
    at = server_at(words)
    front = words if at is None else words[:at]
    for n, word in enumerate(front):
        option = re.match(r"--(?:env|export|setenv)=|-[ex](?==?[A-Za-z_]\w*=)=?", word)
        before = front[n - 1] if n else ""
        if before in ("-u", "--unset") and "env" in front[: n - 1]:
            yield word, None
        elif option or not before.startswith("--") or before in ("--env", "--export", "--setenv"):
            yield from _pairs(re.split(r",(?=[A-Za-z_]\w*=)", word[option.end() :] if option else word))


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        if ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            yield name, value
