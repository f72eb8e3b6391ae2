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
    """

    words: list[str]
    env: Mapping[str, str | None]
    others: int = 0
    found: bool = True


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
    words, env = _without_front(chosen.words), _environment(lines[: servers[-1]], chosen)
    if variables and not isinstance(args, str) and not chosen.around:
        words = [shell.expanded(word, variables) for word in words]
    return Server(words, env, len(servers) - 1)


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
            line = _Line(command.words, around, [*places, command.place], kept)
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
            if ASSIGNMENT.match(word):
                continue  # CMD="python3 ..." runs where $CMD stands
            text = word.partition("=")[2] if word.startswith("-") else word  # sbatch --wrap="python3 ..."
            if re.search(r"\s", text) and text.lstrip()[:1] not in ("{", "[", "<") and MENTIONED.search(text):
                yield from self.tried(text, variables, line)


def _without_front(words: list[str]) -> list[str]:
    """The command without the assignments before its first flag."""
    kept: list[str] = []
    flags = False
    for word in words:
        flags = flags or word.startswith("--")
        if flags or not (ASSIGNMENT.match(word) or (not kept and word in shell.DECLARING)):
            kept.append(word)
    return kept


def _environment(before: list[_Line], chosen: _Line) -> dict[str, str | None]:
    """Variables that the text sets for the server, the last one in force: from the outermost command inwards."""
    env: dict[str, str | None] = {}
    for depth, words in enumerate([*chosen.around, chosen.words]):
        for line in before:
            if line.around != chosen.around[:depth] or line.kept > chosen.kept:
                continue
            surely = surely_before(line.places[-1], chosen.places[depth])
            if surely is not False:  # what a branch before it sets is not settled
                env.update((name, value if surely else f"${name}") for name, value in _settings(line.words))
        env.update(_given_in_front(words))
    return env


def _settings(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """What a command of assignments alone, an `export` or an `unset` does."""
    if words[:1] == ["unset"]:
        yield from ((name, None) for name in words[1:])
        return
    declared = words[:1] and words[0] in shell.DECLARING
    rest = [word for word in words[1:] if word[:1] not in ("-", "+")] if declared else words
    if all(map(ASSIGNMENT.match, rest)):
        yield from _pairs(rest)


def _given_in_front(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """`A=b python3`, `env -u A`, docker's `-e A=b`, `-eA=b`, `--env=A=b`, `srun --export=ALL,A=b`, `mpirun -x A=b`."""
    at = server_at(words)
    front = words if at is None else words[:at]
    for n, word in enumerate(front):
        option = re.match(r"--(?:env|export)=|-[ex](?==?[A-Za-z_]\w*=)=?", word)
        before = front[n - 1] if n else ""
        if before in ("-u", "--unset") and "env" in front[: n - 1]:
            yield word, None
        elif option or not before.startswith("--") or before in ("--env", "--export"):
            yield from _pairs(re.split(r",(?=[A-Za-z_]\w*=)", word[option.end() :] if option else word))


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        if ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            yield name, value
