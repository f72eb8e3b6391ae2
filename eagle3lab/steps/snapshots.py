"""The way of fc through a training, read from the snapshots that the trainer leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.errors import CheckpointError
from eagle3lab.inspection.record import snapshots


def fc_trajectory(folder: Path, points: list[int]) -> list[dict[str, Any]]:
    """Distance of every point block of fc from its start, per snapshot.

    Args:
        folder: a drafter folder with `fc_snapshots/step-NNNNNN.safetensors`.
        points: `resid_pre` indices, ascending: names of the column blocks.

    Returns:
        rows of `step`, `point`, `std` and `moved` = |W - W0| / |W0| in float64; [] when there are no snapshots.

    Raises:
        CheckpointError: a snapshot whose width does not divide into the points.
    """
    start: np.ndarray | None = None
    rows = []
    for step, path in snapshots(folder):
        weight = _matrix(path)
        if weight.shape[1] % len(points):
            raise CheckpointError(f"{path}: fc has {weight.shape[1]} columns", rule=f"{len(points)} equal blocks")
        start = weight if start is None else start
        for point, now, first in zip(
            points, np.split(weight, len(points), 1), np.split(start, len(points), 1), strict=True
        ):
            size = float(np.linalg.norm(first))
            moved = float(np.linalg.norm(now - first)) / size if size else None
            rows.append({"step": step, "point": point, "std": float(now.std())})
            rows[-1]["moved"] = moved
    return rows


def first_snapshot(folder: Path) -> np.ndarray | None:
    """fc before the first step, float64 [H, P*H]; None when there are no snapshots."""
    found = snapshots(folder)
    return _matrix(found[0][1]) if found else None


def _matrix(path: Path) -> np.ndarray:
    """`fc.weight` of a snapshot as float64 [H, P*H]."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)["fc.weight"].double().numpy()
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no fc snapshot ({error})", fix="train again") from error
