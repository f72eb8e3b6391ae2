"""`--run DIR`: a run directory of this lab, finished or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError
from eagle3lab.core.safetensors_header import HeaderError, map_tensor, read_header, widen
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, inside, list_folder, read_json
from eagle3lab.doctor.readers.checkpoint import read_draft
from eagle3lab.doctor.readers.notebooks import add_folder
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import items, mapping

RUN_FILES = ("manifest.json", "status.json")
"""What every run directory holds from its start."""
RUN_SCHEMA, STATUS_SCHEMA = "eagle3lab-run/1", "eagle3lab-status/1"
"""As `eagle3lab.runs.schemas` writes it; a test holds the two together."""
WRITTEN = {"train": ("training.json", "metrics.json", "drafter"), "accept": ("metrics.json",)}
"""What a step leaves behind when it ends ok."""
_STEP = re.compile(r"step-(\d{1,15})")
FC_ROWS = 512
"""Rows of a snapshot of fc that are looked at: enough for its standard deviation and its change."""


def read(value: str, facts: Facts) -> None:
    """Add `status`, `acceptance`, `curve`, `held_out`, `fc_trajectory`, the executed notebooks, the drafter, and what
    the newest checkpoint of an unfinished training holds (`run`)."""
    folder = existing(value, "--run")
    if not folder.is_dir():
        raise UsageError(f"--run {folder} is no folder", rule="a run directory", fix="eagle3lab runs list")
    manifest, status = (_json(folder / name, folder, facts) for name in RUN_FILES)
    # Captured states have a manifest.json too.
    if not (folder / "status.json").exists() and mapping(manifest).get("schema") != RUN_SCHEMA:
        raise UsageError(
            f"{folder} is no run directory",
            rule=f"it holds {' and '.join(RUN_FILES)}",
            fix="eagle3lab runs list; a drafter's folder is given with --draft, captured states with --states",
        )
    _same_schema(manifest, folder / "manifest.json", RUN_SCHEMA, facts)
    _same_schema(status, folder / "status.json", STATUS_SCHEMA, facts)
    _expected(folder, mapping(status), facts)
    if status is None:
        facts.could_not("how the run ended", f"{folder} has no readable status.json", fix="eagle3lab runs list")
    else:
        facts.put("status", status, str(folder / "status.json"))
    metrics = _json(folder / "metrics.json", folder, facts)
    if metrics is not None:
        asked, measured = mapping(manifest).get("preset"), metrics.get("preset")
        if isinstance(asked, str) and isinstance(measured, str) and asked != measured:
            why = f"its numbers are of preset {measured[:40]!r}, the run is of {asked[:40]!r}"
            facts.broken(str(folder / "metrics.json"), why, fix="eagle3lab run --preset " + asked[:40])
        _acceptance(metrics, folder / "metrics.json", facts)
    training = _json(folder / "training.json", folder, facts) or {}
    for name, key in (("curve", "history"), ("held_out", "held_out")):
        if isinstance(training.get(key), list):
            facts.put(name, training[key], str(folder / "training.json"))
    _learning_rates(training, folder / "training.json", facts)
    drafter = folder / "drafter"
    if drafter.is_dir() and inside(drafter, folder.resolve()):
        _trajectory(drafter / "fc_snapshots", facts)
        _newest_checkpoint(drafter / "checkpoints", folder, facts)
        if not facts.has("draft_headers") and (drafter / "config.json").is_file():
            read_draft(str(drafter), facts)
    notebooks = folder / "notebooks"
    if notebooks.is_dir() and inside(notebooks, folder.resolve()):
        add_folder(notebooks, facts)
        _drop_unfinished(facts, mapping(status))


def _same_schema(value: dict[str, Any] | None, path: Path, schema: str, facts: Facts) -> None:
    """A file of another release is told: the lab's own commands refuse it."""
    said = mapping(value).get("schema")
    if said is not None and said != schema:
        fix = "use the release of eagle3lab that wrote it"
        facts.broken(str(path), f"its schema is {str(said)[:60]!r}, needed {schema!r}", fix=fix, actual=str(said)[:60])


def _expected(folder: Path, status: Mapping[str, Any], facts: Facts) -> None:
    """Files that a step which ended ok has written."""
    ok = {name for name, step in mapping(status.get("steps")).items() if mapping(step).get("status") == "ok"}
    missing = [name for step, names in WRITTEN.items() if step in ok for name in names if not (folder / name).exists()]
    drafter = folder / "drafter"
    if "train" in ok and drafter.is_dir() and not any(drafter.glob("*.safetensors")):
        missing.append("drafter/model.safetensors")
    if (folder / "status.json").exists() and not (folder / "manifest.json").exists():
        missing.append("manifest.json")
    for name in dict.fromkeys(missing):
        why = "is not there, though the step that writes it ended ok"
        facts.broken(str(folder / name), why, fix="copy the run whole, or run it again: eagle3lab run")


