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

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from eagle3lab.core.errors import TrainingError
from eagle3lab.drafter.packed import Packed, pack
from eagle3lab.training.loss import Supervision

Convention = Literal["served", "specforge", "speculators"]
CONVENTIONS: tuple[Convention, ...] = ("served", "specforge", "speculators")
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


def supervise(
    convention: Convention,
    batch: Packed,
    steps: int,
    choice: Tensor,
    *,
    decay: float | None = None,
    padded_slots: int | None = None,
) -> Supervision:
    """Turn a convention into (step, row, teacher, weight) pairs.

    Args:
        choice: int64 [N], draft id of the target's own choice *after* slot j (its argmax), -1 = out of vocabulary.
        decay: step weight base; None = the convention's own.
        padded_slots: B * T of the padded batch that SpecForge would divide by; None = longest sample times samples.

    Raises:
        TrainingError: the batch supervises nothing.
    """
    base = STEP_DECAY[convention] if decay is None else decay
    sizes = [s.stop - s.start for s in batch.segments]
    masks = torch.zeros(steps, batch.tokens, dtype=torch.bool)
    scale = torch.zeros(steps, batch.tokens)
    for step in range(steps):
        for s in batch.segments:
            inside = slot_mask(convention, batch.mask[s.start : s.stop], step)
            if s.stop - s.start > step + 1:
                inside[s.stop - s.start - step - 1 :] = False  # no teacher position inside the sample
            else:
                inside[:] = False
            masks[step, s.start : s.stop] = inside
    if not masks.any():
        raise TrainingError(
            f"0 supervised tokens in a batch of {batch.tokens}",
            rule=f"convention '{convention}' needs at least two response tokens in a row",
            fix="eagle3lab doctor --corpus FILE --tokenizer DIR shows the mask by position",
        )
    if convention == "served":
        scale[:] = 1.0 / float(max(int(masks[0].sum()), 1))
    elif convention == "specforge":
        scale[:] = 1.0 / float(padded_slots or max(sizes) * len(sizes))
    else:  # its collator packs every batch into one row, so the mean over rows is over that one
        scale[:] = 1.0 / (masks.sum(-1, keepdim=True).float() + 1e-5)
    return _gather(batch, masks, scale, choice, base, drop_unknown=convention != "speculators")


def _gather(
    batch: Packed, masks: Tensor, scale: Tensor, choice: Tensor, base: float, *, drop_unknown: bool
) -> Supervision:
    """Reindex slot masks [K, N] by teacher position."""
    steps = masks.shape[0]
    row_of = torch.zeros(batch.tokens, dtype=torch.int64)
    row_of[batch.active] = torch.arange(len(batch.active))
    taught = torch.zeros_like(masks)
    for step in range(steps):
        taught[step, step + 1 :] = masks[step, : batch.tokens - step - 1]
    teacher = taught.any(0).nonzero().squeeze(-1)
    labels = choice[teacher]
    rows = torch.zeros(steps, len(teacher), dtype=torch.int64)
    weights = torch.zeros(steps, len(teacher))
    counted = torch.zeros(steps, len(teacher), dtype=torch.bool)
    for step in range(steps):
        slots = (teacher - step - 1).clamp_min(0)
        chosen = taught[step, teacher]
        rows[step] = torch.where(chosen, row_of[slots], 0)
        counted[step] = chosen
        kept = chosen & (labels >= 0) if drop_unknown else chosen
        weights[step] = torch.where(kept, scale[step, slots] * base**step, 0.0)
    return Supervision(teacher, rows, weights, counted, labels)
