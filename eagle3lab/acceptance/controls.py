"""Drafters that must fail: they show that the measured acceptance comes from what fc feeds the drafter."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from eagle3lab.acceptance.counts import AcceptanceCounts, from_lengths, total
from eagle3lab.acceptance.replay import Walk, walk_samples
from eagle3lab.capture.store import Sample
from eagle3lab.drafter.init import init_fc
from eagle3lab.drafter.model import Eagle3Drafter


def replay_counts(drafter: Eagle3Drafter, samples: Sequence[Sample], names: Sequence[str], k: int) -> AcceptanceCounts:
    """Counts of replaying captured replies along the decode path."""
    walks: list[Walk] = walk_samples(drafter, samples, k)
    return total(from_lengths(walk.accepted, k=k, prompt=name) for walk, name in zip(walks, names, strict=True))


def fc_zeroed(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The same drafter, blind: fc gives zero, only token embeddings are left."""
    blind = copy.deepcopy(drafter)
    with torch.no_grad():
        blind.fc.weight.zero_()
    return blind


def fc_points_shuffled(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The same drafter with fc's column blocks moved on by one point: low reads mid, mid reads high, high reads low."""
    moved = copy.deepcopy(drafter)
    with torch.no_grad():
        moved.fc.weight.copy_(drafter.fc.weight.roll(drafter.config.target_hidden_size, dims=1))
    return moved


def untrained(drafter: Eagle3Drafter, seed: int) -> Eagle3Drafter:
    """A drafter of the same shape and vocabulary, every matrix at torch's default initialisation."""
    torch.manual_seed(seed)
    fresh = Eagle3Drafter(drafter.config, drafter.embedding, drafter.d2t.clone())
    init_fc(fresh.fc.weight, "kaiming-uniform", seed)
    return fresh.to(drafter.fc.weight.dtype).eval().requires_grad_(False)


CONTROLS = {
    "fc_zeroed": lambda drafter, seed: fc_zeroed(drafter),
    "fc_points_shuffled": lambda drafter, seed: fc_points_shuffled(drafter),
    "untrained": untrained,
}
"""Name -> (drafter, seed) -> control."""
