"""One job of a sweep, in a process of its own: `python -m eagle3lab.steps.sweep_job JOB.json`.

The job file says which parameters; the answer goes into `JOB.result.json` beside it, twice: the run as soon as there
is one, and how it ended. A reader of the second knows that all is done; a worker that was killed leaves the first.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import Eagle3LabError
from eagle3lab.core.files import folder_lock, read_json, write_json
from eagle3lab.core.paths import cache_folder, runs_folder
from eagle3lab.runs import pipeline
from eagle3lab.runs.directory import Run
from eagle3lab.runs.sweep import Job
from eagle3lab.runs.sweep_runs import PROFILE_INPUT, finished_run, unfinished_run


def write_job(
    path: Path,
    job: Job,
    *,
    notebooks: tuple[str, ...],
    source: Path | None,
    max_minutes: float | None,
    own: str | None,
    any_code: bool,
) -> None:
    """Write the job file. Folders that the environment names go with it: a cluster's node may have another one.

    Args:
        own: run directory that an earlier call of the same sweep began for this job.
    """
    result_path(path).unlink(missing_ok=True)
    folders = {"EAGLE3LAB_RUNS": str(runs_folder().absolute()), "EAGLE3LAB_CACHE": str(cache_folder().absolute())}
    write_json(
        path,
        {
            "job": asdict(job),
            "notebooks": list(notebooks),
            "source": None if source is None else str(source.absolute()),
            "max_minutes": max_minutes,
            "own": own,
            "any_code": any_code,
            "environment": folders,
        },
    )


def result_path(path: Path) -> Path:
    """Where the job file `path` gets its answer."""
    return path.with_suffix(".result.json")


def run_job(path: str | Path) -> None:
    """Run, go on with, or find the run of a job file, and write the answer beside it. Never raises but on Ctrl-C."""
    path = Path(path)
    spec = read_json(path)
    os.environ.update(spec["environment"])
    begun = time.monotonic()
    answer: dict[str, Any] = {"state": "error", "run": None, "reused": False, "error": None}
    try:
        _run(spec, answer, path)
    except KeyboardInterrupt:
        answer |= {"state": "interrupted", "error": "interrupted"}
        raise
    except Eagle3LabError as error:
        answer |= {"state": "error", "error": str(error)}
    except Exception as error:  # the sweep goes on whatever one job met; the log of the job has the whole story
        traceback.print_exc()
        answer |= {"state": "error", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        write_json(result_path(path), answer | {"seconds": round(time.monotonic() - begun, 3)})


def _run(spec: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    job, names, which = Job(**spec["job"]), tuple(spec["notebooks"]), {key: spec[key] for key in ("own", "any_code")}
    # The lock that a notebook in batch takes for these parameters: whoever comes second waits, and then finds the run.
    with folder_lock(runs_folder() / job.sha256[:12]):
        if (run := finished_run(job, names, **which)) is not None:
            answer |= {"state": "ok", "run": str(run.path), "reused": True}
            return
        run = unfinished_run(job, **which) or Run.create(job.profile, job.preset, job.overrides, job.seed)
        if job.profile_sha256:
            run.add_inputs(**{PROFILE_INPUT: job.profile_sha256})
        answer |= {"run": str(run.path), "state": "running"}
        write_json(result_path(path), answer)
        minutes = spec["max_minutes"]
        failure = pipeline.run_notebooks(
            run,
            names=names,
            source=None if spec["source"] is None else Path(spec["source"]),
            deadline=None if minutes is None else time.monotonic() + 60 * minutes,
            note=_say,
        )
        run.merge_metrics({"preset": run.manifest.preset}, timing=pipeline.timing(run))
        from eagle3lab.steps.report import report

        report(run)
    if failure is not None:
        answer |= {"state": failure.status.status, "error": failure.message(run)}
    elif run.status.truncated:
        answer |= {"state": "timeout", "error": f"max_minutes ({minutes:g}) are over; the next sweep goes on with it"}
    else:
        answer |= {"state": "ok"}


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        run_job(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
