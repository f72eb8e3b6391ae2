"""Trees of drafted tokens: their shape, drafting one, and following the target's choice through it.

Place 0 of a tree is the current token (known, not yet read by the target); place i + 1 is node i. Parents stand before
children. The target reads all places in one forward, each seeing the text and its own ancestors; its choice after the
current token names at most one child, the choice after that child names at most one of *its* children, and so on.
A static tree takes fixed ranks of the drafter's tokens; a dynamic one (EAGLE-2, arXiv 2406.16858) keeps, level by
level, the `topk` nodes of greatest joint probability and in the end the best `nodes` of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from eagle3lab.acceptance.chain import draft_extend
from eagle3lab.core.errors import UsageError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.slots import SlotCache


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafted trees of R rows, N nodes each.

    Attributes:
        tokens: int64 [R, N] target ids. parents: int64 [R, N] place of the parent. depth: int64 [R, N], from 1.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor

    def ancestors(self) -> Tensor:
        """bool [R, N+1, N+1]: place i sees place j, itself included."""
        rows, nodes = self.tokens.shape
        seen = torch.eye(nodes + 1, dtype=torch.bool).expand(rows, -1, -1).clone()
        row = torch.arange(rows)
        for node in range(nodes):
            seen[:, node + 1] |= seen[row, self.parents[:, node]]
        return seen

    def follow(self, choice: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Walk from the root along the target's choice int64 [R, N+1] after every place.

        Returns:
            places int64 [R, steps+1], the root first, valid up to the number of kept nodes int64 [R].
        """
        rows = len(choice)
        row, place, alive = torch.arange(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)
        places, kept = [place], torch.zeros(rows, dtype=torch.int64)
        for _ in range(steps):
            hit = (self.parents == place[:, None]) & (self.tokens == choice[row, place][:, None])
            alive = alive & hit.any(1)
            place = torch.where(alive, hit.long().argmax(1) + 1, 0)
            places.append(place)
            kept = kept + alive
        return torch.stack(places, 1), kept


