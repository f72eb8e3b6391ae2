"""The fused loss equals the plain one, gradients included; masks follow the check table; wrong rules are caught."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from eagle3lab.core.conventions import Convention
from eagle3lab.core.errors import TrainingError
from eagle3lab.drafter.attention import reference_attention, ttt_attention
from eagle3lab.training.conventions import slot_mask, supervise
from eagle3lab.training.loss import reference_loss, ttt_loss
from tests.tiny import HIDDEN, random_batch, tiny_drafter, tiny_target

STEPS = 4
CONVENTIONS = get_args(Convention)


def gradients(drafter, batch, supervision, teacher, *, fused, **kind):
    drafter.zero_grad()
    hidden = drafter(batch, STEPS, ttt_attention if fused else reference_attention)
    head = drafter.lm_head.weight
    if fused:
        loss, _ = ttt_loss(hidden, head, teacher, batch.last, supervision, **kind)
    else:
        loss = reference_loss(hidden, head, teacher, batch.last, supervision, **kind)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in drafter.named_parameters()}


def worst(ours, theirs):
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.fixture(scope="module")
def setup():
    drafter = tiny_drafter(tiny_target())
    return drafter, torch.randn(60, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("feature_weight", [0.0, 3.0])
@pytest.mark.parametrize(("kind", "temperature"), [("ce", 1.0), ("ce", 0.5), ("kl", 1.0), ("tv", 1.0), ("lk", 1.0)])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_fused_equals_reference(setup, convention, kind, temperature, feature_weight):
    drafter, teacher = setup
    batch = random_batch(STEPS, (33, 21, 40), (9, 0, 38), convention=convention)
    supervision = supervise(convention, batch, STEPS, drafter.draft_ids(batch.shifted(batch.input_ids, 1)))
    asked = {"kind": kind, "temperature": temperature, "feature_weight": feature_weight}
    ours, plain = (gradients(drafter, batch, supervision, teacher, fused=fused, **asked) for fused in (True, False))
    assert abs(ours[0] - plain[0]) < 1e-5 * abs(plain[0])
    assert worst(ours[1], plain[1]) < 1e-5


def test_out_of_vocabulary_rule_changes_gradients(setup):
    drafter, teacher = setup
    batch = random_batch(STEPS, (33, 21), (9, 0))
    choice = drafter.draft_ids(batch.shifted(batch.input_ids, 1))
    assert 0.1 < float((choice < 0).float().mean()) < 0.6
    right = gradients(drafter, batch, supervise("served", batch, STEPS, choice), teacher, fused=True)
    wrong = gradients(drafter, batch, supervise("served", batch, STEPS, choice.clamp_min(0)), teacher, fused=True)
    assert worst(wrong[1], right[1]) > 1e-2


def test_feature_term_is_of_every_pair_in_or_out_of_the_vocabulary(setup):
    """Against pairs by hand; a term that leaves out what the vocabulary lacks, or takes the state one slot early, is
    another number."""
    drafter, teacher = setup
    batch = random_batch(STEPS, (33, 21), (9, 0))
    choice = drafter.draft_ids(batch.shifted(batch.input_ids, 1))
    supervision = supervise("served", batch, STEPS, choice)
    hidden = [h.detach() for h in drafter(batch, STEPS)]

    def term(late: int, known_only: bool) -> list[float]:
        sums = []
        for k, h in enumerate(hidden):
            total = 0.0
            for segment in batch.segments:
                counted = slot_mask("served", batch.mask[segment.start : segment.stop], k).nonzero().flatten().tolist()
                for slot in counted:
                    at = segment.start + slot + k + 1
                    if known_only and choice[at] < 0:
                        continue
                    mine = h[int((batch.active == segment.start + slot).nonzero())]
                    state = batch.last[at - 1 + late]
                    total += float((mine - state).square().sum() / state.square().sum())
            sums.append(total * 0.8**k / int(supervision.counted[0].sum()))
        return sums

    loss, sums = ttt_loss(hidden, drafter.lm_head.weight, teacher, batch.last, supervision, feature_weight=2.0)
    assert sums.feature.tolist() == pytest.approx(term(1, False), rel=1e-5)
    assert float(loss.detach()) == pytest.approx(float(sums.loss.sum() + 2 * sums.feature.sum()), rel=1e-6)
    for wrong in (term(0, False), term(1, True)):
        assert sums.feature.tolist() != pytest.approx(wrong, rel=1e-3)


@pytest.mark.parametrize("feature_weight", [0.0, 3.0])
def test_packing_equals_one_sample_at_a_time(setup, feature_weight):
    """No leakage across samples at any step: the packed gradient is the weighted sum of single ones."""
    drafter, teacher = setup
    lengths, prompts = (33, 21, 26), (9, 4, 11)
    batch = random_batch(STEPS, lengths, prompts)
    choice = drafter.draft_ids(batch.shifted(batch.input_ids, 1))
    packed = supervise("served", batch, STEPS, choice)
    whole = gradients(drafter, batch, packed, teacher, fused=True, feature_weight=feature_weight)
    total: dict[str, torch.Tensor] = {}
    from eagle3lab.training.conventions import pack_for

    for s in batch.segments:
        cut = slice(s.start, s.stop)
        single = pack_for(
            "served",
            STEPS,
            batch.input_ids[cut],
            batch.aux[cut],
            batch.last[cut],
            [0, s.stop - s.start],
            batch.mask[cut],
        )
        chosen = drafter.draft_ids(single.shifted(single.input_ids, 1))
        supervision = supervise("served", single, STEPS, chosen)
        share = float(supervision.counted[0].sum()) / float(packed.counted[0].sum())
        alone = gradients(drafter, single, supervision, teacher, fused=True, feature_weight=feature_weight)[1]
        for name, grad in alone.items():
            total[name] = total.get(name, 0) + share * grad
    assert worst(whole[1], total) < 1e-5


def test_check_table():
    """Tokens P0 P1 P2 A0 A1 E: the slots of facts' check table at step 0, for all three rules."""
    mask = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool)
    slots = {name: slot_mask(name, mask, 0).nonzero().flatten().tolist() for name in CONVENTIONS}
    assert slots == {"served": [2, 3], "specforge": [3, 4, 5], "speculators": [2, 3, 4]}


