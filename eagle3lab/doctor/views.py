"""Views of configs: the same question answered for every layout (flat, speculators format, text_config wrapper).

A view never raises on a hostile config: a value of the wrong type reads as absent (`whole`, `real`), and the check
`config-values` tells about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3lab import points
from eagle3lab.doctor.facts import Facts

EAGLE3_LLAMA = "LlamaForCausalLMEagle3"
EAGLE3_MLA = "Eagle3DeepseekV2ForCausalLM"
VLLM_CLASSES = {
    *("Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM"),
    *("Eagle3Qwen3vlForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3DeepseekV3ForCausalLM", EAGLE3_LLAMA, EAGLE3_MLA),
}
"""Source: vllm/model_executor/models/registry.py of vLLM 0.32.0."""
LLAMA_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000},
    "max_position_embeddings": 2048,
}
"""Sizes that transformers' LlamaConfig (4.x and 5.x) takes where a config.json leaves them out."""
ROPE_THETA_DEFAULT = 10000.0
"""What transformers' Llama config, SGLang and vLLM take when they find no theta."""
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What transformers, SGLang and vLLM take where YaRN's settings leave them out."""
_TEXT_KEYS = ("text_config", "llm_config", "language_config")
_MLA_FAMILIES = ("kimi_k2", "kimi_k25", "deepseek_v2", "deepseek_v3", "deepseek_v32")


def whole(value: Any) -> int | None:
    """`value` as an int when it is one (7168 or 7168.0), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        return None
    return int(value)


def real(value: Any) -> float | None:
    """`value` as a finite float when it is a number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """`value` when it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def given_twice(values: Iterable[Any]) -> list[Any]:
    """The values that stand more than once, in ascending order."""
    return sorted(value for value, count in Counter(values).items() if count > 1)


@dataclass(frozen=True)
class Rope:
    """Effective rotary settings: theta, the scaling as {type, factor, ...} (None: no scaling), the part that turns."""

    theta: float
    scaling: Mapping[str, Any] | None
    theta_found: bool
    partial: float = 1.0

    @property
    def kind(self) -> str | None:
        """Type of the scaling under either spelling."""
        if self.scaling is None:
            return None
        # engines write `default` over the type where there are sections
        return (
            "mrope" if "mrope_section" in self.scaling else str(self.scaling.get("rope_type", self.scaling.get("type")))
        )

    @property
    def factor(self) -> float | None:
        """Factor of the scaling."""
        return None if self.scaling is None else real(self.scaling.get("factor"))

    def label(self) -> str | None:
        """`yarn x64`, or None without scaling."""
        if self.scaling is None:
            return None
        return f"{self.kind} x{self.factor:g}" if self.factor is not None else str(self.kind)

    def settings(self) -> dict[str, Any]:
        """All that decides the rotation, comparable between spellings."""
        extra = {k: real(v) if real(v) is not None else v for k, v in (self.scaling or {}).items()}
        ignored = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
        extra = {k: v for k, v in extra.items() if v is not None and k not in ignored}
        defaults = _YARN_DEFAULTS if self.kind == "yarn" else {}
        return {"theta": self.theta, "type": self.kind, "partial_rotary_factor": self.partial, **defaults, **extra}


def rope_of(config: Mapping[str, Any], *, old_reader: bool = False) -> Rope:
    """Effective rope of a flat config. `old_reader` sees top-level keys only; a new one also `rope_parameters`."""
    new = {} if old_reader else mapping(config.get("rope_parameters"))
    found = real(config.get("rope_theta"))
    if found is None:
        found = real(new.get("rope_theta"))
    scaling: Any = config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        scaling = new
    elif found is None and not old_reader:
        found = real(scaling.get("rope_theta"))  # transformers 5 takes rope_scaling for rope_parameters
    partial = real(config.get("partial_rotary_factor"))
    if partial is None:
        partial = real(new.get("partial_rotary_factor"))
    kind = scaling.get("rope_type", scaling.get("type"))
    without = not scaling or (kind in (None, "default") and "mrope_section" not in scaling)
    theta = ROPE_THETA_DEFAULT if found is None else found
    return Rope(theta, None if without else scaling, found is not None, 1.0 if partial is None else partial)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config (inside `thinker_config` too), or the config itself."""
    for place in (config, mapping(config.get("thinker_config"))):
        for key in _TEXT_KEYS:
            if text := mapping(place.get(key)):
                return text
    return config


@dataclass(frozen=True)
class Target:
    """What is known of the target; None where unknown."""

    blocks: int | None
    hidden: int | None
    vocab: int | None
    max_positions: int | None
    eps: float | None
    family: str | None
    mla: bool | None
    rope: Rope
    rope_known: bool
    predicts_next: int | None


def target_of(facts: Facts) -> Target | None:
    """The target from `target` (already flat) or `target_config` (config.json, text settings possibly nested)."""
    flat, config = facts.mapping("target"), facts.mapping("target_config")
    if not flat and not config:
        return None
    text = text_of(config)
    source = {**text, **flat}
    family = flat.get("family")
    family = family if isinstance(family, str) else (points.family_of(config) or points.family_of(text))
    attention = flat.get("attention")
    mla = attention == "mla" if isinstance(attention, str) else None
    if mla is None and family is not None:
        mla = "kv_lora_rank" in source or family in _MLA_FAMILIES
    return Target(
        blocks=whole(flat.get("blocks", text.get("num_hidden_layers"))),
        hidden=whole(source.get("hidden_size")),
        vocab=whole(source.get("vocab_size")),
        max_positions=whole(source.get("max_position_embeddings")),
        eps=real(source.get("rms_norm_eps")),
        family=family,
        mla=mla,
        rope=rope_of(source),
        rope_known=any(key in source for key in ("rope_theta", "rope_scaling", "rope_parameters")),
        predicts_next=whole(text.get("num_nextn_predict_layers")),
    )


