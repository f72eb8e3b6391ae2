"""Which rows of the drafter's head a step's loss is taken over: the common ones, the batch's own, and some by chance.

In a small drafter the head is most of the work of a step: every supervised token is compared with all Vd tokens at
each of K depths. Nearly all of the teacher's probability lies on a few hundred of them. A step over a part of the rows
is a soft cross-entropy in a smaller draft vocabulary, made anew each step: exact in itself, and cheaper by the share
of rows left out. Every token that stands in the batch is in, so no supervised pair is lost; rows drawn by chance keep
the rare ones from drifting up unseen, and the last steps run over all rows, which sets right what drifted. What it
changes in accept length is in the log of results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3lab.capture.epochs import numbered_generator
from eagle3lab.training.loss import ARGMAX_COLUMNS

FREQUENT_SHARE, DRAWN_SHARE = 2 / 3, 1 / 8
"""Of the rows of a step: those of the most frequent tokens, and those drawn at least."""


class HeadRows:
    """Chooses rows by step: the same for the same step, seed and text, whoever asks.

    Args:
        counts: int64 [Vd], how often every draft token occurs in the training text.
        lookup: int64 [V], target id -> draft id, -1 = out of the draft vocabulary.
        size: rows of a step; more when the text itself has more tokens.
        stop: first step that runs over all rows.
    """

    def __init__(self, counts: Tensor, lookup: Tensor, size: int, seed: int, stop: int) -> None:
        self.vocabulary, self.lookup, self.size, self.seed, self.stop = len(counts), lookup, size, seed, stop
        # stable: of equally frequent tokens the lower id, as in the draft vocabulary itself
        self.frequent = counts.argsort(descending=True, stable=True)[: int(size * FREQUENT_SHARE)]

    def __call__(self, step: int, input_ids: Tensor) -> Tensor | None:
        """int64 [R], rows of step `step` in ascending order, None = all; input_ids: of its whole batch, all ranks'."""
        if step >= self.stop:
            return None
        own = self.lookup[input_ids]
        chosen = torch.zeros(self.vocabulary, dtype=torch.bool)
        chosen[self.frequent] = True
        chosen[own[own >= 0]] = True
        wanted = max(self.size, int(chosen.sum()) + int(self.size * DRAWN_SHARE))
        if self.size >= ARGMAX_COLUMNS:  # whole blocks of columns: the loss looks for the highest of them by block
            wanted = -(-wanted // ARGMAX_COLUMNS) * ARGMAX_COLUMNS
        others = (~chosen).nonzero().squeeze(-1)
        generator = numbered_generator(self.seed, step)
        drawn = torch.randperm(len(others), generator=generator)[: wanted - int(chosen.sum())]
        chosen[others[drawn]] = True
        return chosen.nonzero().squeeze(-1)


class RowGradient:
    """The gradient of a head of which only some rows have one: one tensor [Vd, H] for all steps.

    Autograd would allocate it and fill it with zeros at every step, 3 % of a step of `default`; here the rows of the
    step before are cleared.
    """

    def __init__(self, head: Tensor) -> None:
        self.whole, self.rows = torch.zeros_like(head), torch.empty(0, dtype=torch.int64, device=head.device)

    def put(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """[Vd, H], zero but for `gradient` [R, H] at `rows`; the next call overwrites it."""
        self.whole.index_fill_(0, self.rows, 0)
        self.rows = rows
        return self.whole.index_copy_(0, rows, gradient)


def places(rows: Tensor, draft_ids: Tensor) -> Tensor:
    """Where draft ids stand in ascending `rows`, -1 where they do not (as -1 itself)."""
    at = torch.searchsorted(rows, draft_ids).clamp_max(len(rows) - 1)
    return torch.where(rows[at] == draft_ids, at, -1)