def test_served_chains_do_not_bridge_turns():
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert slot_mask("served", mask, 0).nonzero().flatten().tolist() == [0, 1, 5, 6, 7]
    assert slot_mask("served", mask, 1).nonzero().flatten().tolist() == [0, 5, 6]


def test_out_of_vocabulary_is_a_miss(setup):
    """A drafter that is right inside its vocabulary still misses what it cannot say."""
    drafter, teacher = setup
    batch = random_batch(STEPS, (60,), (0,))
    choice = drafter.draft_ids(batch.shifted(batch.input_ids, 1))
    supervision = supervise("served", batch, STEPS, choice)
    hidden = [torch.zeros(len(batch.active), HIDDEN) for _ in range(STEPS)]
    labels = supervision.labels
    head = torch.zeros(60, HIDDEN)
    for k in range(STEPS):  # make every hidden state point at its label
        hidden[k][supervision.rows[k], 0] = labels.clamp_min(0).float() - 30
        hidden[k][supervision.rows[k], 1] = 1
    ids = torch.arange(60).float() - 30
    head[:, 0], head[:, 1] = 2 * ids, -(ids**2)  # argmax of 2ab - b^2 is b = a
    _, sums = ttt_loss(hidden, head, teacher, batch.last, supervision)
    known = int(((labels >= 0) & supervision.counted[0]).sum())
    assert int(sums.hits[0]) == known < int(sums.counted[0])


def test_a_batch_out_of_vocabulary_trains_nothing_and_counts_as_missed(setup):
    drafter, teacher = setup
    batch = random_batch(STEPS, (33,), (9,))
    supervision = supervise("served", batch, STEPS, torch.full((33,), -1))
    hidden = [h.detach().requires_grad_() for h in drafter(batch, STEPS)]
    loss, sums = ttt_loss(hidden, drafter.lm_head.weight, teacher, batch.last, supervision)
    loss.backward()
    assert float(loss.detach()) == 0 and not any(h.grad.any() for h in hidden)
    assert int(sums.hits.sum()) == 0 < int(sums.counted.sum())


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_a_batch_shorter_than_the_training_is_deep(tokens):
    """Depths past its end supervise nothing; the first ones are as in a shallower training."""
    deep = supervise("served", random_batch(7, (tokens,), (0,)), 7, torch.zeros(tokens, dtype=torch.int64))
    counted = [max(tokens - step - 2, 0) for step in range(7)]
    assert deep.counted.sum(-1).tolist() == counted


def test_nothing_supervised_is_an_error():
    batch = random_batch(2, (9,), (8,))
    with pytest.raises(TrainingError, match="0 supervised tokens"):
        supervise("served", batch, 2, torch.zeros(9, dtype=torch.int64))