@dataclass(frozen=True)
class Draft:
    """A draft config under one view.

    Fields:
        config: as written. layer: the mapping that holds the decoder's sizes (nested in the speculators format).
        eagle: the nested `eagle_config`, {} when absent.
        given_ids: ids that were given without a config (`draft_config_ids`).
    """

    config: Mapping[str, Any]
    layer: Mapping[str, Any]
    eagle: Mapping[str, Any]
    given_ids: list[int] | None = None

    @property
    def speculators(self) -> bool:
        """Whether it is in the speculators format."""
        return "speculators_model_type" in self.config or "transformer_layer_config" in self.config

    @property
    def architecture(self) -> str | None:
        """First architecture named, None when there is none."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else named
        return first if isinstance(first, str) else None

    @property
    def mla(self) -> bool:
        """Whether the class is the MLA draft."""
        return self.architecture == EAGLE3_MLA or (
            self.architecture is not None and "deepseek" in self.architecture.lower() and "kv_lora_rank" in self.layer
        )

    @property
    def eagle3_class(self) -> bool:
        """Whether the named class is an EAGLE-3 one."""
        return "eagle3" in (self.architecture or "").lower() or self.config.get("speculators_model_type") == "eagle3"

    def size(self, key: str) -> int | None:
        """A whole number of the decoder (`hidden_size`, `num_attention_heads`, ...)."""
        return whole(self.layer.get(key, self.config.get(key)))

    @property
    def hidden(self) -> int | None:
        """Draft width."""
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int | None:
        """Written, or hidden / heads."""
        written, heads = self.size("head_dim"), self.size("num_attention_heads")
        if written is not None:
            return written
        return self.hidden // heads if self.hidden and heads else None

    @property
    def vocab(self) -> int | None:
        """Target vocabulary as the draft config states it."""
        return self.size("vocab_size")

    @property
    def draft_vocab(self) -> int | None:
        """`draft_vocab_size`; None when absent or null (see `config`)."""
        return whole(self.config.get("draft_vocab_size"))

    @property
    def states(self) -> int:
        """Number of states that engines size fc for: `num_aux_hidden_states`, else the nested list's length, else 3."""
        named = whole(self.config.get("num_aux_hidden_states"))
        top = self.top_ids if self.mla else None  # SGLang's latent-attention draft alone counts these too
        for ids in (self.nested_ids, top, self.given_ids):
            if named is None and ids:
                named = len(ids)
        return 3 if named is None else named

    @property
    def nested_ids(self) -> list[int] | None:
        """`eagle_config.eagle_aux_hidden_state_layer_ids` as whole numbers, None when absent or malformed."""
        return id_list(self.eagle.get(IDS_KEY))

    @property
    def top_ids(self) -> list[int] | None:
        """Top-level `eagle_aux_hidden_state_layer_ids`."""
        return id_list(self.config.get(IDS_KEY))

    @property
    def qwen3(self) -> bool:
        """Whether vLLM builds its Qwen3 draft, whose output projection and MLP have no biases."""
        kind = self.layer.get("model_type") if self.speculators else self.architecture
        return isinstance(kind, str) and kind.startswith(("qwen3", "Qwen3", "Eagle3Qwen3For", "PeagleQwen3For"))

    def switched_on(self, key: str) -> bool:
        """Whether a key of the decoder (`attention_bias`, `bias`, ...) is set."""
        return bool(self.layer.get(key, self.config.get(key)))

    def written(self, *names: str) -> str | None:
        """Where one of these switches is true (`fc_norm`, `eagle_config.fc_norm`), top level first; None: nowhere."""
        for prefix, place in (("", self.config), ("eagle_config.", self.eagle)):
            for name in names:
                if place.get(name):
                    return prefix + name
        return None

    def reads(self, engine: str, name: str, *, mla: bool = False) -> bool | None:
        """A norm's switch as this engine reads it; None when it is not where the engine looks.

        Read in SGLang 0.5.23 and vLLM 0.32.0: both look at top level only; for norm_before_fc into eagle_config first,
        and not at all in their MLA drafts. SGLang takes use_aux_norm for fc_norm and never reads norm_before_residual.
        """
        if name == "norm_before_fc":
            if mla or self.mla:
                return None
            places = [place for place in (self.eagle, self.config) if name in place]
            return bool(places[0][name]) if places else None
        if engine == "sglang" and name == "norm_before_residual":
            return None
        names = (name, "use_aux_norm") if (engine, name) == ("sglang", "fc_norm") else (name,)
        values = [self.config[key] for key in names if self.config.get(key) is not None]
        return any(values) if values else None

    def target_hidden(self, target: Target | None) -> int | None:
        """Width of one captured state: `target_hidden_size`, else the target's, else the draft's own."""
        written = whole(self.config.get("target_hidden_size"))
        if written is not None:
            return written
        return target.hidden if target and target.hidden else self.hidden


def same_setting(one: Any, other: Any) -> bool:
    """Whether two settings name the same value; a number written as text names that number."""
    return bool(one == other) or str(one) == str(other)


def id_list(value: Any) -> list[int] | None:
    """`value` as a list of whole numbers, else None."""
    if not isinstance(value, list):
        return None
    ids = [whole(item) for item in value]
    return None if any(item is None for item in ids) else [item for item in ids if item is not None]


def draft_of(facts: Facts) -> Draft:
    """The view of `draft_config` ({} when absent)."""
    config = facts.mapping("draft_config")
    layer = mapping(config.get("transformer_layer_config")) or config
    return Draft(config, layer, mapping(config.get("eagle_config")), id_list(facts.get("draft_config_ids")))
