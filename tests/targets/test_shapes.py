"""Weights and KV bytes from config.json: published sizes, the reference target's known answer, bad configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab.core.errors import ProfileError
from eagle3lab.targets.profiles import load_profile
from eagle3lab.targets.shapes import target_shape

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"


def public_config(name: str) -> dict:
    path = CONFIGS / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}: public configs are not part of the repository")
    return json.loads(path.read_text())


def kimi_shapes():
    yield target_shape(load_profile("kimi-k2.5").config)
    path = CONFIGS / "target.kimi-k2.5.json"
    if path.is_file():
        yield target_shape(json.loads(path.read_text()))


def test_kimi_known_answer() -> None:
    for shape in kimi_shapes():
        parts = {part.kind: part for part in shape.parts}
        assert parts["routed experts"].parameters == pytest.approx(1.0147e12, rel=0.01)
        assert parts["routed experts"].stored_bytes == pytest.approx(570.8e9, rel=0.01)
        assert shape.stored_bytes - parts["routed experts"].stored_bytes == pytest.approx(23.4e9, rel=0.01)
        assert shape.stored_bytes == pytest.approx(594e9, rel=0.01)
        assert shape.stored_bytes / 8 / 1024**3 == pytest.approx(69.2, rel=0.01)
        assert shape.kv_bytes_per_token(8) == shape.kv_bytes_per_token(1) == 70_272


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization_config": None},  # everything bf16: 2.05 TB
        {"first_k_dense_replace": 0},  # one block of experts too many: 1.6 %
        {"n_shared_experts": 24},  # 113 GB instead of 5 GB of shared experts
        {"kv_lora_rank": 256},
    ],
)
def test_kimi_known_answer_is_not_met_by_other_configs(wrong: dict) -> None:
    shape = target_shape({**load_profile("kimi-k2.5").config, **wrong})
    weights = shape.stored_bytes == pytest.approx(594e9, rel=0.01)
    assert not (weights and shape.kv_bytes_per_token(8) == 70_272)


def test_scales_and_ignore_list_count() -> None:
    config = json.loads(json.dumps(load_profile("kimi-k2.5").config))
    config["quantization_config"]["ignore"] = []
    quantised_all = target_shape(config)
    assert quantised_all.stored_bytes < 594e9 * 0.985  # attention and shared experts in 4.5 bits would be 3 % less
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = -1
    assert target_shape(config).stored_bytes < quantised_all.stored_bytes * 0.9  # 4.0 bits instead of 4.5


@pytest.mark.parametrize(
    ("name", "parameters", "stored"),
    [
        ("target.deepseek-v3", 671.0e9, 672e9),  # published: 671B, fp8
        ("target.qwen3-235b-a22b", 235.1e9, 470e9),
        ("target.qwen3-8b", 8.19e9, 16.4e9),
        ("target.kimi-k2.5-nvfp4", 1026.4e9, 590e9),
        ("target.kimi-k2.6-nvfp4", 1026.4e9, 594e9),
    ],
)
def test_published_models(name: str, parameters: float, stored: float) -> None:
    shape = target_shape(public_config(name))
    assert shape.parameters == pytest.approx(parameters, rel=0.002)
    assert shape.stored_bytes == pytest.approx(stored, rel=0.005)


def test_smollm2_and_tied_head() -> None:
    config = load_profile("smollm2").config
    assert target_shape(config).parameters == 134_515_008  # published parameter count of SmolLM2-135M
    assert target_shape({**config, "tie_word_embeddings": False}).parameters > 150e6


def test_grouped_kv_is_split_until_heads_run_out() -> None:
    shape = target_shape(load_profile("smollm2").config)
    assert [shape.kv_bytes_per_token(ranks) for ranks in (1, 3, 8)] == [
        30 * 2 * 3 * 64 * 2,
        30 * 2 * 64 * 2,
        30 * 2 * 64 * 2,
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "61"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ({"max_position_embeddings": "40960"}, "max_position_embeddings"),
        ({"n_routed_experts": 4, "mlp_only_layers": 1}, "mlp_only_layers"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"dtype": "int3"}, "int3"),
        ({"quantization_config": {"quant_method": "fancy"}}, "fancy"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 3}}, "quantization_config"),
        ({"quantization_config": 4}, "quantization_config"),
    ],
)
def test_unusable_config_names_the_key(change: dict, named: str) -> None:
    with pytest.raises(ProfileError, match=named):
        target_shape({**load_profile("smollm2").config, **change})
