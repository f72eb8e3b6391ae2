"""The pipeline with real kernels and toy notebooks: what is ok, what failed, what is dead, how a run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3lab.runs import engine
from eagle3lab.runs.directory import Run
from eagle3lab.runs.pipeline import run_notebooks

NAMES = ("00_preflight", "01_load_target")


def go(run: Run, folder: Path, names: tuple[str, ...] = NAMES, **options):
    notes: list[str] = []
    failure = run_notebooks(run, names=names, source=folder, note=notes.append, **options)
    return failure, notes


def test_all_ok_and_parameters_arrive(run: Run, toys) -> None:
    folder = toys(
        n00_preflight=(
            "import json, os, sys, pathlib",
            "batch = os.environ['EAGLE3LAB_BATCH']",
            "facts = dict(exe=sys.executable, seed=seed, run=run, batch=batch, cwd=os.getcwd())",
            "pathlib.Path(run, 'seen.json').write_text(json.dumps(facts))",
        ),
        n01_load_target=("assert profile == 'smollm2' and preset == 'quick'",),
    )
    failure, _ = go(run, folder)
    assert failure is None
    seen = json.loads((run.path / "seen.json").read_text())
    assert seen == {"exe": sys.executable, "seed": 3, "run": str(run.path), "batch": "1", "cwd": str(folder)}
    assert {name: one.status for name, one in run.status.notebooks.items()} == dict.fromkeys(NAMES, "ok")


def test_a_failing_cell_is_named_and_stops_the_chain(run: Run, toys) -> None:
    folder = toys(n00_preflight=("x = 1", "y = 1 / 0", "z = 2"), n01_load_target=("pass",))
    failure, _ = go(run, folder)
    assert failure is not None and failure.exit_code == 1
    message = failure.message(run)
    assert "00_preflight, code cell 3 of 4 (y = 1 / 0): ZeroDivisionError: division by zero" in message
    assert f"--resume {run.path}" in message
    assert "01_load_target" not in run.status.notebooks
    # The cause is removed: the same run goes on, and what is ok is not run again.
    toys(n00_preflight=("x = 1",))
    assert go(run, folder)[0] is None
    failure, notes = go(run, folder)
    assert failure is None and all("ok already" in note for note in notes)


def test_an_unusable_input_is_exit_2(run: Run, toys) -> None:
    cell = (
        "from eagle3lab.core.errors import FetchError\nraise FetchError('model.safetensors is truncated', fix='fetch')"
    )
    failure, _ = go(run, toys(n00_preflight=(cell,)), names=NAMES[:1])
    assert failure is not None and failure.exit_code == 2
    assert "model.safetensors is truncated" in failure.message(run)


def test_a_killed_kernel_is_dead_though_papermill_calls_its_cells_completed(run: Run, toys) -> None:
    folder = toys(n00_preflight=("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)", "after = 1"))
    failure, _ = go(run, folder, names=NAMES[:1])
    assert failure is not None and failure.status.status == "dead"
    # A kernel that dies may have given the killing cell its number already: then the cell after it is named.
    assert re.search(r"code cell [34] of 4: the kernel died", failure.message(run))
    executed = json.loads((run.notebooks / "00_preflight.ipynb").read_text())
    said = [cell["metadata"]["papermill"]["status"] for cell in executed["cells"] if "papermill" in cell["metadata"]]
    assert "completed" in said, "papermill marks it: without the judge this run would pass"


def test_deadline_truncates_and_resume_finishes(run: Run, toys) -> None:
    slow = "import time, pathlib\nif not pathlib.Path(run, 'fast').exists():\n    time.sleep(60)"
    folder = toys(n00_preflight=("pass",), n01_load_target=(slow, "done = 1"))
    assert go(run, folder, names=NAMES[:1])[0] is None
    begun = time.monotonic()
    failure, notes = go(run, folder, deadline=time.monotonic() + 4)  # for the second one alone: a kernel starts slowly
    assert failure is None and time.monotonic() - begun < 20
    assert run.status.truncated and run.status.notebooks["01_load_target"].status == "timeout"
    assert "--resume" in notes[-1]
    (run.path / "fast").touch()
    assert go(run, folder)[0] is None
    assert not run.status.truncated and run.status.notebooks["01_load_target"].status == "ok"


def test_deadline_between_notebooks_begins_no_new_one(run: Run, toys) -> None:
    folder = toys(n00_preflight=("pass",), n01_load_target=("pass",))
    failure, notes = go(run, folder, deadline=time.monotonic() - 1)
    assert failure is None and run.status.truncated and not run.status.notebooks
    assert "not begun" in notes[-1]


def test_ctrl_c_lets_the_cell_save_and_leaves_a_resumable_run(run: Run, toys) -> None:
    cell = """
import time, pathlib
if not pathlib.Path(run, 'saved').exists():
    try:
        pathlib.Path(run, 'begun').touch()
        time.sleep(60)
    except KeyboardInterrupt:
        pathlib.Path(run, 'saved').touch()
        raise
"""
    folder = toys(n00_preflight=(cell, "after = 1"), n01_load_target=("pass",))

    def press() -> None:
        while not (run.path / "begun").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        go(run, folder)
    status = run.status.notebooks["00_preflight"]
    assert (run.path / "saved").exists() and status.interrupted and status.status == "error"
    assert go(run, folder)[0] is None


def test_a_cell_that_swallows_the_interrupt_is_killed(run: Run, toys, monkeypatch) -> None:
    monkeypatch.setattr(engine, "GRACE_SECONDS", 1.0)
    stubborn = "import time\nwhile True:\n    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
    begun = time.monotonic()
    failure, _ = go(run, toys(n00_preflight=(stubborn,)), names=NAMES[:1], deadline=time.monotonic() + 3)
    assert failure is None and run.status.truncated and time.monotonic() - begun < 15


def test_what_cells_print_is_passed_on(run: Run, toys) -> None:
    heard: list[str] = []
    go(run, toys(n00_preflight=("print('step 3 of 9')",)), names=NAMES[:1], on_text=heard.append)
    assert "step 3 of 9" in "".join(heard)


def test_no_kernel_or_socket_is_left(run: Run, toys) -> None:
    import psutil

    cell = (
        "import json, os, pathlib\nfrom ipykernel.connect import get_connection_file\n"
        "sockets = os.path.dirname(json.loads(pathlib.Path(get_connection_file()).read_text())['ip'])\n"
        "assert os.path.isdir(sockets)\n"
        "pathlib.Path(run, 'left').write_text(f'{os.getpid()} {sockets}')"
    )
    outcome = go(run, toys(n00_preflight=(cell,)), names=NAMES[:1])
    assert outcome[0] is None
    pid, sockets = (run.path / "left").read_text().split()
    assert not psutil.pid_exists(int(pid)) and sockets.startswith("/tmp/eagle3lab-") and not Path(sockets).exists()


def test_no_disk_space_is_one_line_before_anything_runs(run: Run, toys, monkeypatch) -> None:
    from eagle3lab.core import files
    from eagle3lab.core.errors import DiskError

    folder = toys(n00_preflight=("pass",))
    monkeypatch.setattr(files, "free_bytes", lambda _: 10 * 1024**2)
    with pytest.raises(DiskError, match=r"needs 67 MB, 10 MB are free") as caught:
        go(run, folder, names=NAMES[:1])
    assert caught.value.exit_code == 2 and not run.status.notebooks
    monkeypatch.undo()
    assert go(run, folder, names=NAMES[:1])[0] is None, "with space the same run goes on"
