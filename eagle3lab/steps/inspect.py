"""`eagle3lab inspect`: is fc dead, untouched or trained? The checkpoint, or a bare pair of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import CheckpointError, StoreError, UsageError, nearest
from eagle3lab.inspection import Inspection, answer_number_pair, inspect_checkpoint
from eagle3lab.inspection.matrices import MatrixLook
from eagle3lab.inspection.report import LABELS, number
from eagle3lab.inspection.tensorfile import open_checkpoint
from eagle3lab.inspection.words import NumberPair, parse_shape
from eagle3lab.steps.output import table


@dataclass(frozen=True)
class InspectOutcome:
    """An inspection and the labels that a gate asks for."""

    found: Inspection
    require: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Required labels that the verdict has not."""
        return [label for label in self.require if not self.found.verdict.has(label)]

    @property
    def exit_code(self) -> int:
        """0 without a gate, whatever the verdict; 1 when a required label is missing."""
        return 1 if self.missing else 0

    def as_json(self) -> dict[str, Any]:
        """`Inspection.to_json()`, and the gate when there is one."""
        gate = {"gate": {"require": list(self.require), "missing": self.missing}} if self.require else {}
        return self.found.to_json() | gate

    def as_text(self) -> str:
        """Inventory, moments by block, families, verdict with its evidence."""
        found = self.found
        keys = ("name", "role", "dtype", "shape")
        parts = [table(keys, [(*(t[key] for key in keys),) for t in found.tensors])]
        parts.append(table(("point", "mean", "std", "excess kurtosis", "largest"), moment_rows(found)))
        parts.append(
            table(
                ("initial family", "its std", "std / its std", "used by"),
                [(f["name"], f"{f['std']:.7f}", f"{f['ratio']:.5f}", f["used_by"]) for f in found.fc["families"]],
            )
        )
        if found.matrices:
            head = ("other tensor", "mean", "std", "excess kurtosis", "state")
            parts.append(table(head, [_matrix_row(look) for look in found.matrices]))
        lines = [f"verdict: {', '.join(found.verdict.labels)}", *(f"  - {line}" for line in found.verdict.evidence)]
        lines += [f"  - {note}" for note in found.layout.notes]
        if self.missing:
            lines.append(f"gate failed: {', '.join(self.missing)} asked for, not found")
        return "\n\n".join([*parts, "\n".join(lines), found.sentence])


@dataclass(frozen=True)
class BrokenOutcome:
    """A checkpoint that is there and cannot be read: that is the answer, not a failure to start."""

    path: Path
    error: CheckpointError
    exit_code: int = 1

    def as_json(self) -> dict[str, Any]:
        """The keys of an inspection without contents, and one finding in the doctor's form."""
        finding = {
            **{"code": "checkpoint-broken", "severity": "error", "subject": str(self.path), "actual": None},
            **{"message": self.error.what, "rule": self.error.rule, "fix": self.error.fix, "evidence": {}},
        }
        return {"tensors": [], "fc": None, "verdict": {"labels": [], "evidence": []}, "findings": [finding]}

    def as_text(self) -> str:
        """The one line of the error."""
        return str(self.error)


def moment_rows(found: Inspection) -> list[tuple[str, ...]]:
    """Rows of point, mean, std, excess kurtosis and largest magnitude; the whole matrix first."""
    named = [("all", found.pooled), *zip(found.layout.points, found.blocks, strict=True)]
    return [
        (point, number(m.mean, m.mean_se), number(m.std, m.std_se), number(m.kurtosis, m.kurtosis_se),
         f"{m.largest:.8g}")
        for point, m in named
    ]  # fmt: skip


def _matrix_row(look: MatrixLook) -> tuple[object, ...]:
    state = look.state + (f" ({look.family})" if look.family else "")
    if look.zero_rows:
        state += f"; {look.zero_rows} zero rows"
    moments = (number(look.mean, look.mean_se), number(look.std, look.std_se))
    return (look.name, *moments, f"{look.kurtosis:.3f}" if math.isfinite(look.kurtosis) else None, state)


def inspect(path: Path, *, require: Sequence[str] = (), **how: Any) -> InspectOutcome | BrokenOutcome:
    """Inspect the checkpoint at `path`; `how` is what `inspect_checkpoint` takes, with every tensor looked at.

    Raises:
        UsageError: a required label that no verdict can have.
    """
    for label in require:
        if label.partition("(")[0].strip() not in LABELS:
            raise UsageError(f"--require {label!r}", rule=nearest(label, LABELS))
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        if not Path(path).exists():
            raise
        return BrokenOutcome(Path(path), error)
    if how.get("states") is not None:
        how["states"] = states_folder(Path(how["states"]))
        how["target"] = how.get("target") or target_of(how["states"])
    return InspectOutcome(inspect_checkpoint(path, **{"others": True} | how), tuple(require))


def states_folder(path: Path) -> Path:
    """`path`, or the folder that a run's `states` file names.

    Raises:
        StoreError: a file that names no folder.
    """
    if not path.is_file():
        return path
    try:
        named = Path(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path} is no folder of states", rule="a folder with manifest.json, or a run's states"
        ) from error
    if not named.is_dir():
        raise StoreError(f"{path} names {str(named)[:80]}, which is not there", fix="eagle3lab capture")
    return named


def target_of(states: Path) -> Path | None:
    """Folder of the fetched target whose weights made `states`; None when no profile's target is it."""
    from eagle3lab.capture.manifest import read_manifest
    from eagle3lab.targets.fetch import fetched_folder, weight_hash
    from eagle3lab.targets.profiles import known_profiles, load_profile

    wanted = read_manifest(states).target_weight_sha256
    folders = [fetched_folder(load_profile(name)) for name in known_profiles()]
    return next((f for f in folders if any(f.glob("*.safetensors")) and weight_hash(f) == wanted), None)


def number_pair(shape: str, mean: str, std: str) -> NumberPair:
    """What a bare mean and std imply; no file is read."""
    return answer_number_pair(parse_shape(shape), mean, std)
