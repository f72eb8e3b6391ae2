"""Acceptance counters: what they say, next to what people read in them. Arithmetic is in eagle3lab.acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.definitions import ceiling, tree_rates
from eagle3lab.acceptance.sources import from_numbers, from_sglang_meta_info, least_from_sglang_meta_info, prefill_floor
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.readers.launch import parse_args, speculative_config
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, real, whole

LOOK_AT = ["algorithm flag", "keys of the draft", "vocabulary map", "capture points"]
"""Where zero acceptance comes from, most frequent first."""
LOOK_WITH = "eagle3lab doctor --draft DRAFT --target TARGET --launch '...'"
"""The command that looks at all of it."""
ABSENT = ["speculation off", "older server", "no verify step yet"]
FEW_STEPS = 4
"""Below this many verify steps zero accepted drafts prove little: a draft right 40 % of the time misses three in a row
in one run of five."""
LOW_RATE = 1.1 / 3
"""Accepted per drafted position below which a chain is low: 2.1 at 3 steps, the gate of published recipes."""
BARELY = 1.10
"""Accept length that a wrong vocabulary map or wrong weights leave; capture points off by one cost about 0.1."""
BARELY_STEPS = 20
"""Below this many verify steps a length of 1.10 proves little: a draft right 40 % of the time keeps two or fewer of 20
in one run of 270, one or fewer of 10 in one of 22."""

COUNTERS = (("drafts", "accepted"), ("verify_steps", "correct_drafts"))
"""Names under which verify steps and accepted drafts are given."""
OTHER_COUNT = 0.25
"""Difference between a length and its counters that another way to average over prompts explains."""


@check(
    code="accept-answer",
    title="acceptance counters in a server's answer",
    reads=("meta_info",),
    also=("steps", "topk", "draft_tokens"),
    rule="judge by correct drafts: spec_accept_length counts the prefill token, so zero acceptance reads n/(n-1) > 1",
    fix=LOOK_WITH,
    symptom="accept length a little above 1, no speed-up, right text",
)
def answer(facts: Facts) -> Iterator[Finding]:
    """Counts of one SGLang answer; absent counters are unknown, never zero."""
    meta = mapping(facts.get("meta_info"))
    tokens = whole(facts.get("draft_tokens"))
    try:
        counts, least = counts_of(meta, steps=whole(facts.get("steps")), draft_tokens=tokens)
    except AcceptanceError as problem:
        yield error("meta_info", problem.what, fix="ask the server again", actual=dict(meta))
        return
    if counts is None and (said := as_the_server_says([meta], "meta_info")) is not None:
        yield said
        return
    if counts is None or not counts.verify_steps:
        yield info(
            "meta_info",
            f"acceptance is unknown: the answer holds no acceptance counter ({', '.join(ABSENT)})",
            accept_length=None,
            accept_rate=None,
            printed_as="unknown",
            reasons=ABSENT,
        )
        return
    yield judged(counts, "meta_info", server_says=real(meta.get("spec_accept_length")), least=least)
    if (more := tokens_without_a_step([counts], "meta_info")) is not None:
        yield more


def tokens_without_a_step(found: Sequence[AcceptanceCounts], subject: str) -> Finding | None:
    """Answers with more tokens than their verify steps yield: the server's own length, tokens over steps, is too high.

    The first token comes from prefill, a step yields its accepted drafts and the bonus; two tokens more are let pass.
    """
    far = [one for one in found if one.verify_steps and (one.generated_tokens or 0) > _most(one) + 2]
    if not far:
        return None
    one, of = far[0], "" if len(found) == 1 else f"{len(far)} of {len(found)} answers: "
    text = (
        f"{of}{one.generated_tokens} tokens, {one.verify_steps} verify steps and {one.accepted} accepted drafts yield"
    )
    text += f" at most {_most(one)}: the others were made without speculation, or the counters are another answer's"
    fix = "send one prompt to an idle server and read its answer again"
    return warning(subject, text, actual=one.generated_tokens, needed=_most(one), fix=fix)


def _most(counts: AcceptanceCounts) -> int:
    return 1 + counts.verify_steps + counts.accepted


def counts_of(meta: Mapping[str, Any], **known: Any) -> tuple[AcceptanceCounts | None, bool]:
    """Counts of one SGLang answer, and whether they are only the least that they can be.

    Args:
        known: as `from_sglang_meta_info` takes it.
    """
    counts, least = from_sglang_meta_info(meta, **known), False
    if counts is None:
        counts = least_from_sglang_meta_info(meta, **known)
        least = counts is not None
    steps = known.get("steps")
    if counts is not None and steps and counts.verify_steps:
        deepest = max((j for j, count in enumerate(counts.histogram or ()) if count), default=0)
        if deepest > steps or counts.accepted > counts.verify_steps * steps:
            told = f"a verify step that accepted {deepest}" if deepest > steps else f"{counts.accepted}"
            name = f"{known['prompt']}: " if known.get("prompt") else ""
            raise AcceptanceError(
                f"{name}{told} drafts in {counts.verify_steps} verify steps of {steps} draft steps",
                rule=f"a verify step accepts at most its draft steps, {steps}",
            )
    return counts, least


def as_the_server_says(metas: Sequence[Mapping[str, Any]], subject: str) -> Finding | None:
    """What answers tell that hold a length and no counter; None when no length does. 0 is no reading."""
    lengths = [value for meta in metas if (value := real(meta.get("spec_accept_length"))) is not None and value >= 1]
    if not lengths:
        return None
    rates = [real(meta.get("spec_accept_rate")) for meta in metas]
    low, high = min(lengths), max(lengths)
    said = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    text = f"the server says accept length {said}, the token that comes from prefill in it; no counter is beside it"
    evidence: dict[str, Any] = {"server_says": said, "accept_length_from_counts": None}
    if high == 1 or (high <= BARELY and not any(rate is None or rate for rate in rates)):
        return error(subject, f"no draft accepted: {text}", actual=high, look_at=LOOK_AT, **evidence)
    if high <= BARELY:
        return warning(subject, f"{text}, barely above 1.00: look at {', '.join(LOOK_AT)}", actual=high,
                       look_at=LOOK_AT, **evidence)  # fmt: skip
    return info(subject, text, **evidence)


def judged(counts: AcceptanceCounts, subject: str, *, server_says: float | None = None, least: bool = False) -> Finding:
    """The one finding about counts: zero acceptance as an error, next to none as a warning, else numbers as info.

    `least`: accepted drafts follow from the tokens, so those that the end of the answer cut off are not in them.
    """
    tokens = counts.generated_tokens
    evidence: dict[str, Any] = {
        "accept_length_from_counts": counts.accept_length,
        "rate": counts.accept_rate,
        "joint": counts.joint,
        "conditional": counts.conditional,
        "verify_steps": counts.verify_steps,
        "correct": counts.accepted,
        "proposed": counts.proposed,
    }
    if server_says is not None:
        evidence["server_says"] = server_says
    if counts.accepted:
        of = "unknown" if counts.proposed is None else counts.proposed
        bound = "at least " if least else ""
        text = f"accept length {bound}{counts.accept_length:.4g} (bonus in), {bound}{counts.accepted} of {of} drafts"
        text += " accepted"
        text += f" in {counts.verify_steps} verify steps"
        if counts.verify_steps < BARELY_STEPS or (counts.accept_length or 0) > BARELY:
            return info(subject, text, **evidence)
        text += f", barely above 1.00: look at {', '.join(LOOK_AT)}"
        return warning(subject, text, actual=counts.accept_length, look_at=LOOK_AT, **evidence)
    evidence["look_at"] = LOOK_AT
    of = "" if counts.proposed is None else f" of {counts.proposed}"
    text = f"no draft accepted in {counts.verify_steps} verify steps (0{of})"
    floor = prefill_floor(tokens) if tokens is not None and tokens - 1 == counts.verify_steps else None
    if server_says is not None and tokens is not None and floor is not None and abs(server_says - floor) < 0.005:
        evidence["bias"] = f"{tokens}/{tokens - 1}: the first token comes from prefill"
        text += f"; the server's {server_says:g} is {tokens}/{tokens - 1}, its first token comes from prefill"
    elif server_says is not None:
        evidence["bias"] = "the server's length counts the token that comes from prefill"
    if counts.verify_steps - least < FEW_STEPS:
        return warning(subject, text + "; too few steps to judge", fix="send a longer prompt", **evidence)
    return error(subject, text + "; look at " + ", ".join(LOOK_AT), actual=counts.accepted, **evidence)


@check(
    code="accept-counters",
    title="three counters: drafts, drafted, accepted",
    reads=("drafts", "accepted"),
    also=("drafted",),
    rule="accept length = 1 + accepted / drafts, accept rate = accepted / drafted",
    fix="read the counters again",
)
def counters(facts: Facts) -> Iterator[Finding]:
    """vLLM's names: a draft is one verify step, drafted tokens are proposed."""
    values = {name: facts.get(name) for name in ("drafts", "accepted", "drafted")}
    drafts, accepted, drafted = (whole(value) for value in values.values())
    for name, value in values.items():
        if value is not None and whole(value) is None:
            yield error(name, f"{name} is {str(value)[:40]}, a counter is a whole number", actual=value)
            return
    if drafts is None or accepted is None:
        yield info("drafts", "acceptance is unknown: a counter is absent", accept_length=None, accept_rate=None)
        return
    try:
        counts = from_numbers(verify_steps=drafts, accepted=accepted, proposed=drafted)
    except AcceptanceError as problem:
        yield error("accepted", problem.what, actual=values)
        return
    if not drafts:
        yield info("drafts", "acceptance is unknown: no verify step yet", accept_length=None, accept_rate=None)
        return
    if drafted is not None and drafted < drafts:
        text = f"{drafted} tokens drafted in {drafts} drafts: a draft has at least one token"
        yield error("drafted", text, actual=values)
        return
    k = drafted / drafts if drafted else None
    finding = judged(counts, "accepted")
    evidence = {
        **finding.evidence,
        "k": None if k is None else (int(k) if k == int(k) else k),
        "accept_length_with_bonus": counts.accept_length,
        "accepted_per_draft": counts.accepted_per_step,
        "accept_rate": counts.accept_rate,
    }
    remade = {"info": info, "warning": warning, "error": error}[finding.severity]
    yield remade("accepted", finding.message, actual=finding.actual, fix=finding.fix, **evidence)


