"""Expected counts on sampled text equal what rejection sampling really counts on that text, on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.acceptance.sampling import Rejection, TargetOnly
from eagle3lab.acceptance.sampling_replay import ExpectedWalk, _expected, expected_metrics, expected_walks
from eagle3lab.core.errors import AcceptanceError
from tests.acceptance.lab import lab, states_of

K, T, LIMIT = 3, 1.0, 16


def sampled(rule):
    own = lab()
    prompts = own.prompts[:20] * 10
    replies = ChainDecoder(own.target, own.drafters["taught"], K, rule).run(prompts, max_new_tokens=LIMIT, batch=200)
    return own, prompts, replies


def gaps(own, prompts, replies, temperature=T) -> list[tuple[float, float]]:
    """Mean and standard error of counted - expected over replies, for verify steps and for kept drafts."""
    samples = states_of(own.target, prompts, [r.tokens for r in replies])
    walks = expected_walks(own.drafters["taught"], samples, K, logits=own.target.logits, temperature=temperature)
    found = []
    for expected, counted in (
        ([w.steps for w in walks], [len(r.accepted) for r in replies]),
        ([w.at_least.sum() for w in walks], [sum(r.accepted) for r in replies]),
    ):
        gap = np.array(counted, dtype=float) - np.array(expected)
        found.append((gap.mean(), gap.std() / len(gap) ** 0.5))
    return found


def test_expected_counts_agree_with_counted_ones():
    case = sampled(Rejection(T, 5))
    for mean, error in gaps(*case):
        assert error > 0 and abs(mean) < 4 * error
    # Wrong: the chances of another temperature than the text was sampled at.
    assert any(abs(mean) > 4 * error for mean, error in gaps(*case, temperature=3 * T))


def test_top_drafts_on_sampled_text_are_walked_exactly():
    """With the target-only rule the kept drafts are those equal to the text: the plain walk gives the very counts."""
    own, prompts, replies = sampled(TargetOnly(T, 5))
    samples = states_of(own.target, prompts, [r.tokens for r in replies])
    assert [w.accepted for w in walk_samples(own.drafters["taught"], samples, K)] == [r.accepted for r in replies]


def test_known_chances():
    # Two draft steps, five slots; slots 0, 1, 2 start chains, nothing beyond the text is kept.
    chance = np.array([[0.5, 0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0]])
    found = _expected(chance, np.zeros(2), np.array([3, 2]))
    # From 0: keeps 0 (1/2) -> slot 1, 1 (1/4) -> slot 2, 2 (1/4) -> slot 3, past the end. Slot 1 -> slot 2 always.
    assert found.steps == pytest.approx(1 + 0.5 + 0.75)
    assert found.at_least == pytest.approx([0.5 + 0.75, 0.25])


def test_metrics_name_themselves_and_unknown_stays_unknown():
    walk = ExpectedWalk(2.0, np.array([1.0, 0.5]), np.array([0.9, 0.0]), np.array([3, 0]))
    found = expected_metrics([walk], temperature=0.7)
    assert found["kind"] == "teacher-forced expectation" and found["accept_length"] == 1.75
    assert found["joint"] == [0.5, 0.25] and found["accept_length_interval"] is None
    assert found["overlap_all_positions"] == [pytest.approx(0.3), None]
    assert expected_metrics([], temperature=1.0)["accept_length"] is None


def test_temperature_0_is_refused():
    own = lab()
    with pytest.raises(AcceptanceError, match="temperature is 0"):
        expected_walks(own.drafters["fresh"], [], K, logits=torch.nn.Identity(), temperature=0)
