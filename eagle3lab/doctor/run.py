"""One visit: read the artefacts into facts, run the checks, report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Engine, Facts, parse_engine
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.readers.paths import kind_of
from eagle3lab.doctor.registry import run_checks

READERS = {
    "env": "eagle3lab.doctor.readers.environment:read_env",
    "launch": "eagle3lab.doctor.readers.launch",
    "draft": "eagle3lab.doctor.readers.checkpoint:read_draft",
    "target": "eagle3lab.doctor.readers.checkpoint:read_target",
    "states": "eagle3lab.doctor.readers.states",
    "run": "eagle3lab.doctor.readers.rundir",
    "notebooks": "eagle3lab.doctor.readers.notebooks",
    "server": "eagle3lab.doctor.readers.server",
    "log": "eagle3lab.doctor.readers.log",
    "acceptance": "eagle3lab.doctor.readers.acceptance",
    "corpus": "eagle3lab.doctor.readers.corpus",
    "tokenizer": "eagle3lab.doctor.readers.corpus:read_tokenizer",
    "facts": "eagle3lab.doctor.readers.factsfile",
}
"""Flag -> `module[:function]`, function `read(value: str, facts: Facts) -> None` unless named. Read in this order, bare
paths as the flag of what they hold: what the launch line sets counts over the environment around it, and states are
compared with a target that is known by then."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the user pointed the doctor at, one field a flag of `eagle3lab doctor`; empty means not given."""

    env: str = ""
    launch: str = ""
    draft: str = ""
    target: str = ""
    states: str = ""
    run: str = ""
    notebooks: str = ""
    server: str = ""
    log: str = ""
    acceptance: str = ""
    corpus: str = ""
    tokenizer: str = ""
    paths: tuple[str, ...] = field(default=())
    facts: str = ""
    engine: str = ""


def collect(inputs: Inputs) -> Facts:
    """Read every given artefact. A path that is not there is a `UsageError`; a broken artefact becomes a finding."""
    facts, order = Facts(), list(READERS)
    given = [(name, getattr(inputs, name)) for name in order if getattr(inputs, name)]
    given += [(kind_of(existing(path, "PATH")), path) for path in inputs.paths]
    if not given:
        raise UsageError("nothing to look at", rule="give at least one artefact", fix="eagle3lab doctor --draft FOLDER")
    for name, value in sorted(given, key=lambda one: order.index(one[0])):
        reader_of(name)(value, facts)
    if facts.get("launch_args") and any(name == "launch" for name, _ in given):
        from eagle3lab.doctor.readers.launch import follow

        follow(facts)
    choose_engines(facts, inputs.engine)
    return facts


def reader_of(name: str) -> Callable[[str, Facts], None]:
    """The reader behind a flag."""
    module, _, function = READERS[name].partition(":")
    return getattr(importlib.import_module(module), function or "read")


def choose_engines(facts: Facts, asked: str) -> None:
    """--engine decides; else the fact `serve_with`; else the launch line; else SGLang and vLLM are both judged."""
    text = asked if asked and asked != "any" else (facts.get("serve_with") or "")
    if text:
        facts.engines, facts.chosen = (parse_engine(text),), True
    elif facts.get("launch_args"):
        from eagle3lab.doctor.readers.launch import engine_of, environment

        name = engine_of(facts["launch_args"])
        runner = str(environment(facts).get("VLLM_USE_V2_MODEL_RUNNER", "")).strip().lower()
        if name == "vllm" and runner in ("1", "true"):
            name = "vllm-v2"
        facts.engines, facts.chosen = (Engine(name),), True
        facts.either_runner = name == "vllm" and runner not in ("0", "false")


def diagnose(facts: Facts) -> Report:
    """Run the checks over facts that are already there."""
    findings, ran = run_checks(facts)
    return Report.of([*facts.remarks, *findings], ran)


def visit(inputs: Inputs) -> Report:
    """Collect, check, report."""
    return diagnose(collect(inputs))


def existing(value: str, flag: str) -> Path:
    """`value` as a path that exists, or a `UsageError` that names the flag."""
    path = Path(value).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {value[:120]!r} is not a usable path ({error})", fix=f"give {flag} a path") from error
    if not there:
        raise UsageError(f"{flag} {value!r} is not there", rule="the path exists", fix=f"ls {path.parent}")
    return path
