"""Replay for static trees: the rank of the text's next token among the drafter's, at every slot and draft step.

A static tree keeps a node when the text goes through its ranks, and the drafter's state at the node depends on the ids
above it alone, which are then those of the text. So one table of ranks judges every static tree without drafting it
again, exactly as decoding would on greedy text. Dynamic trees depend on probabilities of branches that the text does
not take; they cannot be replayed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagle3lab.acceptance.replay import Walk, pack_samples, response_runs, walk
from eagle3lab.acceptance.tree import StaticTree
from eagle3lab.capture.store import Sample
from eagle3lab.drafter.model import Eagle3Drafter


@torch.inference_mode()
def rank_tables(drafter: Eagle3Drafter, samples: Iterable[Sample], steps: int, topk: int) -> list[Tensor]:
    """One table a reply: int64 [steps, R], rank (from 0) of the text's token at every slot; `topk` = not among them.

    Places past the end of the reply are `topk` too: nothing can be kept there.
    """
    tables = []
    for sample in samples:
        batch = pack_samples([sample], drafter.fc.weight.device)
        if not len(batch.active):
            continue
        best, ids = [_top(drafter, h, topk).cpu() for h in drafter(batch, steps)], batch.input_ids.cpu()
        segment = batch.segments[0]
        for first, stop in response_runs(batch.mask):
            row, size = first - segment.active, stop - first
            text, table = ids[first:stop], torch.full((steps, stop - first), topk)
            for step in range(min(steps, size - 2)):
                judged = size - step - 2
                hit = best[step][row : row + judged] == text[step + 2 :, None]
                table[step, :judged] = torch.where(hit.any(1), hit.long().argmax(1), topk)
            tables.append(table)
    return tables


def _top(drafter: Eagle3Drafter, hidden: Tensor, topk: int) -> Tensor:
    ids = [drafter.lm_head(piece).float().topk(topk, -1).indices for piece in hidden.split(512)]
    return drafter.kept_ids[torch.cat(ids)]


def tree_walks(tables: Sequence[Tensor], tree: StaticTree) -> list[Walk]:
    """The decode path of every reply under a static tree."""
    nodes = set(tree.paths)
    walks = []
    for table in tables:
        kept = []
        for ranks in table[: tree.steps].T.tolist():
            depth = 0
            while depth < len(ranks) and tuple(ranks[: depth + 1]) in nodes:
                depth += 1
            kept.append(depth)
        walks.append(walk(torch.tensor(kept)))
    return walks


def best_tree(tables: Sequence[Tensor], topk: int, nodes: int) -> StaticTree:
    """The static tree of `nodes` nodes that the text goes through most often, over all slots of the tables.

    A node is worth the share of slots whose ranks start with its path; a parent is worth no less than its child, so
    the nodes of greatest worth form a tree.
    """
    worth: Counter[tuple[int, ...]] = Counter()
    for table in tables:
        for ranks in table.T.tolist():
            for depth, rank in enumerate(ranks, 1):
                if rank >= topk:
                    break
                worth[tuple(ranks[:depth])] += 1
    ordered = sorted(worth, key=lambda path: (-worth[path], len(path), path))
    return StaticTree(ordered[:nodes] or [(0,)])
