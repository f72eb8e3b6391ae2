"""Small real objects for tests: a random Llama target with a word-like tokenizer, and a drafter for it."""

from __future__ import annotations

import torch
import transformers

from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.init import build_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import ATTENTION, grouped_attention
from eagle3lab.training.conventions import pack_for

VOCAB, HIDDEN, BLOCKS, POINTS = 97, 32, 8, [2, 4, 5]


class Tokens:
    """Stands for a tokenizer where a test needs none."""


def tiny_target(seed: int = 0, vocab: int = VOCAB) -> Target:
    """An 8-block Llama with 4 query heads on 2 key/value heads, fp32; weights large enough for text that varies."""
    transformers.AttentionInterface.register(ATTENTION, grouped_attention)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
        attn_implementation=ATTENTION,
    )
    return Target(transformers.LlamaForCausalLM(config), Tokens())


def tiny_config(draft_vocab: int = 60, **changes: object) -> DraftConfig:
    """A drafter's shape for `tiny_target`."""
    values = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "points": POINTS,
        "target_blocks": BLOCKS,
        "target_family": "llama",
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
    }
    return DraftConfig(**(values | changes))


def tiny_drafter(target: Target, seed: int = 0, draft_vocab: int = 60, **changes: object) -> Eagle3Drafter:
    """A fresh drafter whose vocabulary leaves out some of the target's tokens."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    return build_drafter(tiny_config(draft_vocab, **changes), target, kept, seed=seed)[0]


def random_batch(
    steps: int, lengths: tuple[int, ...], prompts: tuple[int, ...], seed: int = 0, convention: str = "served"
) -> Packed:
    """A packed batch of random states; sample i has `prompts[i]` unsupervised tokens first."""
    torch.manual_seed(seed)
    total, offsets = sum(lengths), [0]
    mask = torch.zeros(total, dtype=torch.bool)
    for length, prompt in zip(lengths, prompts, strict=True):
        mask[offsets[-1] + prompt : offsets[-1] + length] = True
        offsets.append(offsets[-1] + length)
    ids = torch.randint(0, VOCAB, (total,))
    aux, last = torch.randn(total, HIDDEN * len(POINTS)), torch.randn(total, HIDDEN)
    return pack_for(convention, steps, ids, aux, last, offsets, mask)
