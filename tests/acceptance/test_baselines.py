"""Baselines that need no drafter: n-gram look-up and the share of repeated text, on texts counted by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.acceptance.baselines import lookup, lookup_counts, repeats, without_repeats
from eagle3lab.acceptance.controls import CONTROLS, replay_counts
from eagle3lab.capture.store import Sample
from tests.tiny import HIDDEN, POINTS, tiny_drafter, tiny_target


def test_lookup_takes_the_latest_longest_match():
    assert lookup([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert lookup([7, 5, 8, 5], 2) == [8, 5]  # no 3- or 2-gram occurred before: falls back to one token
    assert lookup([1, 2, 3, 4], 3) == []


def test_lookup_counts_by_hand():
    # after the prefill token 2: look-up proposes 3 4 1 from the prompt, all right; then the bonus 2, and so on
    counts = lookup_counts([[1, 2, 3, 4, 1]], [[2, 3, 4, 1, 2, 3, 5]], ["p"], 3)
    assert [counts.verify_steps, counts.accepted] == [2, 4]
    assert counts.histogram == (0, 1, 0, 1)
    never = lookup_counts([[1, 2]], [[3, 4, 5, 6]], ["p"], 3)
    assert never.accepted == 0 and never.verify_steps == 3


def test_repeats_by_hand():
    assert repeats([1, 2, 3, 4], [5, 1, 2, 3, 4, 6]) == [False, False, False, False, True, False]


def test_without_repeats_leaves_out_steps_inside_repetitions():
    prompt, reply = [1, 2, 3, 4], [5, 1, 2, 3, 4, 6, 7]
    # steps start at reply places 1, 2 (accepting 1), 4 and 5: the one at 4 completes a repeated 4-gram
    share, other = without_repeats([prompt], [reply], [[0, 1, 0, 1]])
    assert share == pytest.approx(1 / 4) and other == pytest.approx(1 + 2 / 3)
    assert without_repeats([[1]], [[2]], [[]]) == (None, None)


def test_controls_change_only_what_they_say():
    drafter = tiny_drafter(tiny_target())
    width = HIDDEN * len(POINTS)
    zeroed = CONTROLS["fc_zeroed"](drafter, 0)
    moved = CONTROLS["fc_points_shuffled"](drafter, 0)
    fresh = CONTROLS["untrained"](drafter, 0)
    assert not zeroed.fc.weight.any() and drafter.fc.weight.any()
    assert torch.equal(moved.fc.weight[:, HIDDEN : 2 * HIDDEN], drafter.fc.weight[:, :HIDDEN])
    assert torch.equal(moved.fc.weight.sort(1).values, drafter.fc.weight.sort(1).values)
    for other in (zeroed, moved):
        assert torch.equal(other.lm_head.weight, drafter.lm_head.weight)
    assert fresh.fc.weight.shape == (HIDDEN, width) and not torch.equal(fresh.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(fresh.d2t, drafter.d2t)


def test_replay_of_a_drafter_that_always_says_the_same():
    """With a head of zeros every draft is the first kept token; it is right exactly where the text has it."""
    drafter = tiny_drafter(tiny_target())
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    said, other = (int(drafter.kept_ids[i]) for i in (0, 1))
    ids = torch.tensor([other, other, other, said, said, said, said, other, other])
    mask = torch.arange(len(ids)) >= 2
    torch.manual_seed(0)
    sample = Sample(0, ids, mask, torch.randn(len(ids), HIDDEN * len(POINTS)), torch.randn(len(ids), HIDDEN))
    counts = replay_counts(drafter, [sample], ["p"], 3)
    # the prefill token, then three drafts kept and the bonus, then two chains that are wrong at once
    assert counts.histogram == (2, 0, 0, 1) and counts.accepted == 3
