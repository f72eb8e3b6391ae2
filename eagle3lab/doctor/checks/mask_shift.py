"""The loss mask against what it supervises. Place p reads token p + 1 and state p, and predicts token p + 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lab.doctor.checks.training_data import Sample, sample_of
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.templates import THINK_OPEN, replies, token_mask
from eagle3lab.doctor.views import mapping, real

TABLE_ROWS = 256
NOTHING = 1e-3
"""Of two gradient norms, this share of the other one is rounding and not a gradient."""
_REPLY_NAME = re.compile(r"^(?:A|R|ANS|REPLY|RESP)_?\d+$", re.IGNORECASE)
_END_NAME = re.compile(r"^(?:E|EOS|END|EOT|<[|/]?\w+[|]?>)$", re.IGNORECASE)
_UNMOVED = re.compile(
    r"\bmask (?:is|was|has) not(?: been)?(?: moved\b| shifted\b|\s*(?:$|[.,;)]))"
    r"|\bmask (?:is |was |left |stays )?(?:unmoved|unshifted)\b"
)

_FIRST = frozenset(
    {"first", "start", "starts", "begin", "begins", "beginning", "left", "front", "head", "opening", "leading", "lead"}
    | {"entry", "enter", "onset", "initial", "early", "lower", "top", "leftmost"}
)
_PAST = frozenset(
    {"right", "after", "stale", "end", "ends", "past", "last", "behind", "beyond", "outside", "tail", "trailing"}
    | {
        "late",
        "stop",
        "close",
        "closing",
        "exit",
        "final",
        "upper",
        "eos",
        "bottom",
        "next",
        "following",
        "rear",
        "rightmost",
    }
)
_BEFORE = frozenset({"prompt", "before"})
"""The last place of the prompt predicts the second token of the reply: the first that a drafter proposes."""
_INSIDE = frozenset({"middle", "inside", "interior", "mean", "median", "average", "all", "rest", "total", "centre"})
_EDGE = frozenset({"edge", "boundary", "border", "place", "position", "token", "slot"})
"""Words by which places of the reply's edges are named: which edge a place lies at, or only that it is one."""


@dataclass(frozen=True)
class Run:
    """One reply: places first..last of its tokens, the end token included; end: its place, None without one."""

    first: int
    last: int
    end: int | None


@check(
    code="mask-shift",
    title="loss mask against labels, by position",
    reads=("loss_mask", "tokens"),
    also=("ids", "template", "assistant_header", "policy", "rule"),
    rule="inputs and teacher move one to the left, and the mask with them: place p supervises token p + 2",
    fix="move the mask one to the left, or supervise p only when tokens p + 1 and p + 2 are both in the reply",
    symptom="the first drafted token of a reply is never trained; two places after the reply are",
)
def shift(facts: Facts) -> Iterator[Finding]:
    """The table by position, and which tokens of the reply no place predicts."""
    tokens, mask = facts.get("tokens") or [], facts.get("loss_mask") or []
    if any(isinstance(token, list) for token in tokens):
        return
    if len(tokens) != len(mask) or any(mark not in (0, 1) for mark in mask):
        text = f"{len(mask)} marks for {len(tokens)} tokens, or marks other than 0 and 1"
        yield error("loss_mask", text, actual=len(mask), fix="one mark of 0 or 1 a token")
        return
    given = facts.get("ids")
    ids = given if isinstance(given, list) and len(given) == len(tokens) else list(range(len(tokens)))
    places = [place for place, mark in enumerate(mask) if mark]
    if not places:
        yield error("loss_mask", "no supervised place", actual=0, fix="eagle3lab doctor --corpus FILE --tokenizer DIR")
        return
    yield from _judged(facts, tokens, ids, mask, places)


def _judged(facts: Facts, tokens: Sequence[Any], ids: Sequence[Any], mask: Sequence[Any],
            places: list[int]) -> Iterator[Finding]:  # fmt: skip
    count = len(tokens)
    targets = {place + 2 for place in places}
    labels = [ids[target] if target < count else None for target in sorted(targets)]
    sample = sample_of(facts)
    runs = reply_of(sample, tokens)
    if runs is None and len(places) < count:
        # the last place has not even an input token: whoever marks it marks the reply's own tokens
        own = places[-1] >= count - 1 or _UNMOVED.search(str(facts.get("rule") or "").lower())
        runs = [Run(first, last, None) for first, last in _stretches(places)] if own else None
    marked = set(places)
    supervised = [run for run in runs or [] if not marked.isdisjoint(_places(run))]  # a trainer may skip whole replies
    never = [
        place
        for run in supervised
        for place in range(max(run.first + 1, 2), run.last + 1)
        if place not in targets and (sample.with_end or place != run.end)
    ]
    real_labels = sum(label is not None for label in labels)
    evidence: dict[str, Any] = {
        "table_p_input_label_mask": [_row(tokens, place, mask[place]) for place in range(min(count, TABLE_ROWS))],
        "supervised_places": places,
        "labels": labels,
        "real_labels": real_labels,
        "labels_past_the_end": len(labels) - real_labels,
        "never_supervised": [ids[place] for place in never],
        "of": len(places),
    }
    told = list(_faults(tokens, ids, places, runs, supervised, never, evidence))
    yield from told
    if not told:
        ends = [place for run in supervised if (place := run.end) is not None and place in never]
        more = f", the end token {ids[ends[0]]} is never predicted" if ends else ""
        yield info("loss_mask", f"{real_labels} of {len(places)} supervised places have a label{more}", **evidence)


