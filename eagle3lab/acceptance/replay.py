"""Acceptance from captured states alone, without decoding.

On states captured along the target's own greedy text the next token *is* the target's choice. A drafted chain is
accepted up to its first token that differs from the text, and up to there the drafter has seen exactly the ids of the
text; so teacher-forced TTT says, for every slot at once, how far a chain started there would get. Walking along the
decode path (the next chain starts after the accepted tokens and the bonus) gives the very counts of decoding. On
sampled text the same walk is teacher-forced only, and is called that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.capture.store import Sample
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed, pack


@dataclass(frozen=True, slots=True)
class Walk:
    """One sample along the decode path.

    Attributes:
        starts: slot of every chain; accepted: tokens of it that the target accepts; proposed: always k a chain.
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
    drafter: Eagle3Drafter, samples: Iterable[Sample], steps: int, *, batch_tokens: int = 4096
) -> list[Walk]:
    """Replay every sample. The first chain of a reply starts at the last prompt slot: its x_{t+1} comes from prefill."""
    walks: list[Walk] = []
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if sum(len(s.input_ids) for s in group) >= batch_tokens:
            walks += _walk_group(drafter, group, steps)
            group = []
    return walks + (_walk_group(drafter, group, steps) if group else [])


def _walk_group(drafter: Eagle3Drafter, samples: list[Sample], steps: int) -> list[Walk]:
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids))
    batch = pack(
        torch.cat([s.input_ids for s in samples]),
        torch.cat([s.aux for s in samples]),
        torch.cat([s.last for s in samples]),
        offsets,
        torch.cat([s.loss_mask for s in samples]),
    )
    drafted = draft_tokens(drafter, batch, steps)
    walks = []
    for s in batch.segments:
        size = s.stop - s.active
        text = batch.input_ids[s.active : s.stop]
        hits = torch.zeros(steps, size, dtype=torch.bool)
        for step in range(steps):
            if size > step + 2:
                hits[step, : size - step - 2] = drafted[step, s.row : s.row + size - step - 2] == text[step + 2 :]
        walks.append(walk(hits.cumprod(0).sum(0)))
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
