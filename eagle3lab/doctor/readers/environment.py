"""Environment variables of a file: `env > FILE`, `export -p`, dotenv, /proc/PID/environ, YAML and JSON."""

from __future__ import annotations

import re
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, parse_yaml, parse_yaml_documents, read_text
from eagle3lab.doctor.readers.command import ASSIGNMENT
from eagle3lab.doctor.run import existing

_DECLARED = re.compile(
    r"\s*(?:export\s+|(?:declare|typeset)\s+-\w*x\w*\s+|(?:ENV|Environment)(?:\s+|\s*=\s*))?(.*)", re.DOTALL
)
_QUOTED = re.compile(r"""\s*(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?""", re.DOTALL)
KEYS = ("environment", "env", "envs", "extraenv", "extraenvs", "extraenvvars", "envvars")
"""Names, in lower case, under which compose, Kubernetes and helm charts keep variables."""


def read_env(value: str, facts: Facts) -> None:
    """`--env FILE`: `NAME=value` lines, as many shells print them, or YAML or JSON with the variables."""
    path = existing(value, "--env")
    try:
        text = read_text(path)
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            parsed = _structured(parse_yaml_documents(text, str(path)))
            if parsed is None:
                raise ReadError("it holds no variables", rule="NAME=value lines, or a mapping of them")
        else:
            parsed = dict(parse_env(text)) or _unnamed(text, str(path))
    except ReadError as error:
        facts.broken(str(path), error.what, fix="env > FILE; eagle3lab doctor --env FILE")
        return
    if not parsed:
        facts.could_not(str(path), "it holds no NAME=value line", fix=f"env > {path}")
    facts.put("env", {str(name): item for name, item in parsed.items()}, str(path))


def parse_env(text: str) -> dict[str, str]:
    """`NAME=value` lines as a mapping, /proc/PID/environ too; lines that are none are left out.

    Quotes around a value, a comment behind it and `export`, `declare -x`, Dockerfile's ENV and systemd's Environment=
    in front of it are dropped.
    """
    found: dict[str, str] = {}
    if "\0" in text:
        lines = [line for line in text.split("\0") if ASSIGNMENT.match(line)]
        return {line.partition("=")[0]: line.partition("=")[2] for line in lines}
    for line in text.splitlines():
        match = _DECLARED.fullmatch(line.strip())
        rest = match[1] if match else line
        if len(rest) > 1 and rest[0] == rest[-1] and rest[0] in "'\"" and ASSIGNMENT.match(rest[1:]):
            rest = rest[1:-1]  # Environment="A=b"
        if ASSIGNMENT.match(rest):
            name, _, item = rest.partition("=")
            found[name] = _value(item)
    return found


def _value(item: str) -> str:
    """A value without its quotes and without a comment behind it, as dotenv files have one."""
    if quoted := _QUOTED.fullmatch(item):
        return quoted[1] if quoted[1] is not None else re.sub(r"\\([\"\\$`])", r"\1", quoted[2])
    if item.lstrip()[:1] not in ("'", '"'):
        item = re.sub(r"\s#.*", "", item)
    return item.strip().strip("'\"")


def _unnamed(text: str, name: str) -> dict[str, Any]:
    """Variables of a file without NAME=value lines and without a telling suffix: it may be YAML all the same."""
    try:
        parsed = parse_yaml(text, name)
    except ReadError:
        return {}
    return (_structured([parsed]) or {}) if isinstance(parsed, (dict, list)) else {}


def _structured(documents: list[Any]) -> dict[str, Any] | None:
    """Variables of a parsed file: under `env` anywhere in it, else of a list or flat mapping; None without any."""
    found: dict[str, Any] = {}
    stack = list(reversed(documents))
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                if str(key).lower() in KEYS and isinstance(value, (dict, list)):
                    found |= variables(value)
                else:
                    stack.append(value)
        elif isinstance(item, list):
            stack.extend(reversed(item))
    if found:
        return found
    whole = documents[0] if len(documents) == 1 else None
    if isinstance(whole, dict):
        return whole
    return variables(whole) if isinstance(whole, list) else None


def variables(given: Any) -> dict[str, str]:
    """`{A: b}`, `["A=b"]` or `[{name: A, value: b}]` as a mapping; a value that comes from elsewhere is left out."""
    if isinstance(given, dict):
        return {str(name): _text(value) for name, value in given.items() if not isinstance(value, (dict, list))}
    found: dict[str, str] = {}
    for item in given if isinstance(given, list) else []:
        if isinstance(item, dict) and "name" in item and "valueFrom" not in item:
            found[str(item["name"])] = _text(item.get("value"))
        elif isinstance(item, str) and ASSIGNMENT.match(item):
            name, _, value = item.partition("=")
            found[name] = value
    return found


def _text(value: Any) -> str:
    return "" if value is None else str(value)
