"""Whole folders and launch lines as they lie about: healthy ones are quiet, damaged ones are named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.artefacts import as_bytes, header_contents, write_safetensors

from eagle3lab.doctor.run import Inputs, visit

from .healthy import config, headers

TARGET = {"blocks": 12, "hidden_size": 32, "vocab_size": 64, "family": "qwen3", "max_position_embeddings": 2048}
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "draft_vocab_size": 32,
}
SERVE = (
    "python3 -m sglang.launch_server --model-path T --speculative-algorithm {} --speculative-draft-model-path D "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
Change = Callable[[dict[str, Any]], dict[str, Any]]


def draft_folder(place: Path, change: Change = dict, **settings: Any) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config(TARGET, **{**SIZES, **settings})))
    names = headers({**config(TARGET, **SIZES), **{k: v for k, v in settings.items() if v is not None}})
    write_safetensors(place / "model.safetensors", header_contents(change(names)))
    return place


@pytest.fixture
def target(tmp_path: Path) -> Path:
    place = tmp_path / "target"
    place.mkdir()
    settings = {**TARGET, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 12}
    (place / "config.json").write_text(json.dumps({**settings, "rope_theta": 1e6, "rms_norm_eps": 1e-6}))
    return place


def faults(**inputs: Any) -> str:
    """Errors and warnings of a visit, in one line."""
    given = {name: value if isinstance(value, (str, tuple)) else str(value) for name, value in inputs.items()}
    return " | ".join(f"{f.code}: {f.message}" for f in visit(Inputs(**given)).findings if f.severity != "info")


def without(*gone: str) -> Change:
    return lambda names: {name: entry for name, entry in names.items() if name not in gone}


def behind(prefix: str, *, but: tuple[str, ...] = ()) -> Change:
    return lambda names: {name if name.startswith(but) else prefix + name: entry for name, entry in names.items()}


def fused(names: dict[str, Any]) -> dict[str, Any]:
    kept = {name: entry for name, entry in names.items() if not any(f"{p}_proj" in name for p in "qkv")}
    return {**kept, "midlayer.self_attn.qkv_proj.weight": ["BF16", [128, 64]]}


SCALE = "midlayer.mlp.up_proj.weight_scale_inv"
FP8 = {"quantization_config": {"quant_method": "fp8"}}
HEALTHY: list[tuple[str, Change, dict[str, Any]]] = [
    ("plain", dict, {}),
    ("head outside the prefix", behind("model.", but=("lm_head", "d2t", "t2d")), {}),
    ("fused projections", fused, {}),
    ("no head_dim", dict, {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}),
    ("zero bias", lambda names: {**names, "fc.bias": ["BF16", [32]]}, {"bias": True}),
    ("empty section", dict, {"eagle_config": None}),
    ("dtype under its new name", dict, {"dtype": "bfloat16", "transformers_version": "5.0"}),
    ("fp8 block scales", lambda names: {**names, SCALE: ["F32", [1, 1]]}, FP8),
]


@pytest.mark.parametrize(("what", "change", "settings"), HEALTHY, ids=[row[0] for row in HEALTHY])
def test_healthy_but_odd_is_quiet(what: str, change: Change, settings: dict, tmp_path: Path, target: Path) -> None:
    draft = draft_folder(tmp_path / "draft", change, **settings)
    assert faults(draft=draft, target=target, launch=SERVE.format("EAGLE3")) == ""


def test_files_beside_the_weights_are_left_alone(tmp_path: Path, target: Path) -> None:
    draft = draft_folder(tmp_path / "draft")
    for name in ("optimizer.pt", "README.md", "tokenizer.json", "vocab.json", "generation_config.json"):
        (draft / name).write_bytes(b"{}")
    assert faults(paths=(str(draft), str(target)), engine="sglang") == ""


def test_a_hub_cache_is_a_folder(tmp_path: Path, target: Path) -> None:
    plain, hub = draft_folder(tmp_path / "draft"), tmp_path / "hub" / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "abc").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(plain / name, hub / "blobs" / name)
        os.symlink(f"../../blobs/{name}", hub / "snapshots" / "abc" / name)
    assert faults(draft=hub / "snapshots" / "abc", target=target, engine="sglang") == ""


DAMAGED: list[tuple[Change, str]] = [
    (behind("student."), "behind the prefix 'student.'"),
    (behind("eagle_head.model."), "behind the prefix 'eagle_head.model.'"),
    (behind("model."), "1 unknown key (model.lm_head.weight): SGLang drops it"),
    (without("lm_head.weight"), "missing key lm_head.weight [32, 32]"),
    (without("d2t", "t2d"), "d2t is missing with a draft vocabulary of 32 of 64"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_damaged_names_are_told(change: Change, words: str, tmp_path: Path, target: Path) -> None:
    assert words in faults(draft=draft_folder(tmp_path / "draft", change), target=target, engine="sglang")


def test_a_prefix_that_sglang_knows_is_refused_by_vllm(tmp_path: Path, target: Path) -> None:
    """vLLM 0.32.0 puts `model.` before every name but the head's."""
    draft = draft_folder(tmp_path / "draft", behind("model.", but=("lm_head", "d2t", "t2d")))
    said = faults(draft=draft, target=target, engine="vllm")
    assert "behind the prefix 'model.', which vLLM puts before every name itself; vLLM refuses them aloud" in said
    assert faults(draft=draft, target=target, engine="sglang") == ""