@check(
    code="accept-tree",
    title="rate of tree drafting and its denominator",
    reads=("verify_steps", "correct_drafts"),
    also=("steps", "topk", "draft_tokens"),
    rule="a tree has two rates, per depth (steps) and per node (draft tokens - 1); a rate names its denominator",
    fix="print accept length, or the rate with the name of its denominator",
)
def tree(facts: Facts) -> Iterator[Finding]:
    """Both rates of a tree; a chain has one."""
    values = {n: whole(facts.get(n)) for n in ("verify_steps", "correct_drafts", "steps", "topk", "draft_tokens")}
    verify, accepted, steps = values["verify_steps"], values["correct_drafts"], values["steps"]
    nodes = values["draft_tokens"]
    if verify is None or accepted is None:
        return
    try:
        counts = from_numbers(verify_steps=verify, accepted=accepted)
    except AcceptanceError as problem:
        yield error("correct_drafts", problem.what, actual=accepted)
        return
    if steps is None and nodes is not None and nodes > 0 and accepted > verify * (nodes - 1):
        text = f"{accepted} accepted drafts in {verify} verify steps of {nodes} draft tokens, one of them the root: "
        text += f"at most {verify * (nodes - 1)}"
        yield error("correct_drafts", text, actual=accepted, ceiling=nodes)
        return
    if steps is not None and accepted > verify * steps:
        text = f"{accepted} accepted drafts in {verify} verify steps of depth {steps}: at most {verify * steps}"
        yield error("correct_drafts", text, actual=accepted, ceiling=steps + 1)
        return
    if verify and not accepted:
        yield judged(counts, "correct_drafts")
        return
    evidence: dict[str, Any] = {"accept_length": counts.accept_length}
    if (barely := judged(counts, "correct_drafts")).severity == "warning":
        yield barely
    if steps is None or nodes is None:
        yield info("correct_drafts", f"accept length {_said(counts.accept_length)} (bonus in)", **evidence)
        return
    rates = tree_rates(verify_steps=verify, accepted=accepted, steps=steps, draft_tokens=nodes)
    evidence |= {
        "chain_depth": steps,
        "tree_nodes": nodes - 1,
        "depth": rates.depth,
        "nodes": rates.nodes,
        "rate_per_depth": rates.rate_per_depth,
        "rate_per_node": rates.rate_per_node,
    }
    if rates.depth == rates.nodes:
        yield info("correct_drafts", f"accept length {_said(counts.accept_length)} (bonus in)", **evidence)
        return
    yield warning(
        "accept rate",
        f"a tree has two rates: {accepted}/{rates.depth} = {_said(rates.rate_per_depth)} per depth and "
        f"{accepted}/{rates.nodes} = {_said(rates.rate_per_node)} per node; name the denominator",
        **evidence,
    )


