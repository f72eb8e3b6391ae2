"""Chain decoding: the text is the target's own whatever the drafter says, and every end of a reply is counted right."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.acceptance import chain
from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.sampling import Greedy
from eagle3lab.core.errors import AcceptanceError, UsageError
from eagle3lab.targets.generate import generate
from eagle3lab.targets.slots import SlotCache
from tests.acceptance.lab import LIMIT, Oracle, counts_of, lab, some_prompts
from tests.tiny import tiny_config, tiny_drafter, tiny_target

K = 3


@pytest.mark.parametrize("name", ["fresh", "taught"])
@pytest.mark.parametrize("batch", [1, 5, 32])
def test_greedy_text_is_that_of_plain_decoding(name, batch):
    own = lab()
    some = slice(0, 12 if batch == 1 else 40)
    replies = ChainDecoder(own.target, own.drafters[name], K).run(own.prompts[some], max_new_tokens=LIMIT, batch=batch)
    assert [reply.tokens for reply in replies] == own.plain[some]
    # A test of nothing would be one whose drafter is never right or never wrong.
    counts = counts_of(replies, K)
    if name == "taught":
        assert 1.2 < counts.accept_length < K + 1 and min(counts.histogram) > 0
    assert len({len(reply.tokens) for reply in replies}) > 1, "some replies must end before the limit"


def test_a_hundred_prompts_in_single_precision():
    own = lab()
    prompts = some_prompts(100, seed=8, longest=40)
    plain = [reply.tokens for reply in generate(own.target, prompts, max_new_tokens=40, batch=16)]
    replies = ChainDecoder(own.target, own.drafters["taught"], K).run(prompts, max_new_tokens=40, batch=32)
    assert own.target.dtype == torch.float32 and [reply.tokens for reply in replies] == plain
    counts = counts_of(replies, K)
    assert counts.accepted > 0 and counts.histogram[0] > 0


def test_many_rows_are_judged_place_by_place_with_less_work(monkeypatch):
    own, read = lab(), []
    decoder = ChainDecoder(own.target, own.drafters["taught"], K)
    logits = own.target.logits
    monkeypatch.setattr(own.target, "logits", lambda last: read.append(last.shape[:-1].numel()) or logits(last))
    found = []
    for rows in (10**6, 1):
        monkeypatch.setattr(chain, "MANY_ROWS", rows)
        found.append((decoder.run(own.prompts[:40], max_new_tokens=LIMIT, batch=40), sum(read)))
        read.clear()
    (whole, all_places), (by_place, some) = found
    assert whole == by_place and min(counts_of(whole, K).histogram) > 0
    assert some < 0.8 * all_places


def test_a_right_draft_behind_a_refused_one_is_not_kept():
    own = lab()
    decoder = ChainDecoder(own.target, own.drafters["taught"], K)
    last = torch.randn(8, K + 1, own.target.hidden_size, generator=torch.Generator().manual_seed(4))
    choice = own.target.logits(last).argmax(-1)
    drafts = choice[:, :K].clone()
    wrong = torch.tensor([[(row >> place) & 1 for place in range(K)] for row in range(8)])  # all 8 patterns of k = 3
    drafts = (drafts + wrong) % own.target.vocab_size
    agreed, bonus = decoder._judge_by_place(last, drafts)
    expected = Greedy().verify(own.target.logits(last), drafts, decoder.kept, None)
    assert agreed.tolist() == expected[0].tolist() == [3, 0, 1, 0, 2, 0, 1, 0]
    assert bonus.tolist() == expected[1].tolist() == choice[torch.arange(8), agreed].tolist()
    assert agreed.tolist() != (wrong == 0).sum(1).tolist(), "right drafts counted wherever they stand"


def test_a_shared_beginning_is_read_once_and_changes_nothing():
    own, prefix = lab(), [9, 8, 7, 6, 5, 4]
    prompts = [[*prefix, *prompt] for prompt in own.prompts[:12]]
    decoder, read = ChainDecoder(own.target, own.drafters["taught"], K), []
    alone = [decoder.run([prompt], max_new_tokens=LIMIT)[0] for prompt in prompts]

    class Counting(ChainDecoder):
        def _read(self, cache, ids, *rest, **more):
            read.append(ids.numel())
            return super()._read(cache, ids, *rest, **more)

    assert Counting(own.target, own.drafters["taught"], K).run(prompts, max_new_tokens=LIMIT) == alone
    assert read[0] == len(prefix) and read[1] < sum(map(len, prompts))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("changes", [{}, {"norm_output": True}, {"fc_norm": True}, {"norm_before_residual": True}])
def test_text_holds_for_other_chain_lengths_and_variants(k, changes):
    own = lab()
    drafter = tiny_drafter(own.target, **changes).eval().requires_grad_(False)
    replies = ChainDecoder(own.target, drafter, k).run(own.prompts[:8], max_new_tokens=12, batch=8)
    assert [reply.tokens for reply in replies] == [text[:12] for text in own.plain[:8]]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_perfect_copy_accepts_everything_that_the_reply_has_room_for(batch):
    own = lab()
    texts = {tuple(p): t for p, t in zip(own.prompts, own.plain, strict=True)}
    oracle = Oracle(own.target, own.drafters["fresh"], K, texts)
    for reply, text in zip(oracle.run(own.prompts, max_new_tokens=LIMIT, batch=batch), own.plain, strict=True):
        assert reply.tokens == text
        rest = len(text) - 1  # the first token is nobody's draft
        full, left = divmod(rest, K + 1)
        assert reply.accepted == [K] * full + ([min(left, K)] if left else [])


def test_known_answer_one_right_draft_a_chain():
    own = lab()
    texts = {tuple(p): t for p, t in zip(own.prompts, own.plain, strict=True)}
    replies = Oracle(own.target, own.drafters["fresh"], K, texts, right=1).run(own.prompts, max_new_tokens=LIMIT)
    counts = counts_of(replies, K)
    whole = sum((len(text) - 1) // 2 for text in own.plain)
    ends = sum((len(text) - 1) % 2 for text in own.plain)  # a last step whose only token is its draft
    assert counts.histogram == (0, whole + ends, 0, 0)
    assert counts.generated_tokens == sum(map(len, own.plain))


def test_end_token_inside_an_accepted_run_cuts_the_reply_there():
    own = lab()
    texts = {tuple(p): t for p, t in zip(own.prompts, own.plain, strict=True)}
    prompt, text, place = next(
        (p, t, j)
        for p, t in zip(own.prompts, own.plain, strict=True)
        for j in range(2, len(t) - 2, K + 1)  # the second draft of its chain
        if t[j] not in t[:j]
    )
    target = tiny_target()
    target.model.generation_config.eos_token_id = text[place]
    reply = Oracle(target, own.drafters["fresh"], K, texts).run([prompt], max_new_tokens=LIMIT)[0]
    assert reply.tokens == text[: place + 1] and reply.ended
    assert reply.accepted[-1] == 2, "the end token was the second draft of its chain; the third is not accepted"
    plain = generate(target, [prompt], max_new_tokens=LIMIT)[0]
    assert plain.tokens == reply.tokens


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_limit_of_new_tokens(limit):
    own = lab()
    replies = ChainDecoder(own.target, own.drafters["taught"], K).run(own.prompts[:10], max_new_tokens=limit)
    assert [reply.tokens for reply in replies] == [text[:limit] for text in own.plain[:10]]
    assert all(_cut(reply) in (0, 1) for reply in replies)
    assert any(_cut(reply) for reply in replies) or limit < 3


def _cut(reply) -> int:
    """Tokens that the counts promise beyond those of the reply: 1 when the last step's bonus did not fit any more."""
    return 1 + sum(reply.accepted) + len(reply.accepted) - len(reply.tokens)


