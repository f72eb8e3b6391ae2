"""`eagle3lab inspect`: is fc dead, untouched or trained? The checkpoint, or a bare pair of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.inspection import Inspection, answer_number_pair, inspect_checkpoint
from eagle3lab.inspection.report import number
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
        """Inventory, moments by block, verdict with its evidence."""
        found = self.found
        keys = ("name", "role", "dtype", "shape")
        rows = [(*(t[key] for key in keys),) for t in found.tensors]
        blocks = [("all", found.pooled), *zip(found.layout.points, found.blocks, strict=True)]
        lines = [
            table(keys, rows), "",
            table(
                ("point", "mean", "std", "excess kurtosis", "largest"),
                [(p, number(m.mean, m.mean_se), number(m.std, m.std_se), number(m.kurtosis, m.kurtosis_se),
                  f"{m.largest:.8g}") for p, m in blocks],
            ), "", found.sentence,
        ]  # fmt: skip
        return "\n".join(lines)


def inspect(path: Path, *, points: Sequence[str] | None = None, tensor: str | None = None,
            require: Sequence[str] = ()) -> InspectOutcome:  # fmt: skip
    """Inspect the checkpoint at `path`; see `inspect_checkpoint`."""
    return InspectOutcome(inspect_checkpoint(path, points=points, tensor=tensor), tuple(require))


def number_pair(shape: str, mean: str, std: str) -> NumberPair:
    """What a bare mean and std imply; no file is read."""
    return answer_number_pair(parse_shape(shape), mean, std)
