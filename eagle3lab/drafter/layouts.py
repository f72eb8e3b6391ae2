"""The layouts in which a drafter lies on disk: tensor names, shapes, and what each side cannot hold.

`sglang` and `specforge` call the decoder layer `midlayer`, `vllm` and `speculators` call it `layers.0`; the MLA drafter
is `layers.0` everywhere. Inside the lab every tensor has one canonical name, that of the module (`midlayer.*`).
Nothing here needs torch. Read in SGLang 0.5.23 (models/llama_eagle3, kimi_k25_eagle3), vLLM 0.32.0
(models/llama_eagle3, deepseek_eagle3, speculators/algos), SpecForge a6b6b02 and speculators c05b95b.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from eagle3lab.core.errors import CheckpointError, UsageError, nearest
from eagle3lab.core.safetensors_header import STORED_AS
from eagle3lab.drafter.config import DraftConfig

Layout = Literal["sglang", "vllm", "speculators", "specforge"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_RENAMED = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "draft_id_to_target_id": "d2t",
}
MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
"""Vocabulary map -> dtypes that the engines read."""
WEIGHT_DTYPES = {header: name for name, header in STORED_AS.items()}
"""Of every other tensor: safetensors' name -> torch's. Numbers of a quantised one mean nothing without its scale."""
EMBEDDING = "embed_tokens.weight"
WRAPPERS = ("module.", "_orig_mod.", "base_model.", "draft_model.", "draft.", "eagle_module.", "eagle.")
"""Prefixes that training wrappers leave on every name; no engine knows them."""
_FUSED = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj")


def check_layout(name: str) -> Layout:
    """`name` as a layout; `UsageError` with the nearest one otherwise."""
    if name not in LAYOUTS:
        raise UsageError(f"unknown layout '{name}'", rule=nearest(name, LAYOUTS))
    return name


def canonical_name(name: str) -> str:
    """The lab's name of a tensor: without `model.`, the layer as `midlayer`, no legacy spelling."""
    bare = name.removeprefix("model.")
    if bare.startswith("layers.0."):
        return "midlayer." + bare.removeprefix("layers.0.")
    return _RENAMED.get(bare, bare)


def wrapper_of(names: Iterable[str]) -> str:
    """The wrapper prefix, maybe of several parts, that all names stand behind; empty when there is none."""
    rest, prefix = list(names), ""
    while part := next((p for p in WRAPPERS if rest and all(name.startswith(p) for name in rest)), ""):
        prefix += part
        rest = [name.removeprefix(part) for name in rest]
    return prefix


def name_in(layout: Layout, canonical: str, architecture: str) -> str:
    """The name of a tensor in a layout."""
    inner = canonical.removeprefix("midlayer.")
    numbered = layout in ("vllm", "speculators") or architecture == "mla"
    return f"layers.0.{inner}" if numbered and inner != canonical else canonical


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that must be in the file (`t2d` follows from `d2t` and may be absent)."""
    hidden, inner, state = config.hidden_size, config.intermediate_size, config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, config.fc_in)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (state,) for i in range(len(config.points))}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.fc_in,)
    layer: dict[str, tuple[int, ...]] = {
        **{f"{norm}.weight": (hidden,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"self_attn.{name}.weight": shape for name, shape in _attention_shapes(config).items()},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.draft_vocab_size != config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def _attention_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    hidden, both, heads = config.hidden_size, 2 * config.hidden_size, config.num_attention_heads
    if config.mla is None:
        wide, narrow = heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return {"q_proj": (wide, both), "k_proj": (narrow, both), "v_proj": (narrow, both), "o_proj": (hidden, wide)}
    q_rank, kv_rank = config.mla["q_lora_rank"], config.mla["kv_lora_rank"]
    nope, rope, value = (config.mla[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "q_a_proj": (q_rank, both),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, both),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }


def optional_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of what may be in the file as well."""
    return {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def identity_maps(config: DraftConfig, found: Mapping[str, Any]) -> list[str]:
    """Maps that a drafter of the target's own vocabulary carries without need (SpecForge's buffers are always saved).

    vLLM refuses a d2t there, so the layouts `vllm` and `speculators` are written without.
    """
    return sorted(found.keys() & MAPS.keys()) if config.draft_vocab_size == config.vocab_size else []


def tensor_problems(config: DraftConfig, found: Mapping[str, tuple[str, Sequence[int]]]) -> list[str]:
    """What is wrong with a set of tensors, one phrase each; empty when an engine would load all of it.

    Args:
        found: canonical name -> (dtype as safetensors spells it, shape).
    """
    needed = tensor_shapes(config)
    known = optional_shapes(config) | needed
    problems = [f"{name} missing (an engine leaves it random)" for name in sorted(needed.keys() - found.keys())]
    for name in sorted(found.keys() - known.keys()):
        fused = any(part in name for part in _FUSED)
        problems.append(f"{name} " + ("is fused: store its parts" if fused else "unknown (SGLang drops it silently)"))
    for name in sorted(found.keys() & known.keys()):
        dtype, shape = found[name]
        if tuple(shape) != known[name]:
            problems.append(f"{name} {list(shape)} instead of {list(known[name])}")
        allowed = MAPS[name][:1] if name in MAPS else tuple(WEIGHT_DTYPES)
        if dtype not in MAPS.get(name, allowed):
            problems.append(f"{name} is {dtype} instead of {' or '.join(allowed)}")
    return problems


def map_problem(config: DraftConfig, d2t: np.ndarray, t2d: np.ndarray | None) -> str | None:
    """What is wrong with a vocabulary map, or None. d2t: integer [Vd] offsets; t2d: [V], true on kept ids."""
    kept = d2t.astype(np.int64) + np.arange(len(d2t))
    if len(kept) and (kept.min() < 0 or kept.max() >= config.vocab_size):
        absolute = "; d2t holds ids, not offsets" if bool((np.diff(d2t) > 0).all()) else ""
        return f"d2t leads to target id {int(kept.max())} of {config.vocab_size}{absolute}"
    if len(np.unique(kept)) != len(kept):
        return "d2t leads two draft ids to one target id"
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(kept)):
        return f"t2d marks {int(np.count_nonzero(t2d))} ids that are not those of d2t"
    return None


