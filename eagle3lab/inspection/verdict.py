"""Labels for fc, decided by margins that were fixed before any checkpoint was seen.

| margin | value | meaning |
|---|---|---|
| std | 1e-3 | relative distance of std to the rounded family's |
| mean | 2e-3 | distance of the mean, in family standard deviations |
| kurtosis | 5e-3 | distance of the excess kurtosis |
| distance | 5e-3 | total variation to the untouched family |
| edge | 0.2 | relative distance of the counts in the two outermost cells of a bounded family |
| match | 0.03 | total variation to the family after the best shrink and Gaussian update |
| signature | 2 | a bounded start is recognised only where it fits this many times better than a normal |
| normal_range | 0.8 .. 1.25 | std ratio within which a normal shape is given a normal family's name |
| largest_update | 1.0 | update over start above which a uniform start leaves no recognisable shape |
| quantised_kurtosis | 0.1 | distance of a quantised matrix in excess kurtosis to the family with the update added |
| quantised | 5 | factor on std, mean and kurtosis margins once quantisation is shown; cells are not compared then |

Every comparison also allows four standard errors (three times the expected noise for distances), which at Kimi size is
nothing and at the size of a test is what keeps an honest draw from failing. No p-value decides anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from eagle3lab.inspection.distribution import Distribution, Fit, fit, fitted_normal
from eagle3lab.inspection.families import Family
from eagle3lab.inspection.formats import grid
from eagle3lab.inspection.moments import Moments


@dataclass(frozen=True)
class Margins:
    """The table above."""

    std: float = 1e-3
    mean: float = 2e-3
    kurtosis: float = 5e-3
    distance: float = 5e-3
    edge: float = 0.2
    match: float = 0.03
    signature: float = 2.0
    normal_range: tuple[float, float] = (0.8, 1.25)
    largest_update: float = 1.0
    quantised: float = 5.0
    quantised_kurtosis: float = 0.1
    errors: float = 4.0
    noises: float = 3.0


MARGINS = Margins()
FEWEST = 256
"""Live entries below which a block is not judged: every family fits a handful of numbers."""


@dataclass
class BlockFinding:
    """One block against every family.

    kind: init | moved | unknown. families: those that pass (init) or fit (moved), best first. failed: for each family
    the first test that it failed, in words.
    """

    kind: str
    families: list[Family] = field(default_factory=list)
    fits: dict[str, Fit] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Family | None:
        """The family that explains it best."""
        return self.families[0] if self.families else None


def judge_block(
    found: Distribution, known: list[Family], fmt: str, scale: float, *, quantised: bool = False
) -> BlockFinding:
    """Compare one block's distribution with every family: at init, moved from it, or unknown.

    Args:
        found: distribution of the block, dead rows and columns left out.
        fmt, scale: grid of the file, for rounded bounds.
    """
    passing: list[tuple[float, Family]] = []
    matching: list[tuple[float, Family]] = []
    finding = BlockFinding("unknown")
    if found.n < FEWEST or not found.moments.std > 0:
        return finding
    normal = fitted_normal(found)
    for family in known:
        result = fit(family, found)
        finding.fits[family.name] = result
        failure = _not_at_init(family, found, result, fmt, scale, quantised)
        if failure is None:
            passing.append((result.distance, family))
        else:
            finding.failed[family.name] = failure
            if not family.native and _matches(result, normal, found.moments, quantised):
                matching.append((abs(math.log(result.std_ratio)), family))
    if passing:
        # A native draw that is told apart by nothing keeps the commoner name, which stands first.
        finding.kind, finding.families = "init", [family for _, family in sorted(passing, key=lambda item: item[0])]
        if len(passing) > 1 and not passing[0][1].native and passing[1][1].native:
            finding.families = [family for _, family in passing]
    elif matching:
        finding.kind, finding.families = "moved", [f for _, f in sorted(matching, key=lambda item: item[0])]
    return finding


def bound_of(family: Family, fmt: str, scale: float, *, quantised: bool) -> float:
    """Largest magnitude that an untouched draw has in this file; quantising to 8 bits may round up by 1/16."""
    if not math.isfinite(family.bound):
        return math.inf
    if quantised:
        return family.bound * (1 + 1 / 16)
    if fmt in ("F32", "F64"):
        return family.bound * (1 + 1e-6)
    return family.largest(grid(fmt), scale)


def _not_at_init(
    family: Family, found: Distribution, result: Fit, fmt: str, scale: float, quantised: bool
) -> str | None:
    """The first equivalence test that fails, in words; None when all pass."""
    m, k = found.moments, MARGINS
    loose = k.quantised if quantised else 1.0
    if abs(m.std / family.std - 1) > 0.05 + k.errors * m.std_se / family.std:  # rounding moves std far less than this
        return f"std {m.std:.7f} is {m.std / family.std - 1:+.2%} off {family.std:.7f}"
    p = family.cells(found.edges)
    mean = float(p @ found.values)
    central = found.values - mean
    std = math.sqrt(float(p @ central**2))
    kurtosis = float(p @ central**4) / std**4 - 3
    if abs(m.std / std - 1) > loose * k.std + k.errors * m.std_se / std:
        return f"std {m.std:.7f} is {m.std / std - 1:+.2%} off {std:.7f}"
    bound = bound_of(family, fmt, scale, quantised=quantised)
    if m.largest > bound:
        outside = f"{found.above(bound):,} entries lie" if fmt not in ("F32", "F64") else f"|w| = {m.largest:.8f} lies"
        return f"{outside} above {bound:.8f}, the largest magnitude of an untouched draw"
    if abs(m.kurtosis - kurtosis) > loose * k.kurtosis + k.errors * m.kurtosis_se:
        return f"excess kurtosis {m.kurtosis:.4f} instead of {kurtosis:.4f}"
    if abs(m.mean - mean) > loose * k.mean * std + k.errors * m.mean_se:
        return f"mean {m.mean:.2e} instead of {mean:.2e}"
    if quantised:
        return None
    if math.isfinite(bound) and (edge := _edge_differs(p, found)):
        return edge
    if result.distance > k.distance + k.noises * result.noise:
        return f"distance {result.distance:.4f} to its distribution"
    return None


def _edge_differs(p: np.ndarray, found: Distribution) -> str | None:
    """Compare the outermost cells of a bounded family: a shrunk or a natively drawn one differs there first."""
    inside = np.flatnonzero(p > 0)
    n = found.n
    # Neighbours of the outermost cells too: the top cell of a native draw is empty by construction.
    for cell in (inside[0], inside[-1], inside[-1] + 1):
        expected, got = n * p[cell], int(found.counts[cell])
        if abs(got - expected) > MARGINS.edge * expected + 6 * math.sqrt(expected) + 3:
            return f"{got:,} entries are {found.values[cell]:.8f} instead of {expected:,.0f}"
    return None


def _matches(result: Fit, normal: Fit, m: Moments, quantised: bool) -> bool:
    """Whether the family, shrunk and blurred, explains the block."""
    k, family = MARGINS, result.family
    low, high = k.normal_range
    if quantised:
        # The comb makes cells meaningless; the fourth moment still tells a flat start from a normal one.
        flat = -1.2 * min(1.0, 1 / result.std_ratio**4) if family.kind == "uniform" else 0.0
        largest = math.hypot(1, k.largest_update) if family.kind == "uniform" else high
        return abs(m.kurtosis - flat) <= k.quantised_kurtosis and low <= result.std_ratio <= largest
    if family.kind == "normal":
        return normal.fitted <= k.match + k.noises * normal.noise and low <= result.std_ratio <= high
    recognised = normal.fitted >= k.signature * result.fitted + k.noises * result.noise
    fits = result.fitted <= k.match + k.noises * result.noise
    return fits and recognised and result.tau <= k.largest_update * family.std
