"""Forecast: hand-computed speeds, the right choice at small and large batch, and no number that was not measured."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.acceptance.counts import from_lengths, total
from eagle3lab.acceptance.forecast import Costs, CostTable, Option, best, chain_options, forecast, walked_chains
from eagle3lab.acceptance.forecast_costs import measure_costs
from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.core.errors import AcceptanceError
from tests.acceptance.lab import lab, states_of

TOKENS = (1, 2, 4, 8, 16)


def table(name: str, small: float, large: float) -> CostTable:
    """Batch 1: a forward costs the same whatever it holds. Batch 64: it costs what it holds."""
    return CostTable(name, {(1, n): small for n in TOKENS} | {(64, n): large * n for n in TOKENS})


COSTS = Costs(
    verify=table("verify", 1.0, 64.0),
    plain=table("plain", 1.0, 64.0),
    draft=table("draft", 0.1, 1.0),
    extend=table("extend", 0.2, 2.0),
)


def test_a_hand_computed_speed():
    found = forecast(Option("chain 3", 3, 1, 3, (0.6, 0.3, 0.1)), 1, COSTS)
    assert found.option.accept_length == pytest.approx(2.0)
    assert (found.draft_seconds, found.verify_seconds) == pytest.approx((0.4, 1.0))
    assert found.speedup == pytest.approx(2.0 / 1.4)
    assert found.speedup != pytest.approx(2.0 / 1.0), "the wrong version forgets the drafts"


def test_the_extension_is_as_wide_as_the_row_that_kept_most():
    """Two rows, drafts kept half of the time: the wider of the two has 2 new slots in 3 of 4 rounds."""
    option = Option("chain 1", 1, 1, 1, (0.5,))
    extend = CostTable("extend", {(b, n): float(n) for b in (1, 2) for n in (1, 2)})
    flat = CostTable("flat", {(b, n): 1.0 for b in (1, 2) for n in (1, 2)})
    costs = Costs(verify=flat, plain=flat, draft=flat, extend=extend)
    assert forecast(option, 1, costs).draft_seconds == pytest.approx(0.5 * 1 + 0.5 * 2)
    found = forecast(option, 2, costs).draft_seconds
    assert found == pytest.approx(0.25 * 1 + 0.75 * 2)
    assert found != pytest.approx(1.5), "the wrong version takes the mean row"


def test_shorter_chains_from_one_replay_are_those_of_their_own_replay():
    own = lab()
    samples = states_of(own.target, own.prompts, own.plain)
    options = walked_chains(walk_samples(own.drafters["taught"], samples, 4), 4)
    for option in options:
        walks = walk_samples(own.drafters["taught"], samples, option.steps)
        counts = total(from_lengths(one.accepted, k=option.steps, prompt=str(i)) for i, one in enumerate(walks))
        assert option.joint == pytest.approx(counts.joint)
    cut = chain_options(options[-1].joint)[0]
    assert cut.joint != pytest.approx(options[0].joint), "the joint rates of a longer chain are only close"


def test_costs_of_real_forwards_have_every_size():
    own = lab()
    costs = measure_costs(
        own.target, own.drafters["taught"], batches=(1, 3), verify_tokens=(2, 4), draft_tokens=(1, 2),
        extend_tokens=(1, 2, 3, 4), context=8, repeats=1,
    )  # fmt: skip
    for option in chain_options([0.5, 0.2, 0.1]):
        assert forecast(option, 2, costs).speedup > 0
    assert torch.isfinite(torch.tensor(list(costs.extend.seconds.values()))).all()
    with pytest.raises(AcceptanceError, match="extend cost at tokens a row 5"):
        forecast(Option("chain 4", 4, 1, 4, (0.5, 0.2, 0.1, 0.1)), 1, costs)


def test_deep_where_forwards_are_free_and_nothing_where_they_are_not():
    options = chain_options([0.6, 0.4, 0.3, 0.25, 0.01])
    assert [o.accept_length for o in options] == pytest.approx([1.6, 2.0, 2.3, 2.55, 2.56])
    assert best(options, 1, COSTS).option.name == "chain 4"
    assert best(options, 64, COSTS) is None, "plain decoding is faster there"


def test_costs_are_interpolated_between_sizes_and_never_beyond():
    assert COSTS.verify.at(64, 3) == pytest.approx(64 * 3)
    assert CostTable("verify", {(1, 1): 1.0, (3, 1): 2.0}).at(2, 1) == pytest.approx(1.5)
    for batch, tokens in ((1, 17), (128, 1), (1, 0)):
        with pytest.raises(AcceptanceError, match="is not measured"):
            COSTS.verify.at(batch, tokens)
    with pytest.raises(AcceptanceError, match="known: none"):
        CostTable("draft", {}).at(1, 1)
