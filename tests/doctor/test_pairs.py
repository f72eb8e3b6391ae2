"""Every check: a failing input beside a passing one, and a mutation of its rule that they catch."""

from __future__ import annotations

import pytest

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.registry import all_checks, find_check

from .conftest import facts_of, visit_facts
from .mutants import mutants
from .pairs import PAIRS

INFORMS = {"points-captured", "config-oddities", "rope-target", "norm-eagle31", "weights-layout", "weights-dtype"}
"""Checks that only inform: their failing input gives a line, their passing one none."""
FILES = {"contents-values", "contents-untouched", "contents-twice", "head-rows"}
"""Checks that need files to say anything: test_contents.py holds their passing and failing inputs."""


def of(report: Report, code: str, *, serious: bool) -> list[str]:
    return [f.message for f in report.findings if f.code == code and (not serious or f.severity != "info")]


def test_every_check_has_a_pair() -> None:
    assert {check.code for check in all_checks()} == PAIRS.keys() | FILES


@pytest.mark.parametrize("code", sorted(PAIRS))
def test_fails_and_passes(code: str) -> None:
    engine, failing, passing = PAIRS[code]
    serious = code not in INFORMS
    bad, good = visit_facts(failing, engine), visit_facts(passing, engine)
    assert of(bad, code, serious=serious), [f"{f.code} {f.message}" for f in bad.findings]
    assert not of(good, code, serious=serious)
    assert not [f.message for report in (bad, good) for f in report.findings if f.code == "check-broken"]


def test_every_finding_is_complete() -> None:
    for engine, failing, _ in PAIRS.values():
        for finding in visit_facts(failing, engine).findings:
            assert finding.code and finding.rule and finding.subject and "\n" not in finding.message
            assert finding.fix or finding.severity == "info", finding


def outcome(code: str, function) -> list[object]:
    """What a function says about both halves in place of the check: severities, or the error that it ends in."""
    engine, failing, passing = PAIRS[code]
    said: list[object] = []
    for values in (failing, passing):
        try:
            said.append([finding.severity for finding in function(facts_of(values, engine))])
        except Exception as error:
            said.append(type(error).__name__)
    return said


@pytest.mark.parametrize("code", sorted(PAIRS))
def test_a_turned_rule_is_caught(code: str) -> None:
    check = find_check(code)
    right = outcome(code, check.function)
    tried = []
    for what, function in mutants(check.function):
        tried.append(what)
        if outcome(code, function) != right:
            return
    pytest.fail(f"none of {len(tried)} mutants of {code} changes what the pair says: {tried}")


@pytest.mark.slow
def test_most_turned_rules_are_caught() -> None:
    killed = total = 0
    for code in PAIRS:
        check = find_check(code)
        right = outcome(code, check.function)
        for _, function in mutants(check.function):
            total += 1
            killed += outcome(code, function) != right
    print(f"{killed} of {total} mutants are caught by the pairs alone")
    assert killed / total > 0.4
