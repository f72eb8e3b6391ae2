"""Replay: captured states give the very counts of decoding, step by step, and the usual mistakes do not."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.replay import all_positions_length, response_runs, walk, walk_samples
from eagle3lab.capture.store import Sample
from tests.acceptance.lab import LIMIT, lab, states_of

K = 3


@pytest.mark.parametrize("name", ["fresh", "taught"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_counts_equal_those_of_decoding_step_by_step(name, k):
    own = lab()
    drafter = own.drafters[name]
    decoded = ChainDecoder(own.target, drafter, k).run(own.prompts, max_new_tokens=LIMIT, batch=7)
    walks = walk_samples(drafter, states_of(own.target, own.prompts, own.plain), k, batch_tokens=100)
    assert [w.accepted for w in walks] == [r.accepted for r in decoded]
    if name == "taught":
        assert len({n for w in walks for n in w.accepted}) > 1


def decoded_lengths(decoder_class=ChainDecoder):
    own = lab()
    return [
        r.accepted for r in decoder_class(own.target, own.drafters["taught"], K).run(own.prompts, max_new_tokens=LIMIT)
    ]


def replayed_lengths(change=lambda sample: sample):
    own = lab()
    samples = [change(s) for s in states_of(own.target, own.prompts, own.plain)]
    return [w.accepted for w in walk_samples(own.drafters["taught"], samples, K)]


def test_an_off_by_one_slot_in_either_is_caught():
    """Wrong versions: states one place late in replay; drafts from one slot early in decoding."""

    def late(s: Sample) -> Sample:
        return Sample(s.sample_id, s.input_ids, s.loss_mask, s.aux.roll(1, 0), s.last)

    class Early(ChainDecoder):
        def _extend(self, cache, fresh, following, begin, count, rows):
            return super()._extend(cache, fresh, following, begin, (count - 1).clamp_min(1), rows)

    assert replayed_lengths() == decoded_lengths()
    assert replayed_lengths(late) != decoded_lengths()
    assert replayed_lengths() != decoded_lengths(Early)


def test_drafting_on_a_stale_cache_is_caught():
    """Wrong version: the drafter keeps its own states of rejected and accepted drafts instead of the target's."""

    class Stale(ChainDecoder):
        def _extend(self, cache, fresh, following, begin, count, rows):
            if begin.max() > 0:
                fresh = torch.zeros_like(fresh)
            return super()._extend(cache, fresh, following, begin, count, rows)

    assert replayed_lengths() != decoded_lengths(Stale)


def test_walk_follows_the_decode_path():
    # Slots 0..6 of a reply: a chain at 0 keeps 2, so the next starts at 3; the last two slots cannot be judged.
    found = walk(torch.tensor([2, 1, 0, 0, 1, 1, 0, 0]))
    assert (found.starts, found.accepted) == ([0, 3, 4], [2, 0, 1])
    assert found.prefix.tolist() == [2, 1, 0, 0, 1, 1]


def test_walking_every_slot_is_another_number():
    """The wrong version counts chains inside accepted runs too: more steps, another length, and it has its own name."""
    found = [walk(torch.tensor([2, 1, 0, 2, 1, 0, 0, 0]))]
    path = 1 + sum(found[0].accepted) / len(found[0].accepted)
    assert path == 3.0
    assert all_positions_length(found) == pytest.approx(1 + 6 / 6)
    own = lab()
    walks = walk_samples(own.drafters["taught"], states_of(own.target, own.prompts, own.plain), K)
    steps = sum(len(w.accepted) for w in walks)
    assert all_positions_length(walks) != pytest.approx(1 + sum(sum(w.accepted) for w in walks) / steps, abs=1e-3)


def test_replies_too_short_to_judge():
    assert walk(torch.zeros(2, dtype=torch.int64)).starts == []
    assert all_positions_length([]) is None
    own = lab()
    prompt = own.prompts[0]
    walks = walk_samples(own.drafters["fresh"], states_of(own.target, [prompt], [own.plain[0][:1]]), K)
    assert walks[0].accepted == []


def test_chains_do_not_run_from_one_reply_into_the_next():
    """Two turns in one sample are walked one by one, as two samples with the same text before them would be."""
    own = lab()
    prompt, reply = own.prompts[0], own.plain[0][:9]
    sample = states_of(own.target, [prompt], [reply])[0]
    mask = torch.zeros(len(sample.input_ids), dtype=torch.bool)
    start = len(prompt)
    mask[start : start + 4] = mask[start + 5 : start + 9] = True
    both = Sample(0, sample.input_ids, mask, sample.aux, sample.last)
    parts = []
    for first, stop in ((start, start + 4), (start + 5, start + 9)):
        some = torch.zeros_like(mask)
        some[first:stop] = True
        parts.append(Sample(0, *(x[:stop] for x in (sample.input_ids, some, sample.aux, sample.last))))
    assert response_runs(mask) == [(start - 1, start + 4), (start + 4, start + 9)]
    drafter = own.drafters["taught"]
    joined = walk_samples(drafter, [both], K)[0]
    single = walk_samples(drafter, parts, K)
    assert joined.accepted == single[0].accepted + single[1].accepted
    bridged = walk_samples(drafter, [Sample(0, sample.input_ids, sample.loss_mask, sample.aux, sample.last)], K)[0]
    assert len(bridged.prefix) != len(joined.prefix), "one long reply judges the tokens between the turns too"
