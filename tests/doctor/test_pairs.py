"""Every check: a failing input beside a passing one, and a mutation of its rule that the pair or a case catches."""

from __future__ import annotations

import pytest

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.registry import Check, all_checks, find_check

from .conftest import facts_of, visit_facts
from .mutants import mutants
from .pairs import PAIRS

INFORMS = {"points-captured", "config-oddities", "rope-target", "norm-eagle31", "weights-layout", "weights-dtype"}
"""Checks that only inform: their failing input gives a line, their passing one none."""


def of(report: Report, code: str, *, serious: bool) -> list[str]:
    return [f.message for f in report.findings if f.code == code and (not serious or f.severity != "info")]


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


def test_codes_of_pairs_exist() -> None:
    assert {check.code for check in all_checks()} >= PAIRS.keys()


def _outcome(check: Check, function) -> tuple[object, object]:
    """What a function says about the pair in place of the check: severities of each half, or the error it ends in."""
    engine, failing, passing = PAIRS[check.code]
    halves: list[object] = []
    for values in (failing, passing):
        try:
            halves.append([finding.severity for finding in function(facts_of(values, engine))])
        except Exception as error:
            halves.append(type(error).__name__)
    return halves[0], halves[1]


@pytest.mark.parametrize("code", sorted(PAIRS))
def test_a_turned_rule_is_caught(code: str) -> None:
    check = find_check(code)
    right = _outcome(check, check.function)
    tried = []
    for what, function in mutants(check.function):
        tried.append(what)
        if _outcome(check, function) != right:
            return
    pytest.fail(f"none of {len(tried)} mutants of {code} changes what the pair says: {tried}")


@pytest.mark.slow
def test_most_turned_rules_are_caught() -> None:
    killed = total = 0
    for code in PAIRS:
        check = find_check(code)
        right = _outcome(check, check.function)
        for _, function in mutants(check.function):
            total += 1
            killed += _outcome(check, function) != right
    print(f"{killed} of {total} mutants are caught by the pairs alone")
    assert killed / total > 0.4
