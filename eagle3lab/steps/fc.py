"""What notebook 04 shows: one inspection of fc, as tables and figures, and the way of fc through its training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.inspection import Inspection, inspect_checkpoint
from eagle3lab.inspection.distribution import Distribution, distribution
from eagle3lab.inspection.report import number
from eagle3lab.inspection.scan import Scan
from eagle3lab.runs.directory import Run
from eagle3lab.steps.snapshots import fc_trajectory, first_snapshot
from eagle3lab.targets.profiles import load_profile

BINS, SPAN = 72, 3.6
"""About how many bins the figure has, and how many standard deviations it reaches to each side."""


@dataclass(frozen=True, slots=True)
class FcLook:
    """An inspection ready to show.

    Attributes:
        way: rows of `fc_trajectory`; [] for a checkpoint without snapshots.
        start: fc before the first step, measured from the first snapshot; None without one.
    """

    found: Inspection
    way: list[dict[str, Any]] = field(default_factory=list)
    start: Scan | None = None

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
        """Per point: `edges` [B + 1], `density` [B], and the same of its start: the first snapshot, else the family."""
        home = self.found.judgement.home if self.found.judgement else None
        blocks = []
        for index, point in enumerate(self.found.layout.points):
            now = distribution(self.found.scan, index)
            first = None if self.start is None else distribution(self.start, index)
            edges = edges_for(now.moments.std)
            initial, name, std = None, None, None
            if first is not None:
                initial, name, std = density(first, edges), "start", first.moments.std
            elif home is not None:
                initial, name, std = (home.cells(edges) / np.diff(edges)).tolist(), home.name, home.std
            blocks.append(
                {
                    "point": str(point),
                    "edges": edges.tolist(),
                    "density": density(now, edges),
                    "initial": initial,
                    "family": name,
                    "std": now.moments.std,
                    "initial_std": None if std is None else float(std),
                }
            )
        return blocks


def edges_for(std: float) -> np.ndarray:
    """Bins a power of two wide: other widths hold now more, now fewer cells of the 16-bit grid, and show teeth."""
    std = std if math.isfinite(std) and std > 0 else 1.0
    width = 2.0 ** round(math.log2(2 * SPAN * std / BINS))
    side = math.ceil(SPAN * std / width)
    return np.arange(-side, side + 1) * width


def density(found: Distribution, edges: np.ndarray) -> list[float]:
    """Density [B] of a distribution in the bins of `edges` [B + 1]."""
    counts, _ = np.histogram(found.values, edges, weights=found.counts)
    return (counts / max(found.n, 1) / np.diff(edges)).tolist()


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
        start = first_snapshot(folder, points) if way else None
        moments = {key: found.fc[key] for key in ("mean", "mean_se", "std", "std_se")}
        run.merge_metrics({"fc": {"drafter": run.drafter_name(folder), "labels": found.verdict.labels, **moments}})
        return FcLook(found, way, start)


def browse(look: FcLook) -> None:
    """Show controls over the weights of the inspected checkpoint (tensor, point, log scale, its step-0 snapshot), and
    under them the first choice as a picture for viewers that run no widgets."""
    from IPython.display import display

    from eagle3lab.inspection.record import snapshots
    from eagle3lab.widgets.fc import Browser, fc_widget, static_twin

    path = look.found.path
    start = next((file for step, file in snapshots(path) if step == 0), None) if path.is_dir() else None
    browser = Browser(path, other=start, points=[str(point) for point in look.found.layout.points])
    display(fc_widget(browser))
    display(static_twin(browser))


def _names(points: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(point) for point in points)