@check(
    code="accept-ceiling",
    title="accept length against what is possible",
    reads=("accept_length",),
    also=("steps", "topk", "draft_tokens", "samples", "launch_args", *(name for pair in COUNTERS for name in pair)),
    rule="1 <= accept length <= draft steps + 1 (bonus in), and at most the draft tokens of a tree",
    fix="measure again and print counts beside the length",
)
def bounds(facts: Facts) -> Iterator[Finding]:
    """One length, or several by name."""
    steps, topk, tokens = (whole(facts.get(name)) for name in ("steps", "topk", "draft_tokens"))
    if steps is None and facts.get("launch_args"):
        launch = parse_args(facts["launch_args"])
        asked = speculative_config(launch).get("num_speculative_tokens")
        steps = launch.number("speculative-num-steps") or whole(asked)
    top = ceiling(steps, topk, tokens)
    given = facts.get("accept_length")
    named = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else [("", given)]
    lengths = {str(name): value for name, value in named}
    depth = steps if steps is not None else (int(top) - 1 if top and topk == 1 else None)
    for name, raw in lengths.items():
        yield from _bounded(name, raw, top, depth, facts)
    yield from _against_counters(real(given), facts)
    yield from _what_was_read(lengths, top, facts)


def _what_was_read(lengths: dict[str, Any], top: float | None, facts: Facts) -> Iterator[Finding]:
    """The lengths as numbers, what a gauge is, and what is possible."""
    read = {name: value for name, raw in lengths.items() if (value := real(raw)) is not None and value >= 1}
    read = {name: value for name, value in read.items() if top is None or value <= top + 0.005}
    parts = [", ".join(f"{name} {value:.4g}".strip() for name, value in list(read.items())[:20])] if read else []
    parts = [f"accept length {part} (bonus in)" for part in parts]
    if read and "gauge" in facts.sources.get("accept_length", ""):
        parts.append("a gauge: a mean over the server's last log interval, no count")
    if top is not None:
        parts.append(f"possible: {1.0:.2f} to {top:.2f}")
    if parts:
        yield info("accept_length", "; ".join(parts), ceiling=top, floor=1.0, read=read)


