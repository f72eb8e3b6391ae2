"""`eagle3lab doctor`: look at what is there, name the fault, the evidence and the fix."""

from __future__ import annotations

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.registry import find_check
from eagle3lab.doctor.render import explain, print_table, to_json
from eagle3lab.doctor.run import Inputs, visit


def doctor(inputs: Inputs, *, as_json: bool = False, strict: bool = False) -> int:
    """Print the report of one visit and return the exit code (DESIGN: 0 good, 1 an error was found)."""
    report = visit(inputs)
    print(to_json(report)) if as_json else print_table(report)
    return report.exit_code(strict=strict)


def look(**where: str) -> Report:
    """The report for a notebook or another step: `look(draft="folder", target="folder", engine="sglang")`."""
    return visit(Inputs(**where))


def explain_code(code: str) -> str:
    """The catalogue entry of one check; an unknown code is a `UsageError` with the nearest."""
    return explain(find_check(code))
