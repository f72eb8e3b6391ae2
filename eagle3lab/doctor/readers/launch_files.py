"""Files that hold a launch line: YAML and JSON (flags, compose, Kubernetes, helm), Dockerfile, systemd, Python.

Each gives the server's command with the variables of the file put in. A file in which no server is found is said to
hold none: its other commands are not judged.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eagle3lab.doctor.readers.bounded import ReadError, parse_json, parse_yaml_documents
from eagle3lab.doctor.readers.command import MENTIONED, Server, rank, server
from eagle3lab.doctor.readers.environment import KEYS, variables

NONE = Server([], {}, found=False)
_LISTED = re.compile(r"\s*(?:CMD|ENTRYPOINT)?\s*(\[\s*\".*\])\s*", re.DOTALL)
"""A launch line as a JSON list of words, as in a Dockerfile."""
_INSTRUCTION = re.compile(r"\s*(FROM|ENV|ARG|CMD|ENTRYPOINT)\s+(.*)", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"(?ms)^[ \t]*(?:```|~~~)[^\n`]*\n(.*?)^[ \t]*(?:```|~~~)[ \t]*$")
_UNIT = re.compile(r"(?m)^ExecStart\s*=")
_ARGUMENTS = re.compile(r".*(?:args|arguments|flags)", re.IGNORECASE)
"""Keys of helm charts and the like under which flags stand: args, extraArgs, serverArgs."""
_SPECULATION = re.compile(r"-*speculative[-_](?:algo|draft|config|num)")
_FLAG = re.compile(r"-*(?:speculative|spec-|model|tp|tensor-parallel)")
_PUT_IN = re.compile(r"\$\(([A-Za-z_]\w*)\)")


def listed(text: str) -> bool:
    """Whether the text is a JSON list of words."""
    return _LISTED.fullmatch(text) is not None


def server_of(text: str, source: str, suffix: str = "") -> Server:
    """The server's command of a text in any of the layouts; `suffix` is the file's, empty for an argument."""
    if suffix in ("", ".md", ".markdown"):
        text = _code(text)
    if suffix in (".yaml", ".yml"):
        return _of_documents(parse_yaml_documents(text, source), source)
    if suffix == ".json":
        return _of_documents([parse_json(text, source).value], source)
    if suffix == ".py":
        return _of_python(text)
    if match := _LISTED.fullmatch(text):
        return _of_documents([parse_json(match[1], source).value], source)
    if not text.startswith("#!") and _UNIT.search(text):  # a script may write a unit
        return _of_unit(text)
    if _is_dockerfile(text):
        return _of_dockerfile(text, source)
    return server(text)


def _code(text: str) -> str:
    """What stands between a page's code marks, without its prose; a text without marks is returned as it is."""
    if blocks := _FENCED.findall(text):
        return "\n".join(blocks)
    inline = re.fullmatch(r"\s*`([^`\n]+)`\s*", text)
    return inline[1] if inline else text


# YAML and JSON


def _of_documents(documents: list[Any], source: str) -> Server:
    """The best of all containers and scripts in the documents; without any, a mapping of flags."""
    first = documents[0] if documents else None
    if isinstance(first, list) and all(isinstance(word, (str, int, float)) for word in first):
        return replace(server([str(word) for word in first]), found=True)
    best, best_rank = NONE, 0
    for one in _candidates(documents):
        if one.found and rank(one.words) > best_rank:
            best, best_rank = one, rank(one.words)
    if best_rank:
        return best
    if not any(isinstance(document, dict) for document in documents):
        held = "is empty" if first is None else f"holds {str(first)[:40]!r} and no flags"
        raise ReadError(f"{source} {held}", rule="flags and values")
    flags = next((document for document in documents if isinstance(document, dict)), {})
    other = len(documents) > 1 or any(isinstance(value, (dict, list)) for value in flags.values())
    if other and not any(_FLAG.match(str(key).replace("_", "-")) for key in flags):
        return NONE
    return Server(_flags(flags), {})


def _candidates(documents: list[Any]) -> Iterator[Server]:
    """Every place that may start a server: a container's command and args, and texts that name one."""
    stack: list[tuple[Any, dict[str, str]]] = [(document, {}) for document in reversed(documents)]
    while stack:
        item, outer = stack.pop()
        if isinstance(item, dict):
            own = [variables(value) for key, value in item.items() if str(key).lower() in KEYS]
            env = {**outer, **{name: value for one in own for name, value in one.items()}}
            if words := _container(item):
                yield _with_env(words, env)
            if any(_SPECULATION.match(str(key)) for key in item) and item not in documents:
                yield Server(_flags({str(key).replace("_", "-"): value for key, value in item.items()}), env)
            stack.extend((value, env) for value in reversed(list(item.values())))
        elif isinstance(item, list):
            stack.extend((value, outer) for value in reversed(item))
        elif isinstance(item, str) and MENTIONED.search(item) and re.search(r"\s", item):
            yield _with_env(item, outer)


