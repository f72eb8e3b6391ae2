"""The one norm of a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        return _Normed.apply(x, self.weight, self.eps)


class _Normed(torch.autograd.Function):
    """Keeps x and one number a row for the backward pass, where autograd would keep every product on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad_weight = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            slope = (grad * weight.to(grad.dtype)).float()
            inward = (slope * normed).mean(-1, keepdim=True)
            grad_x = slope.sub_(normed.mul_(inward)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None