def _bounded(name: str, raw: Any, top: float | None, depth: int | None, facts: Facts) -> Iterator[Finding]:
    """One length: impossible, zero acceptance, next to none, or low for the depth of its draft."""
    subject = f"accept_length {name}".strip()
    value = real(raw)
    if raw is None:
        yield info(subject, f"{subject} is unknown", accept_length=None)
    elif value is None:
        yield error(subject, f"{subject} is {str(raw)[:40]!r}, a number is needed", actual=str(raw)[:40])
    elif top is not None and value > top + 0.005:
        of = f"{int(top) - 1} draft steps" if depth is not None and depth + 1 == top else "the draft tokens of a step"
        yield error(
            subject,
            f"{value:.2f} is above {top:.2f}, the most that {of} can give",
            actual=value,
            ceiling=top,
            likely=["wrong denominator", "tree result read as a chain", "simulated acceptance"],
        )
    elif value < 1:
        text = f"{value:.2f} is below 1.00: the bonus token is left out, or this is a rate"
        yield error(subject, text, actual=value, floor=1.0, likely=["bonus token left out", "accept rate"])
    elif value == 1:
        text = "accept length is exactly 1.00: no draft was ever right"
        yield error(subject, text, actual=value, look_at=LOOK_AT)
    elif value <= BARELY:
        text = f"accept length {value:.2f} is barely above 1.00: look at {', '.join(LOOK_AT)}"
        yield warning(subject, text, actual=value, look_at=LOOK_AT)
    elif depth and (value - 1) / depth < LOW_RATE:
        samples = whole(facts.get("samples"))
        after = f" after {samples} training samples" if samples else ""
        text = f"{value:g} is low for {depth} steps{after}; more regenerated data is the usual remedy"
        yield info(subject, text, accept_length=value, steps=depth, samples=samples)


def _against_counters(stated: float | None, facts: Facts) -> Iterator[Finding]:
    """One stated length against the counters beside it; below 1 it is told of already.

    A length over tokens (with the prefill token, without what the end cut off) is off by a few tokens in all.
    """
    if stated is None or stated < 1:
        return
    for steps_name, accepted_name in COUNTERS:
        steps, accepted = whole(facts.get(steps_name)), whole(facts.get(accepted_name))
        if not steps or steps < 0 or accepted is None or accepted < 0:
            continue
        without, slack = accepted / steps, 0.05 + 1 / steps
        if abs(stated - 1 - without) > slack >= abs(stated - without):
            text = f"accept length {stated:g} leaves out the bonus token: 1 + {accepted}/{steps} = {1 + without:.4g}"
            yield error("accept_length", text, actual=stated, needed=1 + without)
        elif abs(stated - 1 - without) > OTHER_COUNT + slack:
            text = f"accept length {stated:g} does not follow from the counters: 1 + {accepted}/{steps}"
            text += f" = {1 + without:.4g}"
            yield warning("accept_length", text, actual=stated, needed=1 + without)


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
