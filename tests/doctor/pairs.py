"""For every check one input that fails and its neighbour that passes. Sizes are not those of the cases.

PAIRS: code -> (engine or "", failing facts, passing facts). A check that only informs fails by saying so: its failing
input must give a finding of that code, its passing one none above info of that code, and not the same finding.
"""

from __future__ import annotations

from typing import Any

from .healthy import KIMI, QWEN, SERVE, config, damaged, served
from .pairs_artefacts import PAIRS as ARTEFACTS
from .pairs_runs import PAIRS as RUNS

Pair = tuple[str, dict[str, Any], dict[str, Any]]

GOOD = served(QWEN)
DRAFT = config(QWEN)
SMALL = {"vocab_size": 12, "draft_vocab_size": 4}
MLA_BACKEND = [*SERVE, "--attention-backend", "flashmla"]
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
LEGACY = {f"aux_norm_{part}.weight": ["BF16", [4096]] for part in ("low", "mid", "high")}


def points(ids: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"target": dict(QWEN), "draft_config_ids": ids, **more}


def embeddings(*rows: list[float]) -> dict[str, Any]:
    target = [[0.5, -1.0, 0.25], [2.0, 0.125, -0.5], [1.0, 1.5, -2.0]]
    return {
        "target_embed_tokens": {"dtype": "F32", "values": target},
        "draft_embed_tokens": {"dtype": "F32", "values": [list(row) for row in rows] or target},
    }


PACKED = damaged(GOOD, "draft_config", "quantization_config", value={"quant_method": "compressed-tensors"})


