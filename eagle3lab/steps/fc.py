"""What notebook 04 shows: one inspection of fc, as tables and figures, and the way of fc through its training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.inspection import Inspection, inspect_checkpoint
from eagle3lab.inspection.distribution import distribution
from eagle3lab.inspection.report import number
from eagle3lab.runs.directory import Run
from eagle3lab.steps.snapshots import fc_trajectory
from eagle3lab.targets.profiles import load_profile

BINS, SPAN = 72, 3.6
"""About how many bins the figure has, and how many standard deviations it reaches to each side."""


@dataclass(frozen=True, slots=True)
class FcLook:
    """An inspection ready to show.

    Attributes:
        way: rows of `fc_trajectory`; [] for a checkpoint without snapshots.
    """

    found: Inspection
    way: list[dict[str, Any]] = field(default_factory=list)

    @property
    def moments(self) -> list[tuple[str, ...]]:
        """Rows of point, mean, std, excess kurtosis (each with its standard error) and largest magnitude."""
        named = [("all", self.found.pooled), *zip(self.found.layout.points, self.found.blocks, strict=True)]
        return [
            (
                str(name),
                number(m.mean, m.mean_se),
                number(m.std, m.std_se),
                number(m.kurtosis, m.kurtosis_se),
                f"{m.largest:.6g}",
            )
            for name, m in named
        ]

    @property
    def families(self) -> list[tuple[str, str, str, str]]:
        """Rows of initialisation, its std at this shape, observed std over it, who uses it."""
        rows = []
        for family in self.found.fc["families"]:
            used = family["used_by"]
            told = used if isinstance(used, str) else ", ".join(used)
            rows.append((family["name"], f"{family['std']:.6g}", f"{family['ratio']:.4f}", told))
        return rows

    @property
    def densities(self) -> list[dict[str, Any]]:
        """Per point: `edges` [B + 1], `density` [B], and the same of the initialisation that the verdict speaks of."""
        home = self.found.judgement.home if self.found.judgement else None
        blocks = []
        for index, point in enumerate(self.found.layout.points):
            weights = distribution(self.found.scan, index)
            # A power of two as bin width: other widths hold now more, now fewer cells of the 16-bit grid, and show teeth.
            width = 2.0 ** round(math.log2((2 * SPAN * weights.moments.std or 1.0) / BINS))
            side = math.ceil((SPAN * weights.moments.std or 1.0) / width)
            edges = np.arange(-side, side + 1) * width
            counts, _ = np.histogram(weights.values, edges, weights=weights.counts)
            blocks.append(
                {
                    "point": str(point),
                    "edges": edges.tolist(),
                    "density": (counts / weights.n / width).tolist(),
                    "initial": None if home is None else (home.cells(edges) / width).tolist(),
                    "family": None if home is None else home.name,
                    "std": weights.moments.std,
                    "initial_std": None if home is None else home.std,
                }
            )
        return blocks


def examine(run: Run, *, draft: str = "") -> FcLook:
    """Inspect the drafter of `run`, or the checkpoint at `draft`, and note the verdict in `metrics.json`.

    Raises:
        CheckpointError: nothing readable at `draft`.
        RunError: the run has no trained drafter and `draft` is empty.
    """
    if not draft:
        run.require("train")
    folder = Path(draft).expanduser() if draft else run.drafter
    with run.recording("inspect"):
        points = load_profile(run.manifest.profile).model.points
        found = inspect_checkpoint(folder, points=None if draft else _names(points))
        way = [] if draft or not folder.is_dir() else fc_trajectory(folder, points)
        moments = {key: found.fc[key] for key in ("mean", "mean_se", "std", "std_se")}
        run.merge_metrics({"fc": {"labels": found.verdict.labels, **moments}})
        return FcLook(found, way)


def _names(points: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(point) for point in points)