def test_context_limit_ends_the_reply_and_positions_stay_below_it():
    own = lab()
    target = tiny_target()
    target.context = 20
    seen = []
    rotary = target.backbone.rotary_emb

    def note(_, args, kwargs):
        seen.append(int((kwargs["position_ids"] if "position_ids" in kwargs else args[1]).max()))

    hook = rotary.register_forward_pre_hook(note, with_kwargs=True)
    texts = {tuple(p): t for p, t in zip(own.prompts, own.plain, strict=True)}
    replies = Oracle(target, own.drafters["fresh"], 5, texts).run(own.prompts[:10], max_new_tokens=LIMIT)
    hook.remove()
    for prompt, text, reply in zip(own.prompts, own.plain, replies, strict=False):
        assert reply.tokens == text[: 20 - len(prompt)]
    assert max(seen) == 19
    with pytest.raises(UsageError, match="prompt 0 has 20 tokens"):
        ChainDecoder(target, own.drafters["fresh"], K).run([[5] * 20], max_new_tokens=4)


def test_bad_requests_are_named():
    own = lab()
    decoder = ChainDecoder(own.target, own.drafters["fresh"], K)
    with pytest.raises(UsageError, match="prompt 1 has 0 tokens"):
        decoder.run([[3], []], max_new_tokens=4)
    with pytest.raises(AcceptanceError, match="max_new_tokens 0"):
        decoder.run([[3]], max_new_tokens=0)
    with pytest.raises(AcceptanceError, match="k is 0"):
        ChainDecoder(own.target, own.drafters["fresh"], 0)
    assert decoder.run([], max_new_tokens=4) == []


