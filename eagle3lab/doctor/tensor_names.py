"""Which tensor names a drafter may have, and what each engine's loader does with a name. No checks in here.

Read in SGLang 0.5.23 (models/llama_eagle3, models/kimi_k25_eagle3) and vLLM 0.33.0 (models/llama_eagle3):
`midlayer` and `layers.0` are the same layer, `d2t` and `t2d` are found by substring, fused projections keep their
own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3lab.doctor.views import Draft, Target, whole

LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_LAYER = re.compile(r"^(?:midlayer|layers\.(\d{1,9}))\.")
_LORA = re.compile(r"(^|[._])lora_|\.adapter[._]|(^|\.)adapters?\.", re.IGNORECASE)
_BUFFER = re.compile(r"(rotary_emb\.|inv_freq$|cos_cached$|sin_cached$)")
_QUANT = re.compile(
    r"\.((weight|input|output|q|k|v|kv)_(global_)?(scale(_inv|_2)?|zero_point|g_idx|shape)"
    r"|pre_quant_scale|qzeros|scales|g_idx|weight\.(\w+_)?(absmax|quant_map|quant_state\..+))$"
)
_PACKED = re.compile(r"\.(qweight|weight_packed)$")
UNREAD_MAP = "draft_id_to_target_id"
"""What vLLM calls d2t inside: in a file, SGLang does not look for it and vLLM drops it (it renames d2t alone)."""


def strip_prefix(name: str) -> str:
    """`model.fc.weight` -> `fc.weight`; the Llama loaders know both."""
    return name.removeprefix("model.")


def layer_index(name: str) -> int | None:
    """Number of the decoder layer that a canonical name is of, None for a tensor outside the layers."""
    match = _LAYER.match(name)
    return None if match is None else int(match.group(1) or 0)


def layer_name(name: str) -> str | None:
    """Name inside the decoder layer (`self_attn.q_proj.weight`), None for a tensor outside it."""
    match = _LAYER.match(name)
    return name[match.end() :] if match else None


def is_adapter(name: str) -> bool:
    """Whether the name is of a low-rank adapter."""
    return bool(_LORA.search(name))


def is_buffer(name: str) -> bool:
    """Rotary tables and the like: recomputed by every engine, harmless in a file."""
    return bool(_BUFFER.search(name))


def is_scale(name: str) -> bool:
    """Side tensors of a quantised weight."""
    return bool(_QUANT.search(name))


def is_packed(headers: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor holds a weight in another shape: several values in one integer, a scale beside it."""
    if _PACKED.search(name):
        return True
    stem = name.removesuffix("weight")
    return dtype_of(headers, name) in ("U8", "I8", "I32") and any(
        other.startswith(stem) and is_scale(other) for other in headers
    )


def is_map(name: str) -> bool:
    """d2t or t2d under any prefix (SGLang finds them by substring), or the map under the name that no loader reads."""
    return "d2t" in name or "t2d" in name or is_unread_map(name)


def is_unread_map(name: str) -> bool:
    """The vocabulary map under vLLM's inner name, which neither loader reads from a file."""
    return name.endswith(UNREAD_MAP)


def expected_shapes(draft: Draft, target: Target | None, *, mla: bool) -> dict[str, tuple[int | None, ...]]:
    """Canonical name (`midlayer.` for the layer) -> shape of every tensor that must be in the file; None is unknown."""
    hidden, inner = draft.hidden, draft.size("intermediate_size")
    if draft.layer.get("model_type") == "llama4_text":
        inner = None  # SGLang reads intermediate_size_mlp there, vLLM intermediate_size
    state = draft.target_hidden(target)
    both = 2 * hidden if hidden else None
    fc_in = draft.states * state if state else None
    shapes: dict[str, tuple[int | None, ...]] = {"fc.weight": (hidden, fc_in)}
    shapes |= {f"midlayer.{norm}.weight": (hidden,) for norm in LAYER_NORMS}
    attention = _mla_shapes(draft, hidden, both) if mla else _mha_shapes(draft, hidden, both)
    shapes |= {f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft.draft_vocab, hidden),
    }
    return shapes


def _mha_shapes(draft: Draft, hidden: int | None, both: int | None) -> dict[str, tuple[int | None, ...]]:
    heads, dim = draft.size("num_attention_heads"), draft.head_dim
    kv_heads = draft.size("num_key_value_heads") or heads
    q = heads * dim if heads and dim else None
    kv = kv_heads * dim if kv_heads and dim else None
    return {"q_proj": (q, both), "k_proj": (kv, both), "v_proj": (kv, both), "o_proj": (hidden, q)}


def _mla_shapes(draft: Draft, hidden: int | None, both: int | None) -> dict[str, tuple[int | None, ...]]:
    heads, q_rank, kv_rank = (draft.size(k) for k in ("num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, value = (draft.size(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

    def times(a: int | None, *parts: int | None) -> int | None:
        return None if a is None or any(p is None for p in parts) else a * sum(p for p in parts if p is not None)

    query: dict[str, tuple[int | None, ...]] = {
        "q_a_proj": (q_rank, both),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (times(heads, nope, rope), q_rank),
    }
    return {
        **query,
        "kv_a_proj_with_mqa": (times(1, kv_rank, rope), both),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (times(heads, nope, value), kv_rank),
        "o_proj": (hidden, times(heads, value)),
    }


READS_BOTH = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj"),
    *("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"),
)
"""Projections of the first layer that read the embedding beside the state."""
FUSED = {
    "self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "self_attn.fused_qkv_a_proj_with_mqa.weight": (
        "self_attn.q_a_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
    ),
}
"""Fused tensor inside the layer -> the tensors that it stands for."""


