"""Soft cross-entropy of K TTT steps against the target, with the gradient made in the same pass.

Full logits would be K x M x Vd numbers; here the supervised teacher positions are walked in chunks. In a chunk the
teacher's probabilities are computed once and shared by all steps (slot t at step k is taught by position t+k+1). The
drafter's logits live for the chunk only: one matrix product makes them, blocks of rows that fit in a cache turn them
into loss, hits and their own gradient in place, and two products carry that on. A teacher position that trains nothing
and cannot be a hit (out of vocabulary) is left out. Gradients are exact. `reference_loss` is the plain version.

A feature term may be added: |h - t|^2 / |t|^2, the squared distance of the drafter's normed state from the target's
own, which the teacher's head reads. It needs no head at all, so tokens out of the draft vocabulary have it too. EAGLE
(arXiv 2401.15077) trains with such a term and EAGLE-3 without; what it does here is in the log of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

CHUNK_BYTES = 1536
"""Of a column of logits alive at a time (a row is a teacher position at one step): 768 rows in bf16, 384 in float32,
enough for a matrix product at full speed."""
BLOCK_ROWS = 96
"""Rows of a chunk that are turned from logits into gradients at a time: 96 x Vd float32 stay in a laptop's cache."""
PANEL_ROWS = 1024
"""Rows of the head's gradient added to at a time in bf16."""
ARGMAX_COLUMNS = 128

LossKind = Literal["ce", "kl", "tv", "lk"]


@dataclass(frozen=True, slots=True)
class Supervision:
    """Which (step, active row) pairs are trained, by which teacher position, with which weight.

    J supervised teacher positions, K steps.

    Attributes:
        teacher: int64 [J], slot whose last state is the teacher, ascending.
        rows: int64 [K, J], active row that this teacher teaches at step k (any valid row where the weight is 0).
        weights: float32 [K, J], weight of the pair; includes step weight and normalisation. 0 = not trained.
        feature_weights: float32 [K, J], the same before any vocabulary rule: weight of the pair in the feature term.
        counted: bool [K, J], pairs in the accuracy's denominator (supervised, out-of-vocabulary included).
        labels: int64 [J], draft id of the target's choice, -1 = out of the draft vocabulary (never a hit).
    """

    teacher: Tensor
    rows: Tensor
    weights: Tensor
    feature_weights: Tensor
    counted: Tensor
    labels: Tensor


