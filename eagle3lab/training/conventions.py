"""Who is supervised, with which weight: the mask conventions of the field, by name.

`l_t` is 1 on response tokens. Slot t at step k predicts x_{t+k+2} and is taught by position t+k+1.

| name        | weight of slot t at step k          | out of vocabulary | divided by                   | step weights |
|-------------|-------------------------------------|-------------------|------------------------------|--------------|
| served      | l_{t+1} and all of l_{t+2}..l_{t+k+2} | weight 0        | supervised slots of step 0   | 0.8^k        |
| specforge   | l_{t+k}                             | weight 0          | B * T of the padded batch    | 0.8^k        |
| speculators | l_{t+k+1} | trained | mask sum + 1e-5 of each row, mean over rows | 1 |

`served` is what a server really drafts: the chain starts inside a reply and every token of it lies in that reply.

Sources: SpecForge 0.2.0 and speculators 0.9.0 as read and run for tests/parity.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from eagle3lab.core.conventions import Convention
from eagle3lab.core.errors import TrainingError
from eagle3lab.drafter.packed import Packed, pack
from eagle3lab.training.loss import Supervision

STEP_DECAY = {"served": 0.8, "specforge": 0.8, "speculators": 1.0}


def slot_mask(convention: Convention, mask: Tensor, step: int) -> Tensor:
    """bool [T]: slots of one sample that are supervised at `step`, before any vocabulary rule. mask: bool [T]."""
    length = len(mask)

    def ahead(by: int) -> Tensor:
        moved = torch.zeros_like(mask)
        if length > by:
            moved[: length - by] = mask[by:]
        return moved

    if convention == "specforge":
        return ahead(step)
    if convention == "speculators":
        return ahead(step + 1)
    served = ahead(1)
    for by in range(2, step + 3):  # every token from the first drafted one on lies in the same reply
        served = served & ahead(by)
    return served


def first_active(convention: Convention, mask: Tensor, offsets: list[int], steps: int) -> list[int]:
    """Per sample, the first slot that any step supervises (the sample's length when none does)."""
    firsts = []
    for start, stop in pairwise(offsets):
        union = torch.zeros(stop - start, dtype=torch.bool)
        for step in range(steps):
            union |= slot_mask(convention, mask[start:stop], step)
        hits = union.nonzero()
        firsts.append(int(hits[0]) if len(hits) else stop - start)
    return firsts


def pack_for(
    convention: Convention, steps: int, input_ids: Tensor, aux: Tensor, last: Tensor, offsets: list[int], mask: Tensor
) -> Packed:
    """Pack samples so that the active slots are exactly those that this convention can supervise."""
    return pack(input_ids, aux, last, offsets, mask, first_active(convention, mask, offsets, steps))


def supervised(convention: Convention, mask: Tensor, steps: int) -> Tensor:
    """bool [K, T]: pairs of one sample that count, before any vocabulary rule. mask: bool [T]."""
    result = torch.stack([slot_mask(convention, mask, step) for step in range(steps)])
    for step in range(steps):  # the teacher's position t+k+1 lies inside the sample
        result[step, max(len(mask) - step - 1, 0) :] = False
    return result


def divisors(convention: Convention, counts: Tensor, padded_slots: int) -> Tensor:
    """float32 [K]: what the loss of each step is divided by.

    Over several ranks all of them divide by the numbers of the whole batch, so that their gradients add up to its own.

    Args:
        counts: int64 [K], pairs of the whole batch that count.
        padded_slots: B * T of the whole padded batch.
    """
    if convention == "served":
        return counts[:1].clamp_min(1).float().expand_as(counts)
    if convention == "specforge":
        return torch.full_like(counts, padded_slots, dtype=torch.float32)
    return counts.float() + 1e-5  # speculators packs every batch into one row: its mean over rows is over that one


def supervise(
    convention: Convention,
    batch: Packed,
    steps: int,
    choice: Tensor | None,
    *,
    decay: float | None = None,
    padded_slots: int | None = None,
    counts: Tensor | None = None,
) -> Supervision:
    """Turn a convention into (step, row, teacher, weight) pairs.

    Args:
        choice: int64 [N], draft id of the target's own choice *after* slot j (its argmax), -1 = out of vocabulary;
            None = `labelled` will add it.
        decay: step weight base; None = the convention's own.
        padded_slots: B * T of the padded batch that SpecForge would divide by; None = longest sample times samples.
        counts: int64 [K], pairs of the whole batch when this is one rank's part of it; None = this is the whole.

    Raises:
        TrainingError: the batch supervises nothing.
    """
    base = STEP_DECAY[convention] if decay is None else decay
    sizes = [s.stop - s.start for s in batch.segments]
    masks = torch.cat([supervised(convention, batch.mask[s.start : s.stop], steps) for s in batch.segments], -1)
    counts = masks.sum(-1) if counts is None else counts
    if not counts.any():
        raise TrainingError(
            f"0 supervised tokens in a batch of {batch.tokens}",
            rule=f"convention '{convention}' needs at least two response tokens in a row",
            fix="eagle3lab doctor --corpus FILE --tokenizer DIR shows the mask by position",
        )
    scale = 1.0 / divisors(convention, counts, padded_slots or max(sizes) * len(sizes))
    scale *= torch.tensor([base**step for step in range(steps)])
    bare = _gather(batch, masks, scale)
    return bare if choice is None else labelled(convention, bare, choice)


def labelled(convention: Convention, bare: Supervision, choice: Tensor) -> Supervision:
    """Add the target's choice [N] to pairs without one; out of vocabulary, a convention may train nothing."""
    labels = choice[bare.teacher]
    weights = bare.weights if convention == "speculators" else bare.weights * (labels >= 0)
    return replace(bare, weights=weights, labels=labels)


def _gather(batch: Packed, masks: Tensor, scale: Tensor) -> Supervision:
    """Reindex slot masks [K, N] by teacher position; scale [K] is the weight of a pair."""
    steps = masks.shape[0]
    row_of = torch.zeros(batch.tokens, dtype=torch.int64)
    row_of[batch.active] = torch.arange(len(batch.active))
    taught = torch.zeros_like(masks)
    for step in range(steps):
        taught[step, step + 1 :] = masks[step, : max(batch.tokens - step - 1, 0)]
    teacher = taught.any(0).nonzero().squeeze(-1)
    counted = taught[:, teacher]
    slots = teacher - torch.arange(1, steps + 1)[:, None]
    rows = torch.where(counted, row_of[slots.clamp_min(0)], 0)
    weights = counted * scale[:, None]
    return Supervision(teacher, rows, weights, weights, counted, torch.zeros_like(teacher))
