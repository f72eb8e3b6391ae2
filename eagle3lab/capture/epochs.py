"""Shuffled epochs over a store: padded batches of similar length, dealt to ranks without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eagle3lab.core.errors import UsageError

WINDOW = 64
"""Batches that are sorted by length together: padding shrinks, and the order over an epoch stays random."""


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """Generator of the `number`-th epoch or step of a seed: the same on every rank and after a resume."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def epoch_batches(
    lengths: Sequence[int], *, batch_tokens: int, seed: int, epoch: int, rank: int = 0, ranks: int = 1
) -> list[list[int]]:
    """Sample numbers of this rank's batches of one epoch.

    Each batch padded to its longest sample holds at most `batch_tokens` tokens (a longer sample stands alone). Every
    sample is in exactly one batch of one rank; when the batches do not divide evenly, the first ranks have one more.
    The result depends on the arguments alone, so every rank computes the same plan without talking to the others.

    Raises:
        UsageError: a rank outside 0..ranks-1.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} of {ranks}", rule="0 <= rank < ranks")
    generator = numbered_generator(seed, epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    window = WINDOW * max(1, batch_tokens // mean)
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        batches += _cut(sorted(order[start : start + window], key=lambda i: lengths[i]), lengths, batch_tokens)
    mixed = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in mixed[rank::ranks]]


def _cut(members: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut samples of ascending length where the padded batch would grow too large."""
    batches: list[list[int]] = []
    for member in members:
        if batches and lengths[member] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(member)
        else:
            batches.append([member])
    return batches