class Shape(Protocol):
    """How a tree grows. Level l makes C nodes of depth l + 1 out of E expanded ones (level 0: the root alone)."""

    steps: int
    nodes: int

    @property
    def slots(self) -> int:
        """Drafter slots that the expanded nodes take."""
        ...

    def children(self, level: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [R, E] and log-probabilities [R, E, Vd] -> source [R, C] among E, draft id [R, C], score [R, C]."""
        ...

    def expand(self, level: int, scores: Tensor) -> Tensor:
        """int64 [R, E]: which of this level's C nodes get children."""
        ...

    def prune(self, scores: Tensor) -> Tensor:
        """int64 [R, N], ascending: which of all nodes (levels end to end) are sent to the target."""
        ...


class StaticTree:
    """A fixed tree: node (r1, r2, ...) is the drafter's r2-th token (from 0) after its r1-th one, and so on.

    Args:
        paths: all nodes; the prefix of a node must be one too.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        self.paths = sorted(set(paths), key=lambda path: (len(path), path))
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise UsageError(f"tree node {path}", rule="ranks from 0, and the node above it is in the tree too")
        if not self.paths:
            raise UsageError("a tree without nodes", rule="at least one drafted token")
        self.steps, self.nodes = len(self.paths[-1]), len(self.paths)
        self._levels: list[list[tuple[int, ...]]] = [
            [p for p in self.paths if len(p) == level + 1] for level in range(self.steps)
        ]
        parents = {path[:-1] for path in self.paths}
        self._expanded: list[list[tuple[int, ...]]] = [
            [()],
            *([p for p in level if p in parents] for level in self._levels),
        ]

    @classmethod
    def branching(cls, widths: Sequence[int]) -> StaticTree:
        """Every node of level l has the first `widths[l]` tokens as children; [1, 1, 1] is a chain of 3."""
        if not widths or min(widths) < 1:
            raise UsageError(
                f"tree {list(widths)}", rule="a positive number of children for every level, such as 4,2,1"
            )
        return cls([path for depth in range(len(widths)) for path in product(*map(range, widths[: depth + 1]))])

    @property
    def slots(self) -> int:
        """Nodes with children."""
        return sum(len(level) for level in self._expanded[1:])

    def children(self, level: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Shape`."""
        rows, above = len(scores), {path: place for place, path in enumerate(self._expanded[level])}
        nodes = self._levels[level]
        source = torch.tensor([above[path[:-1]] for path in nodes])
        rank = torch.tensor([path[-1] for path in nodes])
        best = logp.topk(int(rank.max()) + 1, -1)
        source = source.expand(rows, -1)
        row = torch.arange(rows)[:, None]
        score = scores.gather(1, source) + best.values[row, source, rank]
        return source, best.indices[row, source, rank], score

    def expand(self, level: int, scores: Tensor) -> Tensor:
        """See `Shape`."""
        nodes = self._levels[level]
        return torch.tensor([nodes.index(path) for path in self._expanded[level + 1]]).expand(len(scores), -1)

    def prune(self, scores: Tensor) -> Tensor:
        """All nodes."""
        return torch.arange(self.nodes).expand(len(scores), -1)


class DynamicTree:
    """A tree that follows the drafter's confidence.

    Args:
        steps: depth. topk: children of an expanded node, and expanded nodes a level. nodes: drafted tokens sent to the
            target; SGLang's --speculative-num-draft-tokens counts the current token too, so it is one more.
    """

    def __init__(self, steps: int, topk: int, nodes: int) -> None:
        grown = topk + (steps - 1) * topk * topk
        if steps < 1 or topk < 1 or not steps <= nodes <= grown:
            raise UsageError(
                f"tree with steps {steps}, topk {topk}, {nodes} nodes",
                rule=f"steps and topk are 1 or more, nodes from steps to topk + (steps - 1) * topk^2 = {grown}",
            )
        self.steps, self.topk, self.nodes = steps, topk, nodes

    @property
    def slots(self) -> int:
        """topk nodes of every level but the last."""
        return (self.steps - 1) * self.topk

    def children(self, level: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Shape`."""
        best = logp.topk(self.topk, -1)
        source = torch.arange(logp.shape[1]).repeat_interleave(self.topk).expand(len(scores), -1)
        return source, best.indices.flatten(1), (scores[..., None] + best.values).flatten(1)

    def expand(self, level: int, scores: Tensor) -> Tensor:
        """See `Shape`."""
        return scores.topk(self.topk, -1).indices

    def prune(self, scores: Tensor) -> Tensor:
        """The best nodes. A parent is never worse than its child and stands before it, so a stable sort keeps it."""
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self.nodes]
        return best.sort(1).values


def draft_tree(drafter: Eagle3Drafter, cache: SlotCache, h: Tensor, slot: Tensor, shape: Shape) -> Tree:
    """Draft one tree a row.

    Args:
        h: [R, 1, H], the drafter's state at the last slot of the text; slot: int64 [R], the first free slot.
    """
    number, state = len(h), h
    scores = torch.zeros(number, 1)
    owner = torch.zeros(number, 1, dtype=torch.int64)
    seen = torch.zeros(number, 1, 0, dtype=torch.bool)  # drafted slots that each expanded node sees
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    totals: list[Tensor] = []
    depths: list[int] = []
    for level in range(shape.steps):
        normed = drafter.norm(state)
        logp = drafter.lm_head(normed).float().log_softmax(-1)
        source, choice, score = shape.children(level, scores, logp)
        place = 1 + sum(t.shape[1] for t in tokens) + torch.arange(source.shape[1]).expand(number, -1)
        tokens.append(drafter.kept_ids[choice])
        parents.append(owner.gather(1, source))
        totals.append(score)
        depths += [level + 1] * source.shape[1]
        if level + 1 == shape.steps:
            break
        pick = shape.expand(level, score)
        origin = source.gather(1, pick)
        row = torch.arange(number)[:, None]
        used, width = seen.shape[2], pick.shape[1]
        seen = torch.cat([seen[row, origin], torch.eye(width, dtype=torch.bool).expand(number, -1, -1)], 2)
        slots = slot[:, None] + used + torch.arange(width)
        state = draft_extend(
            drafter,
            cache,
            drafter.carry(state, normed)[row, origin],
            tokens[-1].gather(1, pick),
            slots,
            positions=(slot + level)[:, None].expand(-1, width),
            mask=tree_mask(slot, seen),
        )
        scores, owner = score.gather(1, pick), place.gather(1, pick)
    return _pruned(shape, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(totals, 1), torch.tensor(depths))


def _pruned(shape: Shape, tokens: Tensor, parents: Tensor, scores: Tensor, depth: Tensor) -> Tree:
    keep = shape.prune(scores)
    moved = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64)  # old place -> new place; the root stays 0
    moved.scatter_(1, keep + 1, torch.arange(1, keep.shape[1] + 1).expand(len(keep), -1))
    return Tree(tokens.gather(1, keep), moved.gather(1, parents.gather(1, keep)), depth[keep])


def tree_mask(start: Tensor, seen: Tensor) -> Tensor:
    """bool [R, 1, q, visible]: every query sees the slots before `start` [R], and of the m slots from there on those
    that `seen` [R, q, m] marks."""
    rows, queries, drafted = seen.shape
    visible = int(start.max()) + drafted
    mask = (torch.arange(visible) < start[:, None])[:, None].repeat(1, queries, 1)
    places = (start[:, None, None] + torch.arange(drafted)).expand(rows, queries, drafted)
    return mask.scatter_(2, places, seen)[:, None]
