"""The norm and the gated product keep little for the backward pass, and give the plain formulas' gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eagle3lab.drafter.model import _Gated
from eagle3lab.drafter.norm import RMSNorm, _Normed

ROWS, SIZE, EPS = 37, 64, 1e-5


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def norm_without_its_scales_gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Wrong: as if the row's scale did not depend on x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS).detach() * weight


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def gate_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Wrong: sigmoid for silu."""
    return torch.sigmoid(gate) * up


def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return _Normed.apply(x, weight, EPS)


def gradients(function, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of a random sum of it by both inputs."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    made = function(*leaves)
    by = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made.dtype)
    return made.detach(), list(torch.autograd.grad(made, leaves, by))


def inputs(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, gate, up = (torch.randn(ROWS, SIZE).mul(3).to(dtype) for _ in range(3))
    return {"norm": (x, torch.rand(SIZE) + 0.5), "gate": (gate, up)}


OURS = {"norm": our_norm, "gate": _Gated.apply}
PLAIN = {"norm": plain_norm, "gate": plain_gate}
WRONG = {"norm": norm_without_its_scales_gradient, "gate": gate_by_sigmoid}


def off(one: list[Tensor], other: list[Tensor]) -> float:
    """Largest relative error of the gradients, in the 2-norm."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("piece", OURS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradients_are_those_of_the_plain_formula(piece, dtype, tolerance):
    given = inputs(dtype)[piece]
    made, mine = gradients(OURS[piece], *given)
    expected, plain = gradients(PLAIN[piece], *given)
    assert torch.equal(made, expected)
    assert [g.dtype for g in mine] == [g.dtype for g in plain]
    assert off(mine, plain) < tolerance
    if dtype == torch.float32:
        assert off(gradients(WRONG[piece], *given)[1], plain) > 0.01


def test_only_what_was_given_is_kept():
    """Besides the inputs a norm keeps one number a row, a gated product nothing; the plain formulas keep more."""

    def kept(function, *given: Tensor) -> int:
        seen: dict[int, int] = {}
        leaves = [one.clone().requires_grad_() for one in given]
        own = {one.untyped_storage().data_ptr() for one in leaves}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = function(*leaves)
        assert made.requires_grad
        return sum(seen.values())

    given = inputs(torch.float32)
    assert kept(our_norm, *given["norm"]) == 4 * ROWS
    assert kept(_Gated.apply, *given["gate"]) == 0
    assert kept(plain_norm, *given["norm"]) >= 4 * ROWS * SIZE
    assert kept(plain_gate, *given["gate"]) >= 4 * ROWS * SIZE


def test_the_module_is_that_function():
    x, weight = inputs(torch.float32)["norm"]
    norm = RMSNorm(SIZE, EPS)
    norm.weight.data.copy_(weight)
    assert torch.equal(norm(x), plain_norm(x, weight))
