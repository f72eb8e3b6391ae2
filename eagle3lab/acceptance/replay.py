"""Acceptance from captured states alone, without decoding.

On states captured along the target's own greedy text the next token *is* the target's choice. A drafted chain is
accepted up to its first token that differs from the text, and up to there the drafter has seen exactly the ids of the
text; so teacher-forced TTT says, for every slot at once, how far a chain started there would get. Walking along the
decode path (the next chain starts after the accepted tokens and the bonus) gives the very counts of decoding. On
sampled text the same walk is teacher-forced only, and is called that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle3lab.capture.store import Sample
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed, pack


@dataclass(frozen=True, slots=True)
class Walk:
    """One sample along the decode path.

    Attributes:
        starts: slot of every chain, from the first active one; accepted: tokens of it that the target accepts.
        prefix: int64 [R], accepted length of a chain started at *every* reply slot (the all-positions average).
    """

    starts: list[int]
    accepted: list[int]
    prefix: Tensor


@torch.inference_mode()
def draft_tokens(drafter: Eagle3Drafter, batch: Packed, steps: int) -> Tensor:
    """int64 [steps, M]: target id drafted at every active slot and step, teacher-forced on the text."""
    hidden = drafter(batch, steps)
    kept = drafter.kept_ids
    best = [torch.cat([drafter.lm_head(piece).float().argmax(-1) for piece in h.split(512)]) for h in hidden]
    return kept[torch.stack(best)] if best else torch.zeros(steps, 0, dtype=torch.int64)


def walk_samples(
    drafter: Eagle3Drafter,
    samples: Iterable[Sample],
    steps: int,
    *,
    batch_tokens: int = 4096,
    precision: AbstractContextManager[Any] | None = None,
) -> list[Walk]:
    """Replay every sample. A reply's first chain starts at the last prompt slot: its x_{t+1} comes from prefill.

    Args:
        precision: what the drafter's forwards run in, such as an autocast; the samples are read outside of it.
    """
    within = precision or contextlib.nullcontext()
    walks: list[Walk] = []
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if sum(len(s.input_ids) for s in group) >= batch_tokens:
            walks += _walk_group(drafter, group, steps, within)
            group = []
    return walks + (_walk_group(drafter, group, steps, within) if group else [])


def pack_samples(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Packed:
    """Samples end to end on a device, every slot from the last prompt token on active."""
    offsets = [0, *accumulate(len(sample.input_ids) for sample in samples)]
    names = ("input_ids", "aux", "last", "loss_mask")
    parts = {name: torch.cat([getattr(s, name) for s in samples]).to(device) for name in names}
    return pack(parts["input_ids"], parts["aux"], parts["last"], offsets, parts["loss_mask"])


def response_runs(mask: Tensor) -> list[tuple[int, int]]:
    """(first, stop) slots of every reply in a sample's mask: a chain must not run from one reply into the next.

    `first` is the slot before the reply, whose x_{t+1} is the reply's first token; `stop` is one past its last token.
    """
    edges = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).cpu().long().diff()
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return [(max(start - 1, 0), stop) for start, stop in zip(starts, stops, strict=True)]


def _walk_group(
    drafter: Eagle3Drafter, samples: list[Sample], steps: int, within: AbstractContextManager[Any]
) -> list[Walk]:
    batch = pack_samples(samples, drafter.fc.weight.device)
    with within:
        drafted = draft_tokens(drafter, batch, steps).cpu()
    ids = batch.input_ids.cpu()
    walks = []
    for s in batch.segments:
        parts = []
        for first, stop in response_runs(batch.mask[s.start : s.stop]):
            row, size = s.row + s.start + first - s.active, stop - first
            text = ids[s.start + first : s.start + stop]
            hits = torch.zeros(steps, size, dtype=torch.bool)
            for step in range(min(steps, size - 2)):
                hits[step, : size - step - 2] = drafted[step, row : row + size - step - 2] == text[step + 2 :]
            parts.append((row - s.row, walk(hits.cumprod(0).sum(0))))
        walks.append(
            Walk(
                [place + slot for place, part in parts for slot in part.starts],
                [number for _, part in parts for number in part.accepted],
                torch.cat([part.prefix for _, part in parts]) if parts else torch.zeros(0, dtype=torch.int64),
            )
        )
    return walks


def walk(prefix: Tensor) -> Walk:
    """Follow the decode path over accepted lengths [R] of chains started at every slot of one reply.

    Slot r drafts x_{r+2}; the last slot that can be judged is R-3 (the text ends at x_{R-1}).
    """
    starts, accepted = [], []
    slot, last = 0, len(prefix) - 2
    while slot < last:
        starts.append(slot)
        accepted.append(int(prefix[slot]))
        slot += accepted[-1] + 1
    return Walk(starts, accepted, prefix[: max(last, 0)])


def all_positions_length(walks: Iterable[Walk]) -> float | None:
    """1 + mean accepted length of chains started at *every* reply slot; None without one.

    Not the accept length: decoding never starts a chain inside an accepted run, and runs lie where drafting is easy,
    so this average counts easy places more often. Print it under its own name.
    """
    lengths = [walk.prefix for walk in walks]
    joined = torch.cat(lengths) if lengths else torch.zeros(0)
    return 1 + float(joined.double().mean()) if len(joined) else None
