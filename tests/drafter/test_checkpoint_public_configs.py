"""Configs of other trainers, read with the target that each was made for: points, widths and flags by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3lab.core.errors import CheckpointError, Eagle3LabError
from eagle3lab.drafter.layouts import tensor_shapes
from eagle3lab.drafter.layouts_read import Parsed, parse_config
from tests.drafter.drafts import mla_config, raw_config

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
public = pytest.mark.skipif(not CONFIGS.is_dir(), reason="public config files are not beside the repository")


def parse(tmp_path: Path, name: str, **place: object) -> Parsed:
    shutil.copyfile(CONFIGS / f"draft.{name}.json", tmp_path / "config.json")
    target = place.pop("target", None)
    return parse_config(tmp_path, target=None if target is None else CONFIGS / f"target.{target}.json", **place)


@public
@pytest.mark.parametrize(
    ("name", "place", "points", "shapes"),
    [
        (
            "assembled.kimi-k2.5-llama-reduced-vocab",
            {"target": "kimi-k2.5"},
            [2, 30, 58],
            {
                "fc.weight": (7168, 21504),
                "lm_head.weight": (32000, 7168),
                "midlayer.mlp.gate_proj.weight": (18432, 7168),
            },
        ),
        (
            "torchspec.kimi_k25_eagle3_mla",
            {"target": "kimi-k2.5"},
            [2, 30, 58],
            {
                "lm_head.weight": (163840, 7168),
                "midlayer.self_attn.q_a_proj.weight": (1536, 14336),
                "midlayer.self_attn.q_b_proj.weight": (64 * 192, 1536),
                "midlayer.self_attn.kv_a_proj_with_mqa.weight": (576, 14336),
                "midlayer.self_attn.kv_b_proj.weight": (64 * 256, 512),
                "midlayer.self_attn.o_proj.weight": (7168, 8192),
            },
        ),
        (
            "specforge.qwen3-235B-A22B-eagle3",
            {"target": "qwen3-235b-a22b"},
            [2, 47, 91],
            {"fc.weight": (4096, 12288)},
        ),
        ("specforge.llama3-8B-eagle3", {"family": "llama", "blocks": 32}, [2, 16, 29], {"fc.weight": (4096, 12288)}),
        (
            "speculators-format.gemma-4-31b.subset",
            {"family": "gemma4", "blocks": 60},
            [2, 30, 57],
            {"midlayer.self_attn.q_proj.weight": (32 * 256, 2 * 5376)},
        ),
        (
            "specforge.gpt-oss-120B-eagle3",
            {"family": "gpt_oss", "blocks": 36},
            [2, 18, 34],
            {"fc.weight": (2880, 8640)},
        ),
    ],
)
def test_points_and_shapes(tmp_path, name, place, points, shapes):
    config = parse(tmp_path, name, **place).config
    assert config.points == points
    found = tensor_shapes(config)
    assert {key: found[key] for key in shapes} == shapes


@public
def test_the_same_ids_mean_other_points_in_another_family(tmp_path):
    """The wrong version: Kimi ids read with the Llama rule are one too high."""
    name = "assembled.kimi-k2.5-llama-reduced-vocab"
    assert parse(tmp_path, name, family="llama", blocks=61).config.points == [3, 31, 59]


@public
def test_flags_scaling_and_notes(tmp_path):
    gemma = parse(tmp_path, "speculators-format.gemma-4-31b.subset", family="gemma4", blocks=60)
    assert gemma.layout == "speculators" and gemma.config.norm_before_residual is True
    assert gemma.carried["speculators"]["speculators_config"]["verifier"]["name_or_path"] == "google/gemma-4-31B-it"
    kimi = parse(tmp_path, "torchspec.kimi_k25_eagle3", target="kimi-k2.5")
    assert kimi.config.rope_scaling["factor"] == 64.0 and kimi.config.rope_theta == 50000.0
    assert kimi.config.draft_vocab_size == 163840 and any("no ids" in note for note in kimi.notes)
    new = parse(tmp_path, "specforge.qwen3-30B-A3B-eagle3.1", family="qwen3_moe", blocks=48)
    assert new.config.fc_norm and new.config.norm_output and any("SpecForge" in note for note in new.notes)


@public
def test_a_target_is_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="--target DIR, or --family NAME --blocks N"):
        parse(tmp_path, "assembled.kimi-k2.5-llama-reduced-vocab")


def written(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not readable JSON"),
        ("[1]", "holds a list"),
        (raw_config([1, 14, 26], hidden_size="8"), "has hidden_size '8'"),
        (raw_config([1, 14, 26], vocab_size=5), "draft vocabulary 6 is larger than the target's 5"),
        (raw_config([1, 14, 26], rope_theta="big"), "has rope_theta 'big'"),
        (raw_config([1, 14, 26], rope_parameters={"rope_theta": 1e6}), "must agree"),
        (raw_config([1, 14, 26], num_hidden_layers=2), "drafters of one layer"),
        (raw_config([1, 14, 26], num_aux_hidden_states=4), "num_aux_hidden_states 4"),
        (raw_config([1, 14, 26], hidden_act="gelu"), "hidden_act 'gelu'"),
        (raw_config([1, 14, 26], eagle_config=3), "has eagle_config '3'"),
        (raw_config(top=7), "has ids 7"),
        (raw_config(top=[2, 15, 31]), r"has ids \[2, 15, 31\]"),
        (raw_config([1, 14, 26], [1, 14, 26]), r"mean different points: vllm \[1, 14, 26\], sglang \[2, 15, 27\]"),
        (raw_config(eagle_config={"use_aux_hidden_state": False}), "engines then skip fc"),
        (mla_config([2, 15, 27], q_lora_rank=None), "MLA drafter without q_lora_rank"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "q_norm and k_norm"),
    ],
)
def test_broken_configs_are_one_line(tmp_path, config, words):
    with pytest.raises(Eagle3LabError, match=words) as caught:
        parse_config(written(tmp_path, config), family="llama", blocks=30)
    assert "\n" not in str(caught.value)


def test_a_record_that_contradicts_its_ids(tmp_path):
    """Someone edits one of the lists of a checkpoint that this lab wrote."""
    config = raw_config([1, 14, 26], [2, 15, 27])
    block = {"resid_pre": [2, 15, 27], "target_blocks": 30, "target_family": "llama"}
    assert parse_config(written(tmp_path, config | {"eagle3lab": block})).config.points == [2, 15, 27]
    moved = config | {"eagle_aux_hidden_state_layer_ids": [3, 16, 28], "eagle3lab": block}
    with pytest.raises(CheckpointError, match=r"its own record \[2, 15, 27\]"):
        parse_config(written(tmp_path, moved))
    with pytest.raises(CheckpointError, match="of 61 blocks, the config says 30"):
        parse_config(written(tmp_path, config | {"eagle3lab": block}), blocks=61)
