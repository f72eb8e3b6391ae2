"""A draft with latent attention (Kimi-K2.5's own kind): norms, biases and layers by the rules of its class."""

from __future__ import annotations

from typing import Any

import pytest

from . import conftest
from .healthy import KIMI, config, headers

H, HEADS, Q_RANK, KV_RANK = 7168, 64, 1536, 512
NOPE, ROPE, VALUE = 128, 64, 128
MLA = {
    **{"num_attention_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK},
    **{"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE},
}
ATTENTION = {
    "q_a_proj": [Q_RANK, 2 * H],
    "q_a_layernorm": [Q_RANK],
    "q_b_proj": [HEADS * (NOPE + ROPE), Q_RANK],
    "kv_a_proj_with_mqa": [KV_RANK + ROPE, 2 * H],
    "kv_a_layernorm": [KV_RANK],
    "kv_b_proj": [HEADS * (NOPE + VALUE), KV_RANK],
    "o_proj": [H, HEADS * VALUE],
}


def said(settings: dict[str, Any], more: dict[str, list[int] | None], engine: str, *severities: str) -> str:
    plain = config(KIMI, architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", head_dim=..., **MLA)
    tensors = {name: entry for name, entry in headers(config(KIMI)).items() if ".self_attn." not in name}
    tensors |= {f"midlayer.self_attn.{part}.weight": ["BF16", shape] for part, shape in ATTENTION.items()}
    tensors |= {name: ["BF16", shape] for name, shape in more.items()}
    facts = {
        "target": dict(KIMI),
        "draft_config": plain | settings,
        "draft_headers": {name: entry for name, entry in tensors.items() if entry[1] is not None},
    }
    return conftest.said(facts, engine, *severities)


LAYER = "midlayer.self_attn."
FC_NORM = {f"fc_norm.{i}.weight": [H] for i in range(3)}


@pytest.mark.parametrize(
    ("settings", "more", "engine", "words"),
    [
        ({"norm_before_fc": True}, {"input_norm.weight": [3 * H]}, "sglang", "the MLA draft has no norm_before_fc"),
        ({"fc_norm": True}, {}, "sglang", "fc_norm is set and fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ({}, FC_NORM, "sglang", "fc_norm.0.weight [7168]"),
        ({"bias": True}, {}, "sglang", "missing key fc.bias [7168]"),
        ({}, {f"{LAYER}kv_b_proj.weight": None}, "sglang", "missing key midlayer.self_attn.kv_b_proj.weight"),
        ({}, {f"{LAYER}q_a_proj.weight": [1536, H]}, "sglang", "q_a_proj"),
        ({}, {f"{LAYER}fused_qkv_a_proj_with_mqa.weight": [2112, H]}, "sglang", "fused_qkv_a_proj_with_mqa"),
        ({"num_hidden_layers": 2}, {}, "sglang", "SGLang's MLA draft takes 1 only and stops"),
        ({}, {f"{LAYER}q_norm.weight": [192]}, "vllm", "1 unknown key (midlayer.self_attn.q_norm.weight)"),
    ],
)
def test_fault(settings: dict[str, Any], more: dict[str, list[int] | None], engine: str, words: str) -> None:
    assert words in said(settings, more, engine, "error")


@pytest.mark.parametrize("engine", ["sglang", "vllm", ""])
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"fc_norm": True}, FC_NORM),
        (
            {},
            {f"{LAYER}q_a_proj.weight": None, f"{LAYER}kv_a_proj_with_mqa.weight": None}
            | {f"{LAYER}fused_qkv_a_proj_with_mqa.weight": [1536 + 512 + 64, 2 * H]},
        ),
    ],
    ids=["plain", "fc_norm", "fused"],
)
def test_healthy(settings: dict[str, Any], more: dict[str, list[int] | None], engine: str) -> None:
    assert said(settings, more, engine, "error", "warning") == ""
