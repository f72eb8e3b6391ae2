"""The pass-through start: one point block is the identity, so that the drafter begins on the target's own stream.

Recipes differ in the small noise added to every entry (ours: N(0, (0.01/sqrt(C))^2), others: none). The diagonal is
what gives it away; the off-diagonal entries tell whether training has moved it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle3lab.inspection.distribution import Distribution, distribution, fit
from eagle3lab.inspection.families import Family
from eagle3lab.inspection.scan import Scan
from eagle3lab.inspection.verdict import MARGINS

NAME = "pass-through"
NOISE = 0.01
"""Recorded recipe: standard deviation of the added noise is NOISE / sqrt(C)."""
DOMINANCE = 20.0
"""A block is a multiple of the identity when its mean diagonal exceeds the off-diagonal std this many times."""


@dataclass(frozen=True)
class PassThrough:
    """diagonal: mean diagonal of each block, 0 where it does not dominate. off_std: std of all other entries.
    untouched: equivalence to the start. change: norm of the change over the norm of the start."""

    diagonal: list[float]
    off_std: float
    untouched: bool
    change: float
    reason: str


def find_pass_through(scan: Scan) -> PassThrough | None:
    """Recognise a pass-through start, or None."""
    points, size = range(len(scan.layout.widths)), scan.shape[0]
    diagonals = [scan.diagonal[b, : min(size, w)].astype(np.float64) for b, w in enumerate(scan.layout.widths)]
    off = [distribution(scan, b, diagonal=False) for b in points]
    means = [float(d.mean()) if abs(d.mean()) > DOMINANCE * o.moments.std else 0.0
             for d, o in zip(diagonals, off, strict=True)]  # fmt: skip
    if not any(means) or not all(math.isfinite(o.moments.std) for o in off):
        return None
    family = Family(NAME, "normal", NOISE / math.sqrt(scan.shape[1]))
    silent = all(o.moments.std == 0 and o.moments.mean == 0 for o in off)
    reason = "every entry off the block diagonals is zero" if silent else ""
    untouched = all(np.std(d) <= 0.005 * abs(m) + 2 * family.std for d, m in zip(diagonals, means, strict=True))
    if untouched and not silent:
        untouched = all(_is_noise(family, o) for o in off)
        reason = f"entries off the block diagonals are the recipe's noise, N(0, {family.std:.2e})"
    # Reference for the size: the identity, or an even split of it, whichever is nearer; noise left out.
    anchors = [_anchor(m, len(means)) for m in means]
    start = math.sqrt(sum(a**2 * len(d) for a, d in zip(anchors, diagonals, strict=True)))
    noise = 0.0 if silent else family.std**2
    moved = sum(max(0.0, o.n * (o.moments.std**2 - noise)) for o in off)
    moved += sum(float(((d - a) ** 2).sum()) for a, d in zip(anchors, diagonals, strict=True))
    pooled = math.sqrt(sum(o.n * o.moments.std**2 for o in off) / sum(o.n for o in off))
    return PassThrough(means, pooled, untouched, math.sqrt(moved) / start, reason)


def _anchor(mean: float, points: int) -> float:
    """0, 1 or 1 / points with the sign of `mean`: the multiple of the identity that a recipe would have used."""
    if mean == 0:
        return 0.0
    return math.copysign(min((1.0, 1 / points), key=lambda a: abs(math.log(abs(mean) / a))), mean)


def _is_noise(family: Family, found: Distribution) -> bool:
    m = found.moments
    if not m.std > 0:
        return False
    result = fit(family, found)
    near = abs(m.std / family.std - 1) <= MARGINS.std + MARGINS.errors * m.std_se / family.std
    return near and result.distance <= MARGINS.distance + MARGINS.noises * result.noise
