"""Samples of unequal length laid end to end: no padding is stored, computed or attended to.

Slot t of a sample stands for (state a_t, next token x_{t+1}); see `eagle3lab.drafter.model`. Only slots from a
sample's first supervised one on are *active*: the slots before it (the prompt) give keys and values at step 0 and
nothing else, so queries, MLP and head are computed for active slots only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample inside the pack: slots `start:stop`, active rows `row:row + stop - active`."""

    start: int
    active: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of samples end to end. N tokens, S samples, M active slots.

    Attributes:
        input_ids: int64 [N].
        aux: [N, P*H], states at the points in ascending order.
        last: [N, H], target state after the final norm.
        offsets: S+1 sample boundaries in N.
        mask: bool [N], true on response tokens.
        segments: one a sample.
        active: int64 [M], slot index of every active row.
    """

    input_ids: Tensor
    aux: Tensor
    last: Tensor
    offsets: list[int]
    mask: Tensor
    segments: tuple[Segment, ...]
    active: Tensor

    @property
    def tokens(self) -> int:
        """N."""
        return int(self.input_ids.shape[0])

    def positions(self) -> Tensor:
        """int64 [N], place of every slot inside its sample, from 0."""
        return torch.cat([torch.arange(s.stop - s.start, device=self.input_ids.device) for s in self.segments])

    def shifted(self, values: Tensor, by: int) -> Tensor:
        """`values[t + by]` within each sample, zero (or False) past its end. values: [N, ...]."""
        result = torch.zeros_like(values)
        for s in self.segments:
            if s.stop - s.start > by:
                result[s.start : s.stop - by] = values[s.start + by : s.stop]
        return result


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Sequence[Segment], by: int) -> Tensor:
        ctx.segments, ctx.by = segments, by
        result = torch.empty_like(rows)
        for here, there, past in _moves(segments, by):
            result[here], result[past] = rows[there], rows[past.stop - 1]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        result = torch.zeros_like(grad)
        for here, there, past in _moves(ctx.segments, ctx.by):
            result[there] = grad[here]
            result[past.stop - 1] += grad[past].sum(0)
        return result, None, None


def _moves(segments: Sequence[Segment], by: int) -> Iterator[tuple[slice, slice, slice]]:
    """Rows that get another, those others, and the rows for which there is none."""
    for s in segments:
        stop = s.row + s.stop - s.active
        if stop > s.row:
            middle = max(stop - by, s.row)
            yield slice(s.row, middle), slice(min(s.row + by, stop), stop), slice(middle, stop)


def rows_ahead(rows: Tensor, segments: Sequence[Segment], by: int) -> Tensor:
    """Row r gets row r + by of the same sample's active rows; where there is none, the last one. rows: [M, ...]."""
    return _Ahead.apply(rows, segments, by) if by else rows


def pack(
    input_ids: Tensor,
    aux: Tensor,
    last: Tensor,
    offsets: list[int],
    mask: Tensor,
    first_active: list[int] | None = None,
) -> Packed:
    """Make a `Packed` from flat tensors.

    Args:
        first_active: per sample, the first slot (inside the sample) that any loss weight touches; None = from the
            token before its first response token. A sample without supervised token has no active slot.
    """
    segments, rows, row = [], [], 0
    for index, (start, stop) in enumerate(pairwise(offsets)):
        if first_active is None:
            hits = mask[start:stop].nonzero()
            first = max(int(hits[0]) - 1, 0) if len(hits) else stop - start
        else:
            first = first_active[index]
        segments.append(Segment(start, start + first, stop, row))
        rows.append(torch.arange(start + first, stop, device=input_ids.device))
        row += stop - start - first
    active = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    return Packed(input_ids, aux, last, list(offsets), mask, tuple(segments), active)
