"""Inspect a checkpoint: read, measure, judge. The one entry that steps and notebooks call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3lab.inspection.families import families, initializer_range
from eagle3lab.inspection.layout import find_fc, role_of
from eagle3lab.inspection.report import Inspection, Verdict, number
from eagle3lab.inspection.scan import scan_fc
from eagle3lab.inspection.tensorfile import Checkpoint, open_checkpoint


def inspect_checkpoint(
    path: Path | str, *, points: Sequence[str] | None = None, tensor: str | None = None
) -> Inspection:
    """Measure fc of the checkpoint at `path` (safetensors file, or folder with one, several or an index).

    Args:
        points: names of the column blocks in ascending order, such as ("2", "30", "58").
        tensor: name of the matrix, when it is not called fc.weight.

    Raises:
        CheckpointError: nothing readable there, or no fusion weight in it.
    """
    checkpoint = open_checkpoint(path)
    layout = find_fc(checkpoint, points=points, tensor=tensor)
    scan = scan_fc(layout)
    pooled = scan.pooled_moments()
    blocks = [scan.block_moments(b) for b in range(len(layout.points))]
    known = families(layout.shape, initializer_range=initializer_range(checkpoint.config))
    fc: dict[str, Any] = {
        "name": layout.name, "shape": list(layout.shape), "dtype": layout.fmt, "layout": layout.notes,
        **pooled.to_json(),
        "blocks": [{"point": p, **m.to_json()} for p, m in zip(layout.points, blocks, strict=True)],
        "families": [{"name": f.name, "std": f.std, "ratio": pooled.std / f.std, "used_by": f.used_by} for f in known],
    }  # fmt: skip
    sentence = (
        f"{layout.name} {list(layout.shape)} {layout.fmt}: mean {number(pooled.mean, pooled.mean_se)}, "
        f"std {number(pooled.std, pooled.std_se)} over {pooled.n:,} entries"
    )
    return Inspection(
        path=Path(path), tensors=inventory(checkpoint), layout=layout, pooled=pooled, blocks=blocks, fc=fc,
        verdict=Verdict([], []), sentence=sentence,
    )  # fmt: skip


def inventory(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """First table of every inspection: what is in the files."""
    return [
        {"name": t.name, "role": role_of(t.name, t.shape), "dtype": t.dtype, "shape": list(t.shape)}
        | {"file": t.file.name}
        for name in checkpoint.tensors
        for t in checkpoint.parts(name)
    ]
