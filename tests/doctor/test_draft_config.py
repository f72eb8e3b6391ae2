"""What an engine takes from a draft's config.json: switches at the right level, biases, layers, the head, the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.run import Inputs, visit

from . import conftest
from .healthy import QWEN, config, headers, served

H = QWEN["hidden_size"]
FC_NORM = {f"fc_norm.{i}.weight": [H] for i in range(3)}
LEGACY = {f"aux_norm_{part}.weight": [H] for part in ("low", "mid", "high")}
INPUT_NORM = {"input_norm.weight": [3 * H]}
QKV = {f"midlayer.self_attn.{p}_proj.bias": [rows] for p, rows in (("q", 4096), ("k", 1024), ("v", 1024))}
QKV_FUSED = {"midlayer.self_attn.qkv_proj.bias": [6144]}
O_BIAS = {"midlayer.self_attn.o_proj.bias": [H]}
FC_BIAS = {"fc.bias": [H]}
MLP = {f"midlayer.mlp.{p}_proj.bias": [rows] for p, rows in (("gate", 3 * H), ("up", 3 * H), ("down", H))}
HEAD_NORMS = {f"midlayer.self_attn.{p}_norm.weight": [128] for p in "qk"}
NO_HEAD = {"lm_head.weight": None}


def layer(index: int, *, without: str = "") -> dict[str, list[int]]:
    """A later decoder layer, whose q, k and v read the state alone."""
    found: dict[str, list[int]] = {}
    for name, (_, shape) in headers(config(QWEN)).items():
        if name.startswith("midlayer.") and without not in name.split("."):
            wide = any(f".{p}_proj." in name for p in "qkv")
            found[name.replace("midlayer", f"layers.{index}")] = [shape[0], H] if wide else shape
    return found


def said(settings: dict[str, Any], more: dict[str, Any], engine: str, *severities: str) -> str:
    draft = config(QWEN, **settings)
    tensors = headers({**config(QWEN), **{k: v for k, v in draft.items() if v is not None}})
    tensors |= {name: ["BF16", shape] for name, shape in more.items()}
    tensors = {name: entry for name, entry in tensors.items() if entry[1] is not None}
    facts = {"target": dict(QWEN), "draft_config": draft, "draft_headers": tensors}
    return conftest.said(facts, engine, *severities)


def eagle(**settings: Any) -> dict[str, Any]:
    return {"eagle_config": settings}


FAULTS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (eagle(fc_norm=True), FC_NORM, "sglang", "eagle_config.fc_norm is true, and fc_norm is read at top level only"),
    (eagle(fc_norm=True), FC_NORM, "vllm", "eagle_config.fc_norm is true, and fc_norm is read at top level only"),
    (eagle(fc_norm=True), FC_NORM, "", "eagle_config.fc_norm is true, and fc_norm is read at top level only"),
    (eagle(use_aux_norm=True), LEGACY, "sglang", "eagle_config.use_aux_norm is true, and fc_norm is read at top level"),
    (eagle(fc_norm=True), {}, "vllm", "top level only; the file holds no fc_norm.0.weight nor fc_norm.1.weight"),
    ({"use_aux_norm": True}, FC_NORM, "vllm", "use_aux_norm is true, which vLLM does not read: it reads fc_norm"),
    ({"use_aux_norm": True}, LEGACY, "vllm", "3 unknown keys (aux_norm_low.weight"),
    ({"fc_norm": True}, LEGACY, "vllm", "3 unknown keys (aux_norm_low.weight"),
    (eagle(norm_before_fc=False) | {"norm_before_fc": True}, INPUT_NORM, "sglang", "is not used: norm_before_fc is"),
    (eagle(norm_before_residual=True), {}, "vllm", "vLLM reads norm_before_residual at top level only"),
    (eagle(norm_before_residual=True), {}, "sglang", "norm_before_residual is true and SGLang never reads it"),
    ({"bias": True}, {}, "sglang", "missing key fc.bias [4096]"),
    ({"bias": True}, {**FC_BIAS, **O_BIAS}, "vllm", "1 unknown key (fc.bias): vLLM drops it without a word"),
    ({"attention_bias": True}, {**QKV, **O_BIAS}, "sglang", "3 unknown keys (midlayer.self_attn.q_proj.bias"),
    ({"attention_bias": True}, {**QKV_FUSED, **O_BIAS}, "sglang", "1 unknown key (midlayer.self_attn.qkv_proj.bias)"),
    ({"attention_bias": True}, QKV, "vllm", "missing key midlayer.self_attn.o_proj.bias"),
    ({"attention_bias": True}, {}, "vllm", "4 missing keys (midlayer.self_attn.q_proj.bias"),
    ({"mlp_bias": True}, MLP, "sglang", "3 unknown keys (midlayer.mlp.gate_proj.bias"),
    (
        {"tie_word_embeddings": True},
        {},
        "sglang",
        "lm_head.weight is dropped without a word, logits come from the first",
    ),
    ({"tie_word_embeddings": True}, NO_HEAD, "sglang", "logits come from the first 32000 rows of the embedding"),
    ({"num_hidden_layers": 32}, {}, "sglang", "num_hidden_layers is 32 and the file holds 1 layer: the others keep"),
    ({"num_hidden_layers": 32}, {}, "vllm", "num_hidden_layers is 32 and the file holds 1 layer: the others keep"),
    ({"num_hidden_layers": ...}, {}, "sglang", "num_hidden_layers is missing, llama takes 32 and the file holds 1"),
    ({"num_hidden_layers": 3}, layer(1), "vllm", "num_hidden_layers is 3 and the file holds 2 layers"),
    ({"num_hidden_layers": 2}, layer(1, without="o_proj"), "sglang", "missing key layers.1.self_attn.o_proj.weight"),
    ({"num_hidden_layers": 2}, layer(1, without="hidden_norm"), "sglang", "missing key layers.1.hidden_norm.weight"),
    ({"num_hidden_layers": 2}, layer(1, without="input_layernorm"), "vllm", "missing key layers.1.input_layernorm"),
    ({"num_hidden_layers": 1}, layer(1), "sglang", "10 unknown keys (layers.1.input_layernorm.weight"),
    (
        {"num_hidden_layers": 2},
        {**layer(1), "layers.1.self_attn.q_proj.weight": [4096, 2 * H]},
        "sglang",
        "layers.1.self_attn.q_proj.weight is [4096, 8192], needed [4096, 4096]",
    ),
    (
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {},
        "sglang",
        "which SGLang 0.5.23 does not have: LlamaForCausalLME",
    ),
    ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {}, "sglang", "which SGLang 0.5.23 does not have"),
    ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, {}, "sglang", "Eagle3DeepseekV2ForCausalLM is needed"),
    ({"tie_word_embeddings": 1}, {}, "sglang", "logits come from the first 32000 rows of the embedding"),
    ({"tie_word_embeddings": "false"}, {}, "sglang", "logits come from the first 32000 rows of the embedding"),
    ({"tie_word_embeddings": "false"}, {}, "vllm", "tie_word_embeddings is the text 'false', which counts as true"),
    ({"norm_output": "no"}, {}, "", "norm_output is the text 'no', which counts as true"),
    ({"num_aux_hidden_states": "3"}, {}, "", "num_aux_hidden_states is '3', a whole number above 0 is needed"),
    ({"rms_norm_eps": "1e-6"}, {}, "", "rms_norm_eps is '1e-6', needed: a small positive number"),
    (
        {"intermediate_size": ...},
        {},
        "",
        "intermediate_size is missing, llama takes 11008: midlayer.mlp.gate_proj.weight",
    ),
    ({"vocab_size": ...}, {}, "", "vocab_size is missing, llama takes 32000: t2d has 151936 rows"),
    ({"rope_scaling": "yarn"}, {}, "", "rope_scaling is 'yarn', null or a mapping is needed"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, {}, "", "factor is '4', a number above 0 is needed"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, {}, "", "factor is -4.0, a number above 0 is needed"),
    (
        {"rope_scaling": {"type": "lama3", "factor": 4.0}},
        {},
        "",
        "the type 'lama3', which no engine knows; did you mean",
    ),
    ({"rope_scaling": {"type": ["yarn"], "factor": 4.0}}, {}, "", "the type ['yarn'], which no engine knows"),
    ({"rope_parameters": {"rope_type": "yarm", "factor": 4.0}}, {}, "", "did you mean 'yarn'?"),
    ({"rope_theta": "1000000.0"}, {}, "", "rope_theta is '1000000.0', a number above 0 is needed"),
    ({"rope_theta": 0}, {}, "sglang", "rope_theta is 0, a number above 0 is needed"),
    ({"rope_theta": -1e4}, {}, "vllm", "rope_theta is -10000.0, a number above 0 is needed"),
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": "1e6"}}, {}, "", "rope_parameters.rope_theta is '1e6', a"),
]


@pytest.mark.parametrize(("settings", "more", "engine", "words"), FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_fault(settings: dict[str, Any], more: dict[str, Any], engine: str, words: str) -> None:
    assert words in said(settings, more, engine, "error")


HEALTHY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"fc_norm": True}, FC_NORM, "sglang"),
    ({"fc_norm": True}, FC_NORM, "vllm"),
    ({"fc_norm": True}, FC_NORM, ""),
    ({"use_aux_norm": True}, LEGACY, "sglang"),
    ({"use_aux_norm": True, "fc_norm": False}, FC_NORM, "sglang"),
    ({"use_aux_norm": True}, LEGACY, ""),
    (eagle(norm_before_fc=True), INPUT_NORM, "sglang"),
    ({"norm_before_fc": True}, INPUT_NORM, "vllm"),
    (eagle(norm_before_fc=False) | {"norm_before_fc": True}, {}, "vllm"),
    ({"norm_before_residual": True}, {}, "vllm"),
    ({"bias": True}, FC_BIAS, "sglang"),
    ({"bias": True}, {**FC_BIAS, **O_BIAS}, "sglang"),
    ({"attention_bias": True}, O_BIAS, "sglang"),
    ({"attention_bias": True}, {**QKV, **O_BIAS}, "vllm"),
    ({"attention_bias": True}, {**QKV_FUSED, **O_BIAS}, "vllm"),
    ({"attention_bias": True, "architectures": ["Eagle3Qwen3ForCausalLM"]}, {**QKV, **HEAD_NORMS}, "vllm"),
    ({"mlp_bias": True}, MLP, "vllm"),
    ({"attention_bias": False, "bias": False, "mlp_bias": False}, {}, ""),
    ({"tie_word_embeddings": True}, {}, "vllm"),
    ({"tie_word_embeddings": 0, "fc_norm": None, "norm_output": False}, {}, "sglang"),
    ({"hidden_size": 4096.0, "head_dim": 128.0}, {}, ""),
    ({"rope_scaling": {}}, {}, ""),
    ({"rope_scaling": {"rope_type": "default"}}, {}, ""),
    ({"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}}, {}, ""),
    ({"tie_word_embeddings": True, "draft_vocab_size": 151936}, NO_HEAD, "sglang"),
    ({"num_hidden_layers": 2}, layer(1), "sglang"),
    ({"num_hidden_layers": 2}, layer(1), ""),
    ({"num_hidden_layers": 2}, layer(1, without="input_layernorm"), "sglang"),
    ({"num_hidden_layers": 2}, layer(1, without="hidden_norm"), "vllm"),
    ({"num_hidden_layers": ..., "model_type": ...}, {}, ""),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, {}, "vllm"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, {}, ""),
    ({"rope_theta": 10000}, {}, ""),
    ({"rope_theta": None}, {}, "sglang"),
]


@pytest.mark.parametrize(("settings", "more", "engine"), HEALTHY, ids=[str(i) for i in range(len(HEALTHY))])
def test_healthy_neighbour(settings: dict[str, Any], more: dict[str, Any], engine: str) -> None:
    assert said(settings, more, engine, "error", "warning") == ""


def test_engines_that_differ_are_told_when_none_is_chosen() -> None:
    told = said({"attention_bias": True}, {**QKV, **O_BIAS}, "", "warning")
    assert "midlayer.self_attn.v_proj.bias: vLLM reads them, SGLang drops them without a word" in told
    assert "o_proj.bias is missing: vLLM needs" in said({"attention_bias": True}, QKV, "", "warning")
    assert "fc.bias: SGLang reads it, vLLM drops it without a word" in said({"bias": True}, FC_BIAS, "", "warning")
    assert "layers.1.hidden_norm.weight is missing: SGLang needs" in said(
        {"num_hidden_layers": 2}, layer(1, without="hidden_norm"), "", "warning"
    )


def test_the_tied_head_of_a_full_vocabulary_is_not_read() -> None:
    told = said({"tie_word_embeddings": True, "draft_vocab_size": 151936}, {}, "sglang", "warning")
    assert "SGLang takes the embedding for a head and drops lm_head.weight" in told


def test_a_nested_norm_output_is_not_on() -> None:
    assert "the pre-norm state is fed back" in said(eagle(norm_output=True), {}, "", "warning")
    assert "must feed the post-norm state" not in said(eagle(norm_output=True), {}, "", "info")
    assert "must feed the post-norm state" in said({"norm_output": True}, {}, "", "info")


def test_a_theta_of_the_wrong_type_is_not_called_absent() -> None:
    assert "is not written" not in said({"rope_theta": "1e6"}, {}, "", "info", "warning")
    assert "is not written" in said({"rope_theta": ...}, {}, "", "info")


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
def test_a_byte_order_mark(mark: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(mark + b'{"hidden_size": 8}')
    found = visit(Inputs(draft=str(tmp_path))).findings
    told = " | ".join(f.message for f in found if f.severity == "error")
    assert ("byte-order mark" in told) == bool(mark)


@pytest.mark.parametrize("kind", ["frobnicate", None])
def test_a_scaling_that_may_be_of_another_release_is_a_warning(kind: str | None) -> None:
    told = said({"rope_scaling": {"rope_type": kind, "factor": 4.0}}, {}, "", "warning")
    assert "rope-values" in told
    assert not said({"rope_scaling": {"rope_type": kind, "factor": 4.0}}, {}, "", "error")


def test_a_switch_written_as_the_text_true_is_a_warning() -> None:
    assert "attention_bias is the text 'true'" in said({"attention_bias": "true"}, {}, "", "warning")


def test_a_table_that_is_left_to_the_default() -> None:
    told = conftest.said(served(QWEN, max_position_embeddings=...), "sglang", "error")
    assert "is 2048, which transformers takes when the key is missing, 40960 are served" in told
    short = served({**QWEN, "max_position_embeddings": 2048}, max_position_embeddings=...)
    assert conftest.said(short, "sglang", "error", "warning") == ""


def test_the_scaling_of_the_target_is_read_too() -> None:
    target = {"model_type": "qwen3", "text_config": {"hidden_size": 64, "rope_scaling": {"rope_type": "yran"}}}
    told = conftest.said({"target_config": target}, "", "error")
    assert "rope_scaling of the target has the type 'yran'" in told
