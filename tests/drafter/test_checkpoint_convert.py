"""`eagle3lab convert` of drafters: the same bytes there and back, the right names, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle3lab.core.errors import CheckpointError, DiskError, Eagle3LabError, PointsError, UsageError
from eagle3lab.drafter.convert import convert_checkpoint
from eagle3lab.drafter.layouts import LAYOUTS
from eagle3lab.drafter.layouts_read import parse_config
from eagle3lab.points import captured
from eagle3lab.steps.convert import convert
from tests.drafter.drafts import (
    KEPT,
    VD,
    H,
    V,
    llama_tensors,
    mla_config,
    mla_tensors,
    raw_config,
    write_draft,
)

LLAMA = {"family": "llama", "blocks": 30}
KIMI = {"family": "kimi_k25", "blocks": 61}
MAPS = ("d2t", "t2d")


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in load_file(folder / "model.safetensors").items()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "src", raw_config([1, 14, 26]), llama_tensors())


@pytest.mark.parametrize("to", LAYOUTS)
def test_there_and_back_is_byte_equal(draft, tmp_path, to):
    there, back = tmp_path / "there", tmp_path / "back"
    convert_checkpoint(draft, there, to, **LLAMA)
    convert_checkpoint(there, back, "sglang")
    assert tensors_of(back) == tensors_of(draft)
    # the config keeps what the other layout has no field for
    assert config_of(back)["bos_token_id"] == 7 and config_of(back)["initializer_range"] == 0.02
    assert parse_config(back).config == parse_config(draft, **LLAMA).config


def test_names_of_each_layout(draft, tmp_path):
    layers = {}
    for to in LAYOUTS:
        convert_checkpoint(draft, tmp_path / to, to, **LLAMA)
        names = set(load_file(tmp_path / to / "model.safetensors"))
        layers[to] = {name.rsplit(".self_attn.q_proj", 1)[0] for name in names if "q_proj" in name}
        assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert layers == {
        "sglang": {"midlayer"},
        "specforge": {"midlayer"},
        "vllm": {"layers.0"},
        "speculators": {"layers.0"},
    }


@pytest.mark.parametrize(
    ("place", "ids", "points", "nested", "top"),
    [
        (LLAMA, [1, 14, 26], [2, 15, 27], [1, 14, 26], [2, 15, 27]),
        (KIMI, [1, 29, 57], [2, 30, 58], [2, 30, 58], [2, 30, 58]),
        (KIMI, [2, 30, 58], [2, 30, 58], [2, 30, 58], [2, 30, 58]),
    ],
)
@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_one_folder_is_captured_right_by_both_engines(tmp_path, place, ids, points, nested, top, to):
    source = write_draft(tmp_path / "src", raw_config(ids), llama_tensors())
    convert_checkpoint(source, tmp_path / "dst", to, **place)
    config = config_of(tmp_path / "dst")
    inner = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    outer = config["eagle_aux_hidden_state_layer_ids"]
    assert (inner, outer) == (nested, top)
    for engine, seen in (("sglang", inner), ("vllm", outer), ("vllm-v2", outer)):
        assert captured(seen, engine=engine, **place).resid_pre == points
    if nested != top:  # the wrong version: one list in both places is off by one in one of the engines
        assert captured(outer, engine="sglang", **place).resid_pre != points
        assert captured(inner, engine="vllm", **place).resid_pre != points
        assert "may differ" in config["eagle3lab"]["ids_note"]


def test_speculators_config_is_the_one_vllm_expands(draft, tmp_path):
    convert_checkpoint(draft, tmp_path / "s", "speculators", verifier="HuggingFaceTB/SmolLM2", **LLAMA)
    config = config_of(tmp_path / "s")
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "HuggingFaceTB/SmolLM2"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert layer["rope_parameters"]["rope_theta"] == layer["rope_theta"] == 50000.0  # older readers see that one
    # vLLM takes true when the key is absent: it must be written
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27] and "eagle_config" not in config


def test_speculators_source_keeps_its_own_words(tmp_path):
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "google/gemma", "architectures": ["X"]},
        },
        "transformer_layer_config": {
            k: v for k, v in raw_config().items() if k not in ("draft_vocab_size", "architectures")
        },
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
    }
    source = write_draft(tmp_path / "src", config, llama_tensors("layers.0", extra=("embed",)))
    done = convert_checkpoint(source, tmp_path / "raw", "sglang", **LLAMA)
    assert any("embed_tokens" in note for note in done.notes)
    convert_checkpoint(tmp_path / "raw", tmp_path / "back", "speculators")
    back = config_of(tmp_path / "back")
    assert tensors_of(tmp_path / "back") == tensors_of(source)
    for key in ("speculators_version", "speculators_config", "embed_requires_grad"):
        assert back[key] == config[key]
    del config["norm_before_residual"]
    bare = write_draft(tmp_path / "bare", config, llama_tensors("layers.0"))
    with pytest.raises(CheckpointError, match=r"norm_before_residual.*vLLM then takes true and speculators false"):
        convert_checkpoint(bare, tmp_path / "x", "sglang", **LLAMA)


@pytest.mark.parametrize(
    ("changes", "extra", "to", "words"),
    [
        ({"norm_before_residual": True}, (), "sglang", "SGLang never reads norm_before_residual"),
        ({"norm_before_residual": True}, (), "specforge", "always adds the un-normed state"),
        ({"norm_before_fc": True}, ("input_norm",), "specforge", "no input_norm"),
        ({"norm_before_fc": True, "fc_norm": True}, ("input_norm", "fc_norm"), "speculators", "not both"),
    ],
)
def test_what_the_other_side_would_drop_is_refused(tmp_path, changes, extra, to, words):
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26], **changes), llama_tensors(extra=extra))
    with pytest.raises(CheckpointError, match=words) as caught:
        convert_checkpoint(source, tmp_path / "dst", to, **LLAMA)
    assert "\n" not in str(caught.value) and "next: --to" in str(caught.value)
    assert not (tmp_path / "dst").exists()
    convert_checkpoint(source, tmp_path / "ok", "vllm", **LLAMA)  # vLLM honours all of them
    assert {key: config_of(tmp_path / "ok")[key] for key in changes} == changes


def test_norm_output_of_specforge_is_another_flag(tmp_path):
    """Our false ("pre-norm is fed back") must reach SpecForge as true ("final norm before the head")."""
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26], norm_output=False), llama_tensors())
    convert_checkpoint(source, tmp_path / "sf", "specforge", **LLAMA)
    assert config_of(tmp_path / "sf")["norm_output"] is True
    assert parse_config(tmp_path / "sf").config.norm_output is False
    fed_back = write_draft(tmp_path / "fb", raw_config([1, 14, 26], norm_output=True), llama_tensors())
    with pytest.raises(CheckpointError, match="norm_output means another thing"):
        convert_checkpoint(fed_back, tmp_path / "no", "specforge", **LLAMA)
    assert any("SpecForge" in note for note in parse_config(fed_back, **LLAMA).notes)


def test_mla_full_vocabulary(tmp_path):
    source = write_draft(tmp_path / "src", mla_config([1, 29, 57]), mla_tensors("midlayer"))
    convert_checkpoint(source, tmp_path / "v", "vllm", **KIMI)
    convert_checkpoint(tmp_path / "v", tmp_path / "s", "sglang")
    names = set(tensors_of(tmp_path / "s"))
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in names and not names & set(MAPS)
    mine = {name.replace("layers.0.", "midlayer."): value for name, value in tensors_of(tmp_path / "s").items()}
    assert mine == tensors_of(source)
    assert config_of(tmp_path / "s")["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config_of(tmp_path / "s")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    for to, words in (("speculators", "no MLA drafter"), ("specforge", "no MLA drafter")):
        with pytest.raises(CheckpointError, match=words):
            convert_checkpoint(source, tmp_path / "no", to, **KIMI)
    wide = write_draft(
        tmp_path / "wide",
        mla_config([2, 30, 58], norm_before_fc=True),
        mla_tensors() | {"input_norm.weight": np.ones(3 * H, np.float16)},
    )
    with pytest.raises(CheckpointError, match="MLA class has no input_norm"):
        convert_checkpoint(wide, tmp_path / "no", "sglang", **KIMI)


def test_mla_reduced_vocabulary(tmp_path):
    source = write_draft(tmp_path / "src", mla_config([2, 30, 58], draft_vocab_size=VD), mla_tensors(vd=VD))
    convert_checkpoint(source, tmp_path / "v", "vllm", **KIMI)
    assert tensors_of(tmp_path / "v") == tensors_of(source)


def test_maps_of_an_equal_vocabulary(tmp_path):
    """SpecForge saves and needs identity maps, vLLM refuses them; the way back restores them byte for byte."""
    maps = {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26], draft_vocab_size=V), llama_tensors(vd=V) | maps)
    for to in ("vllm", "speculators"):
        convert_checkpoint(source, tmp_path / to, to, **LLAMA)
        assert not set(tensors_of(tmp_path / to)) & set(MAPS)
        convert_checkpoint(tmp_path / to, tmp_path / f"{to}-back", "sglang")
        assert tensors_of(tmp_path / f"{to}-back") == tensors_of(source)
    bare = write_draft(tmp_path / "bare", raw_config([1, 14, 26], draft_vocab_size=V), llama_tensors(vd=V))
    convert_checkpoint(bare, tmp_path / "sf", "specforge", **LLAMA)
    assert set(tensors_of(tmp_path / "sf")) - set(tensors_of(bare)) == set(MAPS)


def test_missing_t2d_follows_from_d2t(tmp_path):
    tensors = llama_tensors()
    t2d = tensors.pop("t2d")
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26]), tensors)
    convert_checkpoint(source, tmp_path / "sf", "specforge", **LLAMA)
    assert np.array_equal(load_file(tmp_path / "sf" / "model.safetensors")["t2d"], t2d)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("midlayer.self_attn.q_proj.weight"), "q_proj.weight missing .*random"),
        (lambda t: t.update({"draft_model.fc.weight": t.pop("fc.weight")}), "draft_model.fc.weight unknown .*silently"),
        (lambda t: t.update({"fc_norm.0.weight": np.ones(H, np.float16)}), "fc_norm.0.weight unknown"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].T}), r"fc.weight \[24, 8\] instead of \[8, 24\]"),
        (lambda t: t.update({"d2t": KEPT}), "d2t leads to target id 24 of 20; d2t holds ids, not offsets"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d marks 14 ids that are not those of d2t"),
        (lambda t: t.update({"d2t": t["d2t"].astype(np.float16)}), "d2t is F16 instead of I64"),
        (lambda t: t.pop("d2t"), "d2t missing"),
        (lambda t: t.update({"midlayer.self_attn.qkv_proj.weight": t["norm.weight"]}), "qkv_proj.weight is fused"),
    ],
)
def test_broken_sources_are_refused(tmp_path, change, words):
    tensors = llama_tensors()
    change(tensors)
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26]), tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        convert_checkpoint(source, tmp_path / "dst", "vllm", **LLAMA)
    assert "\n" not in str(caught.value) and not (tmp_path / "dst").exists()


def test_legacy_names_are_read(tmp_path):
    """Older Llama drafters: `model.` in front, aux_norm_* for fc_norm.*, use_aux_norm for the flag."""
    plain = llama_tensors(extra=("fc_norm",))
    legacy = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    renamed = {
        "model." + legacy.get(n.removesuffix(".weight"), n.removesuffix(".weight")) + ".weight"
        if n not in MAPS
        else n: t
        for n, t in plain.items()
    }
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26], use_aux_norm=True), renamed)
    convert_checkpoint(source, tmp_path / "dst", "sglang", **LLAMA)
    reference = write_draft(tmp_path / "ref", raw_config(), plain)
    assert tensors_of(tmp_path / "dst") == tensors_of(reference)


def test_a_wrapper_on_every_name_is_taken_off(tmp_path):
    plain = llama_tensors()
    wrapped = {f"module.draft_model.{name}": tensor for name, tensor in plain.items()}
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26]), wrapped)
    done = convert_checkpoint(source, tmp_path / "dst", "sglang", **LLAMA)
    assert any("'module.draft_model.'" in note for note in done.notes)
    assert tensors_of(tmp_path / "dst") == tensors_of(write_draft(tmp_path / "ref", raw_config(), plain))


def test_points_that_an_engine_cannot_capture(tmp_path):
    """vLLM's state after the last block exists; SGLang's Llama loop never reaches it."""
    source = write_draft(tmp_path / "src", raw_config(top=[2, 15, 30]), llama_tensors())
    convert_checkpoint(source, tmp_path / "v", "vllm", **LLAMA)
    assert "eagle_aux_hidden_state_layer_ids" not in config_of(tmp_path / "v")["eagle_config"]
    with pytest.raises(PointsError, match="sglang cannot capture"):
        convert_checkpoint(source, tmp_path / "s", "sglang", **LLAMA)


def test_shards_are_joined(draft, tmp_path):
    from safetensors.numpy import save_file

    tensors = load_file(draft / "model.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (shards / "config.json").write_text((draft / "config.json").read_text())
    convert_checkpoint(shards, tmp_path / "one", "sglang", **LLAMA)
    assert tensors_of(tmp_path / "one") == tensors_of(draft)
    places[names[0]] = "../../elsewhere.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        convert_checkpoint(shards, tmp_path / "two", "sglang", **LLAMA)


def test_step_reports_and_refuses(draft, tmp_path):
    outcome = convert(draft, tmp_path / "v", to="vllm", **LLAMA)
    assert outcome.exit_code == 0 and outcome.points == [2, 15, 27] and outcome.numbers["renamed"] == 10
    assert "resid_pre: 2, 15, 27" in outcome.as_text()
    for words, call in {
        "unknown layout 'sgl'": lambda: convert(draft, tmp_path / "x", to="sgl"),
        "no folder": lambda: convert(tmp_path / "nowhere", tmp_path / "x", to="vllm"),
        "exists": lambda: convert(draft, tmp_path / "v", to="vllm", **LLAMA),
        "--target DIR": lambda: convert(draft, tmp_path / "x", to="vllm"),
    }.items():
        with pytest.raises(Eagle3LabError, match=words):
            call()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no config.json, manifest.json"):
        convert(tmp_path / "empty", tmp_path / "x", to="vllm")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc_norm": "false"}, "fc_norm 'false'; true or false"),
        ({"norm_before_residual": 0}, "norm_before_residual '0'"),
        ({"eagle_config": {"use_aux_hidden_state": "false"}}, "use_aux_hidden_state 'false'"),
        ({"head_dim": 0}, "head_dim '0'; a whole number above 0"),
        ({"target_hidden_size": ""}, "target_hidden_size ''"),
        ({"num_key_value_heads": False}, "num_key_value_heads 'False'"),
        ({"architectures": 1}, "architectures '1'; a list"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn'; an object"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: .*greater than 0"),
        ({"initializer_range": float("nan")}, "not readable JSON"),
        ({"bias": True}, "bias true"),
        ({"eagle3lab": {"target_family": ["llama"]}}, "target_family .*a name"),
        ({"eagle3lab": {"target_family": "llama", "resid_pre": [[2]]}}, "resid_pre .*a list of layer numbers"),
        ({"eagle3lab": {"target_family": "llama", "carried": {"raw": 1}}}, "raw '1'; an object"),
        ({"eagle3lab": {"target_family": "llama", "carried": {"maps": 1}}}, "maps '1'; a list of d2t, t2d"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, changes, words):
    """None of them stands for an absent key, and none ends in a traceback."""
    source = write_draft(tmp_path / "src", raw_config(None, [2, 15, 27], **changes), llama_tensors())
    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(
            source, tmp_path / "dst", "vllm", family=None if "eagle3lab" in changes else "llama", blocks=30
        )


@pytest.mark.parametrize("to", [layout for layout in LAYOUTS if layout != "speculators"])
def test_a_verifier_that_the_layout_has_no_place_for(draft, tmp_path, to):
    with pytest.raises(UsageError, match=f"--verifier V with --to {to}"):
        convert(draft, tmp_path / "dst", to=to, verifier="V", **LLAMA)
    assert not (tmp_path / "dst").exists()


def test_a_verifier_that_is_no_object(draft, tmp_path):
    convert_checkpoint(draft, tmp_path / "sp", "speculators", **LLAMA)
    path = tmp_path / "sp" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speculators_config": {"verifier": "name"}}))
    with pytest.raises(CheckpointError, match="verifier 'name'; an object"):
        convert_checkpoint(tmp_path / "sp", tmp_path / "dst", "speculators", verifier="other")


def test_quantised_weights_are_refused(tmp_path):
    """Also beside an fc in bf16: their numbers mean nothing without the scales, which no drafter's loader reads."""
    tensors = llama_tensors() | {"lm_head.weight": np.ones((VD, H), np.int8)}
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26]), tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is I8 instead of BF16 or F16 or F32"):
        convert_checkpoint(source, tmp_path / "dst", "sglang", **LLAMA)


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        ({"d2t": np.arange(V)[::-1] - np.arange(V)}, "another order, and vllm has no map"),
        ({"t2d": np.arange(V) < 5}, "t2d marks 5 ids"),
    ],
)
def test_a_map_that_is_no_identity_is_not_left_out(tmp_path, maps, words):
    source = write_draft(tmp_path / "src", raw_config([1, 14, 26], draft_vocab_size=V), llama_tensors(vd=V) | maps)
    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(source, tmp_path / "dst", "vllm", **LLAMA)


def test_an_index_that_cannot_be_parsed(draft, tmp_path):
    (draft / "model.safetensors").rename(draft / "part.safetensors")
    (draft / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        convert_checkpoint(draft, tmp_path / "dst", "vllm", **LLAMA)


def test_a_destination_below_a_file(draft):
    with pytest.raises(DiskError, match=r"no folder .*config\.json can be made"):
        convert_checkpoint(draft, draft / "config.json" / "dst", "vllm", **LLAMA)
