"""Moments of weights in float64 with standard errors.

A format of at most 16 bits is summarised exactly by its histogram over bit patterns: every power sum is a sum over at
most 65,536 different values, so `mean` prints as `-7e-08 +/- 3e-07` and never as `0.000000`. Standard errors assume
independent entries; that holds for an untouched initial draw and is too small after training.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from eagle3lab.inspection.formats import value_table

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Moments:
    """Statistics of one set of weights. Unknown is NaN (JSON: null), never 0.

    n: finite entries. mean_se, std_se, kurtosis_se: standard errors for independent entries. skew: third standardised
    moment. kurtosis: excess (uniform -1.2, Gaussian 0). low, high: smallest and largest finite value. zeros: exact
    zeros. nan, inf: entries that are not numbers.
    """

    n: int
    mean: float
    mean_se: float
    std: float
    std_se: float
    skew: float
    kurtosis: float
    kurtosis_se: float
    low: float
    high: float
    zeros: int
    nan: int
    inf: int

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def constant(self) -> bool:
        """All finite entries are one value."""
        return self.n > 0 and self.low == self.high

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; unknown as None."""
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(self).items()}


def empty_moments(*, nan: int, inf: int) -> Moments:
    """Of no finite entry: all unknown."""
    fields = ("mean", "mean_se", "std", "std_se", "skew", "kurtosis", "kurtosis_se", "low", "high")
    return Moments(n=0, zeros=0, nan=nan, inf=inf, **dict.fromkeys(fields, math.nan))


def moments(values: np.ndarray, counts: np.ndarray, *, nan: int = 0, inf: int = 0) -> Moments:
    """Moments of `values` float64 [G] occurring `counts` [G] times. Exact up to float64 rounding."""
    present = counts > 0
    v, c = values[present], counts[present].astype(np.float64)
    n = int(counts.sum())
    if n == 0:
        return empty_moments(nan=nan, inf=inf)
    low, high, zeros = float(v.min()), float(v.max()), int(counts[values == 0].sum())
    # Work in units of the largest magnitude: fourth powers of 1e-30 weights would otherwise underflow.
    unit = max(abs(low), abs(high))
    if low == high or unit == 0:
        return Moments(n, low, 0.0, 0.0, 0.0, math.nan, math.nan, math.nan, low, high, zeros, nan, inf)
    p, x = c / n, v / unit
    mean = float(p @ x)
    d = x - mean
    m2 = float(p @ d**2)
    z = d / math.sqrt(m2)
    skew, raw4 = float(p @ z**3), float(p @ z**4)
    # Delta method: influence of one entry on the kurtosis is z^4 - 2 k z^2 - 4 g z + k.
    influence = z**4 - 2 * raw4 * z**2 - 4 * skew * z + raw4
    std = math.sqrt(m2) * unit
    return Moments(
        n=n, mean=mean * unit, mean_se=std / math.sqrt(n), std=std,
        std_se=std * math.sqrt(max(0.0, raw4 - 1) / (4 * n)), skew=skew, kurtosis=raw4 - 3,
        kurtosis_se=math.sqrt(float(p @ influence**2) / n), low=low, high=high, zeros=zeros, nan=nan, inf=inf,
    )  # fmt: skip


def histogram_moments(histogram: np.ndarray, fmt: str, scale: float = 1.0) -> Moments:
    """Moments from a histogram over the bit patterns of a table format, values times `scale`."""
    table = value_table(fmt)
    finite = np.isfinite(table)
    nan = int(histogram[np.isnan(table)].sum())
    inf = int(histogram[np.isinf(table)].sum())
    return moments(table[finite] * scale, histogram[finite], nan=nan, inf=inf)


