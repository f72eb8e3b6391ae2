"""The list of checks. A check is a small function over facts with a stable code, a title, a rule and a fix.

    @check(code="launch-algorithm", title="...", reads=("launch_args",), also=("draft_config",), rule="...", fix="...")
    def algorithm(facts: Facts) -> Iterator[Finding]:
        yield error("--speculative-algorithm", "...", given="EAGLE", needed="EAGLE3")

`reads` are the facts without which the check has nothing to say; the first is its artefact. When the artefact was given
and another of `reads` was not, the report says which checks could not run and why. `also` are optional. "a|b" in
`reads` means that either will do.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.doctor.facts import VOCABULARY, Facts
from eagle3lab.doctor.findings import Finding, could_not, warning

CheckFunction = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check as it stands in the catalogue.

    Fields:
        code: stable name, lower case with hyphens, used by `--explain` and in JSON.
        title: what it looks for, in a few words.
        reads: facts that must be there, the artefact first. also: facts that it uses when they are there.
        rule: what is right. fix: what to do when it is not. symptom: what a user sees when the fault is live.
    """

    code: str
    title: str
    reads: tuple[str, ...]
    also: tuple[str, ...]
    rule: str
    fix: str
    symptom: str
    function: CheckFunction

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Run the check; fill in code, rule and fix of what it yields."""
        for finding in self.function(facts):
            yield dataclasses.replace(finding, code=self.code, rule=self.rule, fix=finding.fix or self.fix)


_CHECKS: dict[str, Check] = {}


def check(
    *,
    code: str,
    title: str,
    reads: tuple[str, ...],
    rule: str,
    fix: str,
    also: tuple[str, ...] = (),
    symptom: str = "",
) -> Callable[[CheckFunction], CheckFunction]:
    """Register the decorated function. A code used twice or a fact outside the vocabulary is a `UsageError`."""

    def register(function: CheckFunction) -> CheckFunction:
        if code in _CHECKS and _CHECKS[code].function.__qualname__ != function.__qualname__:
            raise UsageError(f"check code {code!r} is taken", rule="codes are unique", fix="choose another code")
        for name in (*(one for names in reads for one in names.split("|")), *also):
            if name not in VOCABULARY:
                raise UsageError(f"check {code!r} reads unknown fact {name!r}", rule=nearest(name, VOCABULARY))
        _CHECKS[code] = Check(
            code=code, title=title, reads=reads, also=also, rule=rule, fix=fix, symptom=symptom, function=function
        )
        return function

    return register


def all_checks() -> tuple[Check, ...]:
    """Every check, sorted by code. Imports the check modules on first use."""
    package = importlib.import_module("eagle3lab.doctor.checks")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return tuple(_CHECKS[code] for code in sorted(_CHECKS))


def find_check(code: str) -> Check:
    """The check with this code, or a `UsageError` with the nearest."""
    known = {item.code: item for item in all_checks()}
    if code.lower() not in known:
        raise UsageError(
            f"no check has the code {code!r}", rule=nearest(code.lower(), known), fix="eagle3lab doctor --explain CODE"
        )
    return known[code.lower()]


def run_checks(facts: Facts) -> tuple[list[Finding], int]:
    """Run every check whose facts are there. Returns the findings and the number of checks that ran."""
    findings: list[Finding] = []
    not_run: dict[tuple[str, ...], list[Check]] = {}
    ran = 0
    for item in all_checks():
        absent = tuple(names for names in item.reads if not any(facts.has(name) for name in names.split("|")))
        if not absent:
            ran += 1
            findings += _guarded(item, facts)
        elif item.reads[0] not in absent:
            not_run.setdefault(absent, []).append(item)
    if not_run:
        findings.append(_not_run(not_run))
    return findings, ran


def _not_run(not_run: dict[tuple[str, ...], list[Check]]) -> Finding:
    """One line for all checks whose artefact was given and whose other facts were not."""
    count = sum(len(checks) for checks in not_run.values())
    reasons = {
        " and ".join(absent).replace("|", " or "): [c.code for c in checks] for absent, checks in not_run.items()
    }
    why = "; ".join(f"{', '.join(codes)}: {wanted} not given" for wanted, codes in sorted(reasons.items()))
    finding = could_not(f"{count} rule{'' if count == 1 else 's'}", f"facts are missing ({why})")
    return dataclasses.replace(
        finding, code="not-checked", rule="what was given is checked, or the report says why not", evidence=reasons
    )


def _guarded(item: Check, facts: Facts) -> list[Finding]:
    """The check's findings; a check that breaks on what it was given says so instead of ending the visit."""
    found: list[Finding] = []
    try:
        found.extend(item.findings(facts))
    except Exception as problem:  # the visit goes on, and the report tells which check broke and on what
        found.append(
            dataclasses.replace(
                warning(
                    item.code,
                    f"could not check {item.title} because of {type(problem).__name__}: {str(problem)[:200]}",
                    check=item.code,
                ),
                code="check-broken",
                rule="a check never fails on its input",
                fix="report this line with the input",
            )
        )
    return found
