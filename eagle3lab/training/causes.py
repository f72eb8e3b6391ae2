"""Why a training went wrong: looked for only when it has, in the data and the settings that it used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eagle3lab.capture.shards import check_finite
from eagle3lab.core.errors import StoreError

if TYPE_CHECKING:
    from eagle3lab.training.trainer import Trainer

LEAST_RATE = 1e-6
LEAST_NORM = 1e-8
LEAST_AGREEMENT = 0.5
"""Share of a greedy text's tokens that the teacher itself must choose; a right capture has nearly all."""


def of_bad_step(trainer: Trainer, step: int) -> list[str]:
    """What is not finite in the inputs of step `step` (from 1), by sample."""
    found = []
    for member in trainer.plan.step(step - 1):
        sample = trainer.store[member]
        try:
            check_finite(sample.sample_id, sample.aux, sample.last)
        except StoreError as error:
            found.append(f"{error.what} (eagle3lab doctor --states DIR)")
    if not torch.isfinite(trainer.teacher_head).all():
        found.append("the target's head is not finite (eagle3lab doctor --target DIR)")
    return found


def of_stuck_loss(trainer: Trainer) -> list[str]:
    """What in the settings, the states or the teacher keeps a loss where it began."""
    s, guard = trainer.settings, trainer.guard
    found = []
    if s.learning_rate < LEAST_RATE:
        found.append(f"learning_rate {s.learning_rate:g} is too low")
    if max(guard.norms, default=0.0) < LEAST_NORM:
        found.append("the gradient is zero: nothing of the drafter reaches the loss")
    sample = trainer.store[trainer.plan.step(0)[0]]
    for point, block in zip(
        trainer.store.manifest.points, sample.aux.chunk(len(trainer.store.manifest.points), -1), strict=True
    ):
        if bool((block == block[:1]).all()):
            found.append(f"the states at point {point} are the same at every token")
    if bool((sample.last == sample.last[:1]).all()):
        found.append("the last state is the same at every token: the teacher says one thing everywhere")
    elif (agreed := _agreement(trainer)) is not None and agreed < LEAST_AGREEMENT:
        found.append(
            f"the teacher chooses the target's own greedy text in {agreed:.0%} of its tokens: ids shifted, another "
            "target's head, or `last` on the other side of the final norm (eagle3lab doctor --states DIR)"
        )
    return found


@torch.no_grad()
def _agreement(trainer: Trainer) -> float | None:
    """Share of the first batch's trained tokens that the teacher would choose itself; None on sampled text."""
    if not trainer.store.manifest.greedy:
        return None
    share = trainer.reader(0)
    device = trainer.world.device
    labels = trainer.lookup[share.batch.shifted(share.batch.input_ids, 1).to(device)][share.bare.teacher.to(device)]
    last = share.batch.last[share.bare.teacher].to(device, trainer.compute)
    known = labels >= 0
    hits = ((last @ trainer.teacher_head.T).argmax(-1) == labels)[known]
    return float(hits.float().mean()) if len(hits) else None
