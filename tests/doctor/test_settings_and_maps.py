"""Settings that engines read in another way than they are written, vocabulary maps, and files that are no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.artefacts import header_contents, write_safetensors

from eagle3lab import cli
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.readers.bounded import parse_yaml
from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .healthy import QWEN, config, damaged, headers, served
from .hostile import TINY

LLAMA = {"blocks": 32, "hidden_size": 4096, "family": "llama"}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "transformer_layer_config": {"model_type": "llama", "hidden_size": 4096, "vocab_size": 128256},
}
NESTED_IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 16, 28]}}
FOUR_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6, 9]}
LATENT = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "hidden_size": 16, "kv_lora_rank": 4, "q_lora_rank": 8}
VLLM = ["vllm", "serve", "T", "-sc", '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3}']
EAGLE1 = {"architectures": ["LlamaForCausalLMEagle"], "hidden_size": 4096}
OFF = {"eagle_config": {"use_aux_hidden_state": False}}


def told(code: str, facts: dict[str, Any], engine: str = "") -> list[Finding]:
    return [f for f in visit_facts(facts, engine).findings if f.code == code and f.severity != "info"]


@pytest.mark.parametrize(
    ("code", "engine", "facts", "severity", "words"),
    [
        (
            "config-target-hidden-null",
            "vllm",
            {"draft_config": {**EAGLE3, "target_hidden_size": None}},
            "error",
            "vLLM",
        ),
        ("config-target-hidden-null", "", {"draft_config": {**EAGLE3, "target_hidden_size": None}}, "warning", "and"),
        (
            "config-target-hidden-null",
            "vllm",
            {"draft_config": {**LATENT, "target_hidden_size": None}},
            "error",
            "vLLM",
        ),
        ("config-class", "", {"draft_config": {"architectures": ["Eagle3FooForCausalLM"]}}, "error", "neither"),
        ("config-class", "vllm", {"draft_config": {"architectures": ["Qwen3ForCausalLMEagle3"]}}, "error", "vLLM"),
        ("config-values", "", {"target": {"blocks": "61"}, "draft_config_ids": [2, 30, 58]}, "error", "'61'"),
        ("config-values", "", {"target_config": {"hidden_size": -1}}, "error", "-1"),
        (
            "width-fc",
            "vllm",
            {
                "target": {**LLAMA, "hidden_size": 16},
                "draft_config": {**EAGLE3, "hidden_size": 16, **FOUR_IDS},
                "draft_headers": {"fc.weight": ["BF16", [16, 64]]},
            },
            "error",
            "needed 48",
        ),
        (
            "width-fc",
            "vllm",
            {
                "target": {**LLAMA, "hidden_size": 24},
                "draft_config": {
                    **SPECULATORS,
                    "target_hidden_size": None,
                    "transformer_layer_config": {"hidden_size": 16},
                },
                "draft_headers": {"fc.weight": ["BF16", [16, 72]]},
            },
            "warning",
            "must be 24",
        ),
        (
            "points-key",
            "vllm",
            {"target": LLAMA, "draft_config": {**SPECULATORS, **NESTED_IDS}, "states_manifest_resid_pre": [4, 16, 28]},
            "error",
            "is not read by vllm",
        ),
        (
            "points-key",
            "",
            {
                "launch_args": VLLM,
                "env": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
                "target": LLAMA,
                "draft_config": {**EAGLE3, **NESTED_IDS},
            },
            "error",
            "V2 runner",
        ),
        (
            "fc-bypass",
            "sglang",
            {"target": LLAMA, "draft_config_ids": [30], "draft_headers": {"fc.weight": ["BF16", [4096, 4096]]}},
            "error",
            "steps over fc",
        ),
        ("fc-bypass", "", {"draft_config": {**EAGLE3, **OFF}}, "error", "is false"),
        (
            "config-draft-vocab-missing",
            "",
            {
                "launch_args": [
                    "--model-path",
                    "T",
                    "--speculative-algorithm",
                    "EAGLE3",
                    "--speculative-draft-model-path",
                    "D",
                ],
                "draft_config": {**EAGLE3, "vocab_size": 9},
            },
            "error",
            "9",
        ),
        (
            "rope-readers",
            "",
            {"draft_config": {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}},
            "warning",
            "only under rope_scaling",
        ),
        (
            "rope-conversion",
            "",
            {
                "source_config": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
                "converted_config": {"rope_theta": 1e6},
            },
            "error",
            "partial_rotary_factor was 0.5",
        ),
        (
            "rope-spellings",
            "",
            {"configs": [{"text_config": {"rope_theta": 5e4}}, {"rope_theta": 1e4}]},
            "warning",
            "50000",
        ),
        (
            "vocab-lengths",
            "",
            {
                "draft_config": {"vocab_size": 40, "draft_vocab_size": None},
                "draft_headers": {"lm_head.weight": ["BF16", [20, 16]]},
            },
            "error",
            "is null",
        ),
        (
            "vocab-lengths",
            "vllm",
            {"draft_config": {"vocab_size": 40}, "draft_headers": {"lm_head.weight": ["BF16", [20, 16]]}},
            "error",
            "is missing",
        ),
        (
            "vocab-lengths",
            "",
            {"draft_config": {"vocab_size": 40}, "draft_headers": {"d2t": ["I64", [20, 1]]}},
            "error",
            "one dimension",
        ),
        (
            "vocab-offsets",
            "",
            {"draft_config": {"vocab_size": 20}, "d2t": [9, 2, 7, 3], "t2d_true_ids": [2, 3, 7, 9]},
            "error",
            "absolute ids",
        ),
        (
            "vocab-offsets",
            "",
            {"draft_config": {"vocab_size": 40}, "d2t": [30, 4, 15, 0], "t2d_true_ids": [30, 5, 17, 3]},
            "error",
            "not ascending",
        ),
        (
            "embedding-differs",
            "",
            {
                "target_embed_tokens": {"dtype": "F32", "values": [[1.0, 2.0]] * 12},
                "draft_embed_tokens": {"dtype": "F32", "values": [[1.0, 2.0]] * 6},
            },
            "warning",
            "is lost",
        ),
        (
            "weights-twice",
            "",
            damaged(served(QWEN), "draft_headers", "layers.0.mlp.up_proj.weight", value=["BF16", [12288, 4096]]),
            "warning",
            "name one parameter",
        ),
        (
            "vocab-built",
            "",
            {"draft_vocab_size": 1200, "vocab_size": 1000, "built_map": {"padded": True}},
            "error",
            "above vocab_size 1000",
        ),
        (
            "vocab-built",
            "",
            {"cached_map": {"d2t_rows": 8192}, "asked": {"draft_vocab_size": 32000}},
            "error",
            "asked for 32000",
        ),
        (
            "norm-flag",
            "sglang",
            {
                "draft_config": {**EAGLE3, "hidden_size": 16},
                "draft_headers": {
                    f"module.{name}": entry
                    for name, entry in {**headers(TINY), "input_norm.weight": ["BF16", [48]]}.items()
                },
            },
            "error",
            "[48] = 3 x 16",
        ),
        ("states-overflow", "", {"dtype_before": "F32", "value": 3.4e38, "dtype_after": "BF16"}, "error", "inf"),
        ("file-values", "", {"tensor": {"dtype": "BF16", "shape": [], "bytes_hex": "c07f"}}, "error", "1 NaN"),
    ],
)
def test_told(code: str, engine: str, facts: dict[str, Any], severity: str, words: str) -> None:
    found = told(code, facts, engine)
    assert [f.severity for f in found] == [severity] and words in found[0].message, [f.message for f in found]


@pytest.mark.parametrize(
    ("code", "engine", "facts"),
    [
        ("config-target-hidden-null", "sglang", {"draft_config": {**LATENT, "target_hidden_size": None}}),
        ("config-target-hidden-null", "vllm", {"draft_config": {**SPECULATORS, "target_hidden_size": None}}),
        ("config-class", "vllm", {"draft_config": {"architectures": ["Eagle3Qwen3ForCausalLM"]}}),
        ("config-values", "", {"target": {"blocks": 61.0, "hidden_size": 7168}}),
        (
            "width-fc",
            "sglang",
            {
                "target": {**LLAMA, "hidden_size": 16},
                "draft_config": {**LATENT, **FOUR_IDS},
                "draft_headers": {"fc.weight": ["BF16", [16, 64]]},
            },
        ),
        (
            "width-fc",
            "vllm",
            {
                "target": {**LLAMA, "hidden_size": 16},
                "draft_config": {**EAGLE3, "hidden_size": 16, **FOUR_IDS, "num_aux_hidden_states": 4},
                "draft_headers": {"fc.weight": ["BF16", [16, 64]]},
            },
        ),
        ("points-key", "vllm", {"target": LLAMA, "draft_config": {**EAGLE3, **NESTED_IDS}}),
        (
            "points-range",
            "vllm",
            {"target": LLAMA, "draft_config": {**EAGLE3, **NESTED_IDS, "eagle_aux_hidden_state_layer_ids": []}},
        ),
        (
            "points-key",
            "",
            {
                "launch_args": VLLM,
                "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
                "target": LLAMA,
                "draft_config": {**EAGLE3, **NESTED_IDS},
            },
        ),
        ("fc-bypass", "", {"draft_config": {**EAGLE1, **OFF}, "draft_headers": {"fc.weight": ["BF16", [4096, 8192]]}}),
        ("fc-bypass", "sglang", {"target": LLAMA, "draft_config_ids": [2, 16, 29]}),
        (
            "rope-conversion",
            "",
            {
                "source_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
                "converted_config": {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            },
        ),
        ("rope-spellings", "", {"configs": [{"text_config": {"rope_theta": 5e4}}, {"rope_theta": 5e4}]}),
        (
            "vocab-lengths",
            "",
            {
                "draft_config": {"vocab_size": 40, "draft_vocab_size": None},
                "draft_headers": {"lm_head.weight": ["BF16", [40, 16]]},
            },
        ),
        ("vocab-offsets", "", {"draft_config": {"vocab_size": 40, "draft_vocab_size": 4}, "d2t": [30, 4, 15, 0]}),
        ("vocab-offsets", "", {"draft_config": {"vocab_size": 20}, "d2t": [0, 0, 5, 5], "t2d_true_ids": [0, 1, 7, 8]}),
        ("weights-class", "vllm", {**served(QWEN, architectures=["LlamaForCausalLM"]), "launch_args": None}),
        ("weights-twice", "", served(QWEN)),
        ("vocab-built", "", {"cached_map": {"d2t_rows": 32000}, "asked": {"draft_vocab_size": 32000}}),
        ("vocab-offsets", "", {"draft_config": {"vocab_size": 400}, "d2t": list(range(100))}),
        ("states-overflow", "", {"dtype_before": "F32", "value": 3.0e38, "dtype_after": "BF16"}),
        ("file-values", "", {"tensor": {"dtype": "BF16", "shape": [], "bytes_hex": "803f"}}),
    ],
)
def test_not_told(code: str, engine: str, facts: dict[str, Any]) -> None:
    assert [f.message for f in told(code, facts, engine)] == []


def test_a_map_of_too_many_rows_is_not_called_absolute() -> None:
    """d2t[i] = i over even ids, written as long as the vocabulary."""
    facts = {"draft_config": {"vocab_size": 100, "draft_vocab_size": 10}, "d2t": list(range(100)),
             "t2d": [i < 20 and i % 2 == 0 for i in range(100)]}  # fmt: skip
    assert not any("absolute" in f.message for f in told("vocab-offsets", facts)) and told("vocab-lengths", facts)


def test_a_float16_copy_of_small_values_is_the_same_embedding() -> None:
    target = np.random.default_rng(0).normal(0, 0.02, (16, 512)).astype(np.float32)
    facts = {"target_embed_tokens": {"dtype": "F32", "values": target.tolist()}}
    same = {**facts, "draft_embed_tokens": {"dtype": "F16", "values": target.astype(np.float16).tolist()}}
    assert not told("embedding-differs", same)
    moved = {**facts, "draft_embed_tokens": {"dtype": "F16", "values": (target + 1e-3).tolist()}}
    assert told("embedding-differs", moved)


def test_numbers_of_yaml_that_are_also_json() -> None:
    read = parse_yaml("{a: 1e-06, b: 5e4, c: 4.096e3, d: '1e6', e: 1e6x, f: .5e-3}", "x")
    assert read == {"a": 1e-6, "b": 5e4, "c": 4096.0, "d": "1e6", "e": "1e6x", "f": 5e-4}


@pytest.mark.parametrize(("text", "errors"), [("{parameters: {lr: 1e-3}}", 1), ('{"parameters": {"lr": 1e-3}}', 0)])
def test_parameters_are_read_as_a_runner_reads_them(tmp_path: Path, text: str, errors: int) -> None:
    """papermill reads YAML 1.1, in which 1e-3 is a text; in JSON it is a number."""
    notebook = {"cells": [{"source": "lr: float = 1e-4", "tags": ["parameters"]}, {"source": "print(lr)"}]}
    path = tmp_path / "facts.yaml"
    path.write_text(text[:-1] + f', "notebook": {json.dumps(notebook)}' + "}")
    found = [f for f in visit(Inputs(facts=str(path))).findings if f.code == "notebook-parameters"]
    assert sum(f.severity == "error" for f in found) == errors


FOREIGN = {
    "an HTML page": b"\n  <!DOCTYPE html><html><body>Not found</body></html>",
    "an XML answer": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "an error message": b'{"message": "Repository not found", "code": 404}',
    "text, not tensors": b"Entry not found, sorry for that",
    "git-annex": b"../../.git/annex/objects/Xk/9f/SHA256E-s1234--abc/abc",
    "LFS pointer": b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 20100200\n",
    "gzip": b"\x1f\x8b\x08\x00" + bytes(60),
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}q\x00." + bytes(40),
    "numpy": b"\x93NUMPY\x01\x00" + bytes(60),
    "tar": b"model.bin" + bytes(248) + b"ustar\x0000" + bytes(40),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_broken_draft_is_told_beside_a_target_with_a_file_of_the_same_name(tmp_path: Path, what: str) -> None:
    draft, target = tmp_path / "draft", tmp_path / "target"
    for folder in (draft, target):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config(QWEN)))
        write_safetensors(folder / "model.safetensors", header_contents(headers(TINY)))
    assert not [f for f in visit(Inputs(draft=str(draft), target=str(target))).findings if f.code == "file-is-weights"]
    (draft / "model.safetensors").write_bytes(FOREIGN[what])
    findings = visit(Inputs(draft=str(draft), target=str(target))).findings
    [found] = [f for f in findings if f.code == "file-is-weights"]
    assert found.severity == "error" and what in found.message and "split" not in found.fix
    assert not any("no safetensors file" in f.message for f in findings)


def test_inspect_answers_a_broken_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FOREIGN["gzip"])
    assert cli.run(["inspect", str(path), "--json"]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["severity"] == "error" and finding["code"] == "checkpoint-broken"
    assert cli.run(["inspect", str(tmp_path / "nothing")]) == 2
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": null}}')
    assert cli.run(["inspect", str(tmp_path)]) == 1