def kept_mask(config: DraftConfig, d2t: np.ndarray) -> np.ndarray:
    """t2d that belongs to d2t: bool [V]."""
    mask = np.zeros(config.vocab_size, dtype=bool)
    mask[d2t.astype(np.int64) + np.arange(len(d2t))] = True
    return mask


def limits(config: DraftConfig, layout: Layout) -> list[str]:
    """Why `layout` cannot hold this drafter, one sentence each; empty when it can."""
    mla = config.architecture == "mla"
    rules: dict[Layout, list[tuple[bool, str]]] = {
        "sglang": [
            (config.norm_before_residual, "SGLang never reads norm_before_residual: it adds the un-normed state"),
            (mla and config.norm_before_fc, "SGLang's MLA class has no input_norm: it skips the tensor"),
            (config.fc_in == config.hidden_size, "SGLang skips fc when its input is as wide as the embedding"),
        ],
        "vllm": [(mla and config.norm_before_fc, "vLLM's MLA class has no input_norm")],
        "speculators": [
            (mla, "speculators has no MLA drafter, only llama and qwen3 layers"),
            (config.fc_norm and config.norm_before_fc, "speculators takes fc_norm or norm_before_fc, not both"),
            (
                config.target_hidden_size != config.hidden_size,
                f"speculators' fc reads states as wide as the drafter ({config.hidden_size}), the target has "
                f"{config.target_hidden_size}",
            ),
        ],
        "specforge": [
            (mla, "SpecForge has no MLA drafter"),
            (config.norm_before_fc, "SpecForge has no input_norm before fc"),
            (config.norm_before_residual, "SpecForge's layer always adds the un-normed state"),
            (config.norm_output, "SpecForge feeds the pre-norm state back; its norm_output means another thing"),
            (len(config.points) != 3, f"SpecForge takes exactly three points, not {len(config.points)}"),
        ],
    }
    return [text for applies, text in rules[layout] if applies]


def refuse_limits(config: DraftConfig, layout: Layout) -> None:
    """`CheckpointError` with all `limits` in one line, when there are any."""
    if reasons := limits(config, layout):
        others = [name for name in LAYOUTS if not limits(config, name)]
        raise CheckpointError(
            f"this drafter cannot be written for {layout}: {'; '.join(reasons)}",
            rule="what the other side would drop is not written",
            fix=f"--to {others[0]}" if others else "train it without that",
        )


def flags(config: DraftConfig) -> dict[str, Any]:
    """The four norm flags as SGLang, vLLM and speculators spell and mean them."""
    return {
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
