"""Saved acceptance: reports of this lab, and many answers of a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.definitions import first_rise
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.doctor.checks.acceptance import (
    ABSENT,
    LOOK_WITH,
    as_the_server_says,
    counts_of,
    judged,
    tokens_without_a_step,
)
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
    if sets:
        yield from _headline(given)


HEADLINE = ("accept_length", "accept_rate")
"""Numbers of the headline set that stand at the top of a report too."""


def _headline(report: Mapping[str, Any]) -> Iterator[Finding]:
    """The numbers at the top of a report, which people read, against the set that they are said to be of."""
    name, sets = report.get("headline"), mapping(report.get("sets"))
    if name is None:
        return
    if str(name) not in sets:
        known = ", ".join(str(one)[:40] for one in list(sets)[:8])
        text = f"the headline is {str(name)[:40]!r}, the report has the sets {known}"
        yield error("headline", text, actual=str(name)[:40], known=list(sets)[:8])
        return
    own = mapping(sets[str(name)])
    pairs = {key: (report.get(key), own.get(key)) for key in HEADLINE}
    top, below = mapping(report.get("counts")), mapping(own.get("counts"))
    pairs |= {key: (top.get(key), below.get(key)) for key in ("verify_steps", "accepted", "proposed")}
    for key, (stated, needed) in pairs.items():
        one, other = real(stated), real(needed)
        if one is not None and other is not None and abs(one - other) > SLACK:
            text = (
                f"{key.replace('_', ' ')} is {one:g} at the top of the report and {other:g} in its set {str(name)[:40]}"
            )
            yield error("headline", text, actual=stated, needed=needed)
            return


def _one(report: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        counts = AcceptanceCounts.from_json(report)
    except AcceptanceError as problem:
        yield error("counts", problem.what, actual=str(report.get("counts"))[:120])
        return
    except (TypeError, ValueError) as problem:
        yield error("counts", f"counts cannot be read ({str(problem)[:120]})", actual=str(report.get("counts"))[:120])
        return
    yield from _numbers(report, counts)
    yield from _lists(report, counts)
    yield from _prompts(counts)
    stated = real(report.get("accept_length"))
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


def _numbers(report: Mapping[str, Any], counts: AcceptanceCounts) -> Iterator[Finding]:
    """Lengths and rates of the report that its counts do not give."""
    from_counts = {
        "accept_length": counts.accept_length,
        "accepted_per_step": counts.accepted_per_step,
        "accept_rate": counts.accept_rate,
    }
    for name, needed in from_counts.items():
        given = report.get(name)
        if given is not None and real(given) is None:
            yield error(name, f"{name} is {str(given)[:40]!r}, a number is needed", actual=str(given)[:40])
        stated = real(given)
        if stated is not None and needed is not None and abs(stated - needed) > SLACK:
            text = f"{name.replace('_', ' ')} {stated:g} does not follow from its counts: {needed:.4g}"
            yield error(name, text, actual=stated, needed=needed)


def _lists(report: Mapping[str, Any], counts: AcceptanceCounts) -> Iterator[Finding]:
    """Rates by position that the histogram does not give; without one, joint rates that rise or have another sum."""
    for name, needed in (("joint", counts.joint), ("conditional", counts.conditional)):
        stated = report.get(name)
        if not isinstance(stated, list) or not stated:
            continue
        if needed is not None:
            apart = next((j for j, pair in enumerate(zip_longest(stated, needed), 1) if _apart(*pair)), None)
            if apart is not None:
                shown = [None if value is None else round(value, 4) for value in needed]
                text = f"{name} rates {str(stated)[:80]} do not follow from the counts at position {apart}: {shown}"
                yield error(name, text, actual=stated, needed=list(needed), at=apart)
        elif name == "joint":
            yield from _joint_alone(stated, counts)


def _prompts(counts: AcceptanceCounts) -> Iterator[Finding]:
    """Counts by prompt, from which the interval is made, that do not add up to the totals."""
    if not counts.per_prompt:
        return
    for name in ("verify_steps", "accepted"):
        whole_of, parts = getattr(counts, name), sum(getattr(one, name) for one in counts.per_prompt)
        if whole_of != parts:
            text = f"the {len(counts.per_prompt)} prompts add up to {parts} {name.replace('_', ' ')}, the totals say"
            yield error("per_prompt", f"{text} {whole_of}", actual=parts, needed=whole_of)
            return


def _apart(stated: Any, needed: Any) -> bool:
    """Whether two rates differ by more than rounding; a position that no step reached is 0, unknown or left out."""
    one, other = real(stated), real(needed)
    if one is None or other is None:
        return (stated is not None and one is None) or abs((one or 0.0) - (other or 0.0)) > SLACK
    return abs(one - other) > SLACK


def _joint_alone(stated: list[Any], counts: AcceptanceCounts) -> Iterator[Finding]:
    """Joint rates beside counts without a histogram."""
    rates = [real(value) or 0.0 for value in stated]
    mean = counts.accepted_per_step
    if (at := first_rise([1.0, *rates])) is not None:
        text = f"joint acceptance cannot rise: {[1.0, *rates][at - 2]:g} to {rates[at - 2]:g} at position {at - 1}"
        yield error("joint", text, actual=stated, at_depth=at - 1)
    elif mean is not None and abs(sum(rates) - mean) > SLACK * len(rates):
        text = f"joint rates {str(stated)[:80]} add up to {sum(rates):.4g}, the counts give {mean:.4g} accepted a step"
        yield error("joint", text, actual=stated, needed=mean)


@check(
    code="accept-answers",
    title="acceptance counters of many answers",
    reads=("answers",),
    also=("steps",),
    rule="counts add up over answers; a mean of their lengths is another number",
    fix=LOOK_WITH,
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
    if not found and (said := as_the_server_says([mapping(row) for row in rows], "answers")) is not None:
        yield said
        return
    if not found:
        text = f"acceptance is unknown: none of {len(rows)} answers holds a counter ({', '.join(ABSENT)})"
        yield info("answers", text, accept_length=None, accept_rate=None, reasons=ABSENT)
        return
    if silent:
        yield info("answers", f"{silent} of {len(rows)} answers hold no counter and are left out", silent=silent)
    both = total(found)
    yield judged(both, "answers", least=least)
    if (more := tokens_without_a_step(found, "answers")) is not None:
        yield more
