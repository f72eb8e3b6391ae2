"""Sweeps with real workers and kernels, and toy notebooks: nothing runs twice, a failure ends nothing but its job."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.core.errors import UsageError
from eagle3lab.core.files import read_json
from eagle3lab.runs import engine, provenance
from eagle3lab.runs.directory import Run
from eagle3lab.runs.pipeline import run_notebooks
from eagle3lab.runs.schemas import NotebookStatus
from eagle3lab.runs.sweep import read_sweep
from eagle3lab.runs.sweep_runs import Row, finished_run, summary
from eagle3lab.steps import sweep_launch
from eagle3lab.steps.sweep import SweepOutcome, sweep
from eagle3lab.steps.sweep_launch import LocalLauncher
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import load_profile

TARGET = fetched_folder(load_profile("smollm2"))
"""Of the real cache: read before `cache_here` replaces it."""

ONE = "notebooks: [00_preflight]\n"
COUNT = "import pathlib\nwith pathlib.Path(run, 'ran').open('a') as out:\n    out.write('x')"
"""A cell that leaves one letter in its run each time that it runs."""


@pytest.fixture(autouse=True)
def cache_here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def go(tmp_path: Path) -> Callable[..., tuple[SweepOutcome, list[str]]]:
    def run(text: str, folder: Path, **options) -> tuple[SweepOutcome, list[str]]:
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        notes: list[str] = []
        return sweep(path, source=folder, note=notes.append, **options), notes

    return run


def times_run(runs: Path) -> list[int]:
    """How often each run's counting cell ran."""
    return sorted(len(path.read_text()) for path in runs.glob("*/ran"))


def finished(name: str = "00_preflight", **parameters) -> Run:
    """A run whose notebook is ok, as another command would have left it."""
    seed = parameters.pop("seed", 0)
    run = Run.create("smollm2", "quick", parameters, seed)
    run.set_notebook(name, NotebookStatus(status="ok", cells=1, ran=1, seconds=1.0))
    return run


