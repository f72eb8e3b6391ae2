"""`--facts FILE`: a mapping with the input names of tests/cases/data/README.md, in YAML or JSON."""

from __future__ import annotations

from typing import Any

import yaml

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, parse_json, parse_yaml, read_text
from eagle3lab.doctor.readers.command import server
from eagle3lab.doctor.readers.launch import remark
from eagle3lab.doctor.run import existing


def read(value: str, facts: Facts) -> None:
    """Add every fact of the file. A file that is not a mapping, or an unknown name, is a `UsageError` (exit 2)."""
    path = existing(value, "--facts")
    try:
        parsed = _parsed(read_text(path), str(path), json=path.suffix == ".json")
    except ReadError as error:
        raise UsageError(error.what, rule=error.rule or "a YAML or JSON mapping", fix="correct the file") from error
    if not isinstance(parsed, dict):
        raise UsageError(
            f"{path} holds a {type(parsed).__name__}", rule="a mapping of facts", fix="see tests/cases/data/README.md"
        )
    for name, fact in parsed.items():
        facts.put(str(name), fact, str(path))
    try:
        if "launch_args" in parsed and facts.get("launch_args"):
            remark(facts, server(facts["launch_args"]), str(path))
    except ReadError as error:
        facts.broken("launch line", error.what, fix="correct the launch line")
        facts.values.pop("launch_args")


def _parsed(text: str, name: str, *, json: bool) -> Any:
    """The value of a file in YAML or JSON; JSON may stand in a .yaml file.

    A runner reads `parameters` with the rules of YAML 1.1, where 1e-3 is a text, so that part is read as it does.
    """
    if json:
        return parse_json(text, name).value
    if text.lstrip().startswith("{"):
        try:
            return parse_json(text, name).value
        except ReadError:
            pass  # a mapping of YAML in one line
    parsed = parse_yaml(text, name)
    if isinstance(parsed, dict) and isinstance(parsed.get("parameters"), dict):
        parsed["parameters"] = parse_yaml(text, name, yaml.SafeLoader)["parameters"]
    return parsed