def quantised(*ends: str) -> dict[str, Any]:
    """Headers of GOOD with the weights of these names packed, eight 4-bit numbers in one integer."""
    found: dict[str, Any] = {}
    for name, (dtype, shape) in GOOD["draft_headers"].items():
        if name.endswith(ends):
            found[f"{name}_packed"] = ["I32", [shape[0], shape[1] // 8]]
            found[f"{name}_scale"] = ["BF16", [shape[0], shape[1] // 32]]
        else:
            found[name] = [dtype, shape]
    return found


LATENT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "hidden_size": 4096,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
}


def without_rank() -> dict[str, Any]:
    return {"draft_config": {**LATENT, "q_lora_rank": None}}


def renamed(old: str, new: str) -> dict[str, Any]:
    return {**GOOD, "draft_headers": {name.replace(old, new): e for name, e in GOOD["draft_headers"].items()}}


def with_tensor(**more: Any) -> dict[str, Any]:
    return {**GOOD, "draft_headers": {**GOOD["draft_headers"], **more}}


def map_of(d2t: list[int], kept: list[int] | None = None, **more: Any) -> dict[str, Any]:
    marks = {"t2d_true_ids": kept} if kept else {}
    return {"draft_config": dict(SMALL), "d2t": d2t, **marks, **more}


PAIRS: dict[str, Pair] = {
    "launch-algorithm": ("sglang", damaged(GOOD, "launch_args", value=[*SERVE, "--speculative-algo=nextn"]), GOOD),
    "launch-options": (
        "sglang",
        {"launch_args": [*SERVE, "--speculative-num-steps", "three"]},
        {"launch_args": [*SERVE, "--speculative-num-steps", "3"]},
    ),
    "rope-values": (
        "",
        damaged(GOOD, "draft_config", "rope_scaling", value={"rope_type": "yran", "factor": 4.0}),
        damaged(GOOD, "draft_config", "rope_scaling", value={"rope_type": "yarn", "factor": 4.0}),
    ),
    "launch-draft-path": ("sglang", {"launch_args": ["--speculative-algorithm", "eagle3"]}, {"launch_args": SERVE}),
    "launch-draft-attention": (
        "sglang",
        damaged(GOOD, "launch_args", value=MLA_BACKEND),
        damaged(GOOD, "launch_args", value=[*MLA_BACKEND, "--speculative-draft-attention-backend", "fa3"]),
    ),
    "env-simulated-acceptance": (
        "sglang",
        {"launch_args": ["SGLANG_SIMULATE_ACC_LEN=2.5", "python3", *SERVE]},
        {"launch_args": SERVE, "env": {"SGLANG_SIMULATE_ACC_LEN": "0"}},
    ),
    "config-values": ("", {"draft_config": {"hidden_size": "4096"}}, {"draft_config": {"hidden_size": 4096}}),
    "config-norm-before-residual": (
        "sglang",
        {"draft_config": config(QWEN, eagle_config={"norm_before_residual": True})},
        {"draft_config": config(QWEN, norm_before_residual=False)},
    ),
    "config-class": (
        "sglang",
        {"draft_config": config(QWEN, architectures=["Eagle3LlamaForCausalLM"])},
        {"draft_config": DRAFT},
    ),
    "config-tied-head": (
        "sglang",
        damaged(GOOD, "draft_config", "tie_word_embeddings", value=True),
        GOOD,
    ),
    "config-format": ("sglang", {"draft_config": {"speculators_model_type": "eagle3"}}, {"draft_config": DRAFT}),
    "config-target-hidden-null": (
        "sglang",
        {"draft_config": config(QWEN, target_hidden_size=None)},
        {"draft_config": config(QWEN, target_hidden_size=4096)},
    ),
    "config-draft-vocab-missing": (
        "sglang",
        {"draft_config": config(QWEN, draft_vocab_size=...), "draft_headers": GOOD["draft_headers"]},
        {"draft_config": config(QWEN, draft_vocab_size=None), "draft_headers": GOOD["draft_headers"]},
    ),
    "config-vocabulary": (
        "",
        {"target": KIMI, "draft_config": DRAFT},
        {"target": QWEN, "draft_config": DRAFT},
    ),
    "config-oddities": (
        "",
        {"target": {"rms_norm_eps": 1e-5}, "draft_config": {"rms_norm_eps": 1e-6}},
        {"target": {"rms_norm_eps": 1e-6}, "draft_config": {"rms_norm_eps": 1e-6}},
    ),
    "target-rotated": (
        "",
        {"target_config": {"quantization_config": {"quant_method": "quark", "algo": {"online_rotation": True}}}},
        {"target_config": {"quantization_config": {"quant_method": "fp8", "algo": {"online_rotation": False}}}},
    ),
    "fc-bypass": (
        "sglang",
        damaged(GOOD, "draft_config", "eagle_config", "use_aux_hidden_state", value=None),
        damaged(GOOD, "draft_config", "eagle_config", "use_aux_hidden_state", value=True),
    ),
    "points-captured": (
        "sglang",
        points([1, 17, 32]),
        {"target": {"hidden_size": 4096}, "draft_config_ids": [1, 17, 32]},
    ),
    "points-differ": (
        "sglang",
        points([2, 18, 33], states_manifest_resid_pre=[2, 18, 33]),
        points([1, 17, 32], states_manifest_resid_pre=[2, 18, 33]),
    ),
    "points-ambiguous": (
        "sglang",
        {"target": KIMI, "draft_config_ids": [5, 25, 50]},
        {"target": KIMI, "draft_config_ids": [2, 30, 58]},
    ),
    "points-range": ("vllm", points([2, 18, 37]), points([2, 18, 33])),
    "points-order": ("vllm", points([33, 2, 18]), points([2, 18, 33])),
    "points-key": (
        "sglang",
        {"target": QWEN, "draft_config": config(QWEN, eagle_cfg={"eagle_aux_hidden_state_layer_ids": [4, 9, 20]})},
        {"target": QWEN, "draft_config": config(QWEN, **IDS)},
    ),
    "rope-conversion": (
        "",
        {"source_config": {"rope_theta": 5e6}, "converted_config": {}},
        {"source_config": {"rope_theta": 5e6}, "converted_config": {"rope_theta": 5000000}},
    ),
    "rope-readers": (
        "",
        {"draft_config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"draft_config": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "rope-target": (
        "",
        {"target": {"rope_theta": 1e6}, "draft_config": {"rope_theta": 1e4}},
        {"target": {"rope_theta": 1e6}, "draft_config": {"rope_theta": 1000000}},
    ),
    "rope-spellings": (
        "",
        {"configs": [{"rope_scaling": {"type": "yarn", "factor": 8}}, {"rope_scaling": {"type": "yarn", "factor": 4}}]},
        {
            "configs": [
                {"rope_scaling": {"type": "yarn", "factor": 8}},
                {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            ]
        },
    ),
    "context-table": (
        "",
        damaged(GOOD, "draft_config", "max_position_embeddings", value=4096),
        damaged(GOOD, "launch_args", value=[*SERVE, "--context-length=4096"]),
    ),
    "context-trained": ("", {**GOOD, "trained_max_length": 8192}, {**GOOD, "trained_max_length": 40960}),
    "weights-prefix": (
        "sglang",
        {**GOOD, "draft_headers": {f"drafter.{name}": e for name, e in GOOD["draft_headers"].items()}},
        GOOD,
    ),
    "weights-unknown": ("vllm", with_tensor(**{"medusa.weight": ["BF16", [4, 4]]}), GOOD),
    "weights-adapter": ("", with_tensor(**{"midlayer.mlp.up_proj.lora_A.default.weight": ["BF16", [8, 4096]]}), GOOD),
    "weights-missing": ("", damaged(GOOD, "draft_headers", "norm.weight"), GOOD),
    "weights-layers": ("vllm", damaged(GOOD, "draft_config", "num_hidden_layers", value=36), GOOD),
    "weights-layout": (
        "",
        renamed("midlayer.", "layers.0."),
        with_tensor(**{"embed_tokens.weight": ["BF16", [151936, 4096]]}),
    ),
    "weights-class": ("", damaged(GOOD, "draft_config", "architectures", value=["LlamaForCausalLM"]), GOOD),
    "weights-dtype": (
        "",
        damaged(GOOD, "draft_config", "torch_dtype", value="float16"),
        damaged(GOOD, "draft_config", "torch_dtype", value="bfloat16"),
    ),
    "weights-twice": ("", with_tensor(**{"layers.0.mlp.up_proj.weight": ["BF16", [12288, 4096]]}), GOOD),
    "config-mla-rank": ("sglang", without_rank(), {"draft_config": LATENT}),
    "weights-fc-quantised": (
        "sglang",
        {**PACKED, "draft_headers": quantised("fc.weight", "mlp.up_proj.weight")},
        {**PACKED, "draft_headers": quantised("mlp.up_proj.weight")},
    ),
    "norm-flag": (
        "",
        damaged(GOOD, "draft_config", "use_aux_norm", value=True),
        damaged(with_tensor(**LEGACY), "draft_config", "use_aux_norm", value=True),
    ),
    "norm-eagle31": (
        "",
        {"draft_config": config(QWEN, norm_output=True)},
        {"draft_config": config(QWEN, norm_output=False)},
    ),
    "width-fc": ("", damaged(GOOD, "draft_headers", "fc.weight", value=["BF16", [4096, 8192]]), GOOD),
    "width-attention": (
        "",
        damaged(GOOD, "draft_headers", "midlayer.self_attn.v_proj.weight", value=["BF16", [1024, 4096]]),
        GOOD,
    ),
    "width-others": (
        "",
        damaged(GOOD, "draft_headers", "midlayer.mlp.down_proj.weight", value=["BF16", [12288, 4096]]),
        GOOD,
    ),
    "embedding-differs": ("vllm", embeddings([9.0, 9.0, 9.0], [8.0, 8.0, 8.0], [7.0, 7.0, 7.0]), embeddings()),
    "embedding-missing": (
        "",
        {"draft_config": {"hidden_size": 512, "target_hidden_size": 2048}, "draft_embed_tokens": None},
        {"draft_config": {"hidden_size": 512}, "draft_embed_tokens": None},
    ),
    "vocab-missing": (
        "",
        {"draft_config": SMALL, "draft_headers": {"lm_head.weight": ["BF16", [4, 8]]}},
        {"draft_config": {**SMALL, "draft_vocab_size": 12}, "draft_headers": {"lm_head.weight": ["BF16", [12, 8]]}},
    ),
    "vocab-lengths": (
        "",
        {"draft_config": SMALL, "d2t": [1, 2, 3], "t2d_true_ids": [1, 3, 5, 7]},
        {"draft_config": SMALL, "d2t": [1, 2, 3, 4], "t2d_true_ids": [1, 3, 5, 7]},
    ),
    "vocab-dtypes": (
        "",
        {"tensors": {"d2t": {"dtype": "I32", "shape": [4]}}},
        {"tensors": {"d2t": {"dtype": "I64", "shape": [4]}}},
    ),
    "vocab-offsets": ("", map_of([1, 3, 5, 7], [1, 3, 5, 7]), map_of([1, 2, 3, 4], [1, 3, 5, 7])),
    "vocab-coverage": (
        "",
        map_of([1, 2, 3, 4], token_counts={"0": 90, "2": 80, "4": 70, "6": 60, "1": 10}),
        map_of([1, 2, 3, 4], token_counts={"1": 90, "3": 80, "5": 70, "7": 60, "0": 10}),
    ),
    "vocab-built": (
        "",
        {"cached_map": {"draft_vocab_size": 16000}, "asked": {"draft_vocab_size": 8000}},
        {"cached_map": {"draft_vocab_size": 16000}, "asked": {"draft_vocab_size": 16000}},
    ),
    "logits-width": ("", {"vocab_size": 49152, "logits_width": 98304}, {"vocab_size": 49152, "logits_width": 49280}),
    **ARTEFACTS,
    **RUNS,
}
