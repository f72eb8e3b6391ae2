"""Draft steps, topk and draft tokens: the three numbers that shape a chain or a tree."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.acceptance.definitions import ceiling
from eagle3lab.doctor.checks.launch import vllm_draft_asked
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.readers.launch import Launch, parse_args, speculative_config
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import draft_of, target_of, whole

STEPS, TOPK, FLAG = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms of SGLang whose three numbers are chosen together when none is given."""
RULE = "with topk 1 the draft is a chain: draft tokens = steps + 1 (the last verified token is counted)"


@check(
    code="launch-draft-tokens",
    title="draft tokens of a chain in the launch line",
    reads=("launch_args",),
    also=("draft_config", "server", "target", "target_config"),
    rule=f"{RULE}; SGLang takes steps and topk together or neither, vLLM needs num_speculative_tokens",
    fix=f"{FLAG} STEPS+1",
    symptom="SGLang changes the number on its own, or rates are computed with the wrong denominator",
)
def launch_tokens(facts: Facts) -> Iterator[Finding]:
    """A number too few, and SGLang's three against each other: vLLM names the steps alone."""
    launch = parse_args(facts["launch_args"])
    if "sglang" not in facts.engine_names():
        yield from _vllm_steps(facts, launch)
        return
    yield from _too_few(facts, launch)
    steps, topk = launch.number("speculative-num-steps"), launch.number("speculative-eagle-topk")
    yield from chain(steps, topk, launch.number("speculative-num-draft-tokens"), FLAG)


def _vllm_steps(facts: Facts, launch: Launch) -> Iterator[Finding]:
    config, name = speculative_config(launch), "num_speculative_tokens"
    if vllm_draft_asked(facts, launch) and config.get(name) is None and not draft_of(facts).config.get("n_predict"):
        text = f"method {config['method']} without {name}: vLLM does not start"
        yield error("--speculative-config", text, fix=f'"{name}": 3', given=None)


def _too_few(facts: Facts, launch: Launch) -> Iterator[Finding]:
    """SGLang chooses the three numbers itself only when none is given; a running server has done so."""
    named = (launch.value("speculative-algorithm") or "").upper()
    target = target_of(facts)
    family = f"{launch.value('model-path')} {target.family if target else ''}".lower()
    own = launch.has("speculative-adaptive") or launch.has("enable-return-aux-hidden-states") or "iquest" in family
    if named not in EAGLE_FAMILY or own or facts.has("server") or not launch.complete():
        return
    steps, topk, tokens = (launch.has(flag.removeprefix("--")) for flag in (STEPS, TOPK, FLAG))
    fix = f"{STEPS} 3 {TOPK} 1 {FLAG} 4, or none of the three"
    if not steps and (topk or tokens):
        text = f"{TOPK if topk else FLAG} without {STEPS}: SGLang 0.5.23 stops at its start (an assertion)"
        yield error(STEPS, text, fix=fix, given=None)
    elif steps and not topk:
        tell = error if tokens else info
        yield tell(TOPK, f"{STEPS} without {TOPK}: SGLang 0.5.23 stops at its start (None > 1)", fix=fix, given=None)


@check(
    code="draft-tokens",
    title="draft tokens of a chain in published numbers",
    reads=("draft_tokens", "steps"),
    also=("topk",),
    rule=RULE,
    fix="correct the numbers",
)
def given_tokens(facts: Facts) -> Iterator[Finding]:
    """The same for three numbers that a person types; none of them can be below 1."""
    names = ("steps", "topk", "draft_tokens")
    steps, topk, tokens = (whole(facts.get(name)) for name in names)
    for name, value in zip(names, (steps, topk, tokens), strict=True):
        given = facts.get(name)
        if given is not None and (value is None or value < 1):
            yield error(name, f"{name} is {given}, needed: a whole number of 1 or more", actual=given)
    yield from chain(steps, topk, tokens, "draft_tokens")


def chain(steps: int | None, topk: int | None, tokens: int | None, subject: str) -> Iterator[Finding]:
    """The finding about one set of the three numbers; a tree (topk above 1) is free to choose."""
    if steps is None or topk is None or topk != 1 or steps < 1:
        return
    needed = steps + 1
    if tokens is not None and tokens != needed:
        yield error(
            subject,
            f"{subject} is {tokens}, needed {needed}: steps {steps} + 1 when topk is 1",
            actual=tokens,
            fix=f"{FLAG} {needed}",
            given=tokens,
            needed=needed,
            rule="steps + 1 when topk is 1",
        )
        return
    top = ceiling(steps, topk)
    yield info(subject, f"a chain of {steps}: accept length lies between 1 and {top:g}", ceiling=top, floor=1.0)
