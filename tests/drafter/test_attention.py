"""Merged-softmax attention equals its definition: outputs and every gradient, and wrong versions are caught."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.drafter.attention import (
    blocked_attention,
    fused_attention,
    reference_attention,
    ttt_attention,
)
from eagle3lab.drafter.packed import pack

HEADS, DIM = 6, 16


def inputs(kv_heads: int, steps: int, lengths=(23, 40, 1, 31), prompts=(5, 17, 0, 0), seed=0):
    torch.manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    mask = torch.zeros(offsets[-1], dtype=torch.bool)
    batch = pack(mask.long(), mask[:, None].float(), mask[:, None].float(), offsets, mask, list(prompts))
    rows, slots = len(batch.active), offsets[-1]
    made = [torch.randn(rows, HEADS, DIM), torch.randn(slots, kv_heads, DIM), torch.randn(slots, kv_heads, DIM)]
    later = [(torch.randn(rows, kv_heads, DIM), torch.randn(rows, kv_heads, DIM)) for _ in range(steps - 1)]
    return batch, made, later


def run(attention, batch, made, later, grad):
    leaves = [t.clone().requires_grad_() for t in (*made, *(t for pair in later for t in pair))]
    q, k, v, *rest = leaves
    output = attention(q, k, v, list(zip(rest[::2], rest[1::2], strict=True)), batch.segments, DIM**-0.5)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def worst(ours, theirs):
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("attention", [blocked_attention, fused_attention])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [(23, 40, 1, 31), (300, 17)])  # blocks of one sample, a block for each
def test_equal_to_reference(attention, kv_heads, steps, lengths):
    batch, made, later = inputs(kv_heads, steps, lengths, (5, 17, 0, 0)[: len(lengths)])
    grad = torch.randn_like(made[0])
    ours, theirs = run(attention, batch, made, later, grad), run(reference_attention, batch, made, later, grad)
    assert worst(ours, theirs) < 2e-6


def test_catches_later_keys_left_out():
    batch, made, later = inputs(2, 3)
    grad = torch.randn_like(made[0])
    right = run(reference_attention, batch, made, later, grad)
    wrong = run(
        lambda q, k, v, later, s, scale: ttt_attention(q, k, v, later[:1], s, scale), batch, made, later[:1], grad
    )
    assert worst(wrong[:4], right[:4]) > 1e-2


def test_catches_own_normalisation_in_backward():
    """Feeding the fused kernel its own log-sum-exp instead of the merged one: same output, wrong gradients."""
    batch, made, later = inputs(2, 3)
    grad = torch.randn_like(made[0])

    def unmerged(q, k, v, later, segments, scale):
        output = ttt_attention(
            q.detach(), k.detach(), v.detach(), [(a.detach(), b.detach()) for a, b in later], segments, scale
        )
        alone = ttt_attention(q, k, v, [], segments, scale)
        return output + alone - alone.detach() + sum((a.sum() + b.sum()) * 0 for a, b in later)

    wrong, right = run(unmerged, batch, made, later, grad), run(reference_attention, batch, made, later, grad)
    assert torch.allclose(wrong[0], right[0], atol=1e-5)
    assert worst(wrong[1:4], right[1:4]) > 1e-2


def test_samples_do_not_see_each_other():
    batch, made, later = inputs(2, 3)
    grad = torch.randn_like(made[0])
    before = run(ttt_attention, batch, made, later, grad)[0]
    first = batch.segments[0]
    changed = [made[0], made[1].clone(), made[2].clone()]
    changed[1][first.start : first.stop] += 1
    changed[2][first.start : first.stop] += 1
    after = run(ttt_attention, batch, changed, later, grad)[0]
    rows = first.stop - first.active
    assert torch.equal(before[rows:], after[rows:])
    assert not torch.allclose(before[:rows], after[:rows])


@pytest.mark.parametrize("attention", [blocked_attention, fused_attention])
def test_bf16_is_as_near_to_the_truth_as_the_plain_version(attention):
    batch, made, later = inputs(2, 3, (150, 33), (20, 0))
    made, later = [t.bfloat16() for t in made], [(k.bfloat16(), v.bfloat16()) for k, v in later]
    grad = torch.randn_like(made[0])
    truth = run(reference_attention, batch, [t.float() for t in made], [(k.float(), v.float()) for k, v in later], grad)
    error = worst(run(attention, batch, made, later, grad), truth)
    assert error < 2 * worst(run(reference_attention, batch, made, later, grad), truth)
    assert error < 0.02
