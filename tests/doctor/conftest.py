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


@pytest.fixture
def visit():
    return visit_facts
