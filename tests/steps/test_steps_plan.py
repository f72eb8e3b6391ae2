"""The `plan` step: verdicts and exit codes, a model folder read by headers only."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3lab.core.errors import ProfileError, UsageError
from eagle3lab.steps.plan import plan


def test_kimi_96_fits_with_context_printed() -> None:
    outcome = plan(profile="kimi-k2.5", gpus=8, gpu_memory="96GiB", samples=10_000, tokens=2048)
    answer = outcome.as_json()
    assert (outcome.exit_code, answer["verdict"]) == (0, "fits")
    assert answer["fits"][0]["context_left"] > 100_000
    assert str(answer["fits"][0]["context_left"]) in outcome.as_text()
    assert answer["states"]["bytes_per_token"] == 57_344
    assert answer["states"]["total_bytes"] == 10_000 * 2048 * (57_344 + 9)
    json.dumps(answer, allow_nan=False)


def test_kimi_64_is_refused_with_exit_1() -> None:
    outcome = plan(profile="kimi-k2.5", gpus=8, gpu_memory="64GiB")
    assert outcome.exit_code == 1 and outcome.as_json()["verdict"] == "refused"
    assert "refused: " in outcome.as_text().splitlines()[-1] and "12.0 GiB lack" in outcome.as_text()


def test_without_memory_nothing_is_judged() -> None:
    outcome = plan(profile="kimi-k2.5")
    assert outcome.exit_code == 0 and outcome.as_json()["verdict"] == "not judged"
    assert [entry["verdict"] for entry in outcome.as_json()["fits"]] == ["refused", "tight", "fits", "fits", "fits"]
    assert "unknown without --samples" in outcome.as_text() and outcome.as_json()["states"]["total_bytes"] is None


@pytest.fixture
def folder(tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32", "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_model_folder_is_read_by_headers(folder) -> None:
    save_file({"a": np.zeros((4, 8), np.float32)}, folder / "one.safetensors")
    save_file({"b": np.zeros((2, 8), np.float16)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    index = {"metadata": {"total_size": 999}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    outcome = plan(target=folder)
    assert outcome.files_bytes == 4 * 8 * 4 + 2 * 8 * 2  # headers are there: they win over the index's word
    assert any("the files hold" in note for note in outcome.notes)
    (folder / "two.safetensors").unlink()
    assert plan(target=folder).files_bytes == 999


def test_folder_without_weights(folder) -> None:
    outcome = plan(target=folder, gpu_memory="8GiB")
    assert outcome.files_bytes is None and outcome.as_json()["verdict"] == "fits"


@pytest.mark.parametrize("arguments", [{"gpus": 0}, {"samples": -1}, {"tokens": 0}, {"gpu_memory": "lots"}])
def test_bad_numbers(arguments: dict) -> None:
    with pytest.raises(UsageError):
        plan(profile="kimi-k2.5", **arguments)


def test_unknown_profile_and_missing_folder(tmp_path) -> None:
    with pytest.raises(ProfileError, match=r"kimi-k2\.5"):
        plan(profile="kimi-k25")
    with pytest.raises(ProfileError, match="nowhere"):
        plan(target=tmp_path / "nowhere")
