"""Batched generation gives every prompt the text it has alone, whatever leaves the batch or is shared in it."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.core.errors import UsageError
from eagle3lab.targets.generate import generate
from eagle3lab.targets.slots import SlotCache, closed_up, padded, prefill_groups, prefix_length
from tests.tiny import VOCAB, tiny_target

LIMIT = 24


def prompts_with(prefix: list[int], count: int = 30) -> list[list[int]]:
    """Prompts of 1 to 9 tokens after a common prefix."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 10, (count,), generator=generator).tolist()
    return [[*prefix, *torch.randint(2, VOCAB, (n,), generator=generator).tolist()] for n in lengths]


@pytest.mark.parametrize("prefix", [[], [7, 8, 9, 10, 11]], ids=["nothing shared", "shared"])
@pytest.mark.parametrize("batch", [4, 11, 64])
def test_text_does_not_depend_on_the_batch(prefix, batch):
    target, prompts = tiny_target(), prompts_with(prefix)
    alone = [generate(target, [prompt], max_new_tokens=LIMIT)[0] for prompt in prompts]
    assert generate(target, prompts, max_new_tokens=LIMIT, batch=batch) == alone
    assert len({len(reply.tokens) for reply in alone}) > 1, "some replies must end before the limit"


@pytest.mark.parametrize("fault", ["rows are not moved", "one slot too few", "shared by row 0 alone"])
def test_wrong_caches_change_the_text(fault, monkeypatch):
    target, prompts = tiny_target(), prompts_with([7, 8, 9, 10, 11])
    right = [reply.tokens for reply in generate(target, prompts, max_new_tokens=LIMIT, batch=64)]
    keep = SlotCache.keep
    if fault == "rows are not moved":
        monkeypatch.setattr(SlotCache, "keep", lambda self, rows, used: keep(self, torch.arange(len(rows)), used))
    elif fault == "one slot too few":
        monkeypatch.setattr(SlotCache, "keep", lambda self, rows, used: keep(self, rows, used - 1))
    else:
        monkeypatch.setattr(SlotCache, "share", lambda self, count: None)
    assert [reply.tokens for reply in generate(target, prompts, max_new_tokens=LIMIT, batch=64)] != right


def test_a_reply_ends_where_the_context_is_full():
    """As speculative decoding ends there: a longer plain reply would look like a fault of the decoder."""
    target, prompts = tiny_target(), prompts_with([7, 8, 9])
    whole = [reply.tokens for reply in generate(target, prompts, max_new_tokens=LIMIT)]
    target.context = 16
    cut = generate(target, prompts, max_new_tokens=LIMIT)
    assert [reply.tokens for reply in cut] == [text[: 16 - len(p)] for text, p in zip(whole, prompts, strict=True)]
    assert any(len(text) > 16 - len(p) for text, p in zip(whole, prompts, strict=True))
    with pytest.raises(UsageError, match=r"prompt 1 has 16 tokens; 1 or more, and below the context of 16"):
        generate(target, [[1], [1] * 16], max_new_tokens=1)
    with pytest.raises(UsageError, match="prompt 0 has 0 tokens"):
        generate(target, [[]], max_new_tokens=1)


def test_rows_close_up_from_the_end():
    assert closed_up([True, False, True, False, True]).tolist() == [0, 4, 2]
    assert closed_up([False, False]).tolist() == [] and closed_up([True, True]).tolist() == [0, 1]
    assert closed_up([False, True, True]).tolist() in ([2, 1], [1, 2])


def test_what_prompts_share():
    assert prefix_length([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 9]]) == 2
    assert prefix_length([[1, 2], [1, 2], [1, 2, 3]]) == 1, "every prompt keeps a token of its own to be read"
    assert prefix_length([[1, 2, 3]]) == prefix_length([]) == prefix_length([[4], [4, 5]]) == 0


def test_prompts_are_read_in_groups_of_a_size():
    assert prefill_groups([2, 3, 4, 90, 91], tokens=12) == [range(0, 3), range(3, 4), range(4, 5)]
    assert prefill_groups([]) == [] and prefill_groups([5000]) == [range(0, 1)]
    assert padded([[1], [2, 3]]).tolist() == [[1, 0], [2, 3]]


def test_a_target_without_its_blocks_refuses_to_read():
    """Training on stored states lets go of them: what is left must not pass for a model of no blocks."""
    target = tiny_target()
    prompt, before = prompts_with([])[0], target.head.weight.clone()
    target.release_blocks()
    assert torch.equal(target.head.weight, before)
    with pytest.raises(UsageError, match="blocks were released"):
        generate(target, [prompt], max_new_tokens=1)
