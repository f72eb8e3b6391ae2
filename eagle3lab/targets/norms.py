"""What a family's final norm does with its stored weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3lab.points import family_of

PLAIN = (
    *("kimi_k25", "kimi_k2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "gpt_oss"),
    *("llama", "mistral", "ministral3", "phi3", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe"),
    *("qwen3_vl", "qwen3_vl_moe"),
)
"""Families whose final norm is x / rms(x) * weight. Others (Gemma, Qwen3-Next) add one to the weight."""
ONE_PLUS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "t5gemma", "vaultgemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
"""Model types whose final norm is x / rms(x) * (1 + weight), read in the modelling files of transformers 5.24."""


def adds_one(config: Mapping[str, Any]) -> bool | None:
    """Whether the target's final norm adds one to its stored weight; None when its model type is not known here."""
    text = config.get("text_config")
    types = {source.get("model_type") for source in (config, text) if isinstance(source, Mapping)}
    if any(one in ONE_PLUS for one in types):
        return True
    return False if family_of(config) in PLAIN else None
