"""Runs and the jobs of a sweep: which run has a job's parameters already, what a run found, what was captured.

A run counts as one of a job's parameters when profile, preset, seed and amounts are equal and it was made by this code
with these versions: the rule of every batch job here (`eagle3lab.runs.resolve`). The run that the same sweep began
counts whatever the code, as `eagle3lab run --resume` goes on whatever the code; other runs can be let in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.runs import provenance
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import with_overrides
from eagle3lab.runs.sweep import Job, base_preset

RECORD = "sweep.json"
"""The record of a sweep, in its folder."""

PROFILE_INPUT = "profile"
"""Name under which a run made by a sweep notes the hash of a user's own profile file among its inputs."""


def runs_of(job: Job, *, own: str | None = None, any_code: bool = False) -> Iterator[Run]:
    """Runs with the parameters of `job`: first its own of an earlier call (a path), then the others, newest first."""
    first = [Run.open(own)] if own is not None and (Path(own) / "manifest.json").is_file() else []
    # Amounts are compared as they come out, not as they were written: 40 steps at a preset of 40 are no override.
    wanted = (job.profile, job.seed, with_overrides(base_preset(job.profile, job.preset), job.overrides))
    target = provenance.target_hash(job.profile)
    for run in itertools.chain(first, Run.all()):
        manifest = run.manifest
        if not run.began_with("target", target):
            continue
        if (manifest.profile, manifest.seed, run.preset) != wanted:
            continue
        if job.profile_sha256 and manifest.inputs.get(PROFILE_INPUT) != job.profile_sha256:
            continue
        if run in first or any_code or same_code(run):
            yield run


def same_code(run: Run) -> bool:
    """Whether `run` was made by this very code with these versions."""
    return (run.manifest.code_sha256, run.manifest.versions) == (provenance.code_hash(), provenance.versions())


def is_finished(run: Run, notebooks: Sequence[str]) -> bool:
    """Whether all of `notebooks` are ok in `run` and it was not cut short."""
    status = run.status
    found = [status.notebooks.get(name) for name in notebooks]
    return not status.truncated and all(one is not None and one.status == "ok" for one in found)


def finished_run(job: Job, notebooks: Sequence[str], *, own: str | None = None, any_code: bool = False) -> Run | None:
    """The first finished run among `runs_of`, or None."""
    return next((run for run in runs_of(job, own=own, any_code=any_code) if is_finished(run, notebooks)), None)


def unfinished_run(job: Job, *, own: str | None = None, any_code: bool = False) -> Run | None:
    """The first run among `runs_of` that nobody is working on, to go on with, or None."""
    for run in runs_of(job, own=own, any_code=any_code):
        if not run.being_worked_on():
            return run
    return None


@dataclass(slots=True)
class Row:
    """One job of a sweep as its record tells it.

    Fields:
        state: ok | error | dead | timeout | interrupted | running | not begun.
        reused: it had been run before with the same parameters.
        run: path of the run directory, None when there is none yet. error: one line, None when there is none.
        seconds: of this job in this sweep; None when it was reused or not begun.
        capture: `done` when the run captured its states itself, `cached` when they were there, None: not captured.
        states: id of the states it read. accept_length and interval: of the headline set, bonus token in.
        held_out_accept_length: teacher-forced replay after training. training_seconds: of its training.
        other_code: it was made by other code or versions than this.
    """

    number: int
    parameters: dict[str, Any]
    sha256: str
    state: str = "not begun"
    reused: bool = False
    run: str | None = None
    error: str | None = None
    seconds: float | None = None
    capture: str | None = None
    states: str | None = None
    accept_length: float | None = None
    accept_length_interval: list[float] | None = None
    held_out_accept_length: float | None = None
    training_seconds: float | None = None
    other_code: bool | None = None

    def read(self, run: Run) -> None:
        """Take over what `run` found."""
        metrics = run.metrics()
        timing = metrics.get("timing", {})
        self.run, self.other_code = str(run.path), not same_code(run)
        self.states = run.manifest.inputs.get("states")
        if "capture" in metrics:
            self.capture = "cached" if timing.get("capture_tokens_per_second") is None else "done"
        self.accept_length = metrics.get("accept_length")
        self.accept_length_interval = metrics.get("accept_length_interval")
        self.held_out_accept_length = metrics.get("training", {}).get("held_out", {}).get("simulated_accept_length")
        self.training_seconds = timing.get("training_seconds")

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over the rows: how jobs ended, and how often states were captured or found in the cache."""
    states = [row.state for row in rows]
    return {
        "jobs": len(rows),
        "ok": states.count("ok"),
        "reused": sum(row.reused for row in rows),
        "failed": sum(state in {"error", "dead", "timeout"} for state in states),
        "interrupted": states.count("interrupted"),
        "not_begun": states.count("not begun"),
        "captures": {
            "done": sum(row.capture == "done" for row in rows),
            "cached": sum(row.capture == "cached" for row in rows),
            "sets_of_states": len({row.states for row in rows if row.states}),
        },
    }
