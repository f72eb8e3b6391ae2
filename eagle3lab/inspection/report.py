"""The result of an inspection: every number that was measured, the labels, and the lines that decided them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3lab.inspection.layout import FcLayout
from eagle3lab.inspection.moments import Moments
from eagle3lab.inspection.scan import Scan

if TYPE_CHECKING:
    from eagle3lab.inspection.delta import Delta
    from eagle3lab.inspection.functional import Functional
    from eagle3lab.inspection.judge import Judgement
    from eagle3lab.inspection.matrices import MatrixLook, RowMatch
    from eagle3lab.inspection.spectrum import Spectrum

LABELS = ("DEAD", "AT-INIT", "PARTLY-TRAINED", "MOVED-FROM-INIT", "INIT-UNKNOWN", "USEFUL")
"""Words of the verdict; most carry an argument in brackets."""


@dataclass(frozen=True)
class Verdict:
    """labels: DESIGN's words with their argument in brackets. evidence: the lines that decided. where: exact lists."""

    labels: list[str]
    evidence: list[str]
    where: dict[str, list[Any]] = field(default_factory=dict)

    def has(self, label: str) -> bool:
        """`AT-INIT` matches `AT-INIT(kaiming-uniform)`; with a bracket the whole label must agree."""
        wanted = label.strip()
        return any(got == wanted or got.partition("(")[0] == wanted for got in self.labels)


@dataclass
class Inspection:
    """Everything that `inspect` found about one checkpoint.

    tensors: the key inventory (name, role, dtype, shape, file). fc: pooled moments, `blocks` one entry a point, and a
    key for each measurement that ran. sentence: the answer in one plain sentence. scan, judgement: the measurements as
    objects, for figures. delta, spectra, matrices, target_rows, function: empty when not asked for.
    """

    path: Path
    tensors: list[dict[str, Any]]
    layout: FcLayout
    pooled: Moments
    blocks: list[Moments]
    fc: dict[str, Any]
    verdict: Verdict
    sentence: str
    scan: Scan
    judgement: Judgement
    delta: Delta | None = None
    spectra: list[Spectrum] = field(default_factory=list)
    delta_spectrum: list[Spectrum] = field(default_factory=list)
    matrices: list[MatrixLook] = field(default_factory=list)
    target_rows: list[RowMatch] = field(default_factory=list)
    function: Functional | None = None

    def to_json(self) -> dict[str, Any]:
        """DESIGN's `inspect --json`: keys are added over time, never renamed."""
        verdict = {"labels": self.verdict.labels, "evidence": self.verdict.evidence, "where": self.verdict.where}
        return plain({
            "path": str(self.path), "tensors": self.tensors, "fc": self.fc, "verdict": verdict,
            "sentence": self.sentence, "matrices": self.matrices, "target_rows": self.target_rows,
            "function": self.function,
        })  # fmt: skip


def plain(value: Any) -> Any:
    """JSON-ready copy: numpy to Python, dataclasses to objects, NaN and infinity to None (unknown)."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def number(value: float, se: float) -> str:
    """`-7.0e-08 ± 3.2e-07`; a value far from zero keeps the digits that its error leaves."""
    if not math.isfinite(value):
        return "unknown"
    if not math.isfinite(se) or se == 0:
        return f"{value:.6g}"
    if abs(value) < 100 * se:
        return f"{value:.1e} ± {se:.1e}"
    digits = min(12, max(2, math.ceil(math.log10(abs(value) / se)) + 1))
    return f"{value:.{digits}g} ± {se:.1e}"
