"""The way of fc through a training, read from the snapshots that the trainer leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lab.inspection.delta import compare_fc
from eagle3lab.inspection.layout import FcLayout, find_fc
from eagle3lab.inspection.record import snapshots
from eagle3lab.inspection.scan import Scan, scan_fc
from eagle3lab.inspection.tensorfile import open_checkpoint


def fc_trajectory(folder: Path, points: list[int]) -> list[dict[str, Any]]:
    """Distance of every point block of fc from its start, per snapshot; read in tiles from the mapped files.

    Args:
        folder: a drafter folder with `fc_snapshots/step-NNNNNN.safetensors`.
        points: `resid_pre` indices, ascending: names of the column blocks.

    Returns:
        rows of `step`, `point`, `moved` = |W - W0| / |W0|, `cosine` of W and W0, and `std_ratio` = RMS of W over RMS
        of W0, None where the start is zero; [] when there are no snapshots.

    Raises:
        CheckpointError: a file that is no snapshot, or whose width does not divide into the points.
    """
    layouts = [(step, _layout(path, points)) for step, path in snapshots(folder)]
    rows: list[dict[str, Any]] = []
    for step, layout in layouts:
        for point, block in zip(points, compare_fc(layout, layouts[0][1]).blocks[1:], strict=True):
            known = block.relative == block.relative
            values = {"moved": block.relative, "cosine": block.cosine, "std_ratio": block.std_ratio}
            rows.append({"step": step, "point": point, **(values if known else dict.fromkeys(values))})
    return rows


def first_snapshot(folder: Path, points: list[int]) -> Scan | None:
    """fc before the first step, measured; None when there are no snapshots."""
    found = snapshots(folder)
    return scan_fc(_layout(found[0][1], points)) if found else None


def _layout(path: Path, points: list[int]) -> FcLayout:
    return find_fc(open_checkpoint(path), points=[str(point) for point in points])
