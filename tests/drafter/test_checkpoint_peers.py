"""Rotary scaling and latent attention against transformers' own code; and an MLA drafter that decodes."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.core.errors import CheckpointError
from eagle3lab.drafter.attention import reference_attention
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.mla import LatentAttention
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Segment
from eagle3lab.drafter.rope import rotary, softmax_factor
from tests.tiny import HIDDEN, VOCAB, tiny_config, tiny_target

KIMI = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("scaling", "theta", "dim"),
    [
        (KIMI, 50000.0, 64),
        (KIMI | {"beta_fast": 1.0}, 50000.0, 64),
        ({k: v for k, v in KIMI.items() if "mscale" not in k}, 10000.0, 128),
        (KIMI | {"mscale": 0.707, "mscale_all_dim": 0.3, "truncate": False}, 1e6, 128),
        (LLAMA31, 500000.0, 128),
        ({"rope_type": "linear", "factor": 4.0}, 10000.0, 64),
    ],
)
def test_frequencies_equal_transformers(scaling, theta, dim):
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=262144,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device="cpu")
    ours, ours_factor = rotary(dim, theta, scaling)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0) and abs(ours_factor - factor) < 1e-6
    unscaled = rotary(dim, theta, None)[0]  # the wrong version: the scaling ignored
    assert float((unscaled / theirs - 1).abs().max()) > 1


def test_unknown_scaling_is_refused():
    with pytest.raises(CheckpointError, match="rope_type 'longrope'"):
        rotary(64, 10000.0, {"type": "longrope", "factor": 4.0})
    with pytest.raises(CheckpointError, match="llama3 needs a number low_freq_factor"):
        rotary(64, 10000.0, {k: v for k, v in LLAMA31.items() if k != "low_freq_factor"})


def mla_draft(**changes: object) -> DraftConfig:
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
    return tiny_config(architecture="mla", mla=sizes, num_key_value_heads=4, head_dim=14, **changes)


def test_latent_attention_equals_deepseek_v3():
    """DeepSeek-V3's layer of transformers on the 2H-wide input, YaRN included (its latent norms have eps 1e-6)."""
    config = mla_draft(rope_scaling=KIMI, rope_theta=50000.0, rms_norm_eps=1e-6)
    theirs_config = DeepseekV3Config(
        hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=4,
        **(config.mla or {}),
        max_position_embeddings=262144,
        rope_parameters=KIMI | {"rope_theta": 50000.0},
        rope_interleave=True,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    ours, theirs = LatentAttention(config), DeepseekV3Attention(theirs_config, 0)
    theirs.o_proj = torch.nn.Linear(4 * 5, HIDDEN, bias=False)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter.dim() == 1))
    theirs.load_state_dict(ours.state_dict())
    u, size = torch.randn(9, 2 * HIDDEN), 9
    places = torch.arange(size)[None]
    mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
    drafter = Eagle3Drafter(config, torch.randn(VOCAB, HIDDEN), torch.zeros(60, dtype=torch.int64))

    def run(scale: float) -> torch.Tensor:
        cos, sin = drafter.angles(places[0])
        key, value = ours.key_value(u, cos, sin)
        mixed = reference_attention(ours.query(u, cos, sin), key, value, [], (Segment(0, 0, size, 0),), scale)
        return ours.o_proj(mixed.flatten(1))

    with torch.no_grad():
        wanted = theirs(u[None], DeepseekV3RotaryEmbedding(theirs_config)(u[None], places), mask)[0][0]
        assert float((run(ours.scale) - wanted).abs().max()) < 1e-4
        assert softmax_factor(KIMI) > 2  # the wrong version: YaRN's factor left out of the scores
        assert float((run(ours.head_dim**-0.5) - wanted).abs().max()) > 1e-2


def test_an_mla_drafter_decodes_losslessly():
    """The same module in the slot cache of the decoder: greedy text is the target's own, drafts are the module's."""
    target = tiny_target()
    torch.manual_seed(2)
    kept = torch.arange(60)
    drafter = Eagle3Drafter(mla_draft(), target.embedding.weight.detach(), kept - torch.arange(60)).requires_grad_(
        False
    )
    prompts = [[5, 9, 11, 3], [7, 2, 2, 8, 13, 4]]
    replies = ChainDecoder(target, drafter, 3).run(prompts, max_new_tokens=12)
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = list(prompt)
        for token in reply.tokens:
            last, _ = target.states(torch.tensor([ids]))
            assert int(target.logits(last[0, -1]).argmax()) == token
            ids.append(token)
        assert reply.drafts and all(len(draft) == 3 for draft in reply.drafts)
