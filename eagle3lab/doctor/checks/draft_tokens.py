"""Draft steps, topk and draft tokens: the three numbers that shape a chain or a tree."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.acceptance.definitions import ceiling
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.readers.launch import parse_args
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import whole

FLAG = "--speculative-num-draft-tokens"
RULE = "with topk 1 the draft is a chain: draft tokens = steps + 1 (the last verified token is counted)"


@check(
    code="launch-draft-tokens",
    title="draft tokens of a chain in the launch line",
    reads=("launch_args",),
    rule=RULE,
    fix=f"{FLAG} STEPS+1",
    symptom="SGLang changes the number on its own, or rates are computed with the wrong denominator",
)
def launch_tokens(facts: Facts) -> Iterator[Finding]:
    """SGLang only: vLLM names the steps alone."""
    if "sglang" not in facts.engine_names():
        return
    launch = parse_args(facts["launch_args"])
    steps, topk = launch.number("speculative-num-steps"), launch.number("speculative-eagle-topk")
    yield from chain(steps, topk, launch.number("speculative-num-draft-tokens"), FLAG)


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
