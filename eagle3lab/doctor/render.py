"""The report as a table and as HTML (JSON is `Report.as_json`). Everything that came from an artefact is escaped."""

from __future__ import annotations

import html
import io
import shutil
import sys
from typing import Any

from eagle3lab.doctor.findings import Finding, Report
from eagle3lab.doctor.registry import Check

_STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}
_COLOUR = {"error": "#b00020", "warning": "#8a6100", "info": "#555555"}


def one_line(text: Any, limit: int = 400) -> str:
    """`text` on one line: control characters (a name may hold an escape sequence) become spaces, long text is cut."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def summary_line(report: Report) -> str:
    """`2 errors, 1 warning, 3 infos; 41 checks run`."""
    counts = [f"{report.count(s)} {s}{'' if report.count(s) == 1 else 's'}" for s in ("error", "warning", "info")]
    return f"{', '.join(counts)}; {report.checks_run} checks run"


def to_text(report: Report) -> str:
    """Errors and warnings as a table with their fixes, remarks as lines below, then the summary.

    Coloured when stdout is a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max(shutil.get_terminal_size((160, 40)).columns, 60)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False)
    faults = [finding for finding in report.findings if finding.severity != "info"]
    if faults:
        table = Table()
        for heading in ("", "code", "finding", "fix"):
            table.add_column(heading, overflow="fold")
        for finding in faults:
            table.add_row(
                Text(finding.severity, style=_STYLE[finding.severity]),
                Text(finding.code),
                Text(headline(finding)),
                Text(one_line(finding.fix)),
            )
        console.print(table)
    for finding in report.findings:
        if finding.severity == "info":
            console.print(Text(f"info  {finding.code}: {headline(finding)}", style=_STYLE["info"]))
    console.print(Text(summary_line(report)))
    if faults:
        console.print(Text("more about a finding: eagle3lab doctor --explain CODE"))
    return out.getvalue().rstrip()


def headline(finding: Finding) -> str:
    """The finding's one line: its message, with the subject in front when the message does not name it."""
    message, subject = one_line(finding.message), one_line(finding.subject, 80)
    return message if not subject or subject in message else f"{subject}: {message}"


def to_html(report: Report) -> str:
    """The report as an HTML fragment for a notebook; every cell is escaped."""
    rows = "".join(
        f'<tr><td style="color:{_COLOUR[f.severity]}">{f.severity}</td><td><code>{html.escape(f.code)}</code></td>'
        f"<td>{html.escape(headline(f))}</td><td>{html.escape(one_line(f.fix))}</td></tr>"
        for f in report.findings
    )
    head = "<tr><th></th><th>code</th><th>finding</th><th>fix</th></tr>"
    return f"<p>{html.escape(summary_line(report))}</p><table>{head}{rows}</table>"


def explain(check: Check) -> str:
    """All that the catalogue knows of one check, as plain text."""
    lines = [
        f"{check.code}: {check.title}",
        f"rule: {check.rule}",
        f"fix: {check.fix}",
        f"reads: {', '.join(check.reads)}" + (f" (also {', '.join(check.also)})" if check.also else ""),
    ]
    if check.symptom:
        lines.insert(1, f"symptom: {check.symptom}")
    return "\n".join(lines)
