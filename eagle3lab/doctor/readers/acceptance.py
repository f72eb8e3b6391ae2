"""`--acceptance FILE`: counts in any of the forms that they are kept in.

- `accept ... --json` or a run's `metrics.json` -> `acceptance`
- SGLang answers, one or many (JSON, a list, JSON lines) -> `meta_info` or `answers`
- the text of a /metrics page -> `acceptance` (vLLM's counters) or `accept_length` (SGLang's gauge)
- numbers by fact name (YAML or JSON) -> those facts
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lab.acceptance.sources import from_vllm_metrics
from eagle3lab.core.errors import AcceptanceError, UsageError, nearest
from eagle3lab.doctor.facts import VOCABULARY, Facts
from eagle3lab.doctor.readers.bounded import ReadError, parse_json, parse_yaml, read_text
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import mapping, real, whole

_GAUGE = re.compile(r"^sglang:(spec_\w+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def read(value: str, facts: Facts) -> None:
    """Add the facts of one file. Something that is none of the above is a `UsageError`."""
    path = existing(value, "--acceptance")
    try:
        text = read_text(path)
        if "vllm:spec_decode" in text or "sglang:spec_" in text:
            read_metrics(text, str(path), facts)
            return
        parsed = _parsed(text, path)
    except ReadError as error:
        facts.broken(str(path), error.what, fix="measure again")
        return
    add(parsed, str(path), facts)


def _parsed(text: str, path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [parse_json(line, str(path)).value for line in text.splitlines() if line.strip()]
    return parse_json(text, str(path)).value if text.lstrip()[:1] in "{[" else parse_yaml(text, str(path))


def add(parsed: Any, source: str, facts: Facts) -> None:
    """Facts of a parsed file."""
    if isinstance(parsed, list):
        answers = [dict(mapping(mapping(row).get("meta_info"))) for row in parsed]
        if not any(answers):
            raise UsageError(
                f"{source} holds a list without meta_info", rule="a list of SGLang answers", fix="see --help"
            )
        facts.put("answers", answers, source)
    elif not isinstance(parsed, Mapping):
        raise UsageError(f"{source} holds a {type(parsed).__name__}", rule="a mapping or a list", fix="see --help")
    elif "meta_info" in parsed:
        facts.put("meta_info", parsed["meta_info"], source)
    elif any(str(key).startswith("spec_") for key in parsed) and "sets" not in parsed:
        facts.put("meta_info", dict(parsed), source)
    elif "counts" in parsed or "sets" in parsed:
        facts.put("acceptance", dict(parsed), source)
    elif not parsed:
        raise UsageError(
            f"{source} holds nothing", rule="an acceptance number", fix="eagle3lab accept ... --json > FILE"
        )
    else:
        for name, fact in parsed.items():
            if str(name) not in VOCABULARY:
                raise UsageError(
                    f"{source} holds {str(name)[:60]!r}, which is no acceptance number",
                    rule=nearest(str(name), VOCABULARY),
                    fix="eagle3lab accept ... --json > FILE",
                )
            facts.put(str(name), fact, source)


def read_metrics(text: str, source: str, facts: Facts) -> None:
    """Facts of a /metrics page."""
    try:
        counts = from_vllm_metrics(text)
    except AcceptanceError as error:
        facts.broken(source, error.what, fix="read /metrics again")
        return
    if counts is not None:
        facts.put("acceptance", json.loads(json.dumps(counts.to_json())), source)
        return
    # SGLang exports its gauges from the start, at 0, with speculation or without: 0 is no reading
    gauges = {name: number for name, value in _GAUGE.findall(text) if (number := real(_number(value)))}
    length, steps = gauges.get("spec_accept_length"), gauges.get("spec_num_steps")
    if length is None:
        facts.could_not(
            "acceptance", f"{source} holds no counter or gauge above 0: no verify step yet, or speculation is off"
        )
        return
    facts.put("accept_length", length, f"{source}: sglang:spec_accept_length, a gauge")
    if steps is not None and whole(steps):
        facts.put("steps", whole(steps), source)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None
