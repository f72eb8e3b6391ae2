"""Which run a notebook works on: Jupyter takes the newest good one, a batch job never does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle3lab.core.errors import RunError, UsageError
from eagle3lab.runs import resolve
from eagle3lab.runs.directory import Run
from eagle3lab.runs.resolve import build, find_same, in_batch, resolve_run


class Builders(dict):
    """Fake steps that count how often they were done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        super().__init__({name: self._builder(name) for name in ("fetch", "corpus", "capture", "train")})

    def _builder(self, name: str):
        def build_step(run: Run) -> None:
            with run.recording(name):
                self.done.append(name)

        return build_step


@pytest.fixture
def builders() -> Builders:
    return Builders()


@pytest.fixture
def jupyter(monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_BATCH", "0")


@pytest.fixture
def batch(monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_BATCH", "1")


VALUES = {"profile": "smollm2", "preset": "quick", "run": "", "seed": 3}


def finished(*steps: str, seed: int = 3) -> Run:
    run = Run.create("smollm2", "quick", seed=seed)
    for step in steps:
        with run.recording(step):
            pass
    return run


def test_jupyter_takes_the_newest_whose_step_is_ok_and_says_so(jupyter, builders) -> None:
    good = finished("fetch", "corpus", "capture", seed=8)
    finished("fetch")
    said: list[str] = []
    found = resolve_run("03_train_drafter", builders, note=said.append, **VALUES)
    assert found.path == good.path and not builders.done
    assert good.path.name in said[0] and "newest" in said[0] and "seed 8" in said[0]


def test_jupyter_without_a_good_run_names_the_next_command(jupyter, builders) -> None:
    finished("fetch")
    with pytest.raises(RunError, match=r"no run has finished step 'train'.*next: .*eagle3lab run --preset quick"):
        resolve_run("05_measure_acceptance", builders, **VALUES)


def test_batch_never_takes_the_latest(batch, builders) -> None:
    other = finished("fetch", "corpus", "capture", "train", seed=8)
    found = resolve_run("05_measure_acceptance", builders, **VALUES)
    assert found.path != other.path and found.manifest.seed == 3
    assert builders.done == ["fetch", "corpus", "capture", "train"]


def test_batch_fills_a_run_of_the_same_parameters_once(batch, builders) -> None:
    first = resolve_run("03_train_drafter", builders, **VALUES)
    builders["train"](first)
    builders.done.clear()
    assert resolve_run("04_inspect_fc", builders, **VALUES).path == first.path and not builders.done
    # 03 does its own step: where it is done already, a new run is taken instead of overwriting it.
    assert resolve_run("03_train_drafter", builders, **VALUES).path != first.path
    assert "train" not in builders.done


def test_same_means_parameters_code_and_versions(batch, builders, monkeypatch) -> None:
    run = finished("fetch")
    assert find_same("smollm2", "quick", 3).path == run.path
    assert find_same("smollm2", "quick", 4) is None and find_same("smollm2", "long", 3) is None
    assert find_same("smollm2", "quick", 3, {"train_steps": 5}) is None
    monkeypatch.setattr(resolve.provenance, "code_hash", lambda: "other code")
    assert find_same("smollm2", "quick", 3) is None


def test_a_run_of_another_target_is_not_the_same(batch, builders, monkeypatch) -> None:
    """As after `fetch --source`: its states and its drafter are of other weights."""
    run = resolve_run("03_train_drafter", builders, preset="quick")
    run.add_inputs(target="a" * 64)
    for now, found in (("a" * 64, run.path), ("b" * 64, None), (None, run.path)):
        monkeypatch.setattr("eagle3lab.runs.provenance.target_hash", lambda _, now=now: now)
        same = find_same("smollm2", "quick", 0)
        assert (same.path if same else None) == found


def test_a_truncated_run_and_one_of_another_convention_are_not_the_same(batch, builders) -> None:
    """`train --max-minutes` and `train --convention` leave other drafters than the preset's."""
    run = finished("fetch", "corpus", "capture", "train")
    Run.create("smollm2", "quick", {"convention": "specforge"}, seed=3)
    assert find_same("smollm2", "quick", 3).path == run.path
    run.set_truncated(True)
    assert find_same("smollm2", "quick", 3) is None


def test_a_run_that_somebody_works_on_is_left_alone(batch, builders) -> None:
    run = finished("fetch")
    with run.recording("capture"):
        assert find_same("smollm2", "quick", 3) is None
    assert find_same("smollm2", "quick", 3).path == run.path


def test_a_given_run_must_be_ready(batch, builders) -> None:
    run = finished("fetch")
    with pytest.raises(RunError, match=r"step 'capture' of run .* is missing"):
        resolve_run("03_train_drafter", builders, **VALUES | {"run": str(run.path)})
    assert not builders.done, "a run that was named is never filled behind the user's back"
    with pytest.raises(RunError, match="no run directory"):
        resolve_run("03_train_drafter", builders, **VALUES | {"run": "/nowhere"})
    with pytest.raises(UsageError, match="parameter seed"):
        resolve_run("03_train_drafter", builders, **VALUES | {"seed": "3"})


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_checkpoint_of_the_readers_own_gets_its_own_run_and_trains_nothing(mode, builders, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_BATCH", mode)
    other = finished("fetch", "corpus", "capture", "train")
    found = resolve_run("05_measure_acceptance", builders, **VALUES, draft="/my/drafter")
    assert found.path != other.path and builders.done == ["fetch", "corpus"]
    assert "-p draft /my/drafter" in found.manifest.command
    for step in ("fetch", "corpus"):
        assert found.step_state(step) == "ok"
    same = find_same(VALUES["profile"], VALUES["preset"], VALUES["seed"])
    assert same is not None and same.path == other.path, "numbers of another drafter are never continued"


def test_build_stops_at_a_step_that_did_not_end_well(run, builders) -> None:
    builders["capture"] = lambda run: None
    with pytest.raises(RunError, match="step 'capture'"):
        build(run, "train", builders)
    assert builders.done == ["fetch", "corpus"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"JPY_SESSION_NAME": "/x.ipynb"}, False),
        ({"VSCODE_PID": "1"}, False),
        ({"JPY_SESSION_NAME": "/x.ipynb", "EAGLE3LAB_BATCH": "1"}, True),
        ({"EAGLE3LAB_BATCH": "0"}, False),
    ],
)
def test_who_is_looking(environment: dict[str, str], expected: bool, monkeypatch) -> None:
    for name in ("JPY_SESSION_NAME", "VSCODE_PID", "EAGLE3LAB_BATCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resolve, "_parent_runs_notebooks", lambda: False)
    assert in_batch() is expected


def test_papermill_inside_a_notebook_inherits_its_names_but_is_a_batch_job() -> None:
    # The parent's words decide: this child is started by a process that calls itself papermill.
    code = (
        "import os, subprocess, sys\n"
        "os.environ['JPY_SESSION_NAME'] = '/x.ipynb'; os.environ.pop('EAGLE3LAB_BATCH', None)\n"
        "child = 'from eagle3lab.runs.resolve import in_batch; print(in_batch())'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout)"
    )
    server = ["jupyter-lab", "--ServerApp.root_dir=/tmp/pytest-of-me/papermill", "/tmp/pytest-of-me/notebooks"]
    for words, expected in ((["/opt/bin/papermill", "a.ipynb"], "True"), (["-m", "pytest"], "True"), (server, "False")):
        out = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True).stdout
        assert out.strip() == expected
