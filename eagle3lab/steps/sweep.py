"""`eagle3lab sweep FILE`: many runs, one a set of parameters, as processes here or on a cluster.

    sweep.yaml --jobs--> runs/<utc>-... (one each) --rows--> runs/sweep-<name>-<6 hex>/sweep.json

The runs are the truth: a job whose run is finished is never run again, an unfinished one goes on where it stopped, and
a failed one is tried again by the next call. A job that fails, or whose process dies, does not end the others.
"""

from __future__ import annotations

import contextlib
import datetime
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import Eagle3LabError, RunError, UsageError
from eagle3lab.core.files import folder_lock, read_json, write_json, write_text
from eagle3lab.core.hashes import sha256_bytes
from eagle3lab.core.paths import runs_folder
from eagle3lab.runs.directory import Run
from eagle3lab.runs.summary import interval, number
from eagle3lab.runs.sweep import Job, Sweep, read_sweep
from eagle3lab.runs.sweep_runs import RECORD, Row, finished_run, is_finished, runs_of, summary
from eagle3lab.steps.output import table
from eagle3lab.steps.sweep_job import result_path, write_job
from eagle3lab.steps.sweep_launch import Launcher, LocalLauncher, SubmititLauncher, check_options

SCHEMA = "eagle3lab-sweep/1"


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What a sweep did.

    Attributes:
        rows: one a job. record: path of `sweep.json`; None after --dry-run.
        repeated: jobs of the file that equal another one.
    """

    rows: list[Row]
    record: Path | None
    repeated: int = 0

    @property
    def exit_code(self) -> int:
        """0 when every job is ok (or nothing was to be done but look), 1 when one failed."""
        return 0 if self.record is None or all(row.state == "ok" for row in self.rows) else 1

    def as_json(self) -> dict[str, Any]:
        """`sweep`, `jobs`, `repeated`, `summary`."""
        return {
            "sweep": None if self.record is None else str(self.record),
            "jobs": [row.as_json() for row in self.rows],
            "repeated": self.repeated,
            "summary": summary(self.rows),
        }

    def as_text(self) -> str:
        """A table of the jobs, then counts, failures and captures."""
        head = ("job", "parameters", "state", "accept length", "training s", "states", "run")
        lines = [table(head, [_cells(row) for row in self.rows])]
        lines += [f"job {row.number}: {row.error}" for row in self.rows if row.error and row.state != "ok"]
        counts = summary(self.rows)
        captures = counts["captures"]
        if self.repeated:
            lines.append(f"{self.repeated} more jobs of the file repeat parameters of one above: each ran once")
        if self.record is None:
            lines.append(f"{counts['jobs']} jobs, {counts['reused']} of them finished already")
            return "\n".join(lines)
        lines += [
            f"{counts['jobs']} jobs: {counts['ok']} ok ({counts['reused']} of them had been run before), "
            f"{counts['failed']} failed, {counts['interrupted'] + counts['not_begun']} not done",
            f"captures: {captures['done']} done, {captures['cached']} found in the cache, "
            f"{captures['sets_of_states']} different sets of states",
            f"record: {self.record}",
            f"compare: papermill notebooks/07_compare_runs.ipynb compared.ipynb -p runs {self.record.parent}",
        ]
        return "\n".join(lines)


def _cells(row: Row) -> tuple[object, ...]:
    label = " ".join(f"{name}={value}" for name, value in row.parameters.items()) or "-"
    state = f"{row.state}, run before" if row.reused else row.state
    if row.reused and row.other_code:
        state += " by other code"
    length = "-" if row.accept_length is None else number(row.accept_length)
    if row.accept_length_interval:
        length += f" {interval((row.accept_length_interval[0], row.accept_length_interval[1]))}"
    seconds = "-" if row.training_seconds is None else f"{row.training_seconds:.0f}"
    states = "-" if row.states is None else f"{row.states[:6]} {row.capture or ''}".strip()
    return row.number, label, state, length, seconds, states, "-" if row.run is None else Path(row.run).name


def sweep(
    path: Path,
    *,
    workers: int | None = None,
    dry_run: bool = False,
    any_code: bool = False,
    source: Path | None = None,
    note: Callable[[str], None] = print,
) -> SweepOutcome:
    """Run every job of a sweep file that has no finished run yet.

    Args:
        workers: jobs at the same time, instead of the file's.
        dry_run: only say which jobs there are and which are finished.
        any_code: take finished runs of the same parameters that other code or versions made.
        source: folder of the notebooks; None = the checkout's.

    Raises:
        UsageError, ProfileError, ReadError: the file cannot be used; nothing was run.
        KeyboardInterrupt: Ctrl-C or SIGTERM; every job is resumable, and the same command goes on.
    """
    asked = read_sweep(path)
    at_once = asked.file.workers if workers is None else workers
    if at_once < 1:
        raise UsageError(f"--workers {at_once}", rule="1 or more")
    folder = runs_folder().absolute() / f"sweep-{_plain(asked.name)}-{sha256_bytes(asked.text.encode())[:6]}"
    own = _own_runs(folder / RECORD)
    rows = [Row(job.number, job.parameters, job.sha256) for job in asked.jobs]
    for row, job in zip(rows, asked.jobs, strict=True):
        _take_finished(row, job, asked, own=own.get(job.sha256), any_code=any_code, note=note)
    if others := [row for row in rows if row.other_code]:
        note(f"finished runs by other code than this: {len(others)}; to run this sweep anew, rename its file")
    if dry_run:
        if asked.file.executor == "submitit" and not check_options(asked.file.submitit):
            note("submitit is not installed here: the names of its options were not checked")
        return SweepOutcome(rows, None, asked.repeated)
    launcher = _launcher(asked, at_once, folder)
    record = _Record(folder, asked, rows)
    todo = [(row, job) for row, job in zip(rows, asked.jobs, strict=True) if row.state != "ok"]
    note(f"sweep {asked.name}: {len(rows)} jobs, {len(rows) - len(todo)} finished already, {at_once} at the same time")

    def one(row: Row, job: Job) -> None:
        if stopping.is_set():
            return
        file = folder / "jobs" / f"{job.number:04d}-{job.sha256[:6]}.json"
        write_job(
            file,
            job,
            notebooks=asked.notebooks,
            source=source,
            max_minutes=asked.file.max_minutes,
            own=own.get(job.sha256),
            any_code=any_code,
        )
        note(f"[{job.number}/{len(rows)}] {job.label} ...")
        with record.changing():
            row.state, row.error = "running", None
        try:
            problem = launcher.run(file)
        except Exception as error:  # a cluster that takes no job now may take the next one
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with record.changing():
            _finish(row, file, problem, stopped=stopping.is_set())
        note(f"[{job.number}/{len(rows)}] {job.label}: {_told(row)}")

    # A second call with the same file waits for the first, and then finds its runs.
    with folder_lock(folder, note=note), _listening(launcher) as stopping, ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(one, row, job) for row, job in todo]:
            done.result()
    with record.changing():
        pass
    if stopping.is_set():
        note(f"interrupted; next: eagle3lab sweep {path}")
        raise KeyboardInterrupt
    return SweepOutcome(rows, record.path, asked.repeated)


def _own_runs(record: Path) -> dict[str, str]:
    """Hash of a job's parameters -> the run that an earlier call of the same sweep began for it."""
    if not record.is_file():
        return {}
    value = read_json(record)
    if value.get("schema") != SCHEMA:
        raise RunError(f"{record} has schema {value.get('schema')!r}", rule=SCHEMA, fix=f"remove {record.parent}")
    return {job["sha256"]: job["run"] for job in value["jobs"] if job["run"]}


