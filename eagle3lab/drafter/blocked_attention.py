"""TTT attention by blocks of query rows: matrix products of all heads at once, one softmax over both kinds of keys.

What `eagle3lab.drafter.attention.ttt_attention` takes for bf16 on a CPU: the fused CPU kernel works there in small
tiles, and plain products over a whole block are faster (in fp32 they are not). A block holds about BLOCK_ROWS query
rows against all keys up to its last slot, so memory is linear in T. Its softmax runs over the step-0 keys (causal) and,
as further columns, the single keys of the later steps. The backward pass makes the probabilities again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eagle3lab.drafter.packed import Segment

BLOCK_ROWS = 128
"""Query rows of a block, about. Half a block of scores above the diagonal is computed for nothing."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows `rows` of the pack against the keys `start:stop`; the last query row is slot `stop` - 1."""

    rows: slice
    start: int
    stop: int

    @property
    def size(self) -> int:
        """B."""
        return self.rows.stop - self.rows.start

    def queries(self, tensor: Tensor) -> Tensor:
        """[M, kv, g, d] -> [kv, g*B, d]: one matrix for every key/value head."""
        return tensor[self.rows].permute(1, 2, 0, 3).flatten(1, 2)

    def back(self, heads: Tensor) -> Tensor:
        """[kv, g*B, d] -> [B, kv, g, d], a view."""
        return heads.unflatten(1, (-1, self.size)).permute(2, 0, 1, 3)

    def keys(self, tensor: Tensor) -> Tensor:
        """[N, kv, d] -> [kv, n, d], a view."""
        return tensor[self.start : self.stop].transpose(0, 1)


