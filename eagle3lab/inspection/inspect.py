"""Inspect a checkpoint: read, measure, judge. The one entry that steps and notebooks call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.inspection.energy import block_energy
from eagle3lab.inspection.families import Family, families, initializer_range
from eagle3lab.inspection.judge import Judgement, judge
from eagle3lab.inspection.layout import find_fc, role_of
from eagle3lab.inspection.moments import Moments
from eagle3lab.inspection.passthrough import NAME as PASS_THROUGH
from eagle3lab.inspection.record import RECORD, read_init_record
from eagle3lab.inspection.report import Inspection, number
from eagle3lab.inspection.scan import Scan, scan_fc
from eagle3lab.inspection.tensorfile import Checkpoint, open_checkpoint


def inspect_checkpoint(
    path: Path | str,
    *,
    points: Sequence[str] | None = None,
    tensor: str | None = None,
    init: str | None = None,
) -> Inspection:
    """Measure fc of the checkpoint at `path` (safetensors file, or folder with one, several or an index).

    Args:
        points: names of the column blocks in ascending order, such as ("2", "30", "58").
        tensor: name of the matrix, when it is not called fc.weight.
        init: family that fc is known to have started from; without it the checkpoint's own record is the prior.

    Raises:
        CheckpointError: nothing readable there, or no fusion weight in it.
        UsageError: an unknown family.
    """
    checkpoint = open_checkpoint(path)
    layout = find_fc(checkpoint, points=points, tensor=tensor)
    known = families(layout.shape, initializer_range=initializer_range(checkpoint.config))
    prior, prior_from = _prior(checkpoint, init, [family.name for family in known])
    scan = scan_fc(layout)
    found = judge(scan, known, prior=prior, prior_from=prior_from)
    pooled = scan.pooled_moments()
    blocks = [scan.block_moments(b) for b in range(len(layout.points))]
    fc = _measurements(scan, known, pooled, blocks, found)
    labels = ", ".join(found.verdict.labels)
    sentence = (
        f"{layout.name} {list(layout.shape)} {layout.fmt}: mean {number(pooled.mean, pooled.mean_se)}, "
        f"std {number(pooled.std, pooled.std_se)} over {pooled.n:,} entries: {labels}"
    )
    return Inspection(
        path=Path(path), tensors=inventory(checkpoint), layout=layout, pooled=pooled, blocks=blocks, fc=fc,
        verdict=found.verdict, sentence=sentence, scan=scan, judgement=found,
    )  # fmt: skip


def _prior(checkpoint: Checkpoint, init: str | None, names: list[str]) -> tuple[str | None, str]:
    if init is not None:
        if init not in (*names, PASS_THROUGH):
            raise UsageError(f"--init {init!r} is no family", rule=nearest(init, [*names, PASS_THROUGH]))
        return init, "--init"
    record = read_init_record(checkpoint.folder)
    return (record.family, RECORD) if record is not None else (None, "")


def _measurements(
    scan: Scan, known: list[Family], pooled: Moments, blocks: list[Moments], found: Judgement
) -> dict[str, Any]:
    """The `fc` object of the JSON."""
    layout = scan.layout
    energy = {entry.point: asdict(entry) for entry in block_energy(scan)} if not (pooled.nan or pooled.inf) else {}
    rows = []
    for point, m in zip(layout.points, blocks, strict=True):
        finding = found.blocks.get(point)
        ranking = [] if finding is None else sorted(finding.fits.values(), key=lambda f: (f.distance, f.fitted))
        rows.append(
            {"point": point, **m.to_json(), "energy": energy.get(point)}
            | {"state": finding.kind if finding else "dead"}
            | {"families": [{**asdict(f), "family": f.family.name} for f in ranking]}
        )
    return {
        "name": layout.name, "shape": list(layout.shape), "dtype": layout.fmt, "layout": layout.notes,
        **pooled.to_json(), "blocks": rows,
        "families": [{"name": f.name, "std": f.std, "ratio": pooled.std / f.std, "used_by": f.used_by} for f in known],
        "updates": [asdict(update) for update in found.updates],
        "structure": found.structure, "quantisation": found.quantisation, "pass_through": found.pass_through,
        "outside": found.outside and {"bound": found.outside.bound, "entries": found.outside.total},
    }  # fmt: skip


def inventory(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """First table of every inspection: what is in the files."""
    return [
        {"name": t.name, "role": role_of(t.name, t.shape), "dtype": t.dtype, "shape": list(t.shape)}
        | {"file": t.file.name}
        for name in checkpoint.tensors
        for t in checkpoint.parts(name)
    ]
