"""Forecast: hand-computed speeds, the right choice at small and large batch, and no number that was not measured."""

from __future__ import annotations

import pytest

from eagle3lab.acceptance.forecast import Costs, CostTable, Option, best, chain_options, forecast
from eagle3lab.core.errors import AcceptanceError

TOKENS = (1, 2, 4, 8, 16)
# Batch 1: a forward costs the same whatever it holds. Batch 64: it costs what it holds.
VERIFY = CostTable("verify", {(1, n): 1.0 for n in TOKENS} | {(64, n): 64.0 * n for n in TOKENS})
DRAFT = CostTable("draft", {(1, n): 0.1 for n in TOKENS} | {(64, n): 1.0 * n for n in TOKENS})
COSTS = Costs(VERIFY, DRAFT)


def test_a_hand_computed_speed():
    found = forecast(Option("chain 3", 3, 1, 3, 2.0), 1, COSTS)
    assert (found.draft_seconds, found.verify_seconds) == pytest.approx((0.3, 1.0))
    assert found.speedup == pytest.approx(2.0 / 1.3)
    assert found.speedup != pytest.approx(2.0 / 1.0), "the wrong version forgets the drafts"


def test_deep_where_forwards_are_free_and_nothing_where_they_are_not():
    options = chain_options([0.6, 0.4, 0.3, 0.25, 0.01])
    assert [o.accept_length for o in options] == pytest.approx([1.6, 2.0, 2.3, 2.55, 2.56])
    assert best(options, 1, COSTS).option.name == "chain 4"
    assert best(options, 64, COSTS) is None, "plain decoding is faster there"


def test_costs_are_interpolated_between_sizes_and_never_beyond():
    assert VERIFY.at(64, 3) == pytest.approx(64 * 3)
    assert CostTable("verify", {(1, 1): 1.0, (3, 1): 2.0}).at(2, 1) == pytest.approx(1.5)
    for batch, tokens in ((1, 17), (128, 1), (1, 0)):
        with pytest.raises(AcceptanceError, match="is not measured"):
            VERIFY.at(batch, tokens)
    with pytest.raises(AcceptanceError, match="known: none"):
        CostTable("draft", {}).at(1, 1)
