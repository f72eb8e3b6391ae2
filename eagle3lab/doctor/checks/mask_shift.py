"""The loss mask against what it supervises. Place p reads token p + 1 and state p, and predicts token p + 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from eagle3lab.doctor.checks.training_data import sample_of
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.templates import TEMPLATES, hits, replies, token_mask
from eagle3lab.doctor.views import mapping, real

TABLE_ROWS = 256
_REPLY_NAME = re.compile(r"^(?:A|R|ANS|REPLY|RESP)_?\d+$", re.IGNORECASE)
_END_NAME = re.compile(r"^(?:E|EOS|END|EOT|<[|/]?\w+[|]?>)$", re.IGNORECASE)


@check(
    code="mask-shift",
    title="loss mask against labels, by position",
    reads=("loss_mask", "tokens"),
    also=("ids", "template"),
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
    yield _judged(tokens, ids, mask, places, reply_of(facts, tokens))


def _judged(tokens: Sequence[Any], ids: Sequence[Any], mask: Sequence[Any], places: list[int],
            reply: list[int] | None) -> Finding:  # fmt: skip
    count = len(tokens)
    labels = [ids[place + 2] if place + 2 < count else None for place in places]
    late = places[-1] >= count - 1  # not even its input token exists
    meant = reply if reply is not None else (places if late else None)
    drafted = [] if meant is None else [p for before, p in pairwise(meant) if p == before + 1]
    targets = {place + 2 for place in places}
    never = [ids[place] for place in drafted if place not in targets]
    evidence: dict[str, Any] = {
        "table_p_input_label_mask": [_row(tokens, place, mask[place]) for place in range(min(count, TABLE_ROWS))],
        "supervised_places": places,
        "labels": labels,
        "real_labels": sum(label is not None for label in labels),
        "labels_past_the_end": sum(label is None for label in labels),
        "never_supervised": never,
        "of": len(places),
    }
    if never or late:
        lost = f"token {never[0]} is never predicted" if never else "the last place has no input token"
        real_labels = evidence["real_labels"]
        text = f"mask is one place late: {lost}, {real_labels} of {len(places)} places have a label"
        first = {"lost_label": never[0]} if never else {}
        return error("loss_mask", text, actual=places, **first, **evidence)
    if meant and any(place + 2 == start for place in places for start in _starts(meant)):
        text = "the mask supervises the first token of a reply, which prefill makes and no drafter proposes"
        return warning("loss_mask", text, actual=places, **evidence)
    text = f"{evidence['real_labels']} of {len(places)} supervised places have a label"
    return info("loss_mask", text, **evidence)


def _row(tokens: Sequence[Any], place: int, mark: Any) -> list[Any]:
    ahead = [tokens[at] if at < len(tokens) else None for at in (place + 1, place + 2)]
    return [place, *ahead, int(mark)]


def _starts(reply: list[int]) -> list[int]:
    return [place for index, place in enumerate(reply) if index == 0 or reply[index - 1] != place - 1]


def reply_of(facts: Facts, tokens: Sequence[Any]) -> list[int] | None:
    """Places of reply tokens: by the chat template, else by names such as A0, A1, E; None when neither tells."""
    sample = sample_of(facts)
    found_templates = hits(sample.text)
    pattern, end = sample.header, sample.end
    if pattern is None and found_templates:
        best = TEMPLATES[max(found_templates, key=lambda name: found_templates[name])]
        pattern, end = best.header, best.end
    if pattern is not None:
        marks = token_mask(sample.tokens, replies(sample.text, pattern, end), with_end=True)
        return [place for place, mark in enumerate(marks) if mark] or None
    names = [str(token) for token in tokens]
    inside = False
    places: list[int] = []
    for place, name in enumerate(names):
        ends = inside and bool(_END_NAME.match(name))
        inside = bool(_REPLY_NAME.match(name))
        if inside or ends:
            places.append(place)
    return places or None


@check(
    code="mask-gradient",
    title="gradient at the edges of a reply",
    reads=("grad_norm_by_place",),
    also=("after_fix",),
    rule="the first place of a reply gets a gradient, the place after its end gets none",
    fix="move the mask one to the left",
)
def gradient(facts: Facts) -> Iterator[Finding]:
    """Which edge of the reply the gradient reaches."""
    norms = {str(name): real(value) for name, value in mapping(facts.get("grad_norm_by_place")).items()}
    at = next((name for name in norms if re.search(r"first|start|begin|left", name.lower())), None)
    others = [name for name in norms if name != at]
    past = [name for words in ("right|after|stale|end", "edge") for name in others if re.search(words, name.lower())]
    first, edge = norms[at] if at is not None else None, norms[past[0]] if past else None
    if first is None or edge is None:
        yield info("gradient", "could not check the gradient because its first and last place are not named")
    elif first <= 1e-12 < edge:
        text = f"first boundary gets no gradient, the place after the end does ({edge:g})"
        yield error("gradient", text, actual=norms, first_boundary=first, right_edge=edge)
    elif first <= 1e-12:
        yield warning("gradient", "neither edge of the reply gets a gradient", actual=norms)
    elif edge > 1e-12:
        text = f"the place after the end gets a gradient ({edge:g}) beside the first ({first:g})"
        yield warning("gradient", text, actual=norms, first_boundary=first, right_edge=edge)
    else:
        yield info("gradient", f"first boundary {first:g}, after the end {edge:g}", first_boundary=first)