def _faults(tokens: Sequence[Any], ids: Sequence[Any], places: list[int], runs: list[Run] | None,
            supervised: list[Run], never: list[int], evidence: dict[str, Any]) -> Iterator[Finding]:  # fmt: skip
    count = len(tokens)
    apart = "supervise p only when tokens p + 1 and p + 2 are both in the reply"
    if runs is None:
        if len(places) == count:
            text = f"all {count} places are supervised: prompt tokens too, and the last 2 have no label"
            yield warning("loss_mask", text, actual=count, fix=apart, **evidence)
        return
    missed, marked = set(never), set(places)
    late = [run.first + 1 for run in supervised if run.first + 1 in missed and _late(run, tokens, marked)]
    if late:
        lost, of = ids[late[0]], evidence["of"]
        text = f"mask is one place late: token {lost} is never predicted, {evidence['real_labels']} of {of} places"
        yield error("loss_mask", f"{text} have a label", actual=places, lost_label=lost, **evidence)
    reply = {place for run in runs for place in _places(run)}
    prompt = [p + 2 for p in places if p + 2 < count and reply.isdisjoint((p, p + 1, p + 2))]
    if prompt:
        text = f"prompt tokens supervised: {len(prompt)} places predict them, the first predicts token {ids[prompt[0]]}"
        yield warning("loss_mask", text, actual=places, fix=apart, prompt_tokens=[ids[p] for p in prompt], **evidence)
    elif not late and any(run.first - 2 in marked for run in runs):
        text = "the mask supervises the first token of a reply, which prefill makes and no drafter proposes"
        yield warning("loss_mask", text, actual=places, **evidence)
    if late:
        return
    past = [run.last for run in runs if run.last in marked]
    if past and not prompt:
        text = f"the mask goes past the reply: place {past[0]} is its last token, and reads the one after it"
        yield warning("loss_mask", text, actual=places, fix=apart, **evidence)
    targets = {place + 2 for place in places}
    ends = {run.end for run in supervised}
    gaps = []
    for run in supervised:
        # what stands before the first label may be thinking that a trainer leaves out on purpose
        begin = min((place for place in range(run.first + 1, run.last + 1) if place in targets), default=run.last)
        gaps += [place for place in range(begin + 1, run.last + 1) if place in missed and place not in ends]
    if gaps:
        text = f"{len(gaps)} tokens of a reply are never predicted, the first is token {ids[gaps[0]]}"
        yield warning("loss_mask", text, actual=places, fix=apart, **evidence)


def _late(run: Run, tokens: Sequence[Any], marked: set[int]) -> bool:
    """Whether the mask stands on the reply's own places. A prompt may end with <think>."""
    return run.last in marked or (run.first in marked and str(tokens[run.first]) != THINK_OPEN)


def _places(run: Run) -> range:
    """Every place of the reply."""
    return range(run.first, run.last + 1)


