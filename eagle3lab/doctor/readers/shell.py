"""Shell text taken apart without running it: its commands, their words, and the variables that it sets itself.

Quotes, comments, line breaks, separators, redirections and here-documents are those of sh; `$NAME`, `${NAME}`,
`${NAME:-default}` and `"${ARRAY[@]}"` are put in where the text sets them. What only a running shell knows (`$1`,
`$(...)`, a variable from outside, one that a branch sets) stays as it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle3lab.doctor.readers.shell_variables import ABSENT, UNSETTLED, Place, State, Value, Variables

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"\$([A-Za-z_]\w*)")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?)([-=+])(.*))?", re.DOTALL)
_BRACES = re.compile(r"\$\{|\}")
_PLACEHOLDER = re.compile(r"<[\w./:-]+>")
_REDIRECTION = re.compile(r"(?:&>>?|[<>]+[&|]?)")
_HERE = re.compile(r"<<(-?)[ \t]*\\?(['\"]?)([\w.-]+)\2")
_CONTINUED = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+[ \t]*--?[A-Za-z]")
"""Line breaks before a line that begins with a flag, which no command does: the line before goes on."""
_BROKEN = re.compile(r"\\[ \t]+\n")
"""A blank behind the backslash: the shell reads an escaped blank, and the command ends at the line break."""
UNKNOWN = re.compile(r"\$[\w{(@*]|`")
"""What is left of an expansion that the text does not settle."""
DECLARING = ("export", "declare", "typeset", "readonly", "local")
_OPENING = {"if": "if", "case": "case", "for": "loop", "select": "loop", "while": "loop", "until": "loop"}
_CLOSING = {"fi": "if", "esac": "case", "done": "loop"}
_BETWEEN = ("then", "do", "!", "time")
_STRAIGHT = (
    *("cd", "mkdir", "source", ".", ":", "true", "set", "ulimit", "echo", "printf", "sleep", "rm", "cp", "conda"),
    *("pip", "pip3", "uv", "module", "pushd", "unset", "git", "hf", "huggingface-cli", "wait", "sudo", "apt-get"),
)
"""Commands after which `&&` goes on in every run that is worth reading about; any other is a condition."""
_READING = ("read", "mapfile", "readarray", "getopts")
MOST_CHARACTERS = 1_000_000
"""Of all words, variables put in: a few lines that name each other ten times over would fill any memory."""
_MOST_UNENDED = 20
"""`${` and `<<` without an end after which no more ends are looked for: each search goes through the whole text."""
_DEEPEST = 20
"""Defaults within defaults."""


class TooLong(ValueError):
    """The words come to more than `MOST_CHARACTERS`."""


@dataclass
class Command:
    """Words of one command, assignments in front of it among them.

    Fields:
        place: the branches around it. body: its here-documents. cut: the first word that a shell would not count to
            it, because a line before it, unlike others, does not end with a backslash; empty when there is none.
    """

    words: list[str]
    place: Place = ()
    body: str = ""
    cut: str = ""


def commands(text: str, variables: dict[str, str] | None = None) -> tuple[list[Command], dict[str, str]]:
    """(every command in order, the variables at the end); `variables` are those from outside.

    Raises:
        ValueError: a quote that is not closed. TooLong: more text than any launch line has.
    """
    shell = _Shell(text.replace("\r\n", "\n"), Variables(variables))
    return shell.commands(), shell.variables.settled()


def expanded(text: str, variables: dict[str, str]) -> str:
    """One word with its variables put in; those that are not given stay as written."""
    return _Shell(text, Variables(variables)).expanded()


class _Shell:
    def __init__(self, text: str, variables: Variables, depth: int = 0) -> None:
        self.text, self.at, self.depth = text, 0, depth
        self.variables = variables
        self.found: list[Command] = []
        self.words: list[str] = []
        self.word: str | None = None
        self.plain = True
        self.array: tuple[str, list[str]] | None = None
        self.here: list[tuple[str, bool]] = []
        self.defines = False
        self.dropped = False
        self.characters = 0
        self.unended = 0
        self.continued, self.cut = False, ""

    def commands(self) -> list[Command]:
        while self.at < len(self.text):
            self._step()
        self._end_command()
        return self.found

    def expanded(self) -> str:
        while self.at < len(self.text):
            if self.text[self.at] in "$`":
                self._expand(quoted=True)
            else:
                self._add(self.text[self.at], 1)
        return self.word or ""

    def _step(self) -> None:
        here, rest = self.text[self.at], self.text[self.at : self.at + 200]
        if broken := _BROKEN.match(rest):
            self._end_word()
            self.at, self.continued = self.at + len(broken[0]) - 1, True
        elif here == "\\":
            self.continued = self.continued or rest[1:2] == "\n"
            self._add("" if rest[1:2] == "\n" else rest[1:2], 2)
        elif here in "`^" and rest[1:2] == "\n" and self.word is None:
            self.at += 2  # how PowerShell and cmd go on
        elif here == "'" or rest.startswith("$'"):
            self._single()
        elif here == '"':
            self._quoted()
        elif here in "$`":
            self._expand(quoted=False)
        elif here == "#" and self.word is None:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif place := _PLACEHOLDER.match(rest):
            self._add(place[0], len(place[0]))
        elif rest[:3] != "<<<" and (document := _HERE.match(rest)):
            self._end_word()
            self.here.append((document[3], bool(document[1])))
            self.at += len(document[0])
        elif redirection := _REDIRECTION.match(rest):
            self.word = None if self.word is not None and self.word.isdecimal() else self.word
            self._end_word()
            self.at, self.dropped = self.at + len(redirection[0]), True
        elif here == "(" and self.word is not None and self.word.endswith("="):
            self._begin_array(self.word)
        elif here == ")" and self.array is not None:
            self._end_array()
        elif here in " \t" or (here == "\n" and self.array is not None):
            self._end_word()
            self.at += 1
        elif here in "\n;|&()":
            self._separator(here)
        else:
            self._add(here, 1)

    def _add(self, text: str, length: int) -> None:
        self.characters += len(text)
        if self.characters > MOST_CHARACTERS:
            raise TooLong(f"more than {MOST_CHARACTERS:,} characters")
        # A line break that is escaped adds nothing and begins no word.
        self.word = (self.word or "") + text if text or self.word is not None else None
        self.at += length

    # Words: quotes, expansions, arrays

    def _closing(self, mark: str, start: int) -> int:
        end = self.text.find(mark, start)
        if end < 0:
            raise ValueError("No closing quotation")
        return end

    def _single(self) -> None:
        start = self.at + (2 if self.text[self.at] == "$" else 1)
        end = self._closing("'", start)
        while start == self.at + 2 and self.text[end - 1] == "\\" and self.text[end - 2] != "\\":
            end = self._closing("'", end + 1)  # $'it\'s'
        text = self.text[start:end]
        self.plain = False
        self._add(text.replace("\\'", "'") if start == self.at + 2 else text, end + 1 - self.at)
        self.word = self.word or ""

    def _quoted(self) -> None:
        self.word, self.at, self.plain = self.word or "", self.at + 1, False
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
        start = self.at
        name = _NAME.match(self.text, start)
        end = name.end() if name else self._brace(start)
        inner = name[1] if name else self.text[start + 2 : end - 1]
        parameter = _PARAMETER.fullmatch(inner) if end else None
        value = self._value(parameter) if parameter else UNSETTLED
        if value is UNSETTLED or not isinstance(value, (str, list)):
            self._as_written(end)
            return
        self.at = end
        parts = value if isinstance(value, list) else [value] if quoted else value.split()
        for number, part in enumerate(parts):
            if number:
                self._end_word()
            self._add(part, 0)
            self.word = self.word or ""
            self.plain = False

    def _brace(self, start: int) -> int:
        """Where `${...}` ends, expansions within it counted; 0 when none begins here or it does not end."""
        if not self.text.startswith("${", start) or self.unended > _MOST_UNENDED:
            return 0
        depth = 0
        for mark in _BRACES.finditer(self.text, start):
            depth += 1 if mark[0] == "${" else -1
            if not depth:
                return mark.end()
        self.unended += 1
        return 0

    def _value(self, parameter: re.Match[str]) -> State:
        """What `${NAME}` with its default or alternative stands for."""
        name, empty_too, operator, word = parameter[1], bool(parameter[2]), parameter[3], parameter[4]
        value = self.variables.get(name)
        if name.isdecimal() and self.variables.inside("function"):
            value = UNSETTLED  # the function's own
        if operator is None or value is UNSETTLED:
            return value
        missing = value is ABSENT or (empty_too and not value)
        if operator == "+":
            return value if value is ABSENT else "" if missing else self._default(word)
        if not missing:
            return value
        default = self._default(word)
        if operator == "=":
            self.variables.set(name, default)
        return default

    def _default(self, word: str) -> Value | None:
        if self.depth >= _DEEPEST:
            return UNSETTLED
        inner = _Shell(re.sub(r"[\"']", "", word), self.variables, self.depth + 1)
        inner.characters = self.characters
        text = inner.expanded()
        self.characters = inner.characters
        return text

    def _as_written(self, end: int) -> None:
        """Keep an expansion as it stands; `end` is 0 when it is neither `$NAME` nor `${...}`."""
        start = self.at
        if not end and self.text.startswith("$(", start):
            depth, end = 0, start + 1
            while end < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[end], 0)
                end += 1
                if not depth:
                    break
        elif not end:
            end = self.text.find("`", start + 1) + 1 if self.text[start] == "`" else start + 1
        self._add(self.text[start : end or len(self.text)], (end or len(self.text)) - start)

    def _begin_array(self, word: str) -> None:
        name, items = word.rstrip("+="), []
        if word.endswith("+="):
            earlier = self.variables.get(name)
            if earlier is UNSETTLED:
                items = [f"${{{name}[@]}}"]
            elif isinstance(earlier, (str, list)):
                items = list(earlier) if isinstance(earlier, list) else [earlier]
        self.array, self.word, self.at = (name, items), None, self.at + 1

    def _end_array(self) -> None:
        self._end_word()
        if self.array is not None:
            self.variables.set(*self.array)
            if self.words[:1] == ["local"]:
                self.variables.local(self.array[0])
        self.array, self.at = None, self.at + 1

    def _end_word(self) -> None:
        word, plain = self.word, self.plain
        self.word, self.plain = None, True
        if word is None:
            return
        if self.array is not None:
            self.array[1].append(word)
        elif self.dropped:
            self.dropped = False
        elif not (plain and self._reserved(word)):
            self.words.append(self._assigned(word))

    def _assigned(self, word: str) -> str:
        """The word; where it is an assignment, the variable gets its value and `+=` is worked out."""
        given = _ASSIGNMENT.fullmatch(word)
        declared = self.words[:1] != [] and self.words[0] in DECLARING
        before = self.words[1:] if declared else self.words
        if not given or not all(_ASSIGNMENT.fullmatch(one) or (declared and one[:1] in "-+") for one in before):
            return word
        name, value = given[1], given[3]
        if given[2]:
            earlier = self.variables.get(name)
            text = " ".join(earlier) if isinstance(earlier, list) else earlier if isinstance(earlier, str) else ""
            value = (f"${name}" if earlier is UNSETTLED else text) + value
        self.variables.set(name, value)
        if declared and self.words[0] == "local":
            self.variables.local(name)
        return f"{name}={value}"

    # Commands: what separates them, branches, here-documents

    def _reserved(self, word: str) -> bool:
        """Whether the word is one of the shell's own at the start of a command that is no part of one."""
        if self.words and not (word == "{" and self.words[0] == "function"):
            return False
        kind = self.variables.innermost()
        if word in _OPENING:
            self.variables.open(_OPENING[word])
            return word not in ("for", "select", "case")  # their words are looked at when the command ends
        if word == "{":
            self.variables.open("function" if self.defines or self.words else "group")
            self.defines, self.words = False, []
        elif word in ("else", "elif") and kind == "if":
            self.variables.alternative(last=word == "else")
        elif _CLOSING.get(word) == kind != "" or (word == "}" and kind in ("function", "group")):
            self.variables.close()
        elif word not in _BETWEEN:
            return False
        return True

    def _separator(self, here: str) -> None:
        if here == "\n" and not self.here and self.words and (more := _CONTINUED.match(self.text, self.at)):
            self._end_word()
            self.at = more.end() - len(more[0].rpartition("\n")[2])
            self.cut = self.cut or self.text[self.at :].split(maxsplit=1)[0]
            return
        two = self.text[self.at : self.at + 2]
        named = (self.word is not None) + len(self.words) == 1
        if here == "(" and named and re.match(r"\(\s*\)", self.text[self.at : self.at + 40]):
            self.defines = True
        if here == ")" and self.variables.innermost() == "case" and not self._case_body():
            self.variables.pattern(catches_all=self.word == "*")
        opens = here == "(" and not self.words and self.word is None and not self.defines
        self._end_command()
        if opens and self.variables.innermost() != "case":
            self.variables.open("subshell")
        elif here == ")" and self.variables.innermost() == "subshell":
            self.variables.close()
        elif two in ("&&", "||"):
            self._chained(two)
            self.at += 1
        elif here in "\n;&" and self.variables.innermost() == "chain":
            self.variables.close()
        if two == ";;" and self.variables.innermost() == "case":
            self.variables.alternative()
            self.at += 1
        self.at += 1
        if here == "\n" and self.here:
            self._here_documents()

    def _case_body(self) -> bool:
        """Whether a `)` inside a `case` ends a subshell, not a pattern: a pattern is one word."""
        return len(self.words) > (3 if self.words[:1] == ["case"] else 0)

    def _chained(self, mark: str) -> None:
        """After `&&` and `||` an assignment may or may not be made, unless what is in front always succeeds."""
        words = self.found[-1].words if self.found else []
        surely = bool(words) and (words[0] in (*_STRAIGHT, *DECLARING) or _ASSIGNMENT.fullmatch(words[-1]) is not None)
        if self.variables.innermost() != "chain" and not (mark == "&&" and surely):
            self.variables.open("chain")

    def _here_documents(self) -> None:
        """The lines up to each end mark belong to the command, not to the text; without its mark there is none."""
        for mark, tabs in self.here:
            at, start = self.at, self.at
            self.unended += 1
            while at < len(self.text) and self.unended <= _MOST_UNENDED:
                end = self.text.find("\n", at)
                end = len(self.text) if end < 0 else end
                line = self.text[at:end]
                if (line.lstrip("\t") if tabs else line) == mark:
                    if self.found:
                        self.found[-1].body += self.text[start:at]
                    self.at, self.unended = end + 1, self.unended - 1
                    break
                at = end + 1
        self.here = []

    def _end_command(self) -> None:
        self._end_word()
        self.dropped = False
        words, self.words = self.words, []
        cut, self.continued, self.cut = self.cut if self.continued else "", False, ""
        if not words:
            return
        if words[0] == "unset":
            for name in words[1:]:
                self.variables.set(name, ABSENT)
        elif words[0] in _READING or (words[0] in ("for", "select") and len(words) > 1):
            for name in words[1:2] if words[0] in ("for", "select") else words[1:]:
                self.variables.set(name, UNSETTLED)
        if words[0] not in ("for", "select", "case", "function"):
            self.found.append(Command(words, self.variables.place(), cut=cut))
