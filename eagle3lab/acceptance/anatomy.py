"""A decoded reply taken apart: its verify steps, and what kind of place each refused draft stood at.

Only chains: the drafts of a step are its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from eagle3lab.acceptance.chain import Decoded

UNDECIDED = 1.0
"""Entropy in nats from which on the target itself hardly knows: like an even choice between three tokens."""
OUTSIDE, LINE, OPEN, SURE = (
    "not in the draft vocabulary",
    "first token of a line",
    "target undecided",
    "target decided",
)
SORTS = (OUTSIDE, LINE, OPEN, SURE)
"""What a place is called, by the first that fits: only the last is the drafter's to learn."""


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step.

    Attributes:
        place: where in the reply its first draft stood. drafts: all of them; the first `kept` were accepted.
        bonus: the target's own token after those; None where the reply ended inside the accepted ones.
    """

    place: int
    drafts: tuple[int, ...]
    kept: int
    bonus: int | None


@dataclass(slots=True)
class Sort:
    """Places of one sort. judged: drafts that stood there; kept: those that were accepted."""

    sort: str
    judged: int = 0
    kept: int = 0

    @property
    def refused(self) -> int:
        """Drafts that ended their chain there."""
        return self.judged - self.kept


def steps_of(reply: Decoded) -> list[Step]:
    """The verify steps of a reply, in order. Its first token comes from prefill and belongs to none."""
    steps, place = [], 1
    for kept, drafts in zip(reply.accepted, reply.drafts, strict=True):
        after = place + kept
        steps.append(Step(place, tuple(drafts), kept, reply.tokens[after] if after < len(reply.tokens) else None))
        place = after + 1
    return steps


def judged(reply: Decoded) -> Iterator[tuple[int, bool]]:
    """(place in the reply, kept?) of every draft that was judged: the kept ones of a step and the first refused."""
    for step in steps_of(reply):
        yield from ((step.place + number, True) for number in range(step.kept))
        if step.bonus is not None and step.kept < len(step.drafts):
            yield step.place + step.kept, False


def where_lost(
    replies: Sequence[Decoded], entropies: Sequence[Tensor], known: Tensor, ends_line: Callable[[int], bool]
) -> list[Sort]:
    """Judged and kept drafts by the sort of place, every judged draft once.

    Args:
        entropies: [tokens] of each reply, in nats: the target's own uncertainty about each token.
        known: bool [V], tokens of the draft vocabulary.
        ends_line: whether a token's text ends a line.
    """
    table = {sort: Sort(sort) for sort in SORTS}
    for reply, entropy in zip(replies, entropies, strict=True):
        for place, kept in judged(reply):
            row = table[_sort(reply.tokens, place, float(entropy[place]), known, ends_line)]
            row.judged += 1
            row.kept += kept
    return list(table.values())


def lost_json(rows: Sequence[Sort]) -> list[dict[str, object]]:
    """The same as JSON."""
    return [{**asdict(row), "refused": row.refused} for row in rows]


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis."""
    logp = logits.float().log_softmax(-1)
    return -torch.where(logp.isneginf(), 0.0, logp.exp() * logp).sum(-1)


def _sort(tokens: Sequence[int], place: int, entropy: float, known: Tensor, ends_line: Callable[[int], bool]) -> str:
    if not bool(known[tokens[place]]):
        return OUTSIDE
    if ends_line(tokens[place - 1]):
        return LINE
    return OPEN if entropy >= UNDECIDED else SURE
