"""Hostile input: no traceback, no hang, no broken check, no markup, no read outside the given folders."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cases.conftest import DATA, VARIATIONS, load
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lab.core.errors import Eagle3LabError
from eagle3lab.doctor.facts import VOCABULARY, Facts
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.render import to_html, to_text
from eagle3lab.doctor.run import Inputs, choose_engines, collect, diagnose

from .hostile import damage_bytes, damage_value, write_artefacts

SECONDS = 5.0
"""Of processor time, so that a busy machine does not look like a hang."""
INPUTS = [case["input"] for folder in (DATA, VARIATIONS) for case in load(folder)]


class Tags(HTMLParser):
    """The tags of a fragment."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


def judge(report: Report, what: object) -> None:
    """A report over hostile input is still a report."""
    json.dumps(report.as_json(), allow_nan=False).encode()
    broken = [f.message for f in report.findings if f.code == "check-broken"]
    assert not broken, f"{broken} on {str(what)[:2000]}"
    assert Tags(to_html(report)).seen <= {"p", "table", "tr", "th", "td", "code"}
    assert "\x1b" not in to_text(report)
    assert all("\n" not in f.code and f.severity in ("error", "warning", "info") for f in report.findings)


def facts_rounds(rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(rounds):
        values = damage_value(rng.choice(INPUTS), rng)
        started = time.process_time()
        facts = Facts()
        try:
            for name, value in values.items() if isinstance(values, dict) else ():
                facts.put(str(name), value, "fuzz")
            choose_engines(facts, rng.choice(["", "", "sglang", "vllm", "vllm-v2", "sglang@0.5.11"]))
        except Eagle3LabError as error:
            assert "\n" not in str(error)
            continue
        judge(diagnose(facts), values)
        assert time.process_time() - started < SECONDS, (number, str(values)[:500])


def file_rounds(rounds: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    healthy = write_artefacts(folder / "healthy")
    files = [path for path in sorted((folder / "healthy").rglob("*")) if path.is_file()]
    contents = {path: path.read_bytes() for path in files}
    for number in range(rounds):
        path = rng.choice(files)
        path.write_bytes(damaged := damage_bytes(contents[path], rng))
        started = time.process_time()
        try:
            report = diagnose(collect(Inputs(**{flag: str(place) for flag, place in healthy.items()})))
            judge(report, (path.name, damaged[:500]))
        except Eagle3LabError as error:
            assert "\n" not in str(error)
        finally:
            path.write_bytes(contents[path])
        assert time.process_time() - started < SECONDS, (number, path, damaged[:200])


def test_mutated_facts() -> None:
    facts_rounds(400, seed=1)


def test_mutated_files(tmp_path: Path) -> None:
    file_rounds(100, 1, tmp_path)


@pytest.mark.slow
def test_mutated_facts_in_full() -> None:
    facts_rounds(15_000, seed=2)


@pytest.mark.slow
def test_mutated_files_in_full(tmp_path: Path) -> None:
    file_rounds(5_000, 2, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(VOCABULARY)), JSON, min_size=1, max_size=6))
def test_any_facts(values: dict) -> None:
    facts = Facts()
    for name, value in values.items():
        facts.put(name, value, "hypothesis")
    try:
        choose_engines(facts, "")
    except Eagle3LabError:
        return
    judge(diagnose(facts), values)


def command_line(count: int, seed: int, folder: Path) -> None:
    """The same through the command line, in a process of its own."""
    rng = random.Random(seed)
    for number in range(count):
        path = folder / f"facts{number}.json"
        path.write_text(json.dumps(damage_value(rng.choice(INPUTS), rng)), encoding="utf-8")
        words = [sys.executable, "-m", "eagle3lab", "doctor", "--facts", str(path), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 1, 2), done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1, done.stderr
        if done.returncode < 2:
            json.loads(done.stdout)


def test_command_line(tmp_path: Path) -> None:
    command_line(2, 3, tmp_path)


@pytest.mark.slow
def test_command_line_in_full(tmp_path: Path) -> None:
    command_line(100, 4, tmp_path)
