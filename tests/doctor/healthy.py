"""Facts of a healthy drafter in any size: the starting point that the tests damage in one place at a time."""

from __future__ import annotations

import copy
from typing import Any

QWEN = {"blocks": 36, "hidden_size": 4096, "vocab_size": 151936, "family": "qwen3", "max_position_embeddings": 40960}
KIMI = {
    "blocks": 61,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "family": "kimi_k25",
    "max_position_embeddings": 262144,
}
SERVE = ["--model-path", "TARGET", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "DRAFT"]


def config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A Llama EAGLE-3 config for the target, as SGLang reads it; a change to `...` leaves the key out."""
    hidden = target["hidden_size"]
    base = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3 * hidden,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def headers(
    draft: dict[str, Any], state: int | None = None, states: int = 3, layer: str = "midlayer"
) -> dict[str, Any]:
    """The tensors that go with a config: name -> [dtype, shape]."""
    hidden, inner = draft["hidden_size"], draft["intermediate_size"]
    q, kv = draft["num_attention_heads"] * draft["head_dim"], draft["num_key_value_heads"] * draft["head_dim"]
    shapes = {
        "fc.weight": [hidden, states * (state or hidden)],
        f"{layer}.input_layernorm.weight": [hidden],
        f"{layer}.hidden_norm.weight": [hidden],
        f"{layer}.post_attention_layernorm.weight": [hidden],
        f"{layer}.self_attn.q_proj.weight": [q, 2 * hidden],
        f"{layer}.self_attn.k_proj.weight": [kv, 2 * hidden],
        f"{layer}.self_attn.v_proj.weight": [kv, 2 * hidden],
        f"{layer}.self_attn.o_proj.weight": [hidden, q],
        f"{layer}.mlp.gate_proj.weight": [inner, hidden],
        f"{layer}.mlp.up_proj.weight": [inner, hidden],
        f"{layer}.mlp.down_proj.weight": [hidden, inner],
        "norm.weight": [hidden],
        "lm_head.weight": [draft["draft_vocab_size"], hidden],
    }
    found: dict[str, Any] = {name: ["BF16", shape] for name, shape in shapes.items()}
    found["d2t"], found["t2d"] = ["I64", [draft["draft_vocab_size"]]], ["BOOL", [draft["vocab_size"]]]
    return found


def served(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A whole healthy case: launch line, target, config and headers."""
    draft = config(target, **changes)
    whole = {"launch_args": list(SERVE), "target": dict(target), "draft_config": draft}
    return {**whole, "draft_headers": headers({**config(target), **draft})}


def damaged(facts: dict[str, Any], *path: str, value: Any = ...) -> dict[str, Any]:
    """A copy with one place changed (`...` removes it)."""
    changed = copy.deepcopy(facts)
    place = changed
    for key in path[:-1]:
        place = place.setdefault(key, {})
    if value is ...:
        place.pop(path[-1])
    else:
        place[path[-1]] = value
    return changed
