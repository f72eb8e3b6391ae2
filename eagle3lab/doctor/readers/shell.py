"""Shell text taken apart without running it: its commands, their words, and the variables that it sets itself.

Quotes, comments, line breaks, separators and redirections are those of sh; `$NAME`, `${NAME}`, `${NAME:-default}` and
`"${ARRAY[@]}"` are put in where the text sets them. What only a running shell knows (`$1`, `$(...)`, a variable from
outside) stays as it is written.
"""

from __future__ import annotations

import re

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\]|:?-([^}]*))?\})")
_PLACEHOLDER = re.compile(r"<[\w./:-]+>")
_REDIRECTION = re.compile(r"(?:&>>?|[<>]+[&|]?)")
UNKNOWN = re.compile(r"\$[\w{(@*]|`")
"""What is left of an expansion that the text does not settle."""


MOST_CHARACTERS = 1_000_000
"""Of all words, variables put in: a few lines that name each other ten times over would fill any memory."""


class TooLong(ValueError):
    """The words come to more than `MOST_CHARACTERS`."""


def commands(text: str) -> list[list[str]]:
    """The words of every command, in order; assignments in front of one are among its words.

    Raises:
        ValueError: a quote that is not closed. TooLong: more text than any launch line has.
    """
    return _Shell(text.replace("\r\n", "\n")).commands()


class _Shell:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.variables: dict[str, str | list[str]] = {}
        self.found: list[list[str]] = []
        self.words: list[str] = []
        self.word: str | None = None
        self.array: tuple[str, list[str]] | None = None
        self.dropped = False
        self.characters = 0

    def commands(self) -> list[list[str]]:
        while self.at < len(self.text):
            self._step()
        self._end_command()
        return self.found

    def _step(self) -> None:
        here, rest = self.text[self.at], self.text[self.at : self.at + 200]
        if here == "\\":
            self._add("" if rest[1:2] == "\n" else rest[1:2], 2)
        elif here == "'":
            end = self._closing("'", self.at + 1)
            self._add(self.text[self.at + 1 : end], end + 1 - self.at)
        elif here == '"':
            self._quoted()
        elif here in "$`":
            self._expand(quoted=False)
        elif here == "#" and self.word is None:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif place := _PLACEHOLDER.match(rest):
            self._add(place[0], len(place[0]))
        elif redirection := _REDIRECTION.match(rest):
            self.word = None if self.word is not None and self.word.isdecimal() else self.word
            self._end_word()
            self.at, self.dropped = self.at + len(redirection[0]), True
        elif here == "(" and self.word is not None and self.word.endswith("="):
            self.array, self.word, self.at = (self.word.rstrip("+="), []), None, self.at + 1
        elif here == ")" and self.array is not None:
            self._end_word()
            self.variables[self.array[0]] = self.array[1]
            self.array, self.at = None, self.at + 1
        elif here in " \t" or (here == "\n" and self.array is not None):
            self._end_word()
            self.at += 1
        elif here in "\n;|&()":
            self._end_command()
            self.at += 1
        else:
            self._add(here, 1)

    def _add(self, text: str, length: int) -> None:
        self.characters += len(text)
        if self.characters > MOST_CHARACTERS:
            raise TooLong(f"more than {MOST_CHARACTERS:,} characters")
        # A line break that is escaped adds nothing and begins no word.
        self.word = (self.word or "") + text if text or self.word is not None else None
        self.at += length

    def _closing(self, mark: str, start: int) -> int:
        end = self.text.find(mark, start)
        if end < 0:
            raise ValueError("No closing quotation")
        return end

    def _quoted(self) -> None:
        self.word, self.at = self.word or "", self.at + 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            here, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if here == "\\" and after and after in '"\\$`\n':
                self._add("" if after == "\n" else after, 2)
            elif here in "$`":
                self._expand(quoted=True)
            else:
                self._add(here, 1)
        self.at = self._closing('"', self.at) + 1

    def _expand(self, *, quoted: bool) -> None:
        found = _VARIABLE.match(self.text, self.at)
        if found is None:
            self._as_written()
            return
        name, default = found[1] or found[2], found[3]
        value = self.variables.get(name, default)
        if value is None:
            self._add(found[0], len(found[0]))
            return
        self.at += len(found[0])
        parts = value if isinstance(value, list) else [value] if quoted else value.split()
        for number, part in enumerate(parts):
            if number:
                self._end_word()
            self._add(part, 0)

    def _as_written(self) -> None:
        start = self.at
        if self.text.startswith("$(", start):
            depth, end = 0, start + 1
            while end < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[end], 0)
                end += 1
                if not depth:
                    break
        else:
            end = self.text.find("`", start + 1) + 1 if self.text[start] == "`" else start + 1
        self._add(self.text[start : end or len(self.text)], (end or len(self.text)) - start)

    def _end_word(self) -> None:
        word, self.word = self.word, None
        if word is None:
            return
        if self.array is not None:
            self.array[1].append(word)
        elif self.dropped:
            self.dropped = False
        else:
            given = _ASSIGNMENT.fullmatch(word)
            if given and all(_ASSIGNMENT.fullmatch(before) or before == "export" for before in self.words):
                earlier = self.variables.get(given[1], "") if given[2] else ""
                self.variables[given[1]] = (earlier if isinstance(earlier, str) else " ".join(earlier)) + given[3]
                word = f"{given[1]}={self.variables[given[1]]}"
            self.words.append(word)

    def _end_command(self) -> None:
        self._end_word()
        self.dropped = False
        if self.words[:1] == ["unset"]:
            for name in self.words[1:]:
                self.variables.pop(name, None)
        if self.words:
            self.found.append(self.words)
        self.words = []
