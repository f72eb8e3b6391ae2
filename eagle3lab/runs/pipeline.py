"""The notebooks of a run, in order, through papermill, into the run directory.

    run directory --parameters--> 00 .. 05 --executed notebooks, status.json--> report

A notebook that is ok is not run again, so `--resume` continues where a run was stopped. The first one that is not ok
stops the chain, with the failing cell named.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eagle3lab.core.errors as errors
from eagle3lab.core.errors import DiskError, RunError
from eagle3lab.core.files import read_json, require_space
from eagle3lab.core.paths import notebooks_folder
from eagle3lab.runs.directory import Run
from eagle3lab.runs.judge import Verdict, judge
from eagle3lab.runs.parameters import NOTEBOOKS, STANDALONE, validate
from eagle3lab.runs.resolve import BATCH_VARIABLE
from eagle3lab.runs.schemas import NotebookStatus

NOTEBOOK_BYTES = 64 * 1024**2
"""Space asked for before a chain starts: executed notebooks, figures and the report. Big inputs ask for their own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The notebook that ended a chain, and the exit code that follows."""

    notebook: str
    status: NotebookStatus
    exit_code: int

    def message(self, run: Run) -> str:
        """One line: notebook, cell, error, next command."""
        status = self.status
        where = f"{self.notebook}, code cell {status.failing_cell} of {status.cells}"
        again = f"next: eagle3lab run --resume {run.path}"
        if status.status == "dead":
            return f"{where}: the kernel died ({status.error or 'killed, perhaps out of memory'}); {again}"
        return f"{where} ({status.source}): {status.error}; {again}"


def run_notebooks(
    run: Run,
    *,
    names: tuple[str, ...] | None = None,
    draft: str = "",
    deadline: float | None = None,
    source: Path | None = None,
    note: Callable[[str], None] = print,
    on_text: Callable[[str], None] = lambda _: None,
) -> Failure | None:
    """Execute the notebooks of `run` that are not ok yet.

    Args:
        names: which ones, in this order; None = all.
        draft: checkpoint for the notebooks that take one; "" = the run's own.
        deadline: `time.monotonic()` at which the chain stops cleanly; the run is then marked truncated.
        source: folder of the source notebooks; None = the checkout's.
        note: receives a line before and after each notebook. on_text: what the cells print, as it comes.

    Returns:
        None when every notebook is ok or the deadline ended the chain; else the failure.

    Raises:
        KeyboardInterrupt: Ctrl-C; the run stays resumable.
        UsageError, RunError, DiskError: the chain could not start.
    """
    folder = source or notebooks_folder()
    chosen = tuple(NOTEBOOKS) if names is None else names
    jobs = [(name, _parameters(run, name, draft)) for name in chosen]
    for name, _ in jobs:
        if not (folder / f"{name}.ipynb").is_file():
            raise RunError(f"no notebook {name}.ipynb in {folder}", rule="run from a checkout of the repository")
    require_space(run.path, NOTEBOOK_BYTES, f"run {run.path.name}")
    with run.working():
        return _chain(run, folder, jobs, deadline, note, on_text)


def _chain(
    run: Run,
    folder: Path,
    jobs: list[tuple[str, dict[str, Any]]],
    deadline: float | None,
    note: Callable[[str], None],
    on_text: Callable[[str], None],
) -> Failure | None:
    run.set_truncated(False)
    for number, (name, parameters) in enumerate(jobs, 1):
        known = run.status.notebooks.get(name)
        label = f"[{number}/{len(jobs)}] {name}"
        if known and known.status == "ok" and (run.notebooks / f"{name}.ipynb").is_file():
            note(f"{label}: ok already")
            continue
        if deadline is not None and time.monotonic() >= deadline:
            _truncate(run, f"{label}: not begun", note)
            return None
        note(f"{label} ...")
        status = _execute(run, folder / f"{name}.ipynb", parameters, deadline, on_text)
        run.set_notebook(name, status)
        if status.status == "ok":
            note(f"{label}: ok, {status.seconds:.0f} s")
            continue
        if status.interrupted:
            raise KeyboardInterrupt
        if status.status == "timeout":
            _truncate(run, f"{label}: stopped in code cell {status.failing_cell} of {status.cells}", note)
            return None
        return Failure(name, status, _exit_code(status))
    return None


def _parameters(run: Run, name: str, draft: str) -> dict[str, Any]:
    manifest = run.manifest
    values = {"profile": manifest.profile, "preset": manifest.preset, "run": str(run.path), "seed": manifest.seed}
    if "draft" in (NOTEBOOKS | STANDALONE)[name].model_fields:
        values["draft"] = draft
    return validate(name, values)


def _execute(
    run: Run, source: Path, parameters: dict[str, Any], deadline: float | None, on_text: Callable[[str], None]
) -> NotebookStatus:
    # papermill costs a second to import: only a command that really executes notebooks pays for it.
    from eagle3lab.runs.engine import Control, execute

    destination = run.notebooks / source.name
    destination.unlink(missing_ok=True)
    environment = {BATCH_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    # The kernel works in another folder: places that the environment names relative to this one must stay theirs.
    places = {name: os.environ.get(name) for name in ("EAGLE3LAB_CACHE", "EAGLE3LAB_RUNS")}
    environment |= {name: str(Path(place).absolute()) for name, place in places.items() if place}
    control, begun = Control(), time.monotonic()
    try:
        with control.listening(deadline):
            ended = execute(
                source,
                destination,
                parameters,
                control=control,
                environment=environment,
                folder=source.parent,
                on_text=on_text,
            )
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskError(f"no space left on the disk of {run.path}", fix="free some, then --resume") from error
        raise
    verdict = judge(read_json(destination)) if destination.is_file() else Verdict(0, 0, 1, "", None, None)
    return _status(verdict, ended, control.reason, time.monotonic() - begun)


def _status(verdict: Verdict, ended: str | None, stop: str | None, seconds: float) -> NotebookStatus:
    """Put together what the cells say and what the runner met; the cells decide whether it is ok."""
    status = NotebookStatus(
        status="ok",
        cells=verdict.cells,
        ran=verdict.ran,
        seconds=round(seconds, 3),
        failing_cell=verdict.failing_cell,
        source=verdict.source,
        error=f"{verdict.name}: {verdict.message}" if verdict.name else None,
    )
    if verdict.ok and ended is None:
        return status
    if stop is not None:
        status.status, status.interrupted = ("timeout", False) if stop == "deadline" else ("error", True)
        status.error = status.error or stop
    elif ended == "died" or verdict.never_ran:
        status.status = "dead"
        status.failing_cell = verdict.failing_cell or verdict.cells
    else:
        status.status = "error"
    return status


def _exit_code(status: NotebookStatus) -> int:
    """2 when the cell met an input that cannot be used (one of our own errors), else 1."""
    name = (status.error or "").partition(":")[0]
    kind = getattr(errors, name, None)
    return 2 if isinstance(kind, type) and issubclass(kind, errors.Eagle3LabError) else 1


def _truncate(run: Run, what: str, note: Callable[[str], None]) -> None:
    run.set_truncated(True)
    note(f"{what}: --max-minutes is over, the run is truncated; next: eagle3lab run --resume {run.path}")


def timing(run: Run) -> dict[str, Any]:
    """Seconds of each notebook and the peak memory of the largest kernel so far, for `metrics.json`."""
    seconds = {name: one.seconds for name, one in run.status.notebooks.items()}
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    before = run.metrics().get("timing", {}).get("peak_memory_bytes", 0)
    return {
        "notebook_seconds": seconds,
        "total_seconds": round(sum(seconds.values()), 3),
        "peak_memory_bytes": max(peak, before),
    }
