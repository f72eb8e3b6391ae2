"""Where the jobs of a sweep run: processes of this machine, or whatever submitit submits to (Slurm, or a local try).

Both run `eagle3lab.steps.sweep_job` on a job file and wait until it is over; which job runs when is decided by the
caller, and on a cluster by its queue.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from eagle3lab.core.errors import UsageError
from eagle3lab.core.files import read_json
from eagle3lab.steps.sweep_job import result_path, run_job

POLL_SECONDS = 0.2
RESULT_SECONDS = 20.0
"""How long a finished job's answer may take to appear: a shared file system is not at once the same everywhere."""


class Launcher(Protocol):
    """Runs job files, several at the same time from several threads."""

    def run(self, path: Path) -> str | None:
        """Run the job file to its end; None, or what is known of a worker that ended without an answer."""
        ...

    def stop(self) -> None:
        """Interrupt every job that runs; a second call is a harder one."""
        ...


class LocalLauncher:
    """A process a job, with its own session: Ctrl-C reaches it through `stop` only, once.

    Args:
        workers: jobs at the same time; they share the cores.
    """

    def __init__(self, workers: int) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._environment = dict(os.environ)
        if workers > 1:
            # Each numerical library would take all cores for itself, in every worker.
            threads = str(max(1, len(os.sched_getaffinity(0)) // workers)) if hasattr(os, "sched_getaffinity") else "1"
            self._environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | self._environment

    def run(self, path: Path) -> str | None:
        """See `Launcher`. What the job prints goes to the `.log` beside its file."""
        log = path.with_suffix(".log")
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "eagle3lab.steps.sweep_job", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
            with self._lock:
                self._running.add(process)
            try:
                code = process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
        return None if code == 0 else f"its process ended with code {code}; see {log}"

    def stop(self) -> None:
        """See `Launcher`."""
        with self._lock:
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)


class SubmititLauncher:
    """Jobs through submitit (https://github.com/facebookincubator/submitit); answers come by file, none is unpickled.

    Args:
        folder: of submitit's scripts and logs; a new one for each sweep, as its local job numbers are process ids.
        options: of `AutoExecutor.update_parameters`, and `cluster`.

    Raises:
        UsageError: submitit is not installed, or refuses the options.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._executor = _executor(folder, options)
        self._jobs: set[Any] = set()
        self._lock = threading.Lock()

    def run(self, path: Path) -> str | None:
        """See `Launcher`."""
        with self._lock:
            job = self._executor.submit(run_job, str(path))
            self._jobs.add(job)
        while not job.done():
            time.sleep(POLL_SECONDS)
        with self._lock:
            self._jobs.discard(job)
        end = time.monotonic() + RESULT_SECONDS
        while not answered(path) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return None if answered(path) else f"submitit's job {job.job_id} is {job.state}; see {job.paths.stderr}"

    def stop(self) -> None:
        """See `Launcher`."""
        with self._lock:
            for job in self._jobs:
                job.cancel(check=False)


def check_options(options: dict[str, Any]) -> bool:
    """Refuse options that submitit knows not, without a cluster and without submitting; False without submitit.

    Raises:
        UsageError: submitit refuses the options.
    """
    if importlib.util.find_spec("submitit") is None:
        return False
    from submitit.core.plugins import get_executors

    with tempfile.TemporaryDirectory() as folder:
        # The cluster's own commands need not be here for a look at the names of its options.
        known = options.get("cluster") in get_executors()
        _executor(Path(folder), {**options, "cluster": "local"} if known or "cluster" not in options else options)
    return True


def _executor(folder: Path, options: dict[str, Any]) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UsageError(
            "executor: submitit, but submitit is not installed", fix="pip install 'eagle3lab[cluster]'"
        ) from error
    options = dict(options)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=options.pop("cluster", None))
        executor.update_parameters(**options)
    except Exception as error:  # submitit raises AssertionError, NameError, ValueError, RuntimeError and its own
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"submitit refuses its options: {text}", fix="correct submitit: in the sweep file") from error
    return executor


def answered(path: Path) -> bool:
    """Whether the job file has its final answer."""
    result = result_path(path)
    return result.is_file() and read_json(result)["state"] != "running"
