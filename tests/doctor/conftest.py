from __future__ import annotations

import copy
from typing import Any

import pytest

from eagle3lab.doctor.facts import Facts, parse_engine
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.run import choose_engines, diagnose


def facts_of(values: dict[str, Any], engine: str = "") -> Facts:
    """Facts given by name, judged for one engine or for what they imply."""
    facts = Facts()
    for name, value in copy.deepcopy(values).items():
        facts.put(name, value, "test")
    if engine:
        facts.engines, facts.chosen = (parse_engine(engine),), True
    else:
        choose_engines(facts, "")
    return facts


def visit_facts(values: dict[str, Any], engine: str = "") -> Report:
    """The report over facts given by name."""
    return diagnose(facts_of(values, engine))


def serious(values: dict[str, Any], engine: str = "") -> list[tuple[str, str]]:
    """(severity, message) of what is more than information."""
    return [(f.severity, f.message) for f in visit_facts(values, engine).findings if f.severity != "info"]


def said(facts: dict[str, Any], engine: str, *severities: str) -> str:
    """`code: message` of all findings of these severities; no check may break."""
    found = visit_facts(facts, engine).findings
    assert not [f.message for f in found if f.code == "check-broken"]
    return " | ".join(f"{f.code}: {f.message}" for f in found if f.severity in severities)


@pytest.fixture
def visit():
    return visit_facts
