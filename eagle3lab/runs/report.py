"""`report.html`: one self-contained file. No remote asset, no script; everything from data is escaped by the template.

Accept length comes first, then what the doctor found, the figures, parameters, environment, how to reproduce.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from eagle3lab import __version__
from eagle3lab.core.errors import RunError
from eagle3lab.core.files import read_json, write_text
from eagle3lab.doctor.findings import Report as DoctorReport
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import OVERRIDABLE
from eagle3lab.runs.summary import MeasuredSet, measured_sets, same_text, speed_line

FIGURE_BYTES = 3_300_000
"""PNG bytes that are embedded; as base64 with the text around them the file stays under 5 MB."""

YES_NO: dict[Any, str] = {True: "yes", False: "no"}


def write_report(run: Run, doctor: DoctorReport | None) -> Path:
    """Write `report.html` into the run directory, whole or not at all, and return its path.

    Args:
        doctor: findings about the run's drafter; None = it was not examined, and the report says so.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("eagle3lab.runs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    path = run.path / "report.html"
    write_text(path, environment.get_template("report.html").render(_content(run, doctor)))
    return path


def _content(run: Run, doctor: DoctorReport | None) -> dict[str, Any]:
    manifest, status, metrics = run.manifest, run.status, run.metrics()
    sets = measured_sets(metrics)
    figures, left_out = _figures(run)
    return {
        "name": run.path.name,
        "manifest": manifest,
        "version": __version__,
        "status": status,
        "headline": next((one for one in sets if one.name == metrics.get("headline")), None),
        "meaningless": metrics.get("meaningless"),
        "same_text": same_text(metrics),
        "other_drafter": None if metrics.get("drafter", "drafter") == "drafter" else metrics["drafter"],
        "sets": sets,
        "controls": _controls(sets),
        "speed": speed_line(metrics),
        "timing": metrics.get("timing", {}),
        "figures": figures,
        "left_out": left_out,
        "doctor": None if doctor is None else doctor.as_json(),
        "parameters": _parameters(run),
        "environment": _environment(run),
    }


def _controls(sets: list[MeasuredSet]) -> list[str]:
    """Names of the controls of all sets, in the order met."""
    return list(dict.fromkeys(name for one in sets for name in one.controls))


def _figures(run: Run) -> tuple[list[dict[str, str]], list[str]]:
    """Figures as data URIs with title and alternative text, and the names of those that did not fit."""
    shown, left_out, used = [], [], 0
    # Acceptance first: it is what the report is about, and what may not fall out when there are too many.
    order = sorted(run.figures.glob("*.json"), key=lambda path: (not path.name.startswith("05_"), path.name))
    for facts in order:
        image = facts.with_suffix(".png")
        if not image.is_file():
            continue
        data = image.read_bytes()
        if used + len(data) > FIGURE_BYTES:
            left_out.append(image.name)
            continue
        used += len(data)
        words = read_json(facts)
        if not isinstance(words, dict) or not {"title", "alt"} <= words.keys():
            raise RunError(f"{facts} has no title or no alt", rule="a figure has both", fix=f"delete {facts}")
        uri = "data:image/png;base64," + base64.b64encode(data).decode()
        shown.append({"name": facts.stem, "uri": uri, "title": words["title"], "alt": words["alt"]})
    return shown, left_out


def _parameters(run: Run) -> list[tuple[str, Any]]:
    manifest, preset = run.manifest, run.preset
    rows: list[tuple[str, Any]] = [("profile", manifest.profile), ("preset", manifest.preset), ("seed", manifest.seed)]
    for name in OVERRIDABLE:
        value = getattr(preset, name)
        changed = " (of the profile)" if name in manifest.amounts else ""
        changed = " (changed for this run)" if name in manifest.overrides else changed
        rows.append((name, f"{'all' if value is None else value}{changed}"))
    return rows


def _environment(run: Run) -> list[tuple[str, Any]]:
    manifest = run.manifest
    machine = manifest.machine
    memory = machine.get("memory_bytes")
    rows: list[tuple[str, Any]] = [
        ("created", manifest.created),
        ("machine", f"{machine.get('processor') or 'unknown processor'}, {_cores(machine.get('cores'))}"),
        ("memory", f"{memory / 1e9:.1f} GB" if isinstance(memory, int) else "unknown"),
        ("GPUs", ", ".join(machine["gpus"]) or "none" if isinstance(machine.get("gpus"), list) else "unknown"),
        ("system", machine.get("system", "unknown")),
        ("git commit", manifest.git.get("commit", "unknown")),
        ("uncommitted changes", YES_NO.get(manifest.git.get("dirty"), "unknown")),
        ("code sha256", manifest.code_sha256),
    ]
    rows += [(f"{name} (input)", value) for name, value in manifest.inputs.items()]
    return rows + list(manifest.versions.items())


def _cores(count: int | None) -> str:
    return "unknown number of cores" if count is None else f"{count} core{'' if count == 1 else 's'} usable"
