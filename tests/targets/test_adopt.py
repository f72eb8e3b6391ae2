"""A folder of one's own as the target: linked, under its own hash, never overwritten, never changed unseen."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest

from eagle3lab.core.errors import FetchError, ProfileError
from eagle3lab.targets.adopt import adopt
from eagle3lab.targets.fetch import fetch, fetched_folder, target_id, weight_hash
from eagle3lab.targets.profiles import load_profile


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of SmolLM2's sizes, as a user has one."""
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    sizes = {"num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
    (folder / "config.json").write_text(json.dumps(sizes))
    for name in ("model.safetensors", "tokenizer.json", "pytorch_model.bin"):
        (folder / name).write_bytes(name.encode())
    return folder


def test_a_folder_of_ones_own_is_the_target_from_then_on(own):
    profile, said = load_profile("smollm2"), []
    target = adopt(profile, str(own), note=said.append)
    assert target == fetched_folder(profile) == fetch(profile, note=said.append)
    assert weight_hash(target) == hashlib.sha256(b"model.safetensors").hexdigest()
    assert (target / "model.safetensors").resolve() == own / "model.safetensors" and not (
        target / "config.json"
    ).is_symlink()
    assert not (target / "pytorch_model.bin").exists()
    assert any(f"taken from {own} (rm -r {target}" in line for line in said)
    assert adopt(profile, str(own), note=said.append) == target


def test_another_target_is_not_overwritten(own, tmp_path):
    profile = load_profile("smollm2")
    target = adopt(profile, str(own))
    shutil.copytree(own, tmp_path / "other")
    with pytest.raises(FetchError, match=rf"holds the target from {own}; .*rm -r {target}"):
        adopt(profile, str(tmp_path / "other"))


def test_weights_that_change_under_a_target_are_refused(own):
    """The wrong version goes on to download the profile's own weights, or reads the new ones under the old hash."""
    profile = load_profile("smollm2")
    target = adopt(profile, str(own))
    (own / "model.safetensors").write_bytes(b"others")
    with pytest.raises(FetchError, match=rf"--source {own}"):
        fetch(profile)
    assert adopt(profile, str(own)) == target
    assert weight_hash(target) == hashlib.sha256(b"others").hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.json", '{"num_hidden_layers": 32, "hidden_size": 576, "vocab_size": 49152}', "hidden_layers 32; "),
        ("config.json", "{}", "has num_hidden_layers None, hidden_size None"),
        ("config.json", "[]", "holds a list"),
        ("config.json", "{", "is not JSON"),
        ("model.safetensors", None, "no .safetensors file"),
        ("tokenizer.json", None, "no tokenizer in"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}', "model-2.safetensors is not"),
        ("config.json", None, "no config.json"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_the_target(own, name, content, why):
    if content is None:
        (own / name).unlink()
    else:
        (own / name).write_text(content)
    with pytest.raises((FetchError, ProfileError), match=re.escape(why)):
        adopt(load_profile("smollm2"), str(own))
    assert not fetched_folder(load_profile("smollm2")).exists()


def test_a_link_that_leads_nowhere_is_no_weight_file(own):
    (own / "model.safetensors").unlink()
    (own / "model.safetensors").symlink_to(own / "gone")
    with pytest.raises(FetchError, match=r"model\.safetensors is not there"):
        adopt(load_profile("smollm2"), str(own))


def test_a_target_that_does_not_fit_any_more_leaves_the_old_one(own):
    """The wrong version removes the links first: the next run would download the profile's own weights instead."""
    profile = load_profile("smollm2")
    target = adopt(profile, str(own))
    (own / "model.safetensors").write_bytes(b"others")
    (own / "config.json").write_text(json.dumps({"num_hidden_layers": 31}))
    with pytest.raises(FetchError, match="num_hidden_layers 31"):
        adopt(profile, str(own))
    assert (target / "eagle3lab_target.json").is_file()
    with pytest.raises(FetchError, match=rf"not what it was \(size\).*--source {own}"):
        weight_hash(target)


def test_what_is_taken_keeps_its_own_name(own, tmp_path):
    assert target_id(adopt(load_profile("smollm2"), str(own))) == "own"
    cached = tmp_path / "models--some--model" / "snapshots" / "1234"
    shutil.copytree(own, cached)
    shutil.rmtree(fetched_folder(load_profile("smollm2")))
    assert target_id(adopt(load_profile("smollm2"), str(cached))) == "some/model"


def test_random_weights_cannot_be_replaced(own):
    with pytest.raises(FetchError, match="is of random weights"):
        adopt(load_profile("kimi-thin"), str(own))


@pytest.mark.parametrize("name", ["../x", "a/b--c/", "models/my--model", "./model", "a/.."])
def test_words_that_are_no_names_are_one_line(own, name, monkeypatch):
    monkeypatch.chdir(own)
    with pytest.raises(FetchError):
        adopt(load_profile("smollm2"), name)


def test_a_name_that_is_not_in_the_cache_of_the_hub(own, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(own))
    with pytest.raises(FetchError, match=r"not in the hub's cache; .*; next: hf download some/model"):
        adopt(load_profile("smollm2"), "some/model")
