"""How fc meets real hidden states: how much longer or shorter they become, which point the output's energy comes from,
and whether fc reads the directions in which the states vary. Residual norms grow with depth, so equal weight norms of
the blocks do not mean equal contributions; only states can weigh them. Needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

DIRECTIONS = 32
"""Principal directions of the states that fc's energy is measured in."""


@dataclass(frozen=True)
class PointGeometry:
    """One point block on captured states.

    state_norm: RMS norm of its states. gain: RMS |W_b a_b| / |a_b| (an untouched draw: sqrt(R) times its std).
    energy: share of sum_b |W_b a_b|^2. alignment: share of |W_b|_F^2 in the states' `DIRECTIONS` top directions;
    chance: the same for a random matrix. Above chance means that fc reads what the states vary in.
    """

    point: str
    state_norm: float
    gain: float
    energy: float
    alignment: float
    chance: float


@dataclass(frozen=True)
class Geometry:
    """points: one a block. gain: of the whole. cosines: mean cosine between the contributions of a pair of points."""

    points: list[PointGeometry]
    gain: float
    cosines: dict[str, float]
    tokens: int


def geometry(weight: Tensor, aux: Tensor, points: Sequence[str]) -> Geometry:
    """Geometry of fc on states.

    Args:
        weight: [R, P*Ht] fc, any float dtype.
        aux: [T, P*Ht] states as fc reads them (after its norms, if it has any).
        points: names of the blocks.
    """
    blocks = weight.float().chunk(len(points), dim=1)
    states = aux.float().chunk(len(points), dim=1)
    outputs = [a @ w.T for w, a in zip(blocks, states, strict=True)]  # [T, R] each
    energies = [float(o.square().sum()) for o in outputs]
    found = []
    for point, w, a, output, energy in zip(points, blocks, states, outputs, energies, strict=True):
        directions = principal_directions(a, DIRECTIONS)
        norm = float(w.square().sum())
        inside = float((w @ directions).square().sum()) / norm if norm else math.nan
        length = float(a.square().sum())
        found.append(
            PointGeometry(
                point=str(point),
                state_norm=math.sqrt(length / len(a)),
                gain=math.sqrt(float(output.square().sum()) / length) if length else math.nan,
                energy=energy / sum(energies) if sum(energies) else math.nan,
                alignment=inside,
                chance=directions.shape[1] / w.shape[1],
            )
        )
    total = reduce(torch.add, outputs)
    gain = math.sqrt(float(total.square().sum()) / float(aux.float().square().sum()))
    cosines = {
        f"{points[i]} {points[j]}": float(torch.cosine_similarity(outputs[i], outputs[j], dim=1).mean())
        for i in range(len(points))
        for j in range(i)
    }
    return Geometry(found, gain, cosines, len(aux))


def principal_directions(states: Tensor, count: int) -> Tensor:
    """[Ht, count] orthonormal directions of largest variance of states [T, Ht] about their mean."""
    centred = states - states.mean(dim=0)
    count = min(count, *centred.shape)
    # Through the smaller Gram matrix: T tokens are fewer than the 7168 dimensions of a large target.
    if len(centred) < centred.shape[1]:
        _, vectors = torch.linalg.eigh(centred @ centred.T)
        return torch.linalg.qr(centred.T @ vectors[:, -count:]).Q
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    return vectors[:, -count:]