def test_failures_are_recorded_the_rest_goes_on_and_a_second_call_tries_only_those(
    go, toys, runs_here: Path, monkeypatch
) -> None:
    bad = (
        "import os, signal\n"
        "if not pathlib.Path(run).parent.joinpath('mended').exists():\n"
        "    if seed == 1:\n        1 / 0\n    if seed == 2:\n        os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = toys(n00_preflight=(COUNT, bad, "after = 1"))
    text = ONE + "workers: 2\ngrid: {seed: [0, 1, 2, 3]}\n"
    outcome, _ = go(text, folder)
    assert outcome.exit_code == 1 and [row.state for row in outcome.rows] == ["ok", "error", "dead", "ok"]
    assert "ZeroDivisionError" in outcome.rows[1].error and "the kernel died" in outcome.rows[2].error
    assert outcome.record is not None and outcome.record.parent.name.startswith("sweep-sweep-")
    record = read_json(outcome.record)
    assert record["summary"] == outcome.as_json()["summary"] and record["summary"]["failed"] == 2
    assert "job 2: 00_preflight, code cell 3 of 4" in outcome.as_text() and "2 failed" in outcome.as_text()
    # The cause is removed: only the two are run again, in the directories that they had.
    (runs_here / "mended").touch()
    before = [row.run for row in outcome.rows]
    outcome, notes = go(text, folder)
    assert outcome.exit_code == 0 and [row.run for row in outcome.rows] == before
    assert [row.reused for row in outcome.rows] == [True, False, False, True] and times_run(runs_here) == [1, 1, 2, 2]
    assert "2 finished already" in notes[0]
    outcome, notes = go(text, folder)
    assert outcome.exit_code == 0 and len(notes) == 1 and times_run(runs_here) == [1, 1, 2, 2]
    assert all(row.reused for row in outcome.rows) and len(list(runs_here.glob("*/manifest.json"))) == 4
    # What the sweep began itself stays its own when the code changes, and that is said; another file's does not.
    monkeypatch.setattr(provenance, "code_hash", lambda: "other code")
    outcome, notes = go(text, folder, dry_run=True)
    assert all(row.reused for row in outcome.rows) and "finished runs by other code than this: 4" in notes[0]
    outcome, _ = go(text + "# another file\n", folder, dry_run=True)
    assert not any(row.reused for row in outcome.rows)


def test_parameters_arrive_and_every_job_has_a_report(go, toys) -> None:
    cell = (
        "from eagle3lab.runs.directory import Run\nlab = Run.open(run)\n"
        "lab.merge_metrics({'accept_length': lab.preset.train_steps + seed})"
    )
    outcome, _ = go(ONE + "list: [{train_steps: 5, seed: 2}]", toys(n00_preflight=(cell,)))
    assert outcome.rows[0].accept_length == 7
    run = Run.open(outcome.rows[0].run)
    assert (run.path / "report.html").is_file() and run.metrics()["timing"]["notebook_seconds"]["00_preflight"] > 0
    assert run.manifest.overrides == {"train_steps": 5}


def test_a_run_made_elsewhere_counts_when_parameters_and_code_are_equal(go, toys, monkeypatch) -> None:
    folder = toys(n00_preflight=(COUNT,))
    finished(train_steps=7)
    # 40 steps are quick's own: this run has the parameters of no override at all.
    finished(train_steps=40)
    text = ONE + "list: [{train_steps: 7}, {seed: 0}]"
    outcome, _ = go(text, folder, dry_run=True)
    assert [row.reused for row in outcome.rows] == [True, True] and "2 of them finished already" in outcome.as_text()
    monkeypatch.setattr(provenance, "code_hash", lambda: "other code")
    outcome, notes = go(text, folder, dry_run=True)
    assert not any(row.reused for row in outcome.rows) and "--any-code would take it" in notes[0]
    outcome, _ = go(text, folder, dry_run=True, any_code=True)
    assert [row.reused for row in outcome.rows] == [True, True] and "by other code" in outcome.as_text()
    assert outcome.exit_code == 0 and outcome.record is None


@pytest.mark.parametrize("change", ["status", "truncated", "notebook", "seed"])
def test_a_run_that_is_not_finished_or_not_the_same_does_not_count(tmp_path: Path, change: str) -> None:
    run = finished()
    (tmp_path / "s.yaml").write_text(ONE + "grid: {seed: [0]}")
    (job,) = read_sweep(tmp_path / "s.yaml").jobs
    assert finished_run(job, ["00_preflight"]).path == run.path
    names = ["00_preflight"]
    if change == "status":
        run.set_notebook("00_preflight", NotebookStatus(status="dead", cells=1, ran=0, seconds=1.0))
    elif change == "truncated":
        run.set_truncated(True)
    elif change == "notebook":
        names.append("01_load_target")
    else:
        (tmp_path / "s.yaml").write_text(ONE + "grid: {seed: [1]}")
        (job,) = read_sweep(tmp_path / "s.yaml").jobs
    assert finished_run(job, names) is None


def test_captures_are_counted_from_what_the_runs_did(go, toys) -> None:
    """Three jobs at once on one cached folder: one builds it, two find it. A cache by seed would show three."""
    cell = """
import time
from eagle3lab.core.files import build_folder
from eagle3lab.core.paths import cache_folder
from eagle3lab.runs.directory import Run
lab, made = Run.open(run), []
name = f"states-{seed}" if lab.preset.ttt_steps == 4 else "states"
build_folder(cache_folder() / name, lambda part: (time.sleep(1), made.append(part)))
lab.add_inputs(states=name)
lab.merge_metrics({"capture": {}}, timing={"capture_tokens_per_second": 9.0 if made else None})
"""
    folder = toys(n00_preflight=(cell,))
    outcome, _ = go(ONE + "workers: 3\ngrid: {seed: [0, 1, 2]}", folder)
    assert outcome.as_json()["summary"]["captures"] == {"done": 1, "cached": 2, "sets_of_states": 1}
    assert "captures: 1 done, 2 found in the cache, 1 different sets of states" in outcome.as_text()
    outcome, _ = go(ONE + "fixed: {ttt_steps: 4}\ngrid: {seed: [0, 1]}", folder)
    assert outcome.as_json()["summary"]["captures"] == {"done": 2, "cached": 0, "sets_of_states": 2}


def test_a_job_that_does_not_end_is_stopped_and_goes_on_later(go, toys, runs_here: Path) -> None:
    slow = "import time\nif not pathlib.Path(run).parent.joinpath('fast').exists():\n    time.sleep(60)"
    folder = toys(n00_preflight=(COUNT, slow))
    text = ONE + "max_minutes: 0.07\ngrid: {seed: [0]}"
    outcome, _ = go(text, folder)
    assert outcome.exit_code == 1 and outcome.rows[0].state == "timeout" and "goes on" in outcome.rows[0].error
    (runs_here / "fast").touch()
    outcome, _ = go(text.replace("0.07", "5"), folder)
    assert outcome.exit_code == 0 and not outcome.rows[0].reused and times_run(runs_here) in ([1], [2])


@pytest.mark.parametrize("reason", ["deadline", "interrupt"])
def test_a_stop_before_the_kernel_has_answered_is_a_stop(toys, monkeypatch, reason: str) -> None:
    """A signal while the interpreter of the kernel starts kills it; the runner then sees a kernel that never came."""
    attach = engine.Control.attach

    def stop_at_once(self: engine.Control, manager) -> None:
        attach(self, manager)

        def stop() -> None:
            while getattr(getattr(manager, "provisioner", None), "pid", None) is None:
                time.sleep(0.005)
            self.stop(reason)

        if manager is not None:
            threading.Thread(target=stop, daemon=True).start()

    monkeypatch.setattr(engine.Control, "attach", stop_at_once)
    run, folder = Run.create("smollm2", "quick"), toys(n00_preflight=("pass",))
    with pytest.raises(KeyboardInterrupt) if reason == "interrupt" else contextlib.nullcontext():
        assert run_notebooks(run, names=("00_preflight",), source=folder, note=lambda _: None) is None
    status = run.status
    assert status.truncated is (reason == "deadline")
    assert status.notebooks["00_preflight"].status == ("timeout" if reason == "deadline" else "error")


def test_a_kernel_that_dies_before_it_has_answered_is_dead(go, toys, monkeypatch) -> None:
    monkeypatch.setattr(engine.sys, "executable", "/bin/false")
    run, folder = Run.create("smollm2", "quick"), toys(n00_preflight=("pass",))
    failure = run_notebooks(run, names=("00_preflight",), source=folder, note=lambda _: None)
    assert failure is not None and failure.status.status == "dead" and "the kernel died" in failure.message(run)


def test_a_worker_that_is_killed_is_a_dead_job(go, toys, monkeypatch) -> None:
    def kill(self, path: Path) -> str | None:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        return f"its process ended with code {subprocess.run([sys.executable, '-c', code]).returncode}"

    folder = toys(n00_preflight=("pass",))
    with monkeypatch.context() as patch:
        patch.setattr(LocalLauncher, "run", kill)
        outcome, _ = go(ONE + "grid: {seed: [0]}", folder)
    assert outcome.rows[0].state == "dead" and "code -9" in outcome.rows[0].error and outcome.exit_code == 1
    with monkeypatch.context() as patch:
        patch.setattr(LocalLauncher, "run", lambda self, path: 1 / 0)
        outcome, _ = go(ONE + "grid: {seed: [0]}", folder)
    assert "ZeroDivisionError" in outcome.rows[0].error and outcome.exit_code == 1


def test_an_input_that_cannot_be_used_fails_its_job_alone(go, toys, tmp_path: Path) -> None:
    outcome, _ = go(ONE + "grid: {seed: [0]}", tmp_path)
    assert outcome.rows[0].state == "error" and "no notebook 00_preflight.ipynb" in outcome.rows[0].error


START = """
import pathlib, sys
from eagle3lab.steps.sweep import sweep
try:
    sweep(pathlib.Path(sys.argv[1]), source=pathlib.Path(sys.argv[2]), any_code=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_lets_cells_save_and_the_same_command_goes_on(go, toys, tmp_path: Path, runs_here: Path) -> None:
    cell = """
import time
if not pathlib.Path(run).parent.joinpath('saved').exists():
    try:
        pathlib.Path(run).parent.joinpath('begun').touch()
        time.sleep(60)
    except KeyboardInterrupt:
        pathlib.Path(run).parent.joinpath('saved').touch()
        raise
"""
    folder = toys(n00_preflight=(COUNT, cell))
    text = ONE + "grid: {seed: [0, 1]}"
    (tmp_path / "sweep.yaml").write_text(text)
    words = [sys.executable, "-c", START, str(tmp_path / "sweep.yaml"), str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    while not (runs_here / "begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "next: eagle3lab sweep" in out
    (record,) = runs_here.glob("sweep-*/sweep.json")
    assert [job["state"] for job in read_json(record)["jobs"]] == ["interrupted", "not begun"]
    assert (runs_here / "saved").exists(), "the cell saw the interrupt"
    outcome, _ = go(text, folder)
    assert outcome.exit_code == 0 and times_run(runs_here) == [1, 2]


def test_two_sweeps_at_once_run_each_job_once(go, toys, tmp_path: Path, runs_here: Path) -> None:
    folder = toys(n00_preflight=(COUNT, "import time; time.sleep(1)"))
    text = ONE + "grid: {seed: [0, 1]}"
    # Another file with the same jobs: the lock is by parameters, not by file.
    (tmp_path / "other.yaml").write_text(text + "\nworkers: 2\n")
    other = subprocess.Popen([sys.executable, "-c", START, str(tmp_path / "other.yaml"), str(folder)])
    outcome, _ = go(text, folder, any_code=True)
    assert other.wait(60) == 0 and outcome.exit_code == 0 and times_run(runs_here) == [1, 1]


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit (extra `cluster`) is not installed")
def test_the_same_sweep_through_submitit(go, toys, runs_here: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep_launch, "RESULT_SECONDS", 1.0)
    bad = "import os, signal\nif seed == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    dies = "import os, signal\nif seed == 2:\n    os.kill(os.getppid(), signal.SIGKILL)"
    folder = toys(n00_preflight=(COUNT, "import os\nname = os.environ['SUBMITIT_EXECUTOR']", bad, dies))
    text = ONE + "workers: 3\nexecutor: submitit\nsubmitit: {cluster: local, timeout_min: 5}\ngrid: {seed: [0, 1, 2]}"
    outcome, _ = go(text, folder)
    assert [row.state for row in outcome.rows] == ["ok", "dead", "dead"] and outcome.exit_code == 1
    assert "the kernel died" in outcome.rows[1].error and "submitit's job" in outcome.rows[2].error
    outcome, _ = go(text.replace("[0, 1, 2]", "[0]"), folder)
    assert outcome.rows[0].reused and times_run(runs_here) == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_min": 5, "cluster": "slum"}, "doesn't know any executor named slum"),
        ({"timeout_min": 5, "cluster": "local", "slurm_partitoin": "gpu"}, "slurm_partitoin"),
        ({"timeout_min": "5", "cluster": "local"}, "timeout_min"),
        ({"timeout_min": 5, "cluster": "local", "colour": "red"}, "colour"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_options_that_submitit_refuses_run_nothing(
    go, toys, runs_here: Path, options: dict, words: str, dry_run: bool
) -> None:
    pytest.importorskip("submitit", reason="submitit (extra `cluster`) is not installed")
    text = ONE + "grid: {seed: [0]}\nexecutor: submitit\nsubmitit: " + json.dumps(options)
    with pytest.raises(UsageError, match=words):
        go(text, toys(n00_preflight=("pass",)), dry_run=dry_run)
    assert not list(runs_here.glob("*/manifest.json"))


@pytest.mark.parametrize("options", [{"cluster": "slurm", "slurm_partition": "gpu", "mem_gb": 8}, {"gpus_per_node": 0}])
def test_a_dry_run_needs_no_cluster(go, toys, options: dict) -> None:
    text = ONE + "grid: {seed: [0]}\nexecutor: submitit\nsubmitit: " + json.dumps({"timeout_min": 5, **options})
    outcome, _ = go(text, toys(n00_preflight=("pass",)), dry_run=True)
    assert len(outcome.rows) == 1


def test_without_submitit_the_extra_is_named(go, toys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    text = ONE + "grid: {seed: [0]}\nexecutor: submitit\nsubmitit: {timeout_min: 5}"
    with pytest.raises(UsageError, match=r"eagle3lab\[cluster\]"):
        go(text, toys(n00_preflight=("pass",)))


def test_the_command(tmp_path: Path, capfd, runs_here: Path) -> None:
    path = tmp_path / "s.yaml"
    for text, words in (("gird: {}", "did you mean 'grid'?"), ("grid: {seed: [0]}\nworkers: 0", "workers is 0")):
        path.write_text(text)
        assert cli.run(["sweep", str(path)]) == 2
        out, err = capfd.readouterr()
        assert out == "" and words in err and len(err.splitlines()) == 1
    path.write_text(ONE + "grid: {seed: [0, 1], train_steps: [40, 5]}")
    assert cli.run(["sweep", str(path), "--workers", "0"]) == 2
    capfd.readouterr()
    assert cli.run(["sweep", str(path), "--dry-run", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert [job["parameters"] for job in answer["jobs"]][1] == {"seed": 0, "train_steps": 5}
    assert answer["summary"]["not_begun"] == 4 and not runs_here.exists()


def test_a_summary_counts_every_state() -> None:
    rows = [Row(i, {}, "x", state=state) for i, state in enumerate(("ok", "error", "dead", "timeout", "interrupted"))]
    counts = summary([*rows, Row(9, {}, "x")])
    assert (counts["ok"], counts["failed"], counts["interrupted"], counts["not_begun"]) == (1, 3, 1, 1)


@pytest.mark.slow
def test_forty_jobs_capture_once(go, toys) -> None:
    cell = """
from eagle3lab.core.files import build_folder
from eagle3lab.core.paths import cache_folder
from eagle3lab.runs.directory import Run
lab, made = Run.open(run), []
build_folder(cache_folder() / "states", made.append)
lab.add_inputs(states="states")
lab.merge_metrics({"capture": {}}, timing={"capture_tokens_per_second": 9.0 if made else None})
"""
    grid = "grid: {learning_rate: [1e-3, 2e-3, 3e-3, 4e-3], train_steps: [10, 20], seed: [0, 1, 2, 3, 4]}"
    outcome, _ = go(ONE + f"workers: {os.cpu_count()}\n" + grid, toys(n00_preflight=(cell,)))
    assert outcome.as_json()["summary"]["captures"] == {"done": 1, "cached": 39, "sets_of_states": 1}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not TARGET.is_dir(), reason="the embedded target is not fetched")
def test_a_real_sweep_over_training_parameters_captures_once(tmp_path: Path) -> None:
    """Three trainings, two seeds, a cache with nothing but the target in it; other samples are other states."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "targets").symlink_to(TARGET.parent.absolute())
    path = tmp_path / "real.yaml"
    path.write_text(
        "fixed: {train_steps: 2}\nnotebooks: [01_load_target, 02_capture_hidden_states, 03_train_drafter]\nlist:\n"
        "  - {train_samples: 6, learning_rate: 1e-3}\n  - {train_samples: 6, learning_rate: 4e-3, seed: 1}\n"
        "  - {train_samples: 7, learning_rate: 1e-3}\n"
    )
    outcome = sweep(path, note=lambda _: None)
    assert outcome.exit_code == 0 and [row.capture for row in outcome.rows] == ["done", "cached", "done"]
    assert outcome.rows[0].states == outcome.rows[1].states != outcome.rows[2].states
    assert all(row.training_seconds and row.held_out_accept_length for row in outcome.rows)
