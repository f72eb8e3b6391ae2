"""What a check says: one `Finding` a fault, and the `Report` of a whole visit.

A check yields findings through `error`, `warning` and `info`; the registry fills in the code, the rule and the default
fix, so that those three are written once, in the check's declaration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault (or one remark) about one subject, told in one line.

    Fields:
        severity: error (serving or measuring is broken), warning (probably), info (worth knowing).
        subject: the flag, key, tensor or file that it is about.
        message: what is wrong, with the numbers in it.
        actual: the value that was found (any JSON value; None is "nothing was there").
        evidence: name -> JSON value, the numbers behind the message.
        fix: the next thing to type; empty means the check's own fix.
        code, rule: filled in by the registry.
        cause: findings with the same non-empty cause are told as one, the worst of them first.
    """

    severity: Severity
    subject: str
    message: str
    actual: Any = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    code: str = ""
    rule: str = ""
    cause: str = ""

    def as_json(self) -> dict[str, Any]:
        """The finding with the keys of `doctor --json`, every number finite (NaN and infinity become text)."""
        return {
            "code": self.code,
            "severity": self.severity,
            "subject": self.subject,
            "message": self.message,
            "actual": jsonable(self.actual),
            "rule": self.rule,
            "fix": self.fix,
            "evidence": jsonable(self.evidence),
        }


def error(
    subject: str, message: str, *, actual: Any = None, fix: str = "", cause: str = "", **evidence: Any
) -> Finding:
    """A fault that breaks serving, training or a measurement."""
    return Finding(
        severity="error", subject=subject, message=message, actual=actual, fix=fix, cause=cause, evidence=evidence
    )


def warning(
    subject: str, message: str, *, actual: Any = None, fix: str = "", cause: str = "", **evidence: Any
) -> Finding:
    """Something that is wrong in some readers or under some settings, or that cannot be settled from what was given."""
    return Finding(
        severity="warning", subject=subject, message=message, actual=actual, fix=fix, cause=cause, evidence=evidence
    )


def info(subject: str, message: str, *, actual: Any = None, fix: str = "", cause: str = "", **evidence: Any) -> Finding:
    """Something worth knowing: a computed value, an odd but right setting, or why a check could not run."""
    return Finding(
        severity="info", subject=subject, message=message, actual=actual, fix=fix, cause=cause, evidence=evidence
    )


def could_not(what: str, why: str, *, fix: str = "") -> Finding:
    """`could not check <what> because <why>`: said instead of skipping in silence."""
    return info(what, f"could not check {what} because {why}", fix=fix, reason=why)


def of_severity(severity: Severity, finding: Finding) -> Finding:
    """The same finding at another severity."""
    return dataclasses.replace(finding, severity=severity)


def one_cause(findings: Iterable[Finding]) -> list[Finding]:
    """Tell findings of one cause as one: the worst is kept, the others become its evidence `also`.

    Exact repeats (same code, severity, subject and message: two engines with the same fault) are dropped.
    """
    kept: dict[tuple[str, ...], Finding] = {}
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        key = ("cause", finding.cause) if finding.cause else (finding.code, finding.subject, finding.message)
        first = kept.get(key)
        if first is None:
            kept[key] = finding
        elif finding.message != first.message:
            also = [*first.evidence.get("also", []), finding.message]
            kept[key] = dataclasses.replace(first, evidence={**first.evidence, "also": also})
    return list(kept.values())


@dataclass(frozen=True)
class Report:
    """All findings of one visit, worst first, and how many checks really ran."""

    findings: tuple[Finding, ...]
    checks_run: int

    @classmethod
    def of(cls, findings: Iterable[Finding], checks_run: int) -> Report:
        """Merge findings of one cause and sort worst first (stable inside one severity)."""
        merged = one_cause(findings)
        return cls(tuple(sorted(merged, key=lambda f: SEVERITIES.index(f.severity))), checks_run)

    def count(self, severity: Severity) -> int:
        """How many findings of this severity."""
        return sum(f.severity == severity for f in self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """1 when there is an error (with `strict` also on a warning), else 0."""
        return int(self.count("error") > 0 or (strict and self.count("warning") > 0))

    def as_json(self) -> dict[str, Any]:
        """The object that `doctor --json` prints."""
        counts = {severity: self.count(severity) for severity in SEVERITIES}
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "summary": {**counts, "checks_run": self.checks_run},
        }


def jsonable(value: Any, depth: int = 12) -> Any:
    """`value` as strict JSON: tuples and sets become lists, NaN and infinities text, anything else its `str`."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(item, depth - 1) for item in sorted(value, key=str)]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return jsonable(value.item(), depth - 1)
    return str(value)
