"""Run directories: names, strict files, steps, metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3lab.core.errors import RunError, UsageError
from eagle3lab.runs import pipeline, provenance
from eagle3lab.runs.directory import Run


def test_name_and_manifest(run: Run, runs_here: Path) -> None:
    assert re.fullmatch(r"\d{8}T\d{6}Z-smollm2-quick-[0-9a-f]{6}", run.path.name) and run.path.parent == runs_here
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["schema"] == "eagle3lab-run/1" and manifest["seed"] == 3
    assert manifest["versions"]["python"] and "processor" in manifest["machine"]
    assert run.path.name.endswith(manifest["parameters_sha256"][:6])
    assert manifest["command"] == "eagle3lab run --profile smollm2 --preset quick -p seed=3"


def test_equal_parameters_have_equal_hashes_and_others_do_not() -> None:
    a, b = Run.create("smollm2", "quick", {"train_steps": 5}), Run.create("smollm2", "quick", {"train_steps": 5})
    c = Run.create("smollm2", "quick", {"train_steps": 6})
    assert a.path != b.path and a.path.name[-6:] == b.path.name[-6:] != c.path.name[-6:]
    assert c.preset.train_steps == 6 and a.preset.batch_tokens == c.preset.batch_tokens


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train_step": 5}, "did you mean 'train_steps'?"),
        ({"train_steps": "5"}, "'5' (str); train_steps is int"),
        ({"train_steps": True}, "True (bool)"),
        ({"train_steps": 0}, "above 0"),
        ({"learning_rate": float("nan")}, "above 0"),
    ],
)
def test_overrides_are_strict(overrides: dict, words: str, runs_here: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Run.create("smollm2", "quick", overrides)
    assert not runs_here.exists(), "nothing may be made for a refused run"


def test_open_names_what_is_missing(run: Run, tmp_path: Path) -> None:
    assert Run.open(run.path.name).path == Run.open(run.path).path == run.path
    with pytest.raises(RunError, match="did you mean"):
        Run.open(run.path.name[:-1] + "x")
    with pytest.raises(RunError, match=r"no manifest\.json"):
        Run.open(tmp_path)
    manifest = run.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed"', '"sead"'))
    with pytest.raises(RunError, match=r"manifest\.json: se.d"):
        Run.open(run.path)
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(RunError, match="is not JSON"):
        Run.open(run.path)


def test_steps_are_recorded_and_required(run: Run) -> None:
    with pytest.raises(RunError, match=r"step 'train' of run .* is missing.*--resume"):
        run.require("train")
    with pytest.raises(ValueError, match="boom"), run.recording("train"):
        assert run.step_state("train") == "running"
        raise ValueError("boom\nand more")
    assert run.status.steps["train"].error == "ValueError: boom and more"
    with pytest.raises(RunError, match="is error"):
        run.require("train")
    with run.recording("train"):
        pass
    run.require("train")
    with pytest.raises(RunError, match="did you mean 'train'"), run.recording("trian"):
        pass


def test_a_step_whose_process_was_killed_reads_as_dead(run: Run) -> None:
    code = (
        "import os, signal, sys; from eagle3lab.runs.directory import Run\n"
        "with Run.open(sys.argv[1]).recording('capture'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], env=os.environ)
    assert json.loads((run.path / "status.json").read_text())["steps"]["capture"]["status"] == "running"
    assert run.step_state("capture") == "dead"


def test_one_process_works_on_a_run(run: Run) -> None:
    code = (
        "import sys, time; from eagle3lab.runs.directory import Run\n"
        "with Run.open(sys.argv[1]).working(): print('in', flush=True); time.sleep(60)"
    )
    assert not run.being_worked_on()
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"in\n"
        assert run.being_worked_on()
        with pytest.raises(RunError, match=f"another process works on run {run.path.name}; one at a time"):
            pipeline.run_notebooks(run, names=())
        other.kill()
    assert not run.being_worked_on(), "the lock ends with its process"
    assert pipeline.run_notebooks(run, names=()) is None


def test_a_run_does_not_go_on_with_other_inputs(run: Run) -> None:
    run.require_inputs(target="a" * 64)
    run.add_inputs(target="a" * 64)
    run.require_inputs(target="a" * 64, corpus="c" * 64)
    with pytest.raises(RunError, match=rf"the target of run {run.path.name} was a{{12}}, now it is b{{12}}"):
        Run.open(run.path).require_inputs(target="b" * 64)


def test_newest_takes_only_runs_whose_step_is_ok(run: Run) -> None:
    assert Run.newest("train") is None
    with run.recording("train"):
        pass
    Run.create("smollm2", "quick", seed=4)
    newest = Run.newest("train")
    assert newest is not None and newest.path == run.path


def test_metrics_merge_and_the_clock_stands_apart(run: Run) -> None:
    run.merge_metrics({"sets": {"own": {"accept_length": 1.5}}}, timing={"a": 1.0})
    run.merge_metrics({"sets": {"fresh": {"accept_length": 1.4}}, "preset": "quick"}, timing={"b": 2.0})
    metrics = run.metrics()
    assert metrics["sets"] == {"own": {"accept_length": 1.5}, "fresh": {"accept_length": 1.4}}
    assert metrics["timing"] == {"a": 1.0, "b": 2.0} and list(metrics)[-1] == "timing"
    with pytest.raises(ValueError):
        run.merge_metrics({"accept_length": float("nan")})
    assert run.metrics() == metrics, "a refused merge leaves the old file"


def test_two_processes_do_not_lose_each_others_metrics(run: Run) -> None:
    code = (
        "import sys; from eagle3lab.runs.directory import Run\nrun = Run.open(sys.argv[1])\n"
        "for i in range(20): run.merge_metrics({f'{sys.argv[2]}{i}': i})"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code, str(run.path), name]) for name in "ab"]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len([key for key in run.metrics() if key != "timing"]) == 40


def test_git_state_sees_every_kind_of_change(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path)["commit"] == "unknown"

    def git(*words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = provenance.git_state(tmp_path)
    assert clean["dirty"] is False and len(clean["commit"]) == 40
    (tmp_path / "b").write_text("new")
    untracked = provenance.git_state(tmp_path)
    (tmp_path / "b").write_text("other")
    assert untracked["dirty"] is True and provenance.git_state(tmp_path) != untracked
    (tmp_path / "a").write_text("2")
    assert provenance.git_state(tmp_path)["diff_sha256"] != untracked["diff_sha256"]
