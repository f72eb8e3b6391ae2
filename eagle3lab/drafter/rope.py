"""Rotary positions of a drafter: frequencies of the scaling rules that SGLang and vLLM share, and the two layouts.

A rule that the engines apply and this file does not would shift every angle without an error, so an unknown
`rope_type` is refused. Formulas: YaRN (arXiv 2309.00071, with DeepSeek's mscale), Llama 3.1's frequency bands, and
plain linear interpolation; checked in the tests against transformers' `ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3lab.core.errors import CheckpointError, nearest

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The rule's name: `rope_type`, or `type` as older configs spell it. `CheckpointError` when it is unknown here."""
    if not scaling:
        return "default"
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name == "deepseek_yarn":  # SGLang's and vLLM's own name for YaRN inside their DeepSeek classes
        name = "yarn"
    if name not in ROPE_TYPES:
        raise CheckpointError(f"rope_type {name!r}", rule=nearest(str(name), ROPE_TYPES), fix="train with one of those")
    return name


def rotary(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies [dim/2] float32, and the factor that multiplies cos and sin.

    Args:
        dim: rotated dimensions of a head.
        theta: base.
        scaling: `rope_scaling` / `rope_parameters` of the config; None for none.

    Raises:
        CheckpointError: an unknown rule, or a number that the rule needs and the config lacks.
    """
    kind = rope_type(scaling)
    frequency = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind == "default" or scaling is None:
        return frequency, 1.0
    factor = _number(scaling, "factor", kind)
    if kind == "linear":
        return frequency / factor, 1.0
    original = _number(scaling, "original_max_position_embeddings", kind)
    if kind == "llama3":
        low, high = (_number(scaling, name, kind) for name in ("low_freq_factor", "high_freq_factor"))
        turns = original * frequency / (2 * math.pi)  # of each frequency over the original context
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (share + (1 - share) / factor), 1.0
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    first, last = (dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (fast, slow))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequency * (1 - ramp) + frequency / factor * ramp, _yarn_factor(scaling, factor)


def softmax_factor(scaling: Mapping[str, Any] | None) -> float:
    """What DeepSeek's latent attention multiplies its score scale by: the square of YaRN's `mscale_all_dim` term."""
    if rope_type(scaling) != "yarn" or scaling is None:
        return 1.0
    return _mscale(_number(scaling, "factor", "yarn"), float(scaling.get("mscale_all_dim") or 0)) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in transformers' half-split layout. x [rows, heads, d]; cos, sin [rows, d]."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs (0,1), (2,3), ..., DeepSeek's layout. Arguments as `rotate`."""
    half = cos.shape[-1] // 2
    cos, sin = (part[:, None, :half].to(x.dtype) for part in (cos, sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    part, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return _mscale(factor, float(part)) / _mscale(factor, float(whole)) if part and whole else _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(scaling: Mapping[str, Any], name: str, kind: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"rope_type '{kind}' with {name} {value!r}", rule=f"{kind} needs a number {name}")
    return float(value)
