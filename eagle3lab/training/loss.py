"""Soft cross-entropy of K TTT steps against the target, with the gradient made in the same pass.

Full logits would be K x M x Vd numbers; here the supervised teacher positions are walked in chunks. In a chunk the
teacher's probabilities are computed once and shared by all steps (slot t at step k is taught by position t+k+1), the
drafter's logits live for the chunk only, and loss, hits and gradients are taken from them at once. Gradients are exact.
`reference_loss` is the plain version for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

CHUNK_ROWS = 256
"""Teacher positions a chunk: K * 256 rows of Vd logits stay in a laptop's last-level cache."""

LossKind = Literal["ce", "kl", "tv", "lk"]


@dataclass(frozen=True, slots=True)
class Supervision:
    """Which (step, active row) pairs are trained, by which teacher position, with which weight.

    J supervised teacher positions, K steps.

    Attributes:
        teacher: int64 [J], slot whose last state is the teacher, ascending.
        rows: int64 [K, J], active row that this teacher teaches at step k (any valid row where the weight is 0).
        weights: float32 [K, J], weight of the pair; includes step weight and normalisation. 0 = not trained.
        counted: bool [K, J], pairs in the accuracy's denominator (supervised, out-of-vocabulary included).
        labels: int64 [J], draft id of the target's choice, -1 = out of the draft vocabulary (never a hit).
    """

    teacher: Tensor
    rows: Tensor
    weights: Tensor
    counted: Tensor
    labels: Tensor


@dataclass(slots=True)
class StepSums:
    """Sums of one batch, per step [K]: divide only at display."""

    loss: Tensor
    hits: Tensor
    counted: Tensor
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
        sums: StepSums,
        *hidden: Tensor,
    ) -> Tensor:
        steps = len(hidden)
        compute = hidden[0].dtype
        weight, teacher_weight = head.to(compute), teacher_head.to(compute)
        want_head = head.requires_grad
        grad_head = torch.zeros_like(head, dtype=torch.float32) if want_head else None
        grads = [torch.zeros_like(h) for h in hidden]
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(supervision.teacher), CHUNK_ROWS):
            piece = slice(start, start + CHUNK_ROWS)
            p = (last[supervision.teacher[piece]].to(compute) @ teacher_weight.T).float().div_(temperature).softmax(-1)
            rows, weights = supervision.rows[:, piece], supervision.weights[:, piece]
            h = torch.cat([hidden[k][rows[k]] for k in range(steps)])
            logits = (h @ weight.T).float()
            size = p.shape[0]
            best = logits.argmax(-1).view(steps, size)
            hit = (best == supervision.labels[piece]) & supervision.counted[:, piece]
            sums.hits += hit.sum(-1)
            sums.counted += supervision.counted[:, piece].sum(-1)
            log_z = logits.logsumexp(-1)
            value, gradient = _pointwise(kind, logits.view(steps, size, -1), log_z.view(steps, size), p, sums, weights)
            sums.loss += (value * weights).sum(-1).double()
            total += (value * weights).sum().double()
            dlogits = gradient.mul_(weights.unsqueeze(-1)).to(compute).flatten(0, 1)
            dh = dlogits @ weight
            for k, grad in enumerate(grads):  # a row has one teacher a step, so it is written once
                used = weights[k] != 0
                grad[rows[k][used]] = dh[k * size : (k + 1) * size][used]
            if grad_head is not None:
                grad_head += dlogits.T @ h
        ctx.grad_head, ctx.grads = grad_head, grads
        return total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        head = ctx.grad_head.mul_(grad) if ctx.grad_head is not None else None
        return head, None, None, None, None, None, None, *(g.mul_(grad.to(g.dtype)) for g in ctx.grads)


def _pointwise(
    kind: LossKind, logits: Tensor, log_z: Tensor, p: Tensor, sums: StepSums, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss value [K, c] and its gradient by the logits [K, c, Vd] (both before weighting).

    ce: -sum p log q. kl: ce minus the teacher's entropy (same gradient). tv: 1 - sum min(p, q). lk: -log sum min(p, q).
    """
    log_q = logits.sub_(log_z.unsqueeze(-1))
    cross = -torch.einsum("kcv,cv->kc", log_q, p)  # log_z - sum p*logit would cancel: 1e-5 of a small loss in fp32
    q = log_q.exp_()
    if sums.expected is not None or kind in ("tv", "lk"):
        overlap = torch.minimum(q, p).sum(-1)
        if sums.expected is not None:
            sums.expected += (overlap * (weights > 0)).sum(-1).double()
    if kind in ("ce", "kl"):
        value = cross if kind == "ce" else cross + torch.special.xlogy(p, p).sum(-1)
        return value, q.sub_(p)
    below = (q < p).to(q.dtype).mul_(q)  # d overlap / d logit_i = q_i [q_i < p_i] - q_i * sum_j q_j [q_j < p_j]
    slope = q.mul_(below.sum(-1, keepdim=True)).sub_(below)
    if kind == "tv":
        return 1 - overlap, slope
    safe = overlap.clamp_min(1e-6)
    return -safe.log(), slope.div_(safe.unsqueeze(-1))


def ttt_loss(
    hidden: list[Tensor],
    head: Tensor,
    teacher_head: Tensor,
    last: Tensor,
    supervision: Supervision,
    *,
    kind: LossKind = "ce",
    temperature: float = 1.0,
    expected: bool = False,
) -> tuple[Tensor, StepSums]:
    """Weighted loss over all steps, differentiable in `hidden` and `head`.

    Args:
        hidden: K tensors [M, H], norm(h_k) at active rows.
        head: drafter's lm_head weight [Vd, H].
        teacher_head: target's head restricted to the kept rows [Vd, Ht]; the teacher is renormalised on them.
        last: [N, Ht] target states after the final norm.
        temperature: of the teacher; below 1 its distribution is sharpened towards the greedy choice.
        expected: also sum the expected acceptance sum(min(p, q)).

    Returns:
        loss (scalar) and the sums per step.
    """
    zeros = torch.zeros(len(hidden), dtype=torch.float64)
    sums = StepSums(zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone() if expected else None)
    return _FusedLoss.apply(head, teacher_head, last, supervision, kind, temperature, sums, *hidden), sums


def reference_loss(
    hidden: list[Tensor],
    head: Tensor,
    teacher_head: Tensor,
    last: Tensor,
    supervision: Supervision,
    *,
    kind: LossKind = "ce",
    temperature: float = 1.0,
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
    return total
