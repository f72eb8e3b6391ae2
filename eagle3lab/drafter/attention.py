"""Training-time-test attention without a T x T matrix.

Step 0 is causal attention over a sample's slots. At step k, slot t sees the step-0 keys 0..t and one key of each later
step 1..k: the one of the same slot. Its softmax is therefore a merge of up to three parts, each with its own
log-sum-exp: the prompt's keys (all visible), the active slots' keys (causal), and the k single keys. PyTorch's fused
kernel gives the first two with their log-sum-exp; the third is elementwise. In the backward pass the fused kernel's own
backward is right for each part when it is given the merged output and the merged log-sum-exp, because
p = exp(score - lse) and delta = sum(grad * output) are then those of the whole softmax (as in ring attention).
Memory is linear in T. That is `fused_attention`; for bf16 on a CPU `ttt_attention` takes `blocked_attention` instead.
`reference_attention` is the plain version that tests hold both against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3lab.drafter.blocked_attention import BlockedAttention
from eagle3lab.drafter.packed import Segment


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention of one sample.

    query [m, heads, d], key and value [n, kv_heads, d] -> output [m, heads, d], log-sum-exp [m, heads].
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if q.is_cuda:
        q, k, v = (x.contiguous() for x in (q, *_grouped(k, v, q.shape[1])))
        output, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[:, :, : query.shape[0]]  # the kernel pads its log-sum-exp to a multiple of 32 rows
    else:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


def _grouped(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    repeat = heads // key.shape[1]
    return (key, value) if repeat == 1 else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `_flash` under the *merged* output and log-sum-exp. Shapes as there."""
    q, k, v, o, g = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value, output, grad))
    merged = lse.transpose(0, 1).unsqueeze(0).contiguous()
    if q.is_cuda:
        return _flash_backward_cuda(g, q, k, v, o, merged, causal, scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g.contiguous(), q, k, v, o, merged, 0.0, causal, scale=scale
    )
    grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in grads)
    return grad_q, grad_k, grad_v


