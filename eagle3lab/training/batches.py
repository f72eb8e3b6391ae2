"""Which samples form which step: a plan that depends on lengths and seed alone, so any step can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3lab.capture.store import Store
from eagle3lab.drafter.packed import Packed
from eagle3lab.training.conventions import Convention, pack_for


class BatchPlan:
    """Shuffled epochs cut into batches of about `batch_tokens` tokens.

    Args:
        lengths: tokens of every sample.
        members: the samples to train on.
    """

    def __init__(self, lengths: Sequence[int], members: Sequence[int], batch_tokens: int, seed: int) -> None:
        self.lengths, self.members, self.batch_tokens, self.seed = lengths, list(members), batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def step(self, index: int) -> list[int]:
        """Sample numbers of step `index`, counted from 0 over all epochs."""
        epoch = 0
        while True:
            while len(self._epochs) <= epoch:
                self._epochs.append(self._cut(len(self._epochs)))
            if index < len(self._epochs[epoch]):
                return self._epochs[epoch][index]
            index -= len(self._epochs[epoch])
            epoch += 1

    def _cut(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = [self.members[i] for i in torch.randperm(len(self.members), generator=generator).tolist()]
        batches: list[list[int]] = []
        filled = self.batch_tokens
        for member in order:
            if filled + self.lengths[member] > self.batch_tokens and filled > 0:
                batches.append([])
                filled = 0
            batches[-1].append(member)
            filled += self.lengths[member]
        return batches


def load_batch(
    store: Store,
    members: Sequence[int],
    convention: Convention,
    steps: int,
    final_norm: Callable[[Tensor], Tensor] | None = None,
) -> Packed:
    """Read samples of a store and pack them for a convention.

    Args:
        final_norm: the target's, for a store whose last states were captured before it; see `Packed.last`.
    """
    samples = [store[member] for member in members]
    last = torch.cat([s.last for s in samples])
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids))
    return pack_for(
        convention,
        steps,
        torch.cat([s.input_ids for s in samples]),
        torch.cat([s.aux for s in samples]),
        last if final_norm is None else final_norm(last),
        offsets,
        torch.cat([s.loss_mask for s in samples]),
    )
