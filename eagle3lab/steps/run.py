"""`eagle3lab run`: the whole lab, from nothing to a report. Also what a notebook calls to find the run it works on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.runs import pipeline
from eagle3lab.runs.directory import Run
from eagle3lab.runs.injected import refuse_unknown
from eagle3lab.runs.parameters import parse_assignments
from eagle3lab.runs.presets import find_preset
from eagle3lab.runs.resolve import resolve_run
from eagle3lab.steps.preflight import refuse_without_gpus
from eagle3lab.targets.profiles import load_profile


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What `eagle3lab run` says at its end.

    Attributes:
        run: the run directory.
        failure: the notebook that ended the chain, None when all is ok or the run was cut by --max-minutes.
        report: path of the report, None when there is none.
    """

    run: Run
    failure: pipeline.Failure | None
    report: str | None

    @property
    def exit_code(self) -> int:
        """0 when the chain did what was asked; 1 a notebook failed; 2 it met an input that cannot be used."""
        return self.failure.exit_code if self.failure else 0

    def as_json(self) -> dict[str, Any]:
        """Run, status of every notebook, metrics, path of the report."""
        status = self.run.status
        return {
            "run": str(self.run.path),
            "truncated": status.truncated,
            "notebooks": {name: one.model_dump() for name, one in status.notebooks.items()},
            "failure": self.failure.message(self.run) if self.failure else None,
            "report": self.report,
            "metrics": self.run.metrics(),
        }

    def as_text(self) -> str:
        """The measured numbers, then where everything lies."""
        from eagle3lab.runs.summary import summary_lines

        lines = summary_lines(self.run)
        if self.failure:
            lines.append(f"failed: {self.failure.message(self.run)}")
        lines.append(f"run: {self.run.path}")
        if self.report:
            lines.append(f"report: {self.report}")
        return "\n".join(lines)


def run_lab(
    *,
    profile: str = "smollm2",
    preset: str = "default",
    assignments: list[str] | None = None,
    max_minutes: float | None = None,
    resume: str | None = None,
    regenerate: bool = False,
    note: Callable[[str], None] = print,
) -> RunOutcome:
    """Check the words of the command line, then run (or finish) the notebooks and write the report.

    Raises:
        UsageError, ProfileError, RunError, ServerError: nothing was run.
        KeyboardInterrupt: Ctrl-C; `resume` continues there.
    """
    values = parse_assignments(assignments or [])
    if max_minutes is not None and not 0 < max_minutes < float("inf"):
        raise UsageError(
            f"--max-minutes {max_minutes}", rule="minutes are above 0", fix="eagle3lab run --max-minutes 60"
        )
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    draft = _folder(values.pop("draft", ""))
    if resume is not None:
        if values:
            raise UsageError(f"--resume with -p {next(iter(values))}", rule="a run keeps the parameters it began with")
        run = Run.open(resume)
        refuse_without_gpus(load_profile(run.manifest.profile))
        _regenerate(run.manifest.profile, regenerate, note)
    else:
        if profile.endswith(".toml") or "/" in profile:
            profile = str(Path(profile).expanduser().absolute())  # the notebooks run in a folder of their own
        refuse_without_gpus(load_profile(profile))
        find_preset(preset)
        seed = values.pop("seed", 0)
        if not 0 <= seed < 2**31:
            raise UsageError(f"parameter seed is {seed}", rule="0 <= seed < 2**31")
        _regenerate(profile, regenerate, note)
        run = Run.create(profile, preset, values, seed)
    note(f"run {run.path}")
    try:
        failure = pipeline.run_notebooks(
            run, draft=draft, deadline=deadline, note=note, on_text=_live() if sys.stderr.isatty() else _quiet
        )
    except KeyboardInterrupt:
        note(f"interrupted; next: eagle3lab run --resume {run.path}")
        raise
    run.merge_metrics({"preset": run.manifest.preset}, timing=pipeline.timing(run))
    from eagle3lab.steps.report import report

    return RunOutcome(run, failure, str(report(run).path))


def _folder(draft: str) -> str:
    """The reader's own checkpoint as an absolute path: the notebooks run in a folder of their own."""
    if draft and not Path(draft).expanduser().exists():
        raise UsageError(f"parameter draft is {draft}", rule="a drafter's folder that is there")
    return str(Path(draft).expanduser().absolute()) if draft else ""


def _regenerate(profile: str, wanted: bool, note: Callable[[str], None]) -> None:
    if wanted:
        from eagle3lab.steps.corpus_build import regenerate_if_needed

        regenerate_if_needed(profile, note=note)


def open_run(notebook: str, **values: Any) -> Run:
    """The run that `notebook` works on: see `eagle3lab.runs.resolve`. `values` are the notebook's parameters."""
    # Bars of other libraries are widgets that a stored notebook shows frozen at 0 %; the lab prints its own as text.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    refuse_unknown(notebook)
    return resolve_run(notebook, BUILDERS, **values)


def _fetch(run: Run) -> object:
    from eagle3lab.steps.fetch import fetch_for

    return fetch_for(run)


def _corpus(run: Run) -> object:
    from eagle3lab.steps.corpus import prepare_corpus

    return prepare_corpus(run)


def _capture(run: Run) -> object:
    from eagle3lab.steps.capture import capture_states

    return capture_states(run)


def _train(run: Run) -> object:
    from eagle3lab.steps.train import train_drafter

    return train_drafter(run)


BUILDERS = {"fetch": _fetch, "corpus": _corpus, "capture": _capture, "train": _train}


def _quiet(text: str) -> None:
    """Not a terminal: a log file wants no progress bars."""


def _live() -> Callable[[str], None]:
    """Show the last line that the notebook printed in place, as a progress bar would."""

    def show(text: str) -> None:
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        if lines:
            sys.stderr.write(f"\r\x1b[2K  {lines[-1][:110]}\r")
            sys.stderr.flush()

    return show
