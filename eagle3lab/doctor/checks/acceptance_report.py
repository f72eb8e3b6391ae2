"""Saved acceptance: reports of this lab, and many answers of a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.doctor.checks.acceptance import ABSENT, counts_of, judged
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, real, whole

SLACK = 5e-3
"""Difference that rounding to two digits explains."""


@check(
    code="accept-report",
    title="acceptance report against its own counts",
    reads=("acceptance",),
    rule="accept length = 1 + accepted / verify steps of the counts beside it; greedy text equals plain decoding",
    fix="measure again: eagle3lab accept decode",
)
def report(facts: Facts) -> Iterator[Finding]:
    """Every set of the report, or the report itself."""
    given = mapping(facts.get("acceptance"))
    sets = {str(name)[:60]: mapping(value) for name, value in mapping(given.get("sets")).items()}
    for name, one in sets.items() or [("", given)]:
        for finding in _one(one):
            yield dataclasses.replace(finding, message=f"{name}: {finding.message}", subject=name) if name else finding


def _one(report: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        counts = AcceptanceCounts.from_json(report)
    except AcceptanceError as problem:
        yield error("counts", problem.what, actual=str(report.get("counts"))[:120])
        return
    except (TypeError, ValueError) as problem:
        yield error("counts", f"counts cannot be read ({str(problem)[:120]})", actual=str(report.get("counts"))[:120])
        return
    stated = real(report.get("accept_length"))
    if stated is not None and counts.accept_length is not None and abs(stated - counts.accept_length) > SLACK:
        text = f"accept length {stated:g} does not follow from its counts: {counts.accept_length:.4g}"
        yield error("accept_length", text, actual=stated, needed=counts.accept_length)
    interval = report.get("accept_length_interval")
    low, high = map(real, interval) if isinstance(interval, list) and len(interval) == 2 else (None, None)
    if stated is not None and low is not None and high is not None and not low <= stated <= high:
        yield error(
            "accept_length_interval", f"the interval {interval} leaves out its own estimate {stated:g}", actual=interval
        )
    if report.get("lossless") is False:
        text = "the text differs from plain decoding, so this is no speculative decoding of the target"
        yield error("lossless", text, actual=False, fix="eagle3lab accept decode shows the first difference")
    if counts.verify_steps:
        yield judged(counts, "accept_length")
    else:
        yield info("accept_length", "acceptance is unknown: no verify step was counted", accept_length=None)


@check(
    code="accept-answers",
    title="acceptance counters of many answers",
    reads=("answers",),
    also=("steps",),
    rule="counts add up over answers; a mean of their lengths is another number",
    fix="eagle3lab doctor --draft DRAFT --target TARGET --launch '...'",
)
def answers(facts: Facts) -> Iterator[Finding]:
    """Sum of all answers that carry counters."""
    found: list[AcceptanceCounts] = []
    rows = facts.get("answers") or []
    least = False
    for index, row in enumerate(rows):
        try:
            counts, derived = counts_of(mapping(row), steps=whole(facts.get("steps")), prompt=str(index))
            least = least or derived
        except AcceptanceError as problem:
            yield error(f"answer {index}", problem.what, actual=str(row)[:120])
            continue
        if counts is not None and counts.verify_steps:
            found.append(counts)
    silent = len(rows) - len(found)
    if not found:
        text = f"acceptance is unknown: none of {len(rows)} answers holds a counter ({', '.join(ABSENT)})"
        yield info("answers", text, accept_length=None, accept_rate=None, reasons=ABSENT)
        return
    if silent:
        yield info("answers", f"{silent} of {len(rows)} answers hold no counter and are left out", silent=silent)
    both = total(found)
    yield judged(both, "answers", least=least)
