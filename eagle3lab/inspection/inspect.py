"""Inspect a checkpoint: read, measure, judge. The one entry that steps and notebooks call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.inspection.delta import compare_fc
from eagle3lab.inspection.energy import block_energy
from eagle3lab.inspection.families import Family, families, initializer_range
from eagle3lab.inspection.judge import Judgement, judge
from eagle3lab.inspection.layout import FcLayout, find_fc, role_of
from eagle3lab.inspection.matrices import MatrixLook, look_at_others, match_target
from eagle3lab.inspection.moments import Moments
from eagle3lab.inspection.passthrough import NAME as PASS_THROUGH
from eagle3lab.inspection.record import RECORD, read_init_record, snapshots
from eagle3lab.inspection.report import Inspection, Verdict, number
from eagle3lab.inspection.scan import Scan, scan_fc
from eagle3lab.inspection.spectrum import STEPS, exact_spectrum
from eagle3lab.inspection.spectrum import spectrum as lanczos_spectrum
from eagle3lab.inspection.tensorfile import Checkpoint, open_checkpoint

SPECTRA = ("none", "fast", "exact")


def inspect_checkpoint(
    path: Path | str,
    *,
    points: Sequence[str] | None = None,
    tensor: str | None = None,
    init: str | None = None,
    against: Path | str | None = None,
    target: Path | str | None = None,
    states: Path | str | None = None,
    others: bool = False,
    spectrum: str = "none",
) -> Inspection:
    """Measure fc of the checkpoint at `path` (safetensors file, or folder with one, several or an index).

    Args:
        points: names of the column blocks in ascending order, such as ("2", "30", "58").
        tensor: name of the matrix, when it is not called fc.weight.
        init: family that fc is known to have started from; without it the checkpoint's own record is the prior.
        against: another checkpoint whose fc is compared; without it the step-0 snapshot in the folder, if there is one.
        target: the target's checkpoint, whose rows embed_tokens and lm_head are compared with.
        states: folder of captured states: adds what fc does to them; with `target` also the accept length after every
            change of fc. Needs torch.
        others: also look at every other tensor.
        spectrum: none | fast (Lanczos, tens of seconds at Kimi size) | exact (all singular values, minutes).

    Raises:
        CheckpointError: nothing readable there, or no fusion weight in it.
        UsageError: an unknown family or kind of spectrum.
    """
    if spectrum not in SPECTRA:
        raise UsageError(f"spectrum {spectrum!r}", rule=nearest(spectrum, SPECTRA))
    checkpoint = open_checkpoint(path)
    layout = find_fc(checkpoint, points=points, tensor=tensor)
    known = families(layout.shape, initializer_range=initializer_range(checkpoint.config))
    prior, prior_from = _prior(checkpoint, init, [family.name for family in known])
    scan = scan_fc(layout)
    judged = judge(scan, known, prior=prior, prior_from=prior_from)
    pooled = scan.pooled_moments()
    blocks = [scan.block_moments(b) for b in range(len(layout.points))]
    found = Inspection(
        path=Path(path), tensors=inventory(checkpoint), layout=layout, pooled=pooled, blocks=blocks,
        fc=_measurements(scan, known, pooled, blocks, judged), verdict=judged.verdict, sentence="", scan=scan,
        judgement=judged,
    )  # fmt: skip
    if pooled.nan + pooled.inf == 0:
        _compare(found, checkpoint, layout, against)
        _add_spectra(found, layout, spectrum)
    if others:
        found.matrices = look_at_others(checkpoint, layout.name)
        found.verdict.evidence.extend(_other_lines(found.matrices))
    if target is not None:
        found.target_rows = match_target(checkpoint, open_checkpoint(target))
        found.verdict.evidence.extend(match.line() for match in found.target_rows)
    if states is not None:
        _add_function(found, checkpoint, Path(states), None if target is None else Path(target))
    found.sentence = _sentence(found)
    return found


def _add_function(found: Inspection, checkpoint: Checkpoint, states: Path, target: Path | None) -> None:
    from eagle3lab.inspection import functional

    record = read_init_record(checkpoint.folder)
    start = record.family if record else None
    found.function, labels, lines = functional.look(found.layout, checkpoint.folder, states, target=target, start=start)
    found.verdict.labels.extend(label for label in labels if label not in found.verdict.labels)
    found.verdict.evidence.extend(lines)


def _sentence(found: Inspection) -> str:
    layout, m = found.layout, found.pooled
    return (
        f"{layout.name} {list(layout.shape)} {layout.fmt}: mean {number(m.mean, m.mean_se)}, "
        f"std {number(m.std, m.std_se)} over {m.n:,} entries: {', '.join(found.verdict.labels)}"
    )


def _compare(found: Inspection, checkpoint: Checkpoint, layout: FcLayout, against: Path | str | None) -> None:
    """Difference to another fc, or to the recorded start, which also answers where the weights alone cannot."""
    start = next((file for step, file in snapshots(checkpoint.folder) if step == 0), None)
    own = against is None
    source = start if against is None else against
    if source is None:
        return
    name = Path(source).name if own else str(source)
    found.delta = compare_fc(layout, find_fc(open_checkpoint(source), points=layout.points))
    found.fc["delta"] = {"against": str(source), **found.delta.to_json()}
    found.verdict.evidence.extend(found.delta.lines(name))
    if own and math.isfinite(found.delta.all.relative):
        _measured_size(found.verdict, found.delta.all.relative, name)


def _measured_size(verdict: Verdict, size: float, name: str) -> None:
    """Put the measured size in the place of the fitted one, and of an unknown start."""
    for index, label in enumerate(verdict.labels):
        word = label.partition("(")[0]
        if word in ("INIT-UNKNOWN", "MOVED-FROM-INIT"):
            verdict.labels[index] = f"MOVED-FROM-INIT({size:.3g})" if size else f"AT-INIT({name})"
            verdict.evidence.append(f"the size is measured against {name}; from the weights alone: {label}")


def _add_spectra(found: Inspection, layout: FcLayout, kind: str) -> None:
    if kind == "none":
        return
    # With so few rows Lanczos takes as many steps as there are values, and saves nothing.
    compute = exact_spectrum if kind == "exact" or layout.shape[0] <= STEPS else lanczos_spectrum
    found.spectra = compute(layout.column_tiles, layout.shape, layout.widths, layout.points)
    found.fc["spectrum"] = [entry.to_json() for entry in found.spectra]
    found.verdict.evidence.extend(entry.line() for entry in found.spectra)
    if found.delta is not None and found.delta.all.relative > 0:
        found.delta_spectrum = compute(found.delta.column_tiles, layout.shape, layout.widths, layout.points)
        found.fc["delta"]["spectrum"] = [entry.to_json() for entry in found.delta_spectrum]
        found.verdict.evidence.append("difference: " + found.delta_spectrum[0].line())


def _other_lines(looks: Sequence[MatrixLook]) -> list[str]:
    """Evidence from the other tensors: only what is wrong or untouched."""
    lines = [f"{m.name} is dead" + (f" ({m.not_finite:,} not finite)" if m.not_finite else "")
             for m in looks if m.state == "dead"]  # fmt: skip
    lines += [f"{m.name} is at init ({m.family or 'ones'})" for m in looks if m.state == "at init"]
    return lines


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
