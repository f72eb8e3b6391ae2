"""Bootstrap over prompts: coverage on known data, pairing, and the mistakes that would make an interval too narrow."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lab.acceptance.counts import AcceptanceCounts, from_lengths, total
from eagle3lab.acceptance.intervals import compare, ratio_interval
from eagle3lab.core.errors import AcceptanceError


def drafter(rates, steps=40, seed=0, shift=0.0):
    """One prompt a rate: `steps` verify steps of a 3-token chain with that conditional rate."""
    generator = np.random.default_rng(seed)
    prompts = []
    for index, rate in enumerate(rates):
        hits = generator.random((steps, 3)) < min(rate + shift, 1.0)
        lengths = np.cumprod(hits, axis=1).sum(axis=1)
        prompts.append(from_lengths([int(n) for n in lengths], k=3, prompt=f"p{index}"))
    return total(prompts)


def test_interval_holds_the_estimate_and_repeats_with_its_seed():
    counts = drafter(np.linspace(0.2, 0.8, 20))
    low, high = counts.accept_length_interval(seed=3)
    assert low < counts.accept_length < high
    assert counts.accept_length_interval(seed=3) == (low, high)
    assert counts.accept_length_interval(seed=4) != (low, high)


def test_interval_covers_the_truth_about_95_percent_of_the_time():
    generator = np.random.default_rng(5)
    inside = 0
    for trial in range(200):
        accepted = generator.binomial(60, generator.beta(4, 6, size=40))
        low, high = ratio_interval([(int(a), 60) for a in accepted], seed=trial, draws=1000)
        inside += low <= 0.4 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_prompts_that_differ_give_a_wider_interval_than_steps_taken_as_independent():
    counts = drafter([0.1] * 10 + [0.9] * 10)
    low, high = counts.accept_length_interval()
    lengths = np.repeat(np.arange(4), counts.histogram)
    naive = 2 * 1.96 * lengths.std() / np.sqrt(len(lengths))
    assert high - low > 2 * naive


def test_one_prompt_shows_no_spread():
    assert drafter([0.5]).accept_length_interval() is None
    assert ratio_interval([(3, 10), (0, 0)]) is None


def test_paired_difference_sees_what_two_separate_intervals_hide():
    rates = np.linspace(0.05, 0.85, 40)
    first, second = drafter(rates, steps=200), drafter(rates, steps=200, seed=1, shift=0.06)
    result = compare(first, second)
    assert result.differs is True
    assert result.difference == pytest.approx(second.accept_length - first.accept_length)
    assert first.accept_length_interval()[1] > second.accept_length_interval()[0]  # unpaired: nothing to see


def test_a_drafter_against_itself_does_not_differ():
    counts = drafter(np.linspace(0.2, 0.8, 10))
    result = compare(counts, counts)
    assert result.difference == 0.0
    assert result.differs is False


def test_pairing_is_by_name_not_by_order():
    a = total([from_lengths([3, 3], k=3, prompt="easy"), from_lengths([0, 0], k=3, prompt="hard")])
    b = total([from_lengths([0, 0], k=3, prompt="hard"), from_lengths([3, 3], k=3, prompt="easy")])
    assert compare(a, b).interval == (0.0, 0.0)


def test_prompts_of_one_side_only_are_named():
    a = total([from_lengths([1], k=3, prompt="x"), from_lengths([1], k=3, prompt="y")])
    b = total([from_lengths([2], k=3, prompt="y"), from_lengths([2], k=3, prompt="z")])
    result = compare(a, b)
    assert (result.prompts, result.only_a, result.only_b, result.interval) == (1, ("x",), ("z",), None)
    assert result.differs is None


def test_comparison_without_common_or_named_prompts_is_refused():
    a = total([from_lengths([1], k=3, prompt="x")])
    with pytest.raises(AcceptanceError, match="no prompt is common"):
        compare(a, total([from_lengths([1], k=3, prompt="y")]))
    with pytest.raises(AcceptanceError, match="no name"):
        compare(a, total([from_lengths([1], k=3)]))
    with pytest.raises(AcceptanceError, match="twice"):
        compare(a, total([from_lengths([1], k=3, prompt="x"), from_lengths([1], k=3, prompt="x")]))
    with pytest.raises(AcceptanceError, match="no prompt is common"):
        compare(AcceptanceCounts(verify_steps=1, accepted=0), a)
