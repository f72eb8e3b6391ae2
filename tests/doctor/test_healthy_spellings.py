"""Right settings in other spellings are no fault, and the fault beside each of them is still told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.core.safetensors_header import read_header
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers import launch
from eagle3lab.doctor.views import target_of
from eagle3lab.doctor.weightfile import from_path

from .conftest import facts_of, visit_facts

EVEN = list(range(0, 128, 2))
MAP = {"draft_config": {"vocab_size": 200, "draft_vocab_size": 64}}
FIRST = {
    "draft_config": {"vocab_size": 20, "draft_vocab_size": 3},
    "d2t": [0, 0, 0],
    "t2d": [True] * 3 + [False] * 17,
}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
SPELT = {"rope_type": "yarn", "factor": 64, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
ROPE = {"source_config": {"rope_theta": 5e4, "rope_scaling": YARN}}
TABLE = {"draft_config": {"max_position_embeddings": 8192}, "launch_args": ["--context-length=8192"]}
EMBEDDING = {"target_embed_tokens": {"dtype": "F32", "values": [[1, 2, 3, 4], [4, 3, 2, 1]]}}
TEXT = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840}


def told(code: str, values: dict[str, Any], engine: str = "") -> list[tuple[str, str]]:
    found = [f for f in visit_facts(values, engine).findings if f.code == code]
    return [(f.severity, f.message) for f in found]


def draft_rows(*rows: list[float]) -> dict[str, Any]:
    return {**EMBEDDING, "draft_embed_tokens": {"dtype": "F32", "values": list(rows)}}


def converted(**scaling: Any) -> dict[str, Any]:
    return {**ROPE, "converted_config": {"rope_theta": 5e4, "rope_scaling": {**SPELT, **scaling}}}


def nibbles(count: int, data: int, end: int, dtype: str = "F4") -> dict[str, Any]:
    return {"file": {"tensor": {"name": "w", "dtype": dtype, "shape": [count]}, "data_bytes": data,
                     "declared": [0, end]}}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "engine", "values", "severity", "words"),
    [
        ("vocab-offsets", "", {**MAP, "d2t": list(range(64)), "t2d_true_ids": EVEN}, "info", "64 draft ids"),
        ("vocab-offsets", "", {**MAP, "d2t": list(range(1, 65))}, "warning", "t2d is not there"),
        ("vocab-offsets", "", {**MAP, "d2t": list(range(64))}, "info", "64 draft ids"),  # as ids: no selection at all
        ("vocab-offsets", "", {**MAP, "d2t": EVEN, "t2d_true_ids": EVEN}, "error", "absolute ids"),
        ("vocab-coverage", "", {**FIRST, "token_counts": {0: 50, 1: 30, 2: 20}}, "info", "100 of 100"),
        ("vocab-coverage", "", {**FIRST, "token_counts": {0: 50, 1: 30, 7: 20}}, "warning", "80 of 100"),
        ("vocab-coverage", "", FIRST, "warning", "the first 3 ids"),
        ("rope-conversion", "", converted(beta_fast=16), "error", "beta_fast 32.0 became 16.0"),
        ("rope-conversion", "", converted(truncate=False), "error", "truncate True became False"),
        ("rope-spellings", "", {"configs": [{"rope_scaling": YARN}, {"rope_scaling": SPELT}]}, "info", "alike"),
        (
            "rope-spellings",
            "",
            {"configs": [{"rope_scaling": YARN}, {"rope_scaling": {**SPELT, "beta_slow": 2}}]},
            "warning",
            "differently",
        ),
        (
            "context-table",
            "",
            {**TABLE, "prompt_tokens": [8000, 8190], "draft_steps": 3},
            "warning",
            "0 in prefill, 0 at the first draft step, 1 within three draft steps",
        ),
        ("context-table", "", {**TABLE, "prompt_tokens": [8000, 8189], "draft_steps": 3}, "info", "8192 positions"),
        ("embedding-differs", "vllm", draft_rows([1.02, 2, 3, 4.01], [4, 3.03, 2, 1]), "warning", "mean cosine 1"),
        ("embedding-differs", "vllm", draft_rows([4, -3, 2, -1], [1, -2, 3, -4]), "error", "mean cosine"),
        ("embedding-differs", "vllm", draft_rows([0.01, 0.02, 0.03, 0.04], [0.04, 0.03, 0.02, 0.01]), "error", "std"),
        ("embedding-differs", "vllm", draft_rows([1, 2, 3, 4], [4, 3, 2, 1]), "info", "are equal"),
        ("file-is-weights", "", nibbles(4, 2, 1), "error", "needs 2 bytes, has 1"),
        ("file-is-weights", "", nibbles(3, 2, 2), "error", "whole byte"),
        ("file-is-weights", "", nibbles(4, 2, 2, "F5"), "error", "unknown dtype F5"),
        ("points-key", "", {"draft_config_ids": ["4", "20", "40"]}, "error", "a list of whole numbers is needed"),
        ("vocab-built", "", {"cached_map": {"draft_vocab_size": "16000"}, "asked": {"draft_vocab_size": 32000}},
         "error", "16000, asked for 32000"),
    ],
)  # fmt: skip
def test_what_is_said(code: str, engine: str, values: dict[str, Any], severity: str, words: str):
    found = told(code, values, engine)
    assert [s for s, _ in found] == [severity], found
    assert words in found[0][1]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("rope-conversion", converted()),
        ("rope-conversion", converted(truncate=True, attention_factor=None)),
        ("file-is-weights", nibbles(4, 2, 2)),
        ("file-is-weights", nibbles(4, 3, 3, "F6_E2M3")),
        ("file-is-weights", nibbles(8, 6, 6, "F6_E3M2")),
        ("file-is-weights", nibbles(3, 3, 3, "F8_E4M3FNUZ")),
        ("points-key", {"draft_config_ids": [2, 30, 58], "target": {"blocks": 61, "family": "kimi_k2"}}),
        ("points-key", {"draft_config_ids": None, "target": {"blocks": 61, "family": "kimi_k2"}}),
        ("vocab-built", {"cached_map": {"draft_vocab_size": "32000"}, "asked": {"draft_vocab_size": 32000}}),
    ],
)
def test_nothing_is_said(code: str, values: dict[str, Any]):
    assert told(code, values) == []


def test_ids_written_as_text_are_not_taken_for_no_list():
    facts = {"target": {"blocks": 61, "family": "kimi_k2"}, "states_manifest_resid_pre": [4, 20, 40]}
    written = visit_facts({**facts, "draft_config_ids": ["4", "20", "40"]}, "sglang").findings
    assert [f.code for f in written if f.severity == "error"] == ["points-key"]
    assert told("points-differ", {**facts, "draft_config_ids": None}, "sglang")[0][0] == "error"


@pytest.mark.parametrize(
    "config",
    [
        TEXT,
        {"text_config": TEXT},
        {"llm_config": TEXT},
        {"language_config": TEXT, "vision_config": {"hidden_size": 1024}},
        {"thinker_config": {"text_config": TEXT, "audio_config": {"num_hidden_layers": 32}}, "talker_config": {}},
    ],
)
def test_text_settings_are_found_under_every_wrapper(config: dict[str, Any]):
    target = target_of(facts_of({"target_config": config}))
    assert target is not None
    assert (target.blocks, target.hidden, target.vocab) == (61, 7168, 163840)


@pytest.mark.parametrize(("dtype", "count", "data", "faults"), [("F4", 6, 3, 0), ("F4", 5, 3, 1), ("F6_E2M3", 4, 4, 1)])
def test_numbers_below_a_byte_in_a_file(tmp_path: Path, dtype: str, count: int, data: int, faults: int):
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, data]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    assert read_header(path).tensors["w"].needed_bytes == 3
    assert len(from_path(path)["faults"]) == faults


@pytest.mark.parametrize("before", ["", "CMD", " ENTRYPOINT "])
def test_a_list_of_words_without_spaces_is_a_launch_line(before: str):
    words = ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--speculative-num-steps", "3"]
    facts = Facts()
    launch.read(before + json.dumps(words, separators=(",", ":")), facts)
    assert facts["launch_args"] == words
