"""Figures of an inspection: its measurements put into the form that `eagle3lab.plots.fc` draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from eagle3lab.inspection import Inspection
from eagle3lab.inspection.energy import block_energy
from eagle3lab.inspection.spectrum import Spectrum, exact_spectrum
from eagle3lab.inspection.spectrum import spectrum as lanczos_spectrum
from eagle3lab.plots import fc
from eagle3lab.plots.publish import Plot

EXACT_ROWS = 1024


def norm_maps(found: Inspection) -> Plot:
    """Row and column norms, with what was reached by training or is zero marked."""
    scan, where = found.scan, found.verdict.where
    rows = np.sqrt(scan.rows.second / scan.rows.count).T
    columns = np.sqrt(scan.columns.second / scan.columns.count)
    structure = found.judgement.structure
    dead = (structure.rows.zero, structure.columns.zero) if structure else ([], [])
    home = found.judgement.home
    return fc.norm_maps(
        rows.tolist(), columns.tolist(), points=found.layout.points, start=home.std if home else None,
        marked_rows=[*where.get("rows", []), *dead[0]], marked_columns=[*where.get("columns", []), *dead[1]],
    )  # fmt: skip


def energy(found: Inspection) -> Plot:
    """Energy and implied update by block."""
    updates = {update.point: update for update in found.judgement.updates}
    rows: list[Mapping[str, Any]] = []
    for block in block_energy(found.scan):
        update = updates.get(block.point)
        rows.append({
            "point": block.point, "share": block.share, "share_interval": block.share_interval,
            "update": update.by_std if update else None, "update_interval": update.interval if update else None,
        })  # fmt: skip
    return fc.block_energy(rows)


def spectrum(spectra: list[Spectrum]) -> Plot:
    """Spectrum of fc (or of a difference) and of its blocks."""
    return fc.spectrum([
        {"point": s.point, "nodes": s.nodes, "weights": s.weights, "shape": s.shape, "std": s.std,
         "low": s.edges.low, "high": s.edges.high, "outliers": s.outliers}
        for s in spectra
    ])  # fmt: skip


def spectra_of(found: Inspection) -> list[Spectrum]:
    """The spectra of an inspection; computed now when it has none: all values of a small matrix, else Lanczos."""
    if found.spectra:
        return found.spectra
    layout = found.layout
    compute = exact_spectrum if layout.shape[0] <= EXACT_ROWS else lanczos_spectrum
    return compute(layout.column_tiles, layout.shape, layout.widths, layout.points)


def difference(found: Inspection, against: str) -> Plot | None:
    """Difference to the other fc that was compared; None when there was none, or it is zero everywhere."""
    delta = found.delta
    if delta is None or not math.isfinite(delta.all.relative):
        return None
    starts = found.layout.starts
    blocks = delta.blocks[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = np.nan_to_num(np.sqrt(delta.rows / delta.rows_start))
        columns = np.nan_to_num(np.sqrt(delta.columns / delta.columns_start))
    return fc.difference(
        [vars(block) for block in blocks], rows.T.tolist(),
        [columns[a:b].tolist() for a, b in pairwise(starts)], against=against,
    )  # fmt: skip
