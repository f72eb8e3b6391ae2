"""Sampling keeps the distribution: chi-square over 20,000 draws, and rules that are nearly right are caught."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.sampling import Greedy, Rejection, TargetOnly, overlap, rule_for
from eagle3lab.acceptance.tree import DynamicTree, StaticTree
from eagle3lab.acceptance.tree_decode import TreeDecoder
from eagle3lab.core.errors import UsageError
from eagle3lab.drafter.init import build_drafter
from tests.tiny import tiny_config, tiny_target

VOCAB, KEPT, PROMPT, DRAWS, K = 6, [0, 2, 3, 5], [2, 4, 3], 20_000, 2
TEMPERATURE = 4.0
"""The tiny target's weights are large; at 4 every token has a chance that 20,000 draws can show."""


@cache
def pair():
    """A target over 6 tokens and a fresh drafter that knows 4 of them."""
    torch.set_num_threads(1)
    target = tiny_target(seed=1, vocab=VOCAB)
    config = tiny_config(len(KEPT), vocab_size=VOCAB)
    drafter = build_drafter(config, target, torch.tensor(KEPT), seed=1)[0].eval().requires_grad_(False)
    return target, drafter


@cache
def exact() -> dict[tuple[int, ...], float]:
    """Probability of every text of 3 new tokens (shorter when it ends with token 1)."""
    target, _ = pair()
    stop = target.eos_ids[0]
    texts: dict[tuple[int, ...], float] = {}
    for tokens in product(range(VOCAB), repeat=3):
        last, _ = target.states(torch.tensor([[*PROMPT, *tokens]]))
        p = (target.logits(last[0, len(PROMPT) - 1 : -1]) / TEMPERATURE).softmax(-1)
        end = tokens.index(stop) + 1 if stop in tokens else 3
        chance = float(np.prod([float(p[i, tokens[i]]) for i in range(end)]))
        texts[tokens[:end]] = chance
    return texts


