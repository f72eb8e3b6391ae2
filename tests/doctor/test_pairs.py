"""Every check: a failing input beside a passing one, and a mutation of its rule that they catch."""

from __future__ import annotations

import pytest
from cases.conftest import DATA, load

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.registry import Check, all_checks, find_check

from .conftest import facts_of, visit_facts
from .mutants import mutants
from .pairs import PAIRS as FIRST
from .pairs_more import MORE

PAIRS = {**FIRST, **MORE}

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


FILES = {"contents-values", "contents-untouched", "head-rows"}
"""Checks that need files to say anything: test_contents.py holds their passing and failing inputs."""
OTHERS = sorted({check.code for check in all_checks()} - PAIRS.keys() - FILES)
"""Checks whose neighbours stand among the cases."""
CASES = [(case["input"], "" if case["engine"] == "any" else case["engine"]) for case in load(DATA)]


def _applies(check: Check, values: dict) -> bool:
    return all(any(name in values for name in names.split("|")) for names in check.reads)


def _inputs(code: str) -> list[tuple[dict, str]]:
    """The pair of a check, or every case that it looks at."""
    if code in PAIRS:
        engine, failing, passing = PAIRS[code]
        return [(failing, engine), (passing, engine)]
    return [(values, engine) for values, engine in CASES if _applies(find_check(code), values)]


def _outcome(code: str, function) -> list[object]:
    """What a function says in place of the check: severities for each input, or the error that it ends in."""
    said: list[object] = []
    for values, engine in _inputs(code):
        try:
            said.append([finding.severity for finding in function(facts_of(values, engine))])
        except Exception as error:
            said.append(type(error).__name__)
    return said


@pytest.mark.parametrize("code", OTHERS)
def test_fails_and_passes_among_the_cases(code: str) -> None:
    said = _outcome(code, find_check(code).function)
    quiet = [severities for severities in said if not {"error", "warning"} & set(severities)]
    assert len(quiet) < len(said), f"no case makes {code} fail"
    assert quiet, f"no case lets {code} pass"


@pytest.mark.parametrize("code", [*sorted(PAIRS), *OTHERS])
def test_a_turned_rule_is_caught(code: str) -> None:
    check = find_check(code)
    right = _outcome(code, check.function)
    tried = []
    for what, function in mutants(check.function):
        tried.append(what)
        if _outcome(code, function) != right:
            return
    pytest.fail(f"none of {len(tried)} mutants of {code} changes what its inputs say: {tried}")


@pytest.mark.slow
def test_most_turned_rules_are_caught() -> None:
    killed = total = 0
    for code in (*PAIRS, *OTHERS):
        check = find_check(code)
        right = _outcome(code, check.function)
        for _, function in mutants(check.function):
            total += 1
            killed += _outcome(code, function) != right
    print(f"{killed} of {total} mutants are caught by one pair a check, or by the cases of a check without a pair")
    assert killed / total > 0.4