def fused_parts(name: str) -> tuple[str, ...]:
    """Canonical names of the tensors (weights or biases) that a fused one stands for; () when it is none."""
    inner, ending = layer_name(name) or "", name.rpartition(".")[2]
    if ending not in ("weight", "bias"):
        return ()
    parts = FUSED.get(f"{inner.rpartition('.')[0]}.weight", ())
    return tuple(name.removesuffix(inner) + part.removesuffix("weight") + ending for part in parts)


def head_norms(draft: Draft, engine: str, *, mla: bool) -> dict[str, tuple[int | None, ...]]:
    """Norms of every query and key head: vLLM's Qwen3 draft has them, no other draft of either engine does."""
    if engine == "sglang" or mla or not draft.qwen3:
        return {}
    return {f"midlayer.self_attn.{norm}.weight": (draft.head_dim,) for norm in ("q_norm", "k_norm")}


def bias_shapes(draft: Draft, engine: str, *, mla: bool) -> dict[str, tuple[int | None, ...]]:
    """Biases that the engine's class builds and that must be in the file.

    SGLang 0.5.23 builds q, k, v and the MLP without biases whatever the config says, and starts an output projection's
    bias at zero, so that it may be missing; vLLM 0.32.0 builds fc without one.
    """
    hidden = draft.hidden
    if engine == "sglang":
        return {"fc.bias": (hidden,)} if draft.switched_on("bias") else {}
    found: dict[str, tuple[int | None, ...]] = {}
    if mla:
        return found
    rows = {name: shape[:1] for name, shape in _mha_shapes(draft, hidden, None).items()}
    if draft.switched_on("attention_bias"):
        found |= {f"midlayer.self_attn.{part}.bias": rows[part] for part in ("q_proj", "k_proj", "v_proj")}
    if (draft.switched_on("attention_bias") or draft.switched_on("bias")) and not draft.qwen3:
        found["midlayer.self_attn.o_proj.bias"] = (hidden,)
    if draft.switched_on("mlp_bias") and not draft.qwen3:
        inner = draft.size("intermediate_size")
        sizes = {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
        found |= {f"midlayer.mlp.{part}.bias": (size,) for part, size in sizes.items()}
    return found


def optional_names(draft: Draft, engine: str, *, mla: bool) -> set[str]:
    """Names outside the required set that the engine's loader knows (with `midlayer.` for the layer)."""
    names = {"embed_tokens.weight", "input_norm.weight", "lm_head.weight"}
    names |= {f"fc_norm.{i}.weight" for i in range(max(draft.states, 3))}
    names |= {f"midlayer.{name}" for name in FUSED} | set(head_norms(draft, engine, mla=mla))
    if engine != "sglang" and not mla:
        names.add("mask_hidden")  # read for parallel drafting, else skipped with a warning
    if engine == "sglang" and not mla:
        names |= {f"{norm}.weight" for norm in LEGACY_NORMS}
        if draft.switched_on("attention_bias") or draft.switched_on("bias"):
            names.add("midlayer.self_attn.o_proj.bias")
    built = bias_shapes(draft, engine, mla=mla)
    names |= {
        f"midlayer.{fused.removesuffix('weight')}bias"
        for fused, parts in FUSED.items()
        if all(f"midlayer.{part.removesuffix('weight')}bias" in built for part in parts)
    }
    return names


def later_layer(names: Mapping[str, tuple[int | None, ...]], index: int, draft: Draft, engine: str) -> dict[str, Any]:
    """What layer `index` (above 0) needs: it reads the state alone, and one of the two norms before attention.

    SGLang 0.5.23 applies its hidden_norm, vLLM 0.32.0 its input_layernorm; the other one is built and never used.
    """
    unused = "input_layernorm" if engine == "sglang" else "hidden_norm"
    both = 2 * draft.hidden if draft.hidden else None
    found: dict[str, Any] = {}
    for name, shape in names.items():
        inner = layer_name(name)
        if inner is None or inner == f"{unused}.weight":
            continue
        reads_both = len(shape) == 2 and inner.split(".")[-2] in READS_BOTH and shape[1] == both
        found[f"layers.{index}.{inner}"] = (shape[0], draft.hidden) if reads_both else shape
    return found


def canonical_names(names: Iterable[str], *, model_prefix: bool, quantised: bool = False) -> dict[str, str]:
    """File name -> canonical name: `layers.0.` becomes `midlayer.`, `model.` goes when the loader knows it.

    SGLang's loader knows the names inside its `model`; the head stands beside it, so `model.lm_head` is dropped. In a
    quantised draft a packed tensor (`qweight`, `weight_packed`) stands for the weight.
    """
    found: dict[str, str] = {}
    for name in names:
        bare = strip_prefix(name) if model_prefix and not name.startswith("model.lm_head.") else name
        bare = _PACKED.sub(".weight", bare) if quantised else bare
        found[name] = "midlayer." + bare.removeprefix("layers.0.") if bare.startswith("layers.0.") else bare
    return found


def shape_of(headers: Mapping[str, Any], name: str) -> list[int] | None:
    """Shape of a tensor in `draft_headers` form, None when absent or malformed."""
    entry = headers.get(name)
    if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], (list, tuple))):
        return None
    sizes = [whole(size) for size in entry[1]]
    return None if any(size is None for size in sizes) else [size for size in sizes if size is not None]


def dtype_of(headers: Mapping[str, Any], name: str) -> str | None:
    """Dtype of a tensor in `draft_headers` form."""
    entry = headers.get(name)
    return entry[0] if isinstance(entry, (list, tuple)) and entry and isinstance(entry[0], str) else None