def _flash_backward_cuda(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    wide_k, wide_v = _grouped(k, v, heads)
    padded = -(-q.shape[2] // 32) * 32
    full = torch.full((*lse.shape[:2], padded), float("inf"), dtype=lse.dtype, device=lse.device)
    full[:, :, : q.shape[2]] = lse
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        g.contiguous(),
        q.contiguous(),
        wide_k.contiguous(),
        wide_v.contiguous(),
        None,
        o.contiguous(),
        full,
        zero,
        zero,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    fold = (1, kv_heads, heads // kv_heads, -1, k.shape[-1])
    return (
        grad_q[0].transpose(0, 1),
        grad_k.view(fold).sum(2)[0].transpose(0, 1),
        grad_v.view(fold).sum(2)[0].transpose(0, 1),
    )


class _TTTAttention(torch.autograd.Function):
    """See the module docstring. Tensors are flat over samples: query [M, heads, d], key/value [N, kv_heads, d]."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Sequence[Segment], query: Tensor, key: Tensor, value: Tensor, *later: Tensor
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for s in segments:
            if s.active == s.stop:
                continue
            rows = slice(s.row, s.row + s.stop - s.active)
            part, part_lse = _flash(query[rows], key[s.active : s.stop], value[s.active : s.stop], True, scale)
            if s.active > s.start:
                head, head_lse = _flash(query[rows], key[s.start : s.active], value[s.start : s.active], False, scale)
                merged = torch.logaddexp(part_lse, head_lse)
                part = part * (part_lse - merged).exp().unsqueeze(-1).to(part.dtype) + head * (
                    head_lse - merged
                ).exp().unsqueeze(-1).to(part.dtype)
                part_lse = merged
            output[rows], lse[rows] = part, part_lse
        keys, values = later[::2], later[1::2]
        if keys:
            scores = torch.stack([(query.float() * _wide(k, group).float()).sum(-1) * scale for k in keys], -1)
            merged = torch.logaddexp(lse, scores.logsumexp(-1))
            mixed = output.float() * (lse - merged).exp().unsqueeze(-1)
            for index, v in enumerate(values):
                mixed += (scores[..., index] - merged).exp().unsqueeze(-1) * _wide(v, group).float()
            output, lse = mixed.to(query.dtype), merged
        ctx.save_for_backward(query, key, value, output, lse, *later)
        ctx.scale, ctx.segments, ctx.group = scale, segments, group
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse, *later = ctx.saved_tensors
        scale, group = ctx.scale, ctx.group
        grad_q = torch.zeros_like(query)
        grad_k, grad_v = torch.zeros_like(key), torch.zeros_like(value)
        for s in ctx.segments:
            if s.active == s.stop:
                continue
            rows = slice(s.row, s.row + s.stop - s.active)
            parts = [(slice(s.active, s.stop), True)] + (
                [(slice(s.start, s.active), False)] if s.active > s.start else []
            )
            for keys, causal in parts:
                dq, dk, dv = _flash_backward(
                    grad[rows], query[rows], key[keys], value[keys], output[rows], lse[rows], causal, scale
                )
                grad_q[rows] += dq
                grad_k[keys], grad_v[keys] = dk, dv
        grads: list[Tensor] = []
        if later:
            wide_grad = grad.float()
            delta = (wide_grad * output.float()).sum(-1)
            extra = torch.zeros_like(query, dtype=torch.float32)
            for k, v in zip(later[::2], later[1::2], strict=True):
                wide_k, wide_v = _wide(k, group).float(), _wide(v, group).float()
                p = ((query.float() * wide_k).sum(-1) * scale - lse).exp()
                ds = (p * ((wide_grad * wide_v).sum(-1) - delta) * scale).unsqueeze(-1)
                extra += ds * wide_k
                grads.append(_narrow(ds * query.float(), group).to(k.dtype))
                grads.append(_narrow(p.unsqueeze(-1) * wide_grad, group).to(v.dtype))
            grad_q = (grad_q.float() + extra).to(query.dtype)
        return None, None, grad_q, grad_k, grad_v, *grads


def _wide(tensor: Tensor, group: int) -> Tensor:
    """[M, kv_heads, d] -> [M, heads, d]: each key/value head serves `group` query heads."""
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _narrow(tensor: Tensor, group: int) -> Tensor:
    """Sum the query heads of each key/value head: [M, heads, d] -> [M, kv_heads, d]."""
    return tensor if group == 1 else tensor.unflatten(1, (-1, group)).sum(2)


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    segments: Sequence[Segment],
    scale: float,
) -> Tensor:
    """Attention of one TTT step over packed samples.

    Args:
        query: [M, heads, d], rotated, of the active slots.
        key, value: [N, kv_heads, d], step 0, of all slots; values may have another width v than keys.
        later: (key, value) [M, kv_heads, d] of the steps 1..k, of the active slots.
        segments: the samples.
        scale: of the scores, 1/sqrt(d).

    Returns:
        [M, heads, v], v = d unless the values are of another width.
    """
    chosen = fused_attention if query.is_cuda or query.dtype == torch.float32 else blocked_attention
    return chosen(query, key, value, later, segments, scale)


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    segments: Sequence[Segment],
    scale: float,
) -> Tensor:
    """The same by `eagle3lab.drafter.blocked_attention`. Arguments as `ttt_attention`."""
    return BlockedAttention.apply(scale, segments, query, key, value, *(tensor for pair in later for tensor in pair))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    segments: Sequence[Segment],
    scale: float,
) -> Tensor:
    """The same on PyTorch's fused kernels, CUDA's or the CPU's. Arguments as `ttt_attention`."""
    width, value_width = query.shape[-1], value.shape[-1]
    if width != value_width:  # the fused kernels want one width; zeros change neither scores nor the values' own part
        both = max(width, value_width)
        query, key, value = (_pad(tensor, both) for tensor in (query, key, value))
        later = [(_pad(k, both), _pad(v, both)) for k, v in later]
        return fused_attention(query, key, value, later, segments, scale)[..., :value_width]
    flat = [tensor for pair in later for tensor in pair]
    return _TTTAttention.apply(scale, segments, query, key, value, *flat)


def _pad(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    segments: Sequence[Segment],
    scale: float,
) -> Tensor:
    """The same, written as it is defined: one score matrix a sample. Arguments as `ttt_attention`."""
    group = query.shape[1] // key.shape[1]
    outputs = []
    for s in segments:
        rows = slice(s.row, s.row + s.stop - s.active)
        q, k, v = query[rows], _wide(key[s.start : s.stop], group), _wide(value[s.start : s.stop], group)
        scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
        slots = torch.arange(s.active - s.start, s.stop - s.start, device=q.device)
        seen = torch.arange(s.stop - s.start, device=q.device)[None, :] <= slots[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [(q * _wide(lk[rows], group)).sum(-1).T.unsqueeze(-1) * scale for lk, _ in later]
        p = torch.cat([scores, *own], -1).softmax(-1)
        mixed = torch.einsum("hmn,nhd->mhd", p[..., : k.shape[0]], v)
        for index, (_, lv) in enumerate(later):
            mixed = mixed + p[..., k.shape[0] + index].T.unsqueeze(-1) * _wide(lv[rows], group)
        outputs.append(mixed)
    return torch.cat(outputs)