@pytest.mark.parametrize("name", ["vocab_mapping.npy", "hot_token_ids.json", "D2T.pt"])
def test_a_map_beside_the_weights_is_found(name: str, tmp_path: Path, target: Path) -> None:
    draft = draft_folder(tmp_path / "draft", without("d2t", "t2d"))
    (draft / name).write_bytes(b"x")
    assert f"only in {name}" in faults(draft=draft, target=target)


def test_one_number_is_no_constant_tensor(tmp_path: Path) -> None:
    for name, values, words in (("scale", [3.0], ""), ("scale", [3.0, 3.0], "constant"), ("fc.bias", [0.0, 0.0], "")):
        shape = [1, len(values)] if name == "scale" else [len(values)]
        entry = ("F32", shape, as_bytes("F32", np.array(values)))
        write_safetensors(tmp_path / "model.safetensors", {name: entry})
        said = faults(draft=tmp_path / "model.safetensors")
        assert words in said and (words or not said), said


COMMAND = SERVE.format("eagle").split()
LINES = SERVE.format("EAGLE").replace(" --", " \\\n --")
LAUNCHES = {
    "serve.sh": f"#!/bin/bash\nset -e\nexport A=1\nM=/models/t\nnohup {LINES} > x.log 2>&1 &\n",
    "flags.yaml": "model_path: T\nspeculative_algorithm: EAGLE\nspeculative_draft_model_path: D\n",
    "compose.yaml": json.dumps({"services": {"s": {"image": "i", "command": SERVE.format("NEXTN")}}}),
    "pod.yaml": json.dumps({"spec": {"containers": [{"command": COMMAND[:3], "args": COMMAND[3:]}]}}),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_wrong_algorithm_in_any_file(name: str, tmp_path: Path, target: Path) -> None:
    (tmp_path / name).write_text(LAUNCHES[name])
    draft = draft_folder(tmp_path / "draft")
    assert "fc reads 96 = 3 x 32" in faults(draft=draft, target=target, launch=tmp_path / name)


RIGHT = SERVE.format("EAGLE3")
POD = {"env": [{"name": "SGLANG_SIMULATE_ACC_LEN", "value": "2.5"}], "args": RIGHT.split()[3:]}


@pytest.mark.parametrize(
    "launch",
    [
        "docker run --gpus all -e SGLANG_SIMULATE_ACC_LEN=2.5 lmsysorg/sglang " + RIGHT,
        {"services": {"s": {"environment": {"SGLANG_SIMULATE_ACC_LEN": 2.5}, "command": RIGHT}}},
        {"spec": {"containers": [POD]}},
        {"services": {"s": {"environment": ["SGLANG_SIMULATE_ACC_LEN=2.5"], "command": RIGHT.split()}}},
    ],
)
def test_simulated_acceptance_behind_a_container(launch: Any, tmp_path: Path) -> None:
    if not isinstance(launch, str):
        (tmp_path / "c.yaml").write_text(json.dumps(launch))
        launch = str(tmp_path / "c.yaml")
    assert "2.5 each step" in faults(launch=launch)


def test_flags_in_a_named_file_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    report = visit(Inputs(launch="python3 -m sglang.launch_server --model-path T --config serve.yaml"))
    assert any("could not check the flags in serve.yaml" in f.message for f in report.findings)


def test_an_unreadable_shard_does_not_hide_a_missing_one(tmp_path: Path) -> None:
    draft = draft_folder(tmp_path / "draft")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 999\n"
    (draft / "b.safetensors").write_bytes(pointer)
    index = {"weight_map": {"fc.weight": "model.safetensors", "x": "b.safetensors", "y": "../c.safetensors"}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    said = faults(draft=draft)
    assert "../c.safetensors is missing" in said and "Git LFS pointer" in said