def _blocks(segments: Sequence[Segment]) -> Iterator[_Block]:
    """Cut the active slots of every sample into blocks of nearly equal size."""
    for s in segments:
        size = s.stop - s.active
        count = max(1, round(size / BLOCK_ROWS))
        for low, high in pairwise(size * i // count for i in range(count + 1)):
            if high > low:
                yield _Block(slice(s.row + low, s.row + high), s.start, s.active + high)


class _Room:
    """Memory for the largest block, allocated once a call: fresh pages cost more than the arithmetic in them.

    Args:
        like: gives compute type and device.
        heads: query heads; extra: k, columns beside the step-0 keys.
        pairs: how many float32 score matrices are needed at a time.
    """

    def __init__(self, blocks: Sequence[_Block], like: Tensor, heads: int, extra: int, pairs: int) -> None:
        largest = heads * max((b.size * (b.stop - b.start + extra) for b in blocks), default=0)
        self._wide = [like.new_empty(largest, dtype=torch.float32) for _ in range(pairs)]
        self._narrow = None if like.dtype == torch.float32 else like.new_empty(largest)

    def wide(self, index: int, *shape: int) -> Tensor:
        """A float32 tensor in the memory `index`; the next call with that index overwrites it."""
        return self._wide[index][: math.prod(shape)].view(shape)

    def product(self, left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
        """out = scale * left @ right in float32, in the compute type's precision."""
        if self._narrow is None:
            return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
        narrow = self._narrow[: out.numel()].view(out.shape)
        return out.copy_(torch.baddbmm(narrow, left, right, beta=0, alpha=scale, out=narrow))

    def rounded(self, wide: Tensor) -> Tensor:
        """The tensor in the compute type; the next call overwrites it."""
        return wide if self._narrow is None else self._narrow[: wide.numel()].view(wide.shape).copy_(wide)


def _probabilities(block: _Block, query: Tensor, key: Tensor, own: Tensor, scale: float, room: _Room) -> Tensor:
    """float32 [kv, g*B, n+k]: softmax over n step-0 keys, causal in the last B of them, and the k scores `own`.

    query [kv, g*B, d], key [kv, n, d], own [kv, g*B, k].
    """
    keys, size = key.shape[1], block.size
    scores = room.wide(0, *query.shape[:2], keys + own.shape[-1])
    room.product(query, key.transpose(1, 2), scale, scores[..., :keys])
    scores[..., keys:] = own
    hidden = torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
    scores.unflatten(1, (-1, size))[..., keys - size : keys].masked_fill_(hidden, float("-inf"))
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total (float32, any strides) += scale * left @ right."""
    if left.dtype == total.dtype:
        torch.baddbmm(total, left, right, alpha=scale, out=total)
    else:
        total.add_(left @ right, alpha=scale)


class BlockedAttention(torch.autograd.Function):
    """Arguments as `ttt_attention`, with `later` flat: key and value of step 1, of step 2, ..."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Sequence[Segment], query: Tensor, key: Tensor, value: Tensor, *later: Tensor
    ) -> Tensor:
        """[M, heads, v]. Shapes of the arguments as in `ttt_attention`."""
        q = query.unflatten(1, (key.shape[1], -1))  # [M, kv, g, d]
        own = q.new_empty((*q.shape[:3], len(later) // 2), dtype=torch.float32)
        if later:
            wide = q.float()
            for i, k in enumerate(later[::2]):
                own[..., i] = (wide * k.unsqueeze(2)).sum(-1).mul_(scale)
        output = q.new_empty((*q.shape[:3], value.shape[-1]))
        shares = torch.empty_like(own)
        blocks = list(_blocks(segments))
        room = _Room(blocks, query, query.shape[1], own.shape[-1], 1)
        for block in blocks:
            kb = block.keys(key)
            p = _probabilities(block, block.queries(q), kb, block.queries(own), scale, room)
            output[block.rows] = block.back(room.rounded(p[..., : kb.shape[1]]) @ block.keys(value))
            shares[block.rows] = block.back(p[..., kb.shape[1] :])
        if later:
            mixed = output.float()
            for i, v in enumerate(later[1::2]):
                mixed.addcmul_(shares[..., i, None], v.unsqueeze(2).float())
            output = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, own, shares, *later)
        ctx.scale, ctx.segments = scale, segments
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of query, key, value and every later pair, from that of the output [M, heads, v]."""
        query, key, value, output, own, shares, *later = ctx.saved_tensors
        scale = ctx.scale
        q, g = (tensor.unflatten(1, (key.shape[1], -1)) for tensor in (query, grad))
        wide_g = g.float()
        delta = (wide_g * output).sum(-1, keepdim=True)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (key, value))
        blocks = list(_blocks(ctx.segments))
        room = _Room(blocks, query, query.shape[1], own.shape[-1], 2)
        for block in blocks:
            qb, kb, gb, vb = block.queries(q), block.keys(key), block.queries(g), block.keys(value)
            p = _probabilities(block, qb, kb, block.queries(own), scale, room)[..., : kb.shape[1]]
            _add_product(block.keys(grad_v), room.rounded(p).transpose(1, 2), gb, 1.0)
            slope = room.product(gb, vb.transpose(1, 2), 1.0, room.wide(1, *p.shape))
            slope = room.rounded(slope.sub_(block.queries(delta)).mul_(p))
            _add_product(block.keys(grad_k), slope.transpose(1, 2), qb, scale)
            grad_q[block.rows] = block.back(slope @ kb).mul_(scale)
        grads: list[Tensor] = []
        if later:
            wide_q, extra = q.float(), torch.zeros_like(q, dtype=torch.float32)
            for i, (k, v) in enumerate(zip(later[::2], later[1::2], strict=True)):
                share, k = shares[..., i, None], k.unsqueeze(2).float()
                slope = (wide_g * v.unsqueeze(2)).sum(-1, keepdim=True).sub_(delta).mul_(share).mul_(scale)
                extra.addcmul_(slope, k)
                grads.append((slope * wide_q).sum(2).to(v.dtype))
                grads.append((share * wide_g).sum(2).to(v.dtype))
            grad_q = extra.add_(grad_q).to(query.dtype)
        return None, None, grad_q.flatten(1, 2), grad_k.to(key.dtype), grad_v.to(value.dtype), *grads
