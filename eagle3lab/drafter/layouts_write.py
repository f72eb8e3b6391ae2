"""`config.json` of a drafter in each layout; `layouts_read` is the way back.

The raw layouts (`sglang`, `vllm`, `specforge`) share one form: one folder is captured right by both engines, because
SGLang reads only the nested id list and vLLM the top-level one, and for a Llama-like target the two differ on purpose.
`speculators` nests the layer's sizes and knows only the top-level list. Every config that the lab writes also has a
block `eagle3lab` with the points themselves and with the keys of the source that the other form has no place for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3lab.core.errors import CheckpointError, PointsError
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.layouts import Layout, flags
from eagle3lab.points import TOP_LEVEL_KEY, captured, written

IDS = TOP_LEVEL_KEY
BLOCK = "eagle3lab"
REPLACEABLE = ("bos_token_id", "eos_token_id", "model_type")
"""Keys of a raw config that the source's value may replace."""


def write_config(
    config: DraftConfig, layout: Layout, *, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config.json` for a layout.

    Args:
        dtype: of the weights, such as `bfloat16`.
        carried: of the source's `Parsed`.

    Raises:
        PointsError: the engine of the layout cannot be made to capture these points.
    """
    kept = dict(carried or {})
    place = {"blocks": config.target_blocks, "family": config.target_family}
    top, nested = _ids(config, "vllm", layout != "sglang"), _ids(config, "sglang", layout != "vllm")
    block: dict[str, Any] = {
        "layout": layout,
        "resid_pre": config.points,
        "target_blocks": config.target_blocks,
        "target_family": config.target_family,
        "norm_output": config.norm_output,
        "ids_note": "SGLang reads the nested list and vLLM the top-level one; both capture resid_pre "
        f"{config.points} of a {place['family']} target of {place['blocks']} blocks, so the lists may differ",
    }
    if layout == "speculators":
        own = speculators_form(config, top, dtype) | {BLOCK: block | {"carried": _without(kept, "speculators")}}
        return _merge(kept.get("speculators", {}), own)
    block["carried"] = _without(kept, "raw")
    own = raw_form(config, layout, dtype) | {BLOCK: block}
    if top is not None:
        own[IDS] = top
    own["eagle_config"] = {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
    if nested is not None:
        own["eagle_config"][IDS] = nested
    extra = kept.get("raw", {})
    return _merge(extra, own) | {name: extra[name] for name in REPLACEABLE if name in extra}


def _ids(config: DraftConfig, engine: str, needed: bool) -> list[int] | None:
    """The list to write for one engine, checked by converting it back; None when that engine cannot and need not."""
    place: dict[str, Any] = {"blocks": config.target_blocks, "family": config.target_family}
    try:
        ids = written(config.points, engine=engine, **place)[0].ids
    except PointsError:
        if needed:
            raise
        return None
    if captured(ids, engine=engine, **place).resid_pre != config.points:
        raise CheckpointError(f"points {config.points} cannot be written for {engine}", rule="ids must convert back")
    return list(ids)


def _layer(config: DraftConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {"rope_type": "default"}
    parameters = {"rope_type": scaling.get("rope_type", scaling.get("type", "default")), **scaling}
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        # In both places: transformers 5 reads the first, older readers see the other two alone.
        "rope_parameters": {**parameters, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    return sizes | (config.mla or {"head_dim": config.head_dim})


def raw_form(config: DraftConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    """The keys of a raw config, without ids and without the lab's block."""
    mla = config.architecture == "mla"
    kimi = config.target_family.startswith("kimi")
    marks = flags(config)
    if layout == "specforge":
        # There this key asks for the final norm before the head, which every drafter of this lab has.
        marks["norm_output"] = True
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": ("kimi_k2" if kimi else "deepseek_v3") if mla else "llama",
        **_layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.points),
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        **marks,
    }


def speculators_form(config: DraftConfig, ids: list[int] | None, dtype: str) -> dict[str, Any]:
    """The keys of a speculators config, without the lab's block."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {"model_type": "llama", **_layer(config)},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: ids,
        **flags(config),
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _without(carried: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in carried.items() if key != name}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, object by object; what `over` says wins, except in `speculators_config`."""
    merged = dict(base)
    for key, value in over.items():
        if key == "speculators_config" and key in base:
            continue  # the source's own proposal methods and verifier
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
