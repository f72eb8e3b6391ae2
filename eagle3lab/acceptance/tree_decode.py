"""Decoding with trees: `ChainDecoder` with other drafts, another mask, and the kept branch moved in the cache.

In the target's cache place i of a tree lies in slot L + i, whatever its depth, and its rotary position is L + depth.
After the walk the kept branch is copied to the slots L + 1, L + 2, ... where the text goes on.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from eagle3lab.acceptance.chain import ChainDecoder, Round
from eagle3lab.acceptance.sampling import Rejection, Rule
from eagle3lab.acceptance.tree import Shape, draft_tree, tree_mask
from eagle3lab.core.errors import UsageError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import SlotCache


class TreeDecoder(ChainDecoder):
    """Speculative decoding with a static or dynamic tree.

    Args:
        shape: `StaticTree` or `DynamicTree`.
        rule: `Greedy` (None) or `TargetOnly`.

    Raises:
        UsageError: rejection sampling, whose drafts are draws; nodes of a tree are the drafter's top tokens.
    """

    def __init__(self, target: Target, drafter: Eagle3Drafter, shape: Shape, rule: Rule | None = None) -> None:
        if isinstance(rule, Rejection):
            raise UsageError(
                "rejection sampling of a tree", rule="tree nodes are top-k tokens: use the target-only rule"
            )
        super().__init__(target, drafter, shape.steps, rule)
        self.shape = shape

    @property
    def spare(self) -> int:
        """Slots that a round may write beyond the text."""
        return max(self.shape.nodes, self.shape.slots) + 2

    def _round(self, cache: SlotCache, draft_cache: SlotCache, h: Tensor, current: Tensor, length: Tensor) -> Round:
        clock = time.perf_counter()
        tree = draft_tree(self.drafter, draft_cache, h, length, self.shape)
        middle = time.perf_counter()
        places = torch.cat([torch.zeros_like(current)[:, None], tree.depth], 1)
        last, states = self._read(
            cache,
            torch.cat([current[:, None], tree.tokens], 1),
            length,
            positions=length[:, None] + places,
            mask=tree_mask(length, tree.ancestors()),
        )
        choice = self.rule.choose(self.target.logits(last))
        kept, agreed = tree.follow(choice, self.k)
        row = torch.arange(len(kept))
        self._move(cache, length, kept)
        path = torch.cat([current[:, None], tree.tokens], 1).gather(1, kept)[:, 1:]
        bonus = choice[row, kept[row, agreed]]
        self.clock.draft += middle - clock
        self.clock.verify += time.perf_counter() - middle
        return Round(path, agreed, bonus, states[row[:, None], kept], tree.tokens)

    def _move(self, cache: SlotCache, length: Tensor, kept: Tensor) -> None:
        """Copy the kept branch to the slots of the text. Slots past its end hold what nobody sees."""
        source, wanted = length[:, None] + kept[:, 1:], length[:, None] + 1 + torch.arange(kept.shape[1] - 1)
        if not torch.equal(source, wanted):
            cache.move(torch.arange(len(kept)), source, wanted)
