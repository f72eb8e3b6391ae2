"""Ways fc can have been initialised, what each looks like in a file, and how an update blurs it.

Standard deviations at fan_in C and fan_out R (Kimi: 21504 and 7168); the trainers behind each are in `used_by`:

    kaiming-uniform        a = 1/sqrt(C), U(-a, a), std a/sqrt(3) = 0.0039371   torch.nn.Linear default, fp32 then cast
    kaiming-uniform-bf16   the same, drawn in bfloat16 (mean -2.9e-5)          a model built with dtype=bfloat16
    normal-0.02            N(0, 0.02)                                          transformers `post_init()`
    xavier-uniform         a = sqrt(6/(C + R)), std 0.0083517
    kaiming-normal         N(0, sqrt(2/C)), std 0.0096439                      ReLU gain
    lecun-normal           N(0, 1/sqrt(C)), std 0.0068193
    pass-through           a multiple of the identity in each block            judged on the block diagonals

The null that a file is compared with is always the family rounded to the file's own number format: against the
continuous one even a pristine bfloat16 draw is rejected at 154 million entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from eagle3lab.inspection.formats import Grid

_TABLE_END, _TABLE_STEPS = 10.0, 1000
"""Range of the tabulated normal distribution function, and its points a unit."""


@dataclass(frozen=True)
class Family:
    """An initial distribution. kind: uniform | normal. `bound` is a of U(-a, a), infinite for a normal.

    native: drawn directly in the file's 16-bit format on a CPU. torch draws U(-a, a) in float32, rounds it, and moves
    results equal to the upper end to the lower end (`ATen/native/cpu/DistributionTemplates.h`): the top cell is empty,
    the bottom one holds twice its share, and the mean is -2.9e-5 at fan_in 21504.
    """

    name: str
    kind: str
    std: float
    bound: float = math.inf
    native: bool = False
    used_by: str = ""

    def cdf(self, x: np.ndarray, *, shrink: float = 1.0, tau: float = 0.0) -> np.ndarray:
        """P(shrink * w + N(0, tau^2) <= x) for a fresh weight w, float64, before rounding to a format."""
        if self.kind == "normal":
            return normal_cdf(x / math.hypot(shrink * self.std, tau))
        a = shrink * self.bound
        if tau < 1e-6 * a:
            return np.clip((x + a) / (2 * a), 0.0, 1.0)
        x = np.clip(x, -a - 40 * tau, a + 40 * tau)
        return np.clip((_ramp(x + a, tau) - _ramp(x - a, tau)) / (2 * a), 0.0, 1.0)

    def cells(self, edges: np.ndarray, *, shrink: float = 1.0, tau: float = 0.0) -> np.ndarray:
        """Probability [G] of each cell between consecutive `edges` [G + 1]."""
        p = np.diff(self.cdf(edges, shrink=shrink, tau=tau))
        if self.native and tau == 0 and shrink == 1.0:
            inside = np.flatnonzero(p > 0)
            p[inside[0]] += p[inside[-1]]
            p[inside[-1]] = 0.0
        return p

    def largest(self, g: Grid, scale: float = 1.0) -> float:
        """Largest magnitude that a fresh draw can have once rounded to the grid; infinite for a normal.

        bfloat16 at fan_in 21504: 223 * 2^-15 = 0.00680542. Compute it, never reuse the number at another width.
        """
        if not math.isfinite(self.bound):
            return math.inf
        return float(g.values[np.searchsorted(g.edges, self.bound / scale, side="left") - 1]) * scale


@lru_cache
def _normal_table() -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-_TABLE_END, _TABLE_END, int(2 * _TABLE_END * _TABLE_STEPS) + 1)
    return x, np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x])


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Standard normal distribution function, float64, by a table: within 4e-8, monotone, and numpy has no erf."""
    return np.interp(x, *_normal_table(), left=0.0, right=1.0)


def _ramp(x: np.ndarray, tau: float) -> np.ndarray:
    """Integral of the normal distribution function with scale tau up to x: E max(x - N(0, tau^2), 0)."""
    z = x / tau
    return x * normal_cdf(z) + tau * np.exp(-0.5 * np.minimum(z**2, 1400.0)) / math.sqrt(2 * math.pi)


def families(shape: tuple[int, int], *, initializer_range: float | None = None) -> list[Family]:
    """Every family that is tested, for a matrix [R, C] = [fan_out, fan_in].

    initializer_range: the drafter's own, from its config; adds `normal-<range>` when it is not 0.02.
    """
    fan_out, fan_in = shape
    a, xavier = 1 / math.sqrt(fan_in), math.sqrt(6 / (fan_in + fan_out))
    known = [
        Family("kaiming-uniform", "uniform", a / math.sqrt(3), a, used_by="torch.nn.Linear default: TorchSpec, EAGLE"),
        Family("kaiming-uniform-bf16", "uniform", a / math.sqrt(3), a, native=True,
               used_by="torch.nn.Linear built in bfloat16 on a CPU"),
        Family("normal-0.02", "normal", 0.02, used_by="transformers post_init(): SpecForge, speculators"),
        Family("xavier-uniform", "uniform", xavier / math.sqrt(3), xavier, used_by="torch.nn.init.xavier_uniform_"),
        Family("kaiming-normal", "normal", math.sqrt(2 / fan_in), used_by="torch.nn.init.kaiming_normal_, ReLU gain"),
        Family("lecun-normal", "normal", a, used_by="N(0, 1/fan_in)"),
    ]  # fmt: skip
    if initializer_range and not math.isclose(initializer_range, 0.02):
        name = f"normal-{initializer_range:g}"
        known.insert(3, Family(name, "normal", float(initializer_range), used_by="initializer_range of config.json"))
    return known


def initializer_range(config: dict[str, Any] | None) -> float | None:
    """`initializer_range` of a drafter's config, at the top or in `transformer_layer_config`; None when absent."""
    if not config:
        return None
    inner = config.get("transformer_layer_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        value = place.get("initializer_range")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            return float(value)
    return None
