"""Names in a draft file: prefixes beside renames, quantised layouts, vLLM's own names, fused shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.artefacts import header_contents, write_safetensors

from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .healthy import config, headers

TARGET = {"blocks": 8, "hidden_size": 8, "vocab_size": 40, "family": "qwen3", "max_position_embeddings": 256}
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16}
Headers = dict[str, Any]
Change = Callable[[Headers], Headers]


def draft(change: Change = dict, **settings: Any) -> dict[str, Any]:
    sizes = {**SIZES, "draft_vocab_size": 12}
    names = headers(config(TARGET, **sizes))
    return {"target": TARGET, "draft_config": config(TARGET, **sizes, **settings), "draft_headers": change(names)}


def serious(facts: dict[str, Any], engine: str) -> dict[str, Finding]:
    return {f.code: f for f in visit_facts(facts, engine).findings if f.severity in ("error", "warning")}


def renamed(*pairs: tuple[str, str]) -> Change:
    def name_of(name: str) -> str:
        for old, new in pairs:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return lambda names: {name_of(name): entry for name, entry in names.items()}


def plus(**more: list[Any]) -> Change:
    return lambda names: {**names, **{name.replace("__", "."): entry for name, entry in more.items()}}


RENAMES = [
    ((("midlayer.", "decoder.layers.0."), ("fc.", "projector.")), 11),
    ((("midlayer.", "decoder.midlayer."), ("fc.", "fusion.")), 11),
    ((("midlayer.", "transformer.layers.0."), ("fc.", "aux_proj."), ("norm.", "ln_f.")), 12),
]


@pytest.mark.parametrize(("pairs", "count"), RENAMES)
def test_a_renamed_layer_is_no_prefix(pairs: tuple[tuple[str, str], ...], count: int) -> None:
    found = serious(draft(renamed(*pairs)), "sglang")
    assert sorted(found) == ["weights-missing", "weights-unknown"]
    assert found["weights-unknown"].evidence["count"] == found["weights-missing"].evidence["count"] == count
    assert found["weights-unknown"].evidence["suggest"] == {new: old for old, new in pairs}


def wrapped(prefix: str) -> Change:
    return lambda names: {prefix + name: entry for name, entry in names.items()}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("stray", ["extra_head.weight", "module.extra_head.weight"])
def test_a_stray_beside_a_prefix_is_named(stray: str, engine: str) -> None:
    found = serious(draft(lambda names: {**wrapped("module.")(names), stray: ["BF16", [3, 8]]}), engine)
    assert sorted(found) == ["weights-prefix", "weights-unknown"]
    behind = 13 + stray.startswith("module.")
    assert f"{behind} of 16 keys stand behind the prefix 'module.'" in found["weights-prefix"].message
    assert found["weights-unknown"].evidence["unknown"] == [stray]


def test_a_prefix_does_not_hide_a_missing_tensor() -> None:
    facts = draft(wrapped("module."))
    assert sorted(serious(facts, "sglang")) == ["weights-prefix"]
    del facts["draft_headers"]["module.norm.weight"]
    found = serious(facts, "sglang")
    assert sorted(found) == ["weights-missing", "weights-prefix"]
    assert found["weights-missing"].evidence["missing"] == ["norm.weight"]
    assert found["weights-prefix"].evidence["missing"] == 12


def test_a_wrapper_around_the_model_is_the_whole_prefix() -> None:
    def change(names: Headers) -> Headers:
        inner = wrapped("module.model.")(names)
        inner["module.lm_head.weight"] = inner.pop("module.model.lm_head.weight")
        return inner

    found = serious(draft(change), "sglang")
    assert sorted(found) == ["weights-prefix"]
    assert "13 of 15 keys stand behind the prefix 'module.'," in found["weights-prefix"].message


def packed(weight: str, *beside: str) -> Change:
    """Every projection of the layer in another form."""

    def change(names: Headers) -> Headers:
        kept = {name: entry for name, entry in names.items() if "_proj" not in name}
        for name, (_, shape) in names.items():
            if name not in kept:
                rows, columns = shape
                stem = name.removesuffix("weight")
                kept[stem + weight] = ["U8" if weight == "weight" else "I32", [rows, columns // 2]]
                kept |= {stem + suffix: ["F32", [1]] for suffix in beside}
        return kept

    return change


def scaled(*suffixes: str) -> Change:
    stem = "midlayer.self_attn.k_proj."
    return lambda names: {**names, **{stem + suffix: ["F32", [1]] for suffix in suffixes}}


FORMS = {
    "awq": packed("qweight", "qzeros", "scales"),
    "gptq": packed("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": packed("weight_packed", "weight_scale", "weight_shape"),
    "nvfp4": packed("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": packed("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "bitsandbytes": packed("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "asymmetric": scaled("weight_scale", "weight_zero_point", "weight_g_idx"),
    "kv cache": scaled("weight_scale", "k_scale"),
}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_drafts_are_quiet(form: str, engine: str, key: str) -> None:
    assert serious(draft(FORMS[form], **{key: {"quant_method": form}}), engine) == {}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("form", FORMS)
def test_undeclared_quantisation_is_told(form: str, engine: str) -> None:
    assert "weights-unknown" in serious(draft(FORMS[form]), engine)


def test_a_quantised_draft_may_lack_a_tensor() -> None:
    facts = draft(FORMS["awq"], quantization_config={"quant_method": "awq"})
    del facts["draft_headers"]["midlayer.mlp.up_proj.qweight"]
    found = serious(facts, "sglang")
    assert found["weights-missing"].evidence["missing"] == ["midlayer.mlp.up_proj.weight"]


def folder(place: Path, facts: dict[str, Any]) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(facts["draft_config"]))
    write_safetensors(place / "model.safetensors", header_contents(facts["draft_headers"]))
    return place


def codes(place: Path, engine: str = "sglang") -> dict[str, str]:
    report = visit(Inputs(draft=str(place), engine=engine))
    return {f.code: f.message for f in report.findings if f.code.startswith(("weights-", "width-", "vocab-missing"))}


@pytest.mark.parametrize("text", ['{"quantization": {"quant_algo": "FP8"}}', None])
def test_quantisation_declared_beside_the_config(text: str | None, tmp_path: Path) -> None:
    place = folder(tmp_path / "draft", draft(scaled("weight_scale", "input_scale")))
    if text is not None:
        (place / "hf_quant_config.json").write_text(text)
    assert ("weights-unknown" in codes(place)) == (text is None)


HEAD_NORMS = plus(
    midlayer__self_attn__q_norm__weight=["BF16", [4]],
    midlayer__self_attn__k_norm__weight=["BF16", [4]],
)
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"]}


def speculators(change: Change) -> dict[str, Any]:
    facts = draft(change)
    outer = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "draft_vocab_size": 12}
    facts["draft_config"] = {**outer, "transformer_layer_config": {**facts["draft_config"], "model_type": "qwen3"}}
    return facts


def names_said(facts: dict[str, Any], engine: str) -> dict[str, Finding]:
    return {code: found for code, found in serious(facts, engine).items() if code.startswith(("weights-", "width-"))}


@pytest.mark.parametrize("make", [lambda change: draft(change, **QWEN3), speculators], ids=["flat", "speculators"])
def test_vllm_needs_the_head_norms_of_a_qwen3_draft(make: Callable[[Change], dict[str, Any]]) -> None:
    assert names_said(make(HEAD_NORMS), "vllm") == {}
    found = names_said(make(dict), "vllm")
    assert sorted(found) == ["weights-missing"]
    assert found["weights-missing"].evidence["count"] == 2
    assert {code for code, f in names_said(make(HEAD_NORMS), "").items() if f.severity != "info"} == set()
    narrow = make(HEAD_NORMS)
    narrow["draft_headers"]["midlayer.self_attn.q_norm.weight"] = ["BF16", [8]]
    assert sorted(names_said(narrow, "vllm")) == ["width-others"]


def test_a_llama_draft_has_no_head_norms() -> None:
    assert "2 unknown keys" in serious(draft(HEAD_NORMS), "vllm")["weights-unknown"].message


UNREAD = "draft_id_to_target_id"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_map_that_no_loader_reads_is_missing(engine: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "draft", draft(renamed(("d2t", UNREAD))))
    found = codes(place, engine)
    assert "d2t is missing" in found["vocab-missing"]
    assert found["weights-unknown"].endswith(f"drops it without a word; meant: {UNREAD} is d2t")
    place = folder(tmp_path / "draft", draft())
    assert not {"vocab-missing", "weights-unknown"} & set(codes(place, engine))


def test_a_full_vocabulary_needs_no_map_under_any_name() -> None:
    facts = draft(plus(draft_id_to_target_id=["I64", [40]]))
    facts["draft_config"]["draft_vocab_size"] = 40
    del facts["draft_headers"]["d2t"], facts["draft_headers"]["t2d"]
    facts["draft_headers"]["lm_head.weight"] = ["BF16", [40, 8]]
    assert serious(facts, "vllm") == {}


def test_vllm_drops_a_bias_without_a_word() -> None:
    facts = draft(plus(fc__bias=["BF16", [8]]), bias=True)
    found = serious(facts, "vllm")["weights-unknown"]
    assert found.message == "1 unknown key (fc.bias): vLLM drops it without a word"
    assert not found.evidence["suggest"]
    assert found.evidence["engine_logs_it"] is False
    assert serious(facts, "sglang") == {}
    stray = serious(draft(plus(gate__bias=["BF16", [8]])), "vllm")["weights-unknown"]
    assert "vLLM refuses it aloud" in stray.message


def test_vllm_knows_mask_hidden() -> None:
    change = plus(mask_hidden=["BF16", [1, 24]])
    assert serious(draft(change), "vllm") == {}
    assert "drops it without a word" in serious(draft(change), "sglang")["weights-unknown"].message


def fused(rows: int, inner: int) -> Change:
    def change(names: Headers) -> Headers:
        gone = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        kept = {name: entry for name, entry in names.items() if not any(part in name for part in gone)}
        kept["midlayer.self_attn.qkv_proj.weight"] = ["BF16", [rows, 16]]
        kept["midlayer.mlp.gate_up_proj.weight"] = ["BF16", [inner, 8]]
        return kept

    return change


@pytest.mark.parametrize(("rows", "inner", "subject"), [(16, 32, None), (24, 32, "qkv_proj"), (16, 16, "gate_up_proj")])
def test_fused_shapes_are_checked(rows: int, inner: int, subject: str | None) -> None:
    found = serious(draft(fused(rows, inner)), "sglang")
    assert [*found] == ([] if subject is None else ["width-others"])
    assert subject is None or subject in found["width-others"].message