@dataclass(slots=True)
class StepSums:
    """Sums of one batch, per step [K]: divide only at display.

    loss: without the feature term; feature: that term, not multiplied by `feature_weight`.
    """

    loss: Tensor
    hits: Tensor
    counted: Tensor
    feature: Tensor
    expected: Tensor | None = None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        teacher_head: Tensor,
        last: Tensor,
        supervision: Supervision,
        kind: LossKind,
        temperature: float,
        feature_weight: float,
        sums: StepSums,
        *hidden: Tensor,
    ) -> Tensor:
        steps, compute = len(hidden), hidden[0].dtype
        weight, teacher_weight = head.to(compute), teacher_head.to(compute)
        asked = any(ctx.needs_input_grad)  # nobody does when only the sums are wanted
        grad_head = torch.empty_like(head, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grads = [torch.zeros_like(h) for h in hidden] if asked else []
        sums.counted += supervision.counted.sum(-1)
        useful = (supervision.weights != 0) | (supervision.counted & (supervision.labels >= 0))
        if feature_weight:
            useful |= supervision.feature_weights != 0
        teaching = useful.any(0).nonzero().squeeze(-1)
        if grad_head is not None and not len(teaching):
            grad_head.zero_()
        for number, piece in enumerate(teaching.split(max(1, chunk_rows(compute) // steps)) if len(teaching) else ()):
            rows = supervision.rows[:, piece]
            h = torch.stack([hidden[k][rows[k]] for k in range(steps)], 1)
            logits = torch.mm(h.flatten(0, 1), weight.T).view(len(piece), steps, -1)
            states = last[supervision.teacher[piece]]
            taught = torch.mm(states.to(compute), teacher_weight.T)
            _logits_to_gradient(
                kind,
                logits,
                taught,
                temperature,
                supervision.weights[:, piece].T,
                supervision.labels[piece],
                supervision.counted[:, piece].T,
                sums,
            )
            if grad_head is not None:
                _add_product(grad_head, logits.flatten(0, 1), h.flatten(0, 1), first=number == 0)
            dh = torch.mm(logits.flatten(0, 1), weight).view(h.shape) if asked else None
            if feature_weight:
                _add_feature_term(h, states, supervision.feature_weights[:, piece].T, sums, dh, feature_weight)
            if dh is None:
                continue
            for k, grad in enumerate(grads):  # a row has one teacher a step; an untrained pair adds exactly zero
                grad.index_add_(0, rows[k], dh[:, k])
        ctx.grad_head, ctx.grads = grad_head, grads
        return (sums.loss + feature_weight * sums.feature).sum().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        head, grads = ctx.grad_head, ctx.grads
        del ctx.grad_head, ctx.grads  # the engine then takes the tensors as they are instead of copying them
        if grad.is_cuda or float(grad) != 1.0:  # reading a CUDA scalar would wait for the device
            head = head.mul_(grad) if head is not None else None
            grads = [g.mul_(grad.to(g.dtype)) for g in grads]
        return head, None, None, None, None, None, None, None, *grads


def chunk_rows(dtype: torch.dtype) -> int:
    """Rows of logits of this type that are alive at a time."""
    return CHUNK_BYTES // dtype.itemsize


def _add_product(total: Tensor, dlogits: Tensor, h: Tensor, first: bool) -> None:
    """total [Vd, H] += dlogits^T h, or = for the first chunk, which spares filling it with zeros.

    A lower precision goes by panels of rows, so that no second [Vd, H] is made.
    """
    if total.dtype == h.dtype:
        torch.addmm(total, dlogits.T, h, beta=0 if first else 1, out=total)
        return
    for rows, columns in zip(total.split(PANEL_ROWS), dlogits.split(PANEL_ROWS, 1), strict=True):
        product = columns.T @ h
        rows.copy_(product) if first else rows.add_(product)


def _logits_to_gradient(
    kind: LossKind,
    logits: Tensor,
    taught: Tensor,
    temperature: float,
    weights: Tensor,
    labels: Tensor,
    counted: Tensor,
    sums: StepSums,
) -> None:
    """Overwrite logits [c, K, Vd] by the weighted loss's gradient by them, and add to the sums.

    taught [c, Vd]: the teacher's logits. weights [c, K], labels [c], counted [c, K]: as in `Supervision`. Arithmetic is
    float32 whatever the logits' type.

    ce: -sum p log q. kl: ce minus the teacher's entropy (same gradient). tv: 1 - sum min(p, q). lk: -log sum min(p, q).
    """
    size, steps, vocabulary = logits.shape
    block = min(size, max(1, BLOCK_ROWS // steps))
    room = [
        logits.new_empty((block, *shape), dtype=torch.float32) for shape in [(steps, vocabulary)] * 2 + [(vocabulary,)]
    ]
    for start in range(0, size, block):
        part = slice(start, min(start + block, size))
        x, q, p = (buffer[: part.stop - start] for buffer in room)
        p.copy_(taught[part]).div_(temperature)
        entropy = _softmax_entropy(p, q[:, 0]) if kind == "kl" else None
        if entropy is None:
            _softmax(p, p)
        w, source = weights[part], logits[part]
        x.copy_(source)
        highest, best = _max(x)
        sums.hits += ((best == labels[part].unsqueeze(-1)) & counted[part]).sum(0)
        x.sub_(highest.unsqueeze(-1))
        _softmax(x, q)
        if sums.expected is not None or kind in ("tv", "lk"):
            overlap = torch.minimum(q, p.unsqueeze(1)).sum(-1)
            if sums.expected is not None:
                sums.expected += (overlap * (w > 0)).sum(0).double()
        if kind in ("ce", "kl"):
            # log Z - sum p x, both terms positive after the shift by the highest: nothing cancels
            value = -q.gather(-1, best.unsqueeze(-1)).squeeze(-1).log() - (p.unsqueeze(1) @ x.transpose(1, 2)).squeeze(
                1
            )
            if entropy is not None:
                value -= entropy
            slope = torch.sub(q, p.unsqueeze(1), out=x)
        else:
            below = torch.lt(q, p.unsqueeze(1), out=x).mul_(q)
            # d overlap / d logit_i = q_i [q_i < p_i] - q_i * sum_j q_j [q_j < p_j]
            slope = q.mul_(below.sum(-1, keepdim=True)).sub_(below)
            value = 1 - overlap
            if kind == "lk":
                safe = overlap.clamp_min(1e-6)
                value = -safe.log()
                slope.div_(safe.unsqueeze(-1))
        sums.loss += (value * w).sum(0).double()
        source.copy_(slope.mul_(w.unsqueeze(-1)))


def _add_feature_term(
    h: Tensor, states: Tensor, weights: Tensor, sums: StepSums, dh: Tensor | None, feature_weight: float
) -> None:
    """Add w |h - t|^2 / |t|^2 to the sums, and its gradient times `feature_weight` to dh.

    h, dh [c, K, H], states t [c, H], weights w [c, K]. Arithmetic is float32.
    """
    target = states.float()
    gap = h.float() - target.unsqueeze(1)
    scaled = weights / target.square().sum(-1, keepdim=True)
    sums.feature += (gap.square().sum(-1) * scaled).sum(0).double()
    if dh is not None:
        dh.add_((gap * (2 * feature_weight * scaled).unsqueeze(-1)).to(dh.dtype))


def _softmax(x: Tensor, out: Tensor) -> None:
    """Softmax over the last axis into `out`, which may be `x`."""
    torch.ops.aten._softmax.out(x, -1, False, out=out)


def _softmax_entropy(x: Tensor, room: Tensor) -> Tensor:
    """Softmax of x [c, Vd] in place; its entropy [c, 1], as log Z - sum p x after the shift by the highest."""
    torch.sub(x, x.amax(-1, keepdim=True), out=room)
    _softmax(room, x)
    return -x.amax(-1, keepdim=True).log() - (x.unsqueeze(1) @ room.unsqueeze(-1)).squeeze(1)


def _max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Highest value over the last axis and the first index of it, as `max` gives them.

    PyTorch's CPU kernels are ten times faster without the index, so it is looked up in the first block of columns
    that holds the highest value.
    """
    if x.is_cuda or x.shape[-1] % ARGMAX_COLUMNS:
        return x.max(-1)
    blocks = x.unflatten(-1, (-1, ARGMAX_COLUMNS))
    highest, block = blocks.amax(-1).max(-1)
    index = block[..., None, None].expand(*block.shape, 1, ARGMAX_COLUMNS)
    inside = blocks.gather(-2, index).squeeze(-2).argmax(-1)
    return highest, block * ARGMAX_COLUMNS + inside


def ttt_loss(
    hidden: list[Tensor],
    head: Tensor,
    teacher_head: Tensor,
    last: Tensor,
    supervision: Supervision,
    *,
    kind: LossKind = "ce",
    temperature: float = 1.0,
    feature_weight: float = 0.0,
    expected: bool = False,
) -> tuple[Tensor, StepSums]:
    """Weighted loss over all steps, differentiable in `hidden` and `head`.

    Args:
        hidden: K tensors [M, H], norm(h_k) at active rows.
        head: drafter's lm_head weight [Vd, H].
        teacher_head: target's head restricted to the kept rows [Vd, Ht]; the teacher is renormalised on them.
        last: [N, Ht] target states after the final norm.
        temperature: of the teacher; below 1 its distribution is sharpened towards the greedy choice.
        feature_weight: of the feature term; 0 = none. With it, H must be Ht.
        expected: also sum the expected acceptance sum(min(p, q)).

    Returns:
        loss (scalar) and the sums per step.
    """
    zeros = torch.zeros(len(hidden), dtype=torch.float64, device=hidden[0].device)
    sums = StepSums(
        zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone(), expected=zeros.clone() if expected else None
    )
    loss = _FusedLoss.apply(head, teacher_head, last, supervision, kind, temperature, feature_weight, sums, *hidden)
    return loss, sums


def reference_loss(
    hidden: list[Tensor],
    head: Tensor,
    teacher_head: Tensor,
    last: Tensor,
    supervision: Supervision,
    *,
    kind: LossKind = "ce",
    temperature: float = 1.0,
    feature_weight: float = 0.0,
) -> Tensor:
    """The same loss with full logits and autograd. Arguments as `ttt_loss`."""
    p = (last[supervision.teacher] @ teacher_head.T).float().div(temperature).softmax(-1)
    total = hidden[0].new_zeros((), dtype=torch.float32)
    for k, h in enumerate(hidden):
        log_q = (h[supervision.rows[k]] @ head.T).float().log_softmax(-1)
        if kind in ("ce", "kl"):
            value = -(p * log_q).sum(-1)
            if kind == "kl":
                value = value + torch.special.xlogy(p, p).sum(-1)
        else:
            overlap = torch.minimum(p, log_q.exp()).sum(-1)
            value = 1 - overlap if kind == "tv" else -overlap.clamp_min(1e-6).log()
        total = total + (value * supervision.weights[k]).sum()
        if feature_weight:
            states = last[supervision.teacher].float()
            error = (h[supervision.rows[k]].float() - states).square().sum(-1) / states.square().sum(-1)
            total = total + feature_weight * (error * supervision.feature_weights[k]).sum()
    return total
