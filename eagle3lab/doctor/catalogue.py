"""The page of all checks, written from their declarations: `python -m eagle3lab.doctor.catalogue > docs/checks.md`."""

from __future__ import annotations

from collections.abc import Iterable

from eagle3lab.doctor.registry import Check, all_checks

_HEAD = """# Checks of the doctor

Written by `python -m eagle3lab.doctor.catalogue > docs/checks.md`; do not edit by hand. `doctor --explain CODE`
prints one entry. A check runs when the facts it reads are there; what was given and could not be checked is said in the
report under `not-checked`, and a draft or target that the launch line names and that lies on this disk is read too
(`also-read`). Besides these, `artefact-broken` tells of a file that cannot be read, `fact-type` of a fact
of the wrong type, and `check-broken` of a check that failed on its input, which is a bug of this program.
"""


def page(checks: Iterable[Check]) -> str:
    """The whole page as Markdown, grouped by the first word of the codes."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.code.partition("-")[0], []).append(check)
    parts = [_HEAD]
    for group, members in groups.items():
        parts.append(f"## {group}\n")
        parts += [entry(check) for check in members]
    return "\n".join(parts).rstrip() + "\n"


def entry(check: Check) -> str:
    """One check as Markdown."""
    reads = ", ".join(f"`{name}`" for name in check.reads).replace("|", "` or `")
    also = ", ".join(f"`{name}`" for name in check.also if name not in check.reads)
    lines = [
        f"### {check.code}\n",
        f"{check.title[0].upper()}{check.title[1:]}.\n",
        f"- Rule: {check.rule}.",
        f"- Fix: {check.fix}.",
        *([f"- Symptom: {check.symptom}."] if check.symptom else []),
        f"- Reads: {reads}{f'; also {also}' if also else ''}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(all_checks()), end="")
