"""Shapes of the core with their axis names, checked by jaxtyping: one name, one size, in a whole call.

Axes as in the docstrings: N tokens of a batch, M active slots, K steps, J teachers, H hidden, P points, Vd draft
vocabulary, T tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from eagle3lab.capture.store import Store
from eagle3lab.drafter.attention import fused_attention, reference_attention, ttt_attention
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed
from eagle3lab.training.conventions import supervise
from eagle3lab.training.loss import Supervision, ttt_loss
from tests.capture.capturing import run_capture
from tests.tiny import HIDDEN, POINTS, random_batch, tiny_drafter, tiny_target

STEPS = 3
Kinds = tuple[tuple[object, type], ...]


def fits(*pairs: tuple[object, type]) -> bool:
    """Whether every tensor has its shape, with one size for each axis name in all of them."""
    with jaxtyped("context"):
        return all(isinstance(tensor, kind) for tensor, kind in pairs)


def batch_kinds(batch: Packed) -> Kinds:
    return (
        (batch.input_ids, Int[Tensor, "N"]),
        (batch.aux, Float[Tensor, "N PH"]),
        (batch.last, Float[Tensor, "N H"]),
        (batch.mask, Bool[Tensor, "N"]),
        (batch.active, Int[Tensor, "M"]),
        (batch.positions(), Int[Tensor, "N"]),
        (batch.shifted(batch.aux, 1), Float[Tensor, "N PH"]),
    )


@pytest.fixture(scope="module")
def drafter() -> Eagle3Drafter:
    return tiny_drafter(tiny_target())


@pytest.fixture(scope="module")
def batch() -> Packed:
    return random_batch(STEPS, (33, 21, 40), (9, 0, 30))


def test_drafter_forward(drafter: Eagle3Drafter, batch: Packed) -> None:
    hidden = drafter(batch, STEPS)
    assert len(hidden) == STEPS and batch.aux.shape[1] == len(POINTS) * HIDDEN
    outputs = tuple((one, Float[Tensor, "M H"]) for one in hidden)
    weights = (
        (drafter.fc.weight, Float[Tensor, "H PH"]),
        (drafter.lm_head.weight, Float[Tensor, "Vd H"]),
        (drafter.d2t, Int[Tensor, "Vd"]),
        (drafter.t2d, Bool[Tensor, "V"]),
        (drafter.embedding, Float[Tensor, "V H"]),
        (drafter.kept_ids, Int[Tensor, "Vd"]),
        (drafter.fuse(batch.aux), Float[Tensor, "N H"]),
        (drafter.draft_ids(batch.input_ids), Int[Tensor, "N"]),
    )
    assert fits(*batch_kinds(batch), *outputs, *weights)
    # states of all slots instead of the active ones: the same calls with another M
    assert not fits(*batch_kinds(batch), (drafter.fuse(batch.aux), Float[Tensor, "M H"]))


@pytest.mark.parametrize(
    "attention", [ttt_attention, fused_attention, reference_attention], ids=lambda one: one.__name__
)
def test_attention(batch: Packed, attention) -> None:
    n, m = batch.tokens, len(batch.active)
    query, key, value = torch.randn(m, 4, 8), torch.randn(n, 2, 8), torch.randn(n, 2, 6)
    later = [(torch.randn(m, 2, 8), torch.randn(m, 2, 6)) for _ in range(2)]
    mixed = attention(query, key, value, later, batch.segments, 0.35)
    inputs = (
        *batch_kinds(batch),
        (query, Float[Tensor, "M heads d"]),
        (key, Float[Tensor, "N kv_heads d"]),
        (value, Float[Tensor, "N kv_heads v"]),
        *((k, Float[Tensor, "M kv_heads d"]) for k, _ in later),
        *((v, Float[Tensor, "M kv_heads v"]) for _, v in later),
    )
    assert fits(*inputs, (mixed, Float[Tensor, "M heads v"]))
    assert not fits(*inputs, (mixed.transpose(0, 1), Float[Tensor, "M heads v"]))


def supervision_kinds(one: Supervision) -> Kinds:
    return (
        (one.teacher, Int[Tensor, "J"]),
        (one.rows, Int[Tensor, "K J"]),
        (one.weights, Float[Tensor, "K J"]),
        (one.counted, Bool[Tensor, "K J"]),
        (one.labels, Int[Tensor, "J"]),
    )


@pytest.mark.parametrize("kind", ["ce", "tv"])
def test_fused_loss(drafter: Eagle3Drafter, batch: Packed, kind) -> None:
    choice = drafter.draft_ids(batch.shifted(batch.input_ids, 1))
    supervision = supervise("served", batch, STEPS, choice)
    teacher = torch.randn(drafter.config.draft_vocab_size, HIDDEN)
    hidden = drafter(batch, STEPS)
    loss, sums = ttt_loss(hidden, drafter.lm_head.weight, teacher, batch.last, supervision, kind=kind, expected=True)
    loss.backward()
    kinds = (
        *batch_kinds(batch),
        *supervision_kinds(supervision),
        *((one, Float[Tensor, "M H"]) for one in hidden),
        (teacher, Float[Tensor, "Vd H"]),
        (drafter.lm_head.weight, Float[Tensor, "Vd H"]),
        (drafter.lm_head.weight.grad, Float[Tensor, "Vd H"]),
        (loss, Float[Tensor, ""]),
        *((getattr(sums, name), Float[Tensor, "K"]) for name in ("loss", "hits", "counted", "expected")),
    )
    assert fits(*kinds)
    turned = dataclasses.replace(supervision, rows=supervision.rows.T)
    assert not fits(*kinds, *supervision_kinds(turned))


def test_store(tmp_path: Path) -> None:
    run_capture(tmp_path)
    store = Store(tmp_path, points=POINTS)
    assert len(store) == 24
    for sample in store:
        kinds = (
            (sample.input_ids, Int[Tensor, "T"]),
            (sample.loss_mask, Bool[Tensor, "T"]),
            (sample.aux, Float[Tensor, f"T {len(POINTS)}*H"]),
            (sample.last, Float[Tensor, "T H"]),
        )
        assert fits(*reversed(kinds))
        assert not fits((sample.last, Float[Tensor, "T H"]), (sample.aux, Float[Tensor, "T H"]))
