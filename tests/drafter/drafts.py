"""Checkpoints for tests, written without torch and with names spelt by hand, not by the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

H, HT, INNER, HEADS, KV, DIM, V, VD = 8, 8, 12, 2, 1, 4, 20, 6
KEPT = np.array([0, 3, 4, 11, 18, 19])
MLA = {"q_lora_rank": 5, "kv_lora_rank": 3, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}


def llama_tensors(
    layer: str = "midlayer", *, vd: int = VD, points: int = 3, extra: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Weights of a Llama drafter. `extra`: fc_norm, input_norm, embed."""
    shapes = {
        "fc.weight": (H, points * HT),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.post_attention_layernorm.weight": (H,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * DIM, 2 * H),
        f"{layer}.self_attn.k_proj.weight": (KV * DIM, 2 * H),
        f"{layer}.self_attn.v_proj.weight": (KV * DIM, 2 * H),
        f"{layer}.self_attn.o_proj.weight": (H, HEADS * DIM),
        **_tail(layer, vd),
    }
    if "fc_norm" in extra:
        shapes |= {f"fc_norm.{i}.weight": (HT,) for i in range(points)}
    if "input_norm" in extra:
        shapes["input_norm.weight"] = (points * HT,)
    if "embed" in extra:
        shapes["embed_tokens.weight"] = (V, H)
    return _filled(shapes, vd)


def mla_tensors(layer: str = "layers.0", *, vd: int = V) -> dict[str, np.ndarray]:
    """Weights of an MLA drafter, by default with the target's whole vocabulary."""
    shapes = {
        "fc.weight": (H, 3 * HT),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.post_attention_layernorm.weight": (H,),
        f"{layer}.self_attn.q_a_proj.weight": (5, 2 * H),
        f"{layer}.self_attn.q_a_layernorm.weight": (5,),
        f"{layer}.self_attn.q_b_proj.weight": (HEADS * 6, 5),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (3 + 2, 2 * H),
        f"{layer}.self_attn.kv_a_layernorm.weight": (3,),
        f"{layer}.self_attn.kv_b_proj.weight": (HEADS * 8, 3),
        f"{layer}.self_attn.o_proj.weight": (H, HEADS * 4),
        **_tail(layer, vd),
    }
    return _filled(shapes, vd)


def _tail(layer: str, vd: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.mlp.gate_proj.weight": (INNER, H),
        f"{layer}.mlp.up_proj.weight": (INNER, H),
        f"{layer}.mlp.down_proj.weight": (H, INNER),
        "norm.weight": (H,),
        "lm_head.weight": (vd, H),
    }


def _filled(shapes: Mapping[str, tuple[int, ...]], vd: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    tensors = {name: draw.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    if vd != V:
        tensors["d2t"] = KEPT - np.arange(len(KEPT))
        tensors["t2d"] = np.isin(np.arange(V), KEPT)
    return tensors


def raw_config(nested: list[int] | None = None, top: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """A config as SGLang and vLLM read it, of no trainer in particular."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": V,
        "draft_vocab_size": VD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 7,
        "initializer_range": 0.02,
    }
    if nested is not None:
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested}
    if top is not None:
        config["eagle_aux_hidden_state_layer_ids"] = top
    return config | changes


def mla_config(nested: list[int], **changes: Any) -> dict[str, Any]:
    """A config of an MLA drafter with the target's whole vocabulary."""
    config = raw_config(nested, draft_vocab_size=V, **MLA) | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_key_value_heads": HEADS,
    }
    del config["head_dim"]
    return config | changes


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A drafter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
