"""How the energy of fc is spread over its point blocks, and how large the implied update is, with intervals over rows.

Intervals resample rows (95 %, percentile): after training the entries of a row move together, so standard errors for
independent entries would be too small. Equal weight norms do not mean equal contributions: residual norms grow with
depth, and only captured states can weigh that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle3lab.inspection.families import Family
from eagle3lab.inspection.scan import Scan

RESAMPLES = 400
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class BlockEnergy:
    """One point block. share: of the squared Frobenius norm. norm: Frobenius. `*_interval`: 95 % over rows."""

    point: str
    norm: float
    share: float
    share_interval: tuple[float, float]
    std_interval: tuple[float, float]


@dataclass(frozen=True)
class Update:
    """Size of the update over the family's RMS, if it is uncorrelated with the start and nothing shrank it.

    by_std: from the excess of std, with its interval over rows. Values below 0 mean that std lies below the start.
    """

    point: str
    by_std: float
    interval: tuple[float, float]


def _resampled(scan: Scan, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resampled sums [B, P] of w^2, w and counts over rows."""
    rng = np.random.default_rng(seed)
    weights = rng.poisson(1.0, size=(RESAMPLES, scan.shape[0])).astype(np.float64)
    return weights @ scan.rows.second, weights @ scan.rows.first, weights @ scan.rows.count


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def block_energy(scan: Scan, *, seed: int = 0) -> list[BlockEnergy]:
    """Energy of every point block. Zero matrices have unknown (NaN) shares."""
    square = scan.rows.second.sum(axis=0)
    again, first, count = _resampled(scan, seed)
    share = square / square.sum()
    shares = again / again.sum(axis=1, keepdims=True)
    stds = np.sqrt(np.maximum(again / count - (first / count) ** 2, 0.0))
    low, high = np.percentile(shares, INTERVAL, axis=0)
    std_low, std_high = np.percentile(stds, INTERVAL, axis=0)
    return [
        BlockEnergy(point, math.sqrt(square[b]), float(share[b]), (float(low[b]), float(high[b])),
                    (float(std_low[b]), float(std_high[b])))
        for b, point in enumerate(scan.layout.points)
    ]  # fmt: skip


@np.errstate(invalid="ignore", over="ignore")
def implied_updates(scan: Scan, family: Family, *, seed: int = 0) -> list[Update]:
    """Implied update of the whole matrix (point `all`) and of every block."""
    second, first, count = scan.rows.second, scan.rows.first, scan.rows.count
    again = _resampled(scan, seed)
    found = []
    for name, blocks in [("all", slice(None)), *((p, slice(b, b + 1)) for b, p in enumerate(scan.layout.points))]:
        sums = [(x[:, blocks].sum(axis=1)) for x in again]
        variance = sums[0] / sums[2] - (sums[1] / sums[2]) ** 2
        totals = [x[:, blocks].sum() for x in (second, first, count)]
        mine = totals[0] / totals[2] - (totals[1] / totals[2]) ** 2
        ratios = _signed_root(variance / family.std**2 - 1)
        low, high = np.percentile(ratios, INTERVAL)
        found.append(Update(name, float(_signed_root(np.array(mine / family.std**2 - 1))), (float(low), float(high))))
    return found


def _signed_root(excess: np.ndarray) -> np.ndarray:
    return np.sign(excess) * np.sqrt(np.abs(excess))
