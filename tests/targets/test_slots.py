"""Attention over slots equals plain softmax attention, however many queries there are."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.targets import slots
from eagle3lab.targets.slots import FEW_QUERIES, SlotCache, causal_slot_mask, grouped_attention

ROWS, KV_HEADS, GROUP, DIM = 3, 2, 3, 8


def attention_over_slots(q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, q, heads, d] twice: of q new tokens after texts of unequal length, and the same written out in float64."""
    generator = torch.Generator().manual_seed(q)
    length = torch.tensor([4, 9, 6])
    cache = SlotCache(ROWS, 30)

    def add(count: int, start: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key, value = torch.randn(2, ROWS, KV_HEADS, count, DIM, generator=generator)
        positions = start[:, None] + torch.arange(count)
        cache.place(positions, int(positions.max()) + 1)
        return positions, *cache.update(key, value, 0)

    add(9, torch.zeros(ROWS, dtype=torch.int64))  # the shorter texts' last slots are written again below
    positions, keys, values = add(q, length)
    query = torch.randn(ROWS, KV_HEADS * GROUP, q, DIM, generator=generator)
    mask = causal_slot_mask(positions, keys.shape[2])
    found, _ = grouped_attention(torch.nn.Identity(), query, keys, values, mask)
    wide = [x.double().repeat_interleave(GROUP, 1) for x in (keys, values)]
    scores = query.double() @ wide[0].transpose(2, 3) / DIM**0.5
    return found, (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ wide[1]).transpose(1, 2)


@pytest.mark.parametrize("q", [1, 2, FEW_QUERIES // GROUP, FEW_QUERIES // GROUP + 1, 12])
def test_grouped_attention_is_softmax_attention(q):
    found, plain = attention_over_slots(q)
    torch.testing.assert_close(found.double(), plain, rtol=1e-5, atol=1e-6)


def test_queries_that_see_slots_ahead_are_caught(monkeypatch):
    """The wrong version: the mask of the last query for all."""
    right = slots._few_queries
    monkeypatch.setattr(
        slots, "_few_queries", lambda q, k, v, mask, scale: right(q, k, v, mask[:, :, -1:].expand_as(mask), scale)
    )
    found, plain = attention_over_slots(2)
    assert (found.double() - plain).abs().max() > 1e-2
