"""`eagle3lab report`: everything about one run in a single HTML file that opens offline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.findings import Report as DoctorReport
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.runs.directory import Run
from eagle3lab.runs.report import write_report


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Where the report lies and how large it is."""

    path: Path
    bytes: int

    @property
    def exit_code(self) -> int:
        """0: it was written."""
        return 0

    def as_json(self) -> dict[str, Any]:
        """`report`, `bytes`."""
        return {"report": str(self.path), "bytes": self.bytes}

    def as_text(self) -> str:
        """One line."""
        return f"report: {self.path} ({self.bytes / 1e6:.1f} MB)"


def report(run: Run) -> ReportOutcome:
    """Write `report.html` of `run`: what was measured so far, and what the doctor says about its drafter."""
    path = write_report(run, examine(run))
    return ReportOutcome(path, path.stat().st_size)


def examine(run: Run) -> DoctorReport | None:
    """The doctor's visit to the run's drafter; None when there is no drafter yet."""
    if run.step_state("train") != "ok":
        return None
    try:
        return visit(Inputs(draft=str(run.drafter)))
    except UsageError:
        return None