def test_a_stale_cache_changes_the_text(monkeypatch):
    """The wrong version: rejected tokens stay in the cache because the first write to a slot wins."""
    own = lab()
    right = SlotCache.update

    def stale(self, keys, values, layer_idx, *rest, **more):
        if layer_idx < len(self.keys):
            rows = self._active if self._active is not None else torch.arange(self.rows)
            old = self.keys[layer_idx][rows[:, None], :, self._positions]
            written = (old != 0).any(-1).any(-1)[:, None, :, None]
            keys = torch.where(written, old.transpose(1, 2), keys)
        return right(self, keys, values, layer_idx, *rest, **more)

    monkeypatch.setattr(SlotCache, "update", stale)
    replies = ChainDecoder(own.target, own.drafters["fresh"], K).run(own.prompts[:10], max_new_tokens=LIMIT)
    assert [reply.tokens for reply in replies] != own.plain[:10]


def test_a_bonus_counted_as_accepted_breaks_the_sum_of_tokens():
    """The wrong version: accept length minus bonus. Tokens of a reply = first + accepted + one a step, less the cut."""
    own = lab()
    for reply in ChainDecoder(own.target, own.drafters["taught"], K).run(own.prompts[:10], max_new_tokens=LIMIT):
        yielded = 1 + sum(reply.accepted) + len(reply.accepted)
        assert 0 <= yielded - len(reply.tokens) <= 1
        wrong = 1 + sum(n + 1 for n in reply.accepted) + len(reply.accepted)
        assert not 0 <= wrong - len(reply.tokens) <= 1 or len(reply.accepted) < 2


def test_a_drafter_of_another_target_is_refused():
    own = lab()
    other = tiny_drafter(own.target)
    other.config = tiny_config(vocab_size=96)
    with pytest.raises(AcceptanceError, match="V 96"):
        ChainDecoder(own.target, other, K)


def test_prompts_are_answered_in_their_order():
    own = lab()
    prompts = some_prompts(6, seed=3)
    decoder = ChainDecoder(own.target, own.drafters["fresh"], K)
    together = [r.tokens for r in decoder.run(prompts, max_new_tokens=8, batch=2)]
    assert together == [decoder.run([p], max_new_tokens=8)[0].tokens for p in prompts]