def _stretches(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of every stretch without a gap."""
    firsts = [place for index, place in enumerate(places) if index == 0 or places[index - 1] != place - 1]
    lasts = [place for index, place in enumerate(places) if places[index + 1 : index + 2] != [place + 1]]
    return list(zip(firsts, lasts, strict=True))


def _row(tokens: Sequence[Any], place: int, mark: Any) -> list[Any]:
    ahead = [tokens[at] if at < len(tokens) else None for at in (place + 1, place + 2)]
    return [place, *ahead, int(mark)]


def reply_of(sample: Sample, tokens: Sequence[Any]) -> list[Run] | None:
    """The replies: by the chat template, else by names such as A0, A1, E; None when neither tells."""
    header = sample.header or (sample.family.header if sample.family else None)
    if header is not None:
        found = replies(sample.text, header, sample.family)
        body, full = (token_mask(sample.tokens, found, with_end=with_end) for with_end in (False, True))
        places = [place for place, mark in enumerate(full) if mark]
        ends = {place for place in places if not body[place]}
    else:
        places, ends = [], set()
        inside = False
        for place, name in enumerate(map(str, tokens)):
            if inside and _END_NAME.match(name):
                ends.add(place)
            inside = bool(_REPLY_NAME.match(name))
            if inside or place in ends:
                places.append(place)
    runs = [Run(first, last, last if last in ends else None) for first, last in _stretches(places)]
    return runs or None


@check(
    code="mask-gradient",
    title="gradient at the edges of a reply",
    reads=("grad_norm_by_place",),
    also=("after_fix", "tokens", "template", "assistant_header"),
    rule="the first place of a reply gets a gradient, the place after its end gets none",
    fix="move the mask one to the left",
)
def gradient(facts: Facts) -> Iterator[Finding]:
    """Which edge of the reply the gradient reaches."""
    norms = {str(name): real(value) for name, value in mapping(facts.get("grad_norm_by_place")).items()}
    at, past = _edges(list(norms), facts)
    first, edge = norms[at] if at is not None else None, norms[past] if past is not None else None
    if first is None or edge is None:
        yield info("gradient", "could not check the gradient because its first and last place are not named")
    elif edge > 1e-12 and first < NOTHING * edge:
        text = f"first boundary gets no gradient, the place after the end does ({edge:g})"
        yield error("gradient", text, actual=norms, first_boundary=first, right_edge=edge)
    elif first <= 1e-12:
        yield warning("gradient", "neither edge of the reply gets a gradient", actual=norms)
    elif edge > NOTHING * first and not _told_apart(at or "", past or "", facts):
        text = f"{at} gets a gradient ({first:g}), and {past} too ({edge:g}): is {past} a place after the reply's end?"
        yield info("gradient", text, first_boundary=first, right_edge=edge)
    elif edge > NOTHING * first:
        text = f"the place after the end gets a gradient ({edge:g}) beside the first ({first:g})"
        yield warning("gradient", text, actual=norms, first_boundary=first, right_edge=edge)
    else:
        yield info("gradient", f"first boundary {first:g}, after the end {edge:g}", first_boundary=first)


def _told_apart(at: str, past: str, facts: Facts) -> bool:
    """Whether something other than the order of two numbers tells which edge is which."""
    known = facts.get("tokens") is not None or bool(facts.get("after_fix"))
    return known or edge_of(at) is not None or edge_of(past) is not None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()))


def edge_of(name: str) -> str | None:
    """Which edge of the reply a place is named after: first, past, or None."""
    words = _words(name)
    if words & _INSIDE:
        return None
    if words & _BEFORE:
        return "first"
    if words & _PAST:
        return "past"
    return "first" if words & _FIRST else None


def _edges(names: list[str], facts: Facts) -> tuple[str | None, str | None]:
    """The first place of the reply and the one after its end among named places: by name, else what the fix did to
    them, else by place numbers, else the one that is left."""
    named = {edge: [name for name in names if edge_of(name) == edge] for edge in ("first", "past")}
    at, past = (next(iter(named[edge]), None) for edge in ("first", "past"))
    if at is not None and past is not None:
        return at, past
    fixed = {str(name): real(value) for name, value in mapping(facts.get("after_fix")).items()}
    largest = max((value for value in fixed.values() if value is not None), default=0.0)
    for name in names:
        value = fixed.get(name)
        if value is not None and largest > 0 and at is None and name != past and value > NOTHING * largest:
            at = name
        elif value is not None and largest > 0 and past is None and name != at and value <= NOTHING * largest:
            past = name
    if at is None and past is None:
        at, past = _by_number(names, facts)
    open_ = [name for name in names if name not in (at, past) and _words(name) & _EDGE]
    if len(open_) == 1 and (at is None) != (past is None):
        at, past = (open_[0], past) if at is None else (at, open_[0])
    return at, past


def _by_number(names: list[str], facts: Facts) -> tuple[str | None, str | None]:
    """Two places by their numbers: those of the reply in the tokens, else the lower and the higher of two."""
    found = {name: re.findall(r"\d{1,9}", name) for name in names}
    places = {int(numbers[0]): name for name, numbers in found.items() if len(numbers) == 1}
    tokens = facts.get("tokens")
    if isinstance(tokens, list) and not any(isinstance(token, list) for token in tokens):
        runs = reply_of(sample_of(facts), tokens) or []
        return next(((places.get(run.first - 1), places.get(run.last)) for run in runs), (None, None))
    if len(places) != 2 or len(names) != 2:
        return None, None  # of several places any may lie in the prompt or in the reply
    low, high = sorted(places)
    return places[low], places[high]
