"""Acceptance arithmetic: known answers, next to the readings of the same numbers that people get wrong."""

from __future__ import annotations

import json

import pytest

from eagle3lab.acceptance.counts import AcceptanceCounts, accepted_prefix, from_lengths, total
from eagle3lab.core.errors import AcceptanceError


def published_example() -> AcceptanceCounts:
    """SGLang's own worked check: completion 106, verify 43, proposed 215, this histogram."""
    return AcceptanceCounts(verify_steps=43, accepted=63, proposed=215, histogram=(11, 14, 11, 4, 0, 3))


def test_accept_length_has_the_bonus_token_in_and_the_rate_its_own_denominator():
    counts = published_example()
    assert counts.accept_length == pytest.approx(1 + 63 / 43)
    assert counts.accepted_per_step == pytest.approx(63 / 43)
    assert counts.accept_rate == pytest.approx(0.2930, abs=5e-5)
    assert counts.accept_rate != pytest.approx(63 / 43)


def test_joint_and_conditional_by_position():
    counts = published_example()
    assert counts.at_least == (32, 18, 7, 3, 3)
    assert counts.joint == pytest.approx([32 / 43, 18 / 43, 7 / 43, 3 / 43, 3 / 43])
    assert counts.conditional == pytest.approx([32 / 43, 18 / 32, 7 / 18, 3 / 7, 1.0])
    assert 1 + sum(counts.joint) == pytest.approx(counts.accept_length)
    assert 1 + sum(counts.conditional) != pytest.approx(counts.accept_length)


def test_a_position_that_nothing_reached_has_no_conditional_rate():
    counts = AcceptanceCounts(verify_steps=6, accepted=6, proposed=18, histogram=(0, 6, 0, 0))
    assert counts.joint == (1.0, 0.0, 0.0)
    assert counts.conditional == (1.0, 0.0, None)


def test_unknown_stays_unknown():
    counts = AcceptanceCounts(verify_steps=0, accepted=0)
    assert counts.accept_length is None
    assert counts.accept_rate is None
    assert counts.joint is None
    assert counts.accept_length_interval() is None
    assert counts.to_json()["accept_length"] is None


def test_zero_acceptance_is_known_and_is_not_unknown():
    counts = AcceptanceCounts(verify_steps=15, accepted=0, proposed=45, histogram=(15,))
    assert (counts.accept_length, counts.accept_rate, counts.joint) == (1.0, 0.0, ())


@pytest.mark.parametrize(
    "impossible",
    [
        {"verify_steps": 10, "accepted": 31, "proposed": 30},
        {"verify_steps": 0, "accepted": 1},
        {"verify_steps": 10, "accepted": -1},
        {"verify_steps": 10.5, "accepted": 1},
        {"verify_steps": True, "accepted": 1},
        {"verify_steps": 3, "accepted": 2, "histogram": (1, 1)},
        {"verify_steps": 2, "accepted": 2, "histogram": (1, 1)},
    ],
)
def test_impossible_counts_are_refused(impossible):
    with pytest.raises(AcceptanceError, match="impossible counts"):
        AcceptanceCounts(**impossible)


def test_total_adds_up_and_keeps_the_prompts():
    one = from_lengths([0, 3, 1], k=3, prompt="a")
    two = from_lengths([2], k=3, prompt="b")
    both = total([one, two])
    assert (both.verify_steps, both.accepted, both.proposed, both.histogram) == (4, 6, 12, (1, 1, 1, 1))
    assert [prompt.prompt for prompt in both.per_prompt] == ["a", "b"]


def test_a_total_with_one_unknown_part_is_unknown_not_smaller():
    known = AcceptanceCounts(verify_steps=2, accepted=1, proposed=6, histogram=(1, 1))
    silent = AcceptanceCounts(verify_steps=2, accepted=1)
    both = total([known, silent])
    assert both.proposed is None
    assert both.histogram is None
    assert both.accepted == 2


@pytest.mark.parametrize(("correct", "kept"), [([1, 0, 1, 0], 1), ([0, 1, 1], 0), ([1, 1], 2), ([], 0)])
def test_only_the_prefix_is_kept(correct, kept):
    assert accepted_prefix(correct) == kept


def test_more_accepted_than_drafted_in_a_step_is_refused():
    with pytest.raises(AcceptanceError, match="4 accepted of 3 drafted"):
        from_lengths([1, 4], k=3)


def test_json_has_the_promised_keys_and_reads_back():
    counts = total([from_lengths([0, 3, 1], k=3, prompt="a", generated=8), from_lengths([2], k=3, prompt="b")])
    written = json.loads(json.dumps(counts.to_json(), allow_nan=False))
    promised = {"accept_length", "accept_length_interval", "accept_rate", "joint", "conditional", "counts"}
    assert promised <= written.keys()
    assert {"verify_steps", "proposed", "accepted", "histogram"} <= written["counts"].keys()
    assert AcceptanceCounts.from_json(written) == counts


@pytest.mark.parametrize("broken", [{}, {"counts": None}, {"counts": {"verify_steps": 3}}, {"counts": [1]}])
def test_json_without_counts_is_refused(broken):
    with pytest.raises(AcceptanceError):
        AcceptanceCounts.from_json(broken)


def test_counts_between_two_readings():
    before = AcceptanceCounts(verify_steps=60, accepted=30, proposed=180, histogram=(40, 10, 10))
    after = AcceptanceCounts(verify_steps=103, accepted=93, proposed=395, histogram=(51, 24, 21, 4, 0, 3))
    assert after.since(before) == published_example(), "a histogram that has grown longer counts from 0 there"
    assert after.since(after) == AcceptanceCounts(verify_steps=0, accepted=0, proposed=0, histogram=(0,) * 6)
    with pytest.raises(AcceptanceError, match=r"counters went back.*restarted"):
        before.since(after)
    silent = AcceptanceCounts(verify_steps=70, accepted=35)
    assert silent.since(before) == AcceptanceCounts(verify_steps=10, accepted=5), "unknown stays unknown"
