"""Lists of per-position acceptance, single verify steps, and numbers that are put side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from eagle3lab.acceptance.counts import accepted_prefix
from eagle3lab.acceptance.definitions import (
    conditional_from_joint,
    differing_settings,
    first_rise,
    joint_from_conditional,
    length_from_conditional,
    length_from_joint,
)
from eagle3lab.doctor.checks.acceptance import BARELY, COUNTERS, LOOK_AT, LOOK_WITH
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, real, whole

BESIDE = tuple(name for pair in COUNTERS for name in pair)
RATES_RULE = "joint S_j = steps that accepted at least j / all steps, never rising; conditional c_j = S_j / S_{j-1}"
ROUNDED = 5e-3
"""Difference by position that rounding to two digits explains."""
MEANINGS = {
    **dict.fromkeys(("joint", "survival", "cumulative", "s", "s_j"), "joint"),
    **dict.fromkeys(("conditional", "cond", "c", "c_j", "n-alpha", "alpha"), "conditional"),
    **dict.fromkeys(("marginal", "marginals", "unconditional", "unconditioned"), "marginal"),
}
"""Marginal: each position by itself, whatever came before it; it may rise, and no length follows from it."""
NEGATIONS = frozenset({"not", "non", "no", "nor", "neither"})
UNKNOWN = frozenset(
    {"unknown", "none", "null", "nil", "nan", "na", "untagged", "unlabelled", "unlabeled", "unnamed", "unspecified"}
    | {"undefined", "undocumented", "undetermined", "undecided", "unclear", "uncertain", "unsure", "unstated"}
    | {"ambiguous", "missing", "absent", "empty", "tbd", "todo", "maybe", "perhaps", "probably", "possibly"}
    | {"presumably", "likely", "guess", "guessed", "assumed"}
)
"""Words that say that a meaning is not known, or not for sure."""
SILENT = frozenset(
    {"given", "stated", "said", "specified", "known", "told", "recorded", "documented", "available", "applicable"}
    | {"labelled", "labeled", "tagged", "named", "sure", "clear", "idea", "meaning", "name", "tag", "label", "default"}
    | {"either", "both", "any", "other", "whatever", "it", "we", "t", "don", "know", "to", "be", "determined"}
    | {"accept", "accepted", "acceptance", "rate", "rates", "ratio", "probability", "probabilities", "share", "percent"}
    | {"fraction", "value", "values", "number", "numbers", "list", "mean", "average", "avg", "measured", "reported"}
    | {"per", "by", "each", "every", "at", "of", "in", "for", "from", "the", "a", "an", "this", "is", "are", "was"}
    | {"position", "positions", "pos", "positionwise", "wise", "depth", "depths", "level", "levels", "index", "slot"}
    | {"step", "steps", "token", "tokens", "draft", "drafts", "drafted", "drafter", "speculative", "decoding", "n"}
    | {"p", "prob", "probs", "raw"}
)
"""Words that leave both readings open: any list by position can be called so."""


@check(
    code="accept-joint-rates",
    title="accept length from joint rates",
    reads=("joint_rates",),
    also=BESIDE,
    rule=RATES_RULE,
    fix="print counts by position beside the rates",
)
def joint_rates(facts: Facts) -> Iterator[Finding]:
    """One list of joint rates, or several."""
    given = facts.get("joint_rates") or []
    lists = given if any(isinstance(item, list) for item in given) else [given]
    lengths: list[float] = []
    for index, raw in enumerate(lists):
        rates, problem = rates_of(raw, f"joint_rates[{index}]")
        if problem is not None:
            yield problem
        elif (at := first_rise(rates)) is not None:
            yield _rises(rates, at)
        else:
            lengths.append(length_from_joint(rates))
    if lengths:
        said = ", ".join(f"{length:.4g}" for length in lengths)
        yield info("joint_rates", f"accept length (bonus in): {said}", accept_length=lengths)
    for length in lengths:
        yield from _next_to_nothing("joint_rates", length)
    if len(lists) == len(lengths) == 1:
        yield from _against_counters("joint_rates", lengths[0], len(lists[0]), facts)


@check(
    code="accept-per-position",
    title="meaning of a list by position",
    reads=("per_depth",),
    also=("meaning", *BESIDE),
    rule=RATES_RULE + "; a list without a name has both readings",
    fix="say which of the two the list holds",
)
def per_position(facts: Facts) -> Iterator[Finding]:
    """A named list gives a length; one without a name gives both, and none is chosen."""
    rates, problem = rates_of(facts.get("per_depth"), "per_depth")
    if problem is not None:
        yield problem
        return
    text = str(facts.get("meaning") or "").strip().lower()
    meaning, open_ = meaning_of(text)
    rise = first_rise(rates)
    if meaning == "joint" and rise is not None:
        yield _rises(rates, rise)
    elif meaning == "joint":
        length = length_from_joint(rates)
        yield info("per_depth", f"accept length {length:.4g} (bonus in), from joint rates", accept_length=length,
                   conditional=conditional_from_joint(rates))  # fmt: skip
        yield from _next_to_nothing("per_depth", length)
        yield from _against_counters("per_depth", length, len(rates), facts)
    elif meaning == "conditional":
        length = length_from_conditional(rates)
        yield info("per_depth", f"accept length {length:.4g} (bonus in), from conditional rates", accept_length=length,
                   joint=joint_from_conditional(rates))  # fmt: skip
        yield from _next_to_nothing("per_depth", length)
        yield from _against_counters("per_depth", length, len(rates), facts)
    elif text and not open_:
        own = ": each position by itself, and it may rise" if meaning == "marginal" else ""
        said = f"per_depth holds {text[:40]!r} rates, from which no accept length follows{own}"
        yield warning("per_depth", said, actual=text[:40], known=["joint", "conditional"], chosen=None)
    else:
        yield _both_readings(rates, rise)


def _next_to_nothing(subject: str, length: float) -> Iterator[Finding]:
    """Rates of which none is above 0, or that make a length barely above 1."""
    if length == 1:
        text = f"every rate is 0: no draft was ever right; look at {', '.join(LOOK_AT)}"
        yield error(subject, text, actual=length, fix=LOOK_WITH, look_at=LOOK_AT)
    elif length <= BARELY:
        text = f"accept length {length:.4g} is barely above 1.00: look at {', '.join(LOOK_AT)}"
        yield warning(subject, text, actual=length, fix=LOOK_WITH, look_at=LOOK_AT)


def _against_counters(subject: str, length: float, positions: int, facts: Facts) -> Iterator[Finding]:
    """The rates against the counters that are given beside them."""
    for steps_name, accepted_name in COUNTERS:
        steps, accepted = whole(facts.get(steps_name)), whole(facts.get(accepted_name))
        if not steps or steps < 0 or accepted is None or accepted < 0:
            continue
        needed = 1 + accepted / steps
        if abs(length - needed) > ROUNDED * positions:
            text = f"the rates make accept length {length:.4g}, the counters 1 + {accepted}/{steps} = {needed:.4g}"
            yield error(subject, text, actual=length, needed=needed, fix="read rates and counters of the same time")


def meaning_of(text: str) -> tuple[str | None, bool]:
    """What a list's name says it holds (joint, conditional, marginal or None), and whether both readings are open.

    A name in words counts by its words; what vLLM prints is joint. A word for "unknown" names nothing, and a doubt
    about a kind chooses none.
    """
    if text in MEANINGS:
        return MEANINGS[text], False
    words = {word for word in re.split(r"[\W_]+", text) if word}
    if words <= UNKNOWN | SILENT | NEGATIONS:
        return None, True
    kinds = {MEANINGS[word] for word in words if len(word) > 1 and word in MEANINGS}
    if "unconditional" in words and (kinds == {"joint", "marginal"} or "vllm" in words):
        kinds = {"joint"}  # a joint rate is conditional on nothing either
    elif "vllm" in words and not kinds:
        kinds = {"joint"}
    if len(kinds) == 1 and not words & (NEGATIONS | UNKNOWN) and "?" not in text:
        return kinds.pop(), False
    return None, bool(kinds)


def _both_readings(rates: list[float], rise: int | None) -> Finding:
    conditional = length_from_conditional(rates)
    if rise is not None:
        said = f"per_depth rises at position {rise}, so it cannot be joint; read as conditional: {conditional:.4g}"
        return warning("per_depth", said, if_joint=None, if_conditional=conditional, chosen=None, at_depth=rise)
    joint = length_from_joint(rates)
    said = f"per_depth has no meaning attached: accept length {joint:.4g} if joint, {conditional:.4g} if conditional"
    return warning("per_depth", said, if_joint=joint, if_conditional=conditional, chosen=None)


def _rises(rates: list[float], at: int) -> Finding:
    pair = rates[at - 2 : at]
    return error(
        "per_depth",
        f"joint acceptance cannot rise: {pair[0]:g} to {pair[1]:g} at position {at}",
        actual=rates,
        fix="the list is conditional, or its positions are mixed up",
        at_depth=at,
        values=pair,
    )


def rates_of(raw: Any, name: str) -> tuple[list[float], Finding | None]:
    """The list as rates in 0..1, or the finding that says why it is none."""
    values = [real(item) for item in raw] if isinstance(raw, list) else []
    if not values or any(value is None for value in values):
        what = "a list of numbers is needed"
        return [], error(name, f"{name} is {str(raw)[:60]}: {what}", actual=str(raw)[:60])
    rates = [value for value in values if value is not None]
    bad = next((value for value in rates if not 0 <= value <= 1), None)
    if bad is None:
        return rates, None
    percent = all(0 <= value <= 100 for value in rates)
    hint = "these are per cent" if percent else "rates lie between 0 and 1"
    return [], error(name, f"{name} holds {bad:g}: {hint}", actual=bad, fix="divide by 100" if percent else "")


@check(
    code="accept-prefix",
    title="prefix rule of one verify step",
    reads=("acceptance_vector",),
    rule="a verify step keeps the drafts before the first wrong one; a right one behind it is thrown away",
    fix="count to the first 0, not the ones",
)
def prefix(facts: Facts) -> Iterator[Finding]:
    """One step's marks, or a list of steps."""
    given = facts.get("acceptance_vector") or []
    nested = any(isinstance(item, list) for item in given)
    steps = [item if isinstance(item, list) else [item] for item in given] if nested else [given]
    if not given or any(mark not in (0, 1) for step in steps for mark in step):
        yield error("acceptance_vector", "acceptance_vector holds marks other than 0 and 1", actual=str(given)[:80])
        return
    accepted, proposed = sum(accepted_prefix(step) for step in steps), sum(len(step) for step in steps)
    length = 1 + accepted / len(steps)
    yield info(
        "acceptance_vector",
        f"{accepted} of {proposed} accepted, accept length {length:.4g} (bonus in): the first wrong draft ends a step",
        accepted=accepted,
        accept_length=length,
        accept_rate=accepted / proposed if proposed else None,
    )


@check(
    code="accept-comparable",
    title="two numbers under the same settings",
    reads=("b", "a"),
    rule="accept lengths compare only under equal sampling, thinking mode, steps and prompts",
    fix="measure both with the same settings",
)
def comparable(facts: Facts) -> Iterator[Finding]:
    """Every setting that differs, or that one side does not tell."""
    a, b = mapping(facts.get("a")), mapping(facts.get("b"))
    if not a or not b:
        return
    fields = differing_settings(a, b)
    if not fields:
        yield info("a, b", "settings are equal", comparable=True, fields=[])
        return
    said = ", ".join(f"{name} {_shown(a, name)} / {_shown(b, name)}" for name in fields)
    yield warning("a, b", f"settings differ: {said}; the two numbers cannot be compared", comparable=False,
                  fields=fields)  # fmt: skip


def _shown(side: Any, name: str) -> str:
    return str(side[name])[:40] if name in side else "unknown"
