"""`eagle3lab doctor`: look at what is there, name the fault, the evidence and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.registry import find_check
from eagle3lab.doctor.render import explain, to_html, to_text
from eagle3lab.doctor.run import Inputs, visit


@dataclass(frozen=True)
class Visit:
    """Outcome of one visit (see `steps/output.py`): a table in a terminal, HTML in a notebook, JSON on request."""

    report: Report
    strict: bool = False

    @property
    def exit_code(self) -> int:
        """0 good, 1 an error was found (with `strict` also a warning)."""
        return self.report.exit_code(strict=self.strict)

    def as_json(self) -> dict[str, Any]:
        """{"findings": [...], "summary": {...}}."""
        return self.report.as_json()

    def as_text(self) -> str:
        """The table and the summary line."""
        return to_text(self.report)

    def _repr_html_(self) -> str:
        return to_html(self.report)


def doctor(inputs: Inputs, *, strict: bool = False) -> Visit:
    """One visit over everything that `inputs` names."""
    return Visit(visit(inputs), strict)


def look(**where: str) -> Visit:
    """The visit for a notebook or another step: `look(draft="folder", target="folder", engine="sglang")`."""
    return doctor(Inputs(**cast("dict[str, Any]", where)))


def explain_code(code: str) -> str:
    """The catalogue entry of one check; an unknown code is a `UsageError` with the nearest."""
    return explain(find_check(code))