def p_value(decoder: ChainDecoder) -> float:
    """Chi-square of 20,000 sampled texts against `exact`; cells below 5 expected are pooled."""
    replies = decoder.run([PROMPT] * DRAWS, max_new_tokens=3, batch=5000)
    seen: dict[tuple[int, ...], int] = {}
    for reply in replies:
        seen[tuple(reply.tokens)] = seen.get(tuple(reply.tokens), 0) + 1
    assert sum(exact().values()) == pytest.approx(1.0, abs=1e-4) and not set(seen) - set(exact())
    cells = [(seen.get(text, 0), chance * DRAWS) for text, chance in exact().items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    large += [(sum(c[0] for c in rest), sum(c[1] for c in rest))] if rest else []
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in large if expected > 0)
    freedom = torch.tensor((len(large) - 1) / 2, dtype=torch.float64)
    return float(1 - torch.special.gammainc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


class Careless(Rejection):
    """Base of rules that are wrong in one place."""

    def verify(self, logits, drafts, kept, q):
        p = (logits / self.temperature).softmax(-1)
        spread = torch.zeros_like(p[:, : drafts.shape[1]])
        spread[..., kept] = q
        agreed = self.judge(p, spread, drafts)
        row = torch.arange(len(drafts))
        return agreed, self._draw(self.residual(p, spread, agreed, row))

    def judge(self, p, spread, drafts):
        at = drafts[..., None]
        chance = p[:, :-1].gather(-1, at)[..., 0] / spread.gather(-1, at)[..., 0]
        return (torch.rand(drafts.shape, generator=self.generator) < chance).long().cumprod(1).sum(1)

    def residual(self, p, spread, agreed, row):
        own = p[row, agreed]
        rest = (own - spread[row, agreed.clamp(max=spread.shape[1] - 1)]).clamp_min(0)
        return torch.where((agreed == spread.shape[1])[:, None], own, rest)


class FreshDraw(Careless):
    """Wrong: after a refusal the token comes from p instead of max(0, p - q)."""

    def residual(self, p, spread, agreed, row):
        return p[row, agreed]


class Renormalised(Careless):
    """Wrong: p is renormalised on the draft vocabulary before it is compared, so drafts are kept too often."""

    def judge(self, p, spread, drafts):
        known = spread.sum(1, keepdim=True) > 0
        return super().judge(
            torch.cat([p[:, :-1] * known, p[:, -1:]], 1) / (p * known).sum(-1, keepdim=True), spread, drafts
        )


class DraftIds(Careless):
    """Wrong: the residual subtracts q by draft id, as if the vocabularies were one."""

    def residual(self, p, spread, agreed, row):
        q = torch.cat([spread[..., KEPT], torch.zeros(*spread.shape[:2], VOCAB - len(KEPT))], -1)
        return super().residual(p, q, agreed, row) + 1e-9


def test_the_careless_base_is_itself_right():
    assert p_value(ChainDecoder(*pair(), K, Careless(TEMPERATURE, 5))) > 1e-3


@pytest.mark.parametrize(
    "rule", [Rejection(TEMPERATURE, 11), TargetOnly(TEMPERATURE, 12)], ids=["rejection", "target-only"]
)
def test_chain_sampling_keeps_the_distribution(rule):
    assert p_value(ChainDecoder(*pair(), K, rule)) > 1e-3


@pytest.mark.parametrize("shape", [StaticTree.branching([2, 2]), DynamicTree(2, 2, 4)], ids=["static", "dynamic"])
def test_tree_sampling_keeps_the_distribution(shape):
    assert p_value(TreeDecoder(*pair(), shape, TargetOnly(TEMPERATURE, 13))) > 1e-3


@pytest.mark.parametrize("rule", [FreshDraw, Renormalised, DraftIds])
def test_wrong_rules_are_caught(rule):
    assert p_value(ChainDecoder(*pair(), K, rule(TEMPERATURE, 17))) < 1e-6


def test_a_tree_rule_that_prefers_drafts_is_caught():
    """Wrong: a child that is likely enough is taken without a draw (typical acceptance)."""

    class Typical(TargetOnly):
        def choose(self, logits):
            p = (logits / self.temperature).softmax(-1)
            best = p.max(-1)
            return torch.where(best.values > 0.3, best.indices, super().choose(logits))

    assert p_value(TreeDecoder(*pair(), StaticTree.branching([2, 2]), Typical(TEMPERATURE, 13))) < 1e-6


@pytest.mark.parametrize("k", [1, 4])
def test_first_draft_is_kept_as_often_as_min_p_q_says(k):
    """Known chance: sum(min(p, q)) with q on 2 of 4 tokens; the reduced vocabulary caps it."""
    p, q, kept = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.75, 0.25]), torch.tensor([1, 3])
    assert float(overlap(p, q, kept)) == pytest.approx(0.2 + 0.25)
    rule = Rejection(1.0, 3)
    rows = 20_000
    logits = p.log().expand(rows, k + 1, 4)
    drafted, weights = rule.draft(q.log().expand(rows, 2))
    drafts = kept[drafted][:, None].expand(-1, k)
    agreed, bonus = rule.verify(logits, drafts, kept, weights[:, None].expand(-1, k, -1))
    share = float((agreed > 0).float().mean())
    assert share == pytest.approx(0.45, abs=4 * (0.45 * 0.55 / rows) ** 0.5)
    if k == 1:
        first = torch.where(agreed > 0, drafts[:, 0], bonus)
        assert (torch.bincount(first, minlength=4) / rows).tolist() == pytest.approx(p.tolist(), abs=0.015)


def test_equal_distributions_keep_everything_and_never_divide_by_zero():
    rule = Rejection(0.7, 3)
    logits = torch.randn(500, 9, generator=torch.Generator().manual_seed(0))
    drafted, q = rule.draft(logits)
    agreed, bonus = rule.verify(logits[:, None].expand(-1, 2, -1), drafted[:, None], torch.arange(9), q[:, None])
    assert agreed.float().mean() > 0.99 and int(bonus.min()) >= 0


def test_same_seed_same_text_other_seed_other_text():
    texts = [
        [r.tokens for r in ChainDecoder(*pair(), K, Rejection(TEMPERATURE, seed)).run([PROMPT] * 20, max_new_tokens=12)]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_rules_are_chosen_and_refused_by_name():
    assert isinstance(rule_for(0), Greedy) and not isinstance(rule_for(0), TargetOnly)
    assert isinstance(rule_for(0.5), Rejection)
    assert type(rule_for(0.5, sampled_drafts=False)) is TargetOnly
    with pytest.raises(UsageError, match=r"temperature is -0\.1"):
        rule_for(-0.1)
    with pytest.raises(UsageError, match="rejection sampling of a tree"):
        TreeDecoder(*pair(), StaticTree.branching([1]), Rejection(1.0))
