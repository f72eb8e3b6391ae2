"""The same drafter under two flags: fc called at 3 H, or walked past, and the text the target's own both times."""

from __future__ import annotations

import copy

import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.flags import FlaggedDecoder, serve
from tests.acceptance.lab import LIMIT, lab
from tests.tiny import HIDDEN, POINTS

K = 3


def served(algorithm, drafter=None):
    own = lab()
    names = [f"p{i}" for i in range(8)]
    drafter = drafter or own.drafters["taught"]
    return serve(own.target, drafter, own.prompts[:8], names, algorithm=algorithm, k=K, max_new_tokens=LIMIT)


def drafts(found):
    return [reply.drafts for reply in found.replies]


def test_eagle3_is_plain_chain_decoding():
    own = lab()
    found = served("EAGLE3")
    plain = ChainDecoder(own.target, own.drafters["taught"], K).run(own.prompts[:8], max_new_tokens=LIMIT)
    assert found.replies == plain and found.counts.accepted > 0
    assert found.handed == len(POINTS) * HIDDEN and found.embedding == HIDDEN
    assert found.fc_inputs and set(found.fc_inputs) == {len(POINTS) * HIDDEN}


def test_eagle_walks_past_fc_and_writes_the_same_text():
    own, found = lab(), served("EAGLE")
    assert found.handed == found.embedding == HIDDEN and found.fc_inputs == []
    assert [reply.tokens for reply in found.replies] == own.plain[:8]
    assert found.counts.accepted < served("EAGLE3").counts.accepted


def test_fc_decides_nothing_under_eagle():
    """Another fc, other drafts; where fc is skipped, the same drafts."""
    broken = copy.deepcopy(lab().drafters["taught"])
    with torch.no_grad():
        broken.fc.weight.fill_(7.0)
    assert drafts(served("EAGLE", broken)) == drafts(served("EAGLE"))
    assert drafts(served("EAGLE3", broken)) != drafts(served("EAGLE3"))


def test_the_head_is_the_targets_under_eagle():
    """Another head of the drafter changes nothing there, and drafts may lie outside the draft vocabulary."""
    other = copy.deepcopy(lab().drafters["taught"])
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert drafts(served("EAGLE", other)) == drafts(served("EAGLE"))
    assert drafts(served("EAGLE3", other)) != drafts(served("EAGLE3"))


def test_a_wrong_emulation_is_noticed(monkeypatch):
    """Handing the captured states to the drafter although the flag says EAGLE would call fc."""
    monkeypatch.setattr(FlaggedDecoder, "_read", ChainDecoder._read)
    assert served("EAGLE").fc_inputs != []


def test_the_drafter_is_left_as_it_was():
    drafter = lab().drafters["taught"]
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    served("EAGLE")
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert not drafter.fc._forward_hooks and drafter.lm_head.weight.shape[0] == drafter.config.draft_vocab_size