def _container(item: dict[Any, Any]) -> list[str]:
    """Words of `entrypoint`, `command` and `args`, a chart's extraArgs behind them."""
    keys = [key for key in ("entrypoint", "command", "args") if key in item]
    keys += [key for key in item if key not in keys and _ARGUMENTS.fullmatch(str(key))]
    words: list[str] = []
    for key in keys:
        value = item[key]
        if isinstance(value, list):
            words += [str(word) for word in value if isinstance(word, (str, int, float))]
        elif isinstance(value, dict):
            words += _flags(value)
        elif isinstance(value, str):
            words += _text_words(value, words)
    return words


def _text_words(text: str, before: list[str]) -> list[str]:
    """Words of a command that is written as one text; a whole script stays one, for a shell to read."""
    if before and re.fullmatch(r"-\w*c", before[-1]):
        return [text]
    simple = "\n" not in text.strip() and not any(mark in text for mark in (";", "&&", "||", "$"))
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words, simple = text.split(), False
    return words if simple or before else ["sh", "-c", text]


def _with_env(args: str | list[str], env: dict[str, str]) -> Server:
    """The command with the container's variables: `$(NAME)` as Kubernetes puts it in, `$NAME` as a shell does."""

    def put_in(text: str) -> str:
        text = _PUT_IN.sub(lambda match: env.get(match[1], match[0]), text)
        return re.sub(r"\$(\$[A-Za-z_{])", r"\1", text)  # compose's way to write a dollar

    try:
        found = server(put_in(args) if isinstance(args, str) else [put_in(word) for word in args], env)
    except ReadError:
        return NONE
    return replace(found, env=found.seen(env))


def _flags(mapping: dict[Any, Any]) -> list[str]:
    """`{flag: value}` as words: true is a switch, false and null leave it out."""
    words: list[str] = []
    for key, value in mapping.items():
        if value is None or value is False:
            continue
        words.append("--" + str(key).lstrip("-"))
        if value is not True:
            items = value if isinstance(value, list) else [value]
            words += [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
    return words


# Dockerfile, systemd, Python


def _is_dockerfile(text: str) -> bool:
    lines = [line.strip().upper() for line in _joined(text)]
    starts = [line for line in lines if line and not line.startswith(("#", "ARG "))][:1]
    return bool(starts) and starts[0].startswith("FROM ") and any(re.match(r"CMD\b|ENTRYPOINT\b", one) for one in lines)


def _joined(text: str, comment: str = "#") -> list[str]:
    """Lines, those that end with a backslash joined with the next; lines of comment in between end nothing."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(tuple(comment))]
    return re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines()


def _of_dockerfile(text: str, source: str) -> Server:
    """ENTRYPOINT and CMD of the last stage, with ENV and the defaults of ARG."""
    env: dict[str, str] = {}
    known: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    image: list[str] = []
    for line in _joined(text):
        match = _INSTRUCTION.fullmatch(line)
        if match is None:
            continue
        name, rest = match[1].upper(), match[2].strip()
        if name == "FROM":
            image, parts = rest.split()[:1], {}
        elif name in ("ENV", "ARG"):
            first, _, last = rest.partition(" ")
            pairs = variables(_split(rest)) or ({first: last.strip()} if name == "ENV" else {})
            known |= pairs
            env |= pairs if name == "ENV" else {}
        else:
            parts[name] = _command_words(rest, source)
    words = parts.get("ENTRYPOINT", [one for one in image if "vllm-openai" in one]) + parts.get("CMD", [])
    found = server(words, known)
    return replace(found, env=found.seen(env))


def _command_words(rest: str, source: str) -> list[str]:
    """A Dockerfile's command: a JSON list, or a text for a shell."""
    if rest.startswith("[") and rest.endswith("]"):
        return [str(word) for word in parse_json(rest, source).value]
    return ["sh", "-c", rest]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _of_unit(text: str) -> Server:
    """ExecStart of a systemd unit, with its Environment= lines."""
    env: dict[str, str] = {}
    removed: list[str] = []
    started = ""
    for line in _joined(text, "#;"):
        name, _, value = line.partition("=")
        if name.strip() == "Environment":
            env = env | variables(_split(value)) if value.strip() else {}
        elif name.strip() == "UnsetEnvironment":
            removed += [one.partition("=")[0] for one in _split(value)]
        elif name.strip() == "ExecStart":
            started = value.strip().lstrip("@-:+!")
    env = {name: value for name, value in env.items() if name not in removed}
    found = server(started, env)
    return replace(found, env=found.seen(env))


def _of_python(text: str) -> Server:
    """A list of words, or a text, that names a server in a Python file; what is no constant stays unknown."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return NONE
    best = NONE
    joined = any(isinstance(node, ast.Attribute) and node.attr == "join" for node in nodes)
    for node in nodes:
        found = NONE
        if isinstance(node, (ast.List, ast.Tuple)):
            words = [_constant(item) for item in node.elts]
            found = server(
                [part for word in words for part in (_split(word) if joined and word[:2] == "--" else [word])]
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\s", node.value):
            found = _with_env(node.value, {}) if MENTIONED.search(node.value) else NONE
        if found.found and rank(found.words) > max(rank(best.words), 127):
            best = found
    return best


def _constant(item: ast.expr) -> str:
    if isinstance(item, ast.Constant):
        return str(item.value)
    name = item.id if isinstance(item, ast.Name) else "ARGS"
    return f"${{{name}}}"