@dataclass
class PowerSums:
    """Running float64 sums of 32- and 64-bit weights, whose values no table holds.

    Sums of powers 1 to 8 are taken around `pivot` (the first finite value seen), which keeps a constant tensor at
    exactly zero spread, and in units of `unit` (the first largest magnitude), which keeps eighth powers in range.
    A float64 value beyond float32 counts as infinite: it is that for every engine.
    """

    pivot: float | None = None
    unit: float = 1.0
    n: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(8))
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0
    nan: int = 0
    inf: int = 0

    def add(self, values: np.ndarray) -> None:
        """Add an array of any shape."""
        flat = np.asarray(values, dtype=np.float64).ravel()
        finite = np.abs(flat) <= _LARGEST
        if not finite.all():
            nan = int(np.isnan(flat).sum())
            self.nan += nan
            self.inf += int(flat.size - finite.sum()) - nan
            flat = flat[finite]
        if flat.size == 0:
            return
        if self.pivot is None:
            self.pivot, self.unit = float(flat[0]), float(np.abs(flat).max()) or 1.0
        self.n += flat.size
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        self.zeros += int(flat.size - np.count_nonzero(flat))
        d = (flat - self.pivot) / self.unit
        power = np.ones_like(d)
        for i in range(8):
            power *= d
            self.sums[i] += power.sum()

    def merge(self, other: PowerSums) -> None:
        """Add what `other` has seen; its sums are moved to this pivot and unit first."""
        self.nan, self.inf = self.nan + other.nan, self.inf + other.inf
        if other.pivot is None:
            return
        if self.pivot is None:
            self.pivot, self.unit = other.pivot, other.unit
        shift, ratio = (other.pivot - self.pivot) / self.unit, other.unit / self.unit
        raw = [float(other.n), *(total * ratio ** (k + 1) for k, total in enumerate(other.sums))]
        for k in range(1, 9):
            self.sums[k - 1] += sum(math.comb(k, j) * raw[j] * shift ** (k - j) for j in range(k + 1))
        self.n, self.zeros = self.n + other.n, self.zeros + other.zeros
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def without(self, removed: np.ndarray) -> PowerSums:
        """A copy that forgets `removed` (finite values that were added before); low and high stay as they were."""
        gone = PowerSums(pivot=self.pivot, unit=self.unit)
        gone.add(removed)
        return replace(self, n=self.n - gone.n, sums=self.sums - gone.sums, zeros=self.zeros - gone.zeros)

    def moments(self) -> Moments:
        """The moments of everything added."""
        if self.n == 0 or self.pivot is None:
            return empty_moments(nan=self.nan, inf=self.inf)
        if self.low == self.high:
            return Moments(
                self.n, self.low, 0.0, 0.0, 0.0, math.nan, math.nan, math.nan,
                self.low, self.high, self.zeros, self.nan, self.inf,
            )  # fmt: skip
        raw = [1.0, *(self.sums / self.n)]
        shift = raw[1]
        central = [sum(math.comb(k, j) * raw[j] * (-shift) ** (k - j) for j in range(k + 1)) for k in range(9)]
        spread = math.sqrt(max(central[2], 0.0))
        z = [central[k] / spread**k if spread > 0 else math.nan for k in range(9)]
        k4, g = z[4], z[3]
        variance = z[8] + 4 * k4**2 * z[4] + 16 * g**2 + k4**2  # influence^2 expanded, E z = 0, E z^2 = 1
        variance += -4 * k4 * z[6] - 8 * g * z[5] + 2 * k4 * z[4] + 16 * k4 * g * z[3] - 4 * k4**2
        std = spread * self.unit
        return Moments(
            n=self.n, mean=self.pivot + shift * self.unit, mean_se=std / math.sqrt(self.n), std=std,
            std_se=std * math.sqrt(max(0.0, k4 - 1) / (4 * self.n)), skew=g, kurtosis=k4 - 3,
            kurtosis_se=math.sqrt(max(0.0, variance) / self.n), low=self.low, high=self.high, zeros=self.zeros,
            nan=self.nan, inf=self.inf,
        )  # fmt: skip