def _learning_rates(training: Mapping[str, Any], path: Path, facts: Facts) -> None:
    """`log_lr` of the history's rows, in the order in which they were written."""
    rows = [mapping(row) for row in items(training.get("history"))]
    rates = [[row["step"], row["learning_rate"]] for row in rows if {"step", "learning_rate"} <= row.keys()]
    if rates:
        facts.put("log_lr", rates, f"{path}: history")


def _acceptance(metrics: Mapping[str, Any], path: Path, facts: Facts) -> None:
    measured = {name: found for name, found in mapping(metrics.get("sets")).items() if "counts" in mapping(found)}
    if measured or "counts" in metrics:
        top = {key: metrics[key] for key in ("accept_length", "accept_rate", "counts") if key in metrics}
        if str(metrics.get("headline")) in measured or metrics.get("headline") not in mapping(metrics.get("sets")):
            top |= {"headline": metrics.get("headline")}
        facts.put("acceptance", {**top, "sets": measured} if measured else metrics, str(path))
    else:
        facts.could_not("acceptance", f"{path} has neither `counts` nor `sets` with counts")


def _drop_unfinished(facts: Facts, status: Mapping[str, Any]) -> None:
    """While a step is running, a notebook without a status is still being executed: its empty cells mean nothing."""
    running = [name for name, step in mapping(status.get("steps")).items() if mapping(step).get("status") == "running"]
    found = facts.mapping("notebooks")
    for name in list(found):
        if running and name.removesuffix(".ipynb") not in mapping(status.get("notebooks")):
            del found[name]
            facts.could_not(name, f"step {str(running[0])[:40]} is still running")


def _json(path: Path, root: Path, facts: Facts) -> dict[str, Any] | None:
    if not path.is_file() or not inside(path, root.resolve()):
        if path.exists() or path.is_symlink():
            facts.could_not(path.name, f"{path} is no file inside the run")
        return None
    try:
        parsed = read_json(path)
    except ReadError as error:
        facts.broken(str(path), error.what.removeprefix(f"{path} "))
        return None
    if parsed.not_finite:
        facts.broken(str(path), f"NaN or infinity at {', '.join(parsed.not_finite[:5])}, which is not JSON")
    if not isinstance(parsed.value, dict):
        facts.broken(str(path), f"holds a JSON {type(parsed.value).__name__}, not an object")
        return None
    return parsed.value


def _newest_checkpoint(folder: Path, root: Path, facts: Facts) -> None:
    if not folder.is_dir() or not inside(folder, root.resolve()):
        return
    try:
        steps = [path for path in list_folder(folder)[0] if path.name.startswith("step-")]
    except ReadError as error:
        facts.could_not("the checkpoints", error.what)
        return
    if steps and (state := _json(max(steps) / "state.json", root, facts)) is not None:
        numbers = [int(found[1]) for path in steps if (found := _STEP.fullmatch(path.name))]
        held = {**mapping(state.get("run")), "checkpoint_steps": numbers}
        facts.put("run", held, str(max(steps) / "state.json"))


def _trajectory(folder: Path, facts: Facts) -> None:
    """Standard deviation of fc by snapshot, and how far it moved from the first one (as a share of its size)."""
    if not folder.is_dir():
        return
    try:
        files = [path for path in list_folder(folder)[0] if path.suffix == ".safetensors"]
        rows = [(path.stem, _rows(path)) for path in files[:50]]
    except (ReadError, HeaderError, OSError) as error:
        facts.could_not("the snapshots of fc", str(getattr(error, "what", error))[:200])
        return
    first = rows[0][1] if rows else None
    found: list[Any] = []
    for name, values in rows:
        moved = None
        if first is not None and values.shape == first.shape:
            size = float(np.linalg.norm(first))
            moved = float(np.linalg.norm(values - first)) / size if size else None
        found.append(
            {"step": name.removeprefix("step-").lstrip("0") or "0", "std": float(values.std()), "moved": moved}
        )
    if found:
        facts.put("fc_trajectory", found, str(folder))


def _rows(path: Path) -> np.ndarray:
    header = read_header(path)
    entry = header.tensors.get("fc.weight")
    if entry is None or len(entry.shape) != 2:
        raise HeaderError("structure", f"{path} has no fc.weight of two dimensions")
    values = map_tensor(header, "fc.weight")
    stride = max(1, entry.shape[0] // FC_ROWS)
    return widen(entry, values[::stride]).astype(np.float64)