def _take_finished(
    row: Row, job: Job, asked: Sweep, *, own: str | None, any_code: bool, note: Callable[[str], None]
) -> None:
    run = finished_run(job, asked.notebooks, own=own, any_code=any_code)
    if run is not None:
        row.read(run)
        row.state, row.reused = "ok", True
        return
    row.run = own
    others = (run for run in runs_of(job, any_code=True) if is_finished(run, asked.notebooks))
    if (other := next(others, None)) is not None:
        note(f"job {job.number}: {other.path.name} has its parameters but other code made it; --any-code would take it")


def _finish(row: Row, file: Path, problem: str | None, *, stopped: bool) -> None:
    """Put together what the job answered and what its worker's end tells."""
    result = result_path(file)
    answer: dict[str, Any] = {"state": "dead", "run": None, "reused": False, "error": None}
    if result.is_file():
        answer = read_json(result)
    row.state, row.reused, row.error = answer["state"], answer["reused"], answer["error"]
    row.seconds = answer.get("seconds")
    if answer["run"] is not None:
        try:
            row.read(Run.open(answer["run"]))
        except Eagle3LabError as error:  # somebody removed or damaged it meanwhile
            row.state, row.error = "error", str(error)
    if row.state in {"running", "dead"} and row.error is None:
        # No final answer: the worker itself is gone (out of memory, killed, or stopped before it had begun).
        row.state = "interrupted" if stopped else "dead"
        row.error = problem or "its process ended without an answer"


def _told(row: Row) -> str:
    if row.state != "ok":
        return f"{row.state}: {row.error}"
    took = "run before" if row.reused else f"{row.seconds or 0:.0f} s"
    states = {"done": ", states captured", "cached": ", states from the cache", None: ""}[row.capture]
    length = "" if row.accept_length is None else f", accept length {number(row.accept_length)}"
    return f"ok, {took}{states}{length}"


def _launcher(asked: Sweep, workers: int, folder: Path) -> Launcher:
    if asked.file.executor == "submitit":
        stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S.%fZ}"
        return SubmititLauncher(folder / "submitit" / stamp, asked.file.submitit)
    return LocalLauncher(workers)


@contextlib.contextmanager
def _listening(launcher: Launcher) -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; they also stop what the launcher runs."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        # A handler runs in the main thread between two of its instructions: a lock held there would never be freed.
        threading.Thread(target=launcher.stop, daemon=True).start()

    main = threading.current_thread() is threading.main_thread()
    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield stopping
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Record:
    """`sweep.json`, replaced whole after every change; the threads of a sweep change rows inside `changing` only."""

    def __init__(self, folder: Path, asked: Sweep, rows: list[Row]) -> None:
        self.path, self._asked, self._rows = folder / RECORD, asked, rows
        self._lock = threading.Lock()
        write_text(folder / "sweep.yaml", asked.text)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        with self._lock:
            yield
            write_json(
                self.path,
                {
                    "schema": SCHEMA,
                    "name": self._asked.name,
                    "profile": self._asked.jobs[0].profile,
                    "preset": self._asked.file.preset,
                    "fixed": self._asked.file.fixed,
                    "notebooks": list(self._asked.notebooks),
                    "repeated": self._asked.repeated,
                    "summary": summary(self._rows),
                    "jobs": [row.as_json() for row in self._rows],
                },
            )


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in name.lower()) or "sweep"
