"""`papermill notebooks/... out.ipynb -p ...` itself, from a folder that is not the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3lab.core.paths import notebooks_folder, repository
from eagle3lab.runs.directory import Run
from eagle3lab.runs.injected import injected_names
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import load_profile


def papermill(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """papermill as a person calls it: no variable of ours but the folder of the runs."""
    environment = {key: value for key, value in os.environ.items() if key != "EAGLE3LAB_BATCH"}
    command = [sys.executable, "-m", "papermill", str(notebooks_folder() / f"{name}.ipynb"), "out.ipynb", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


def test_parameters_arrive_and_nothing_is_written_beside_the_output(elsewhere: Path, runs_here: Path) -> None:
    before = sorted(path.name for path in repository().iterdir())
    done = papermill(elsewhere, "00_preflight", "-p", "preset", "long", "-p", "seed", "7")
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = Run.all()
    assert (run.manifest.preset, run.manifest.seed) == ("long", 7) and run.path.parent == runs_here
    assert list(run.figures.glob("00_needs.png"))
    assert [path.name for path in elsewhere.iterdir()] == ["out.ipynb"]
    assert sorted(path.name for path in repository().iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-p", "sed", "7"), "unknown parameter 'sed' for 00_preflight; did you mean 'seed'?"),
        (("-p", "seed", "1.5"), "parameter seed of 00_preflight is 1.5 (float)"),
    ],
)
def test_what_papermill_only_warns_about_fails(elsewhere: Path, runs_here: Path, words, said: str) -> None:
    done = papermill(elsewhere, "00_preflight", *words)
    assert done.returncode != 0 and said in done.stderr and not list(runs_here.glob("*/manifest.json"))


def test_only_the_added_cell_is_looked_at() -> None:
    assert injected_names(["", "seed: int = 0", "# Parameters\nsed = 7\nrun = 'x'\n", "other = 1"]) == ["sed", "run"]
    assert injected_names(["", "seed: int = 0", "other = 1"]) == []


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not fetched_folder(load_profile("smollm2")).is_dir(), reason="the embedded target is not fetched")
def test_a_drafter_is_trained_from_another_folder(elsewhere: Path, runs_here: Path) -> None:
    done = papermill(elsewhere, "03_train_drafter", "-p", "preset", "quick", "-p", "seed", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = Run.all()
    assert run.step_state("train") == "ok" and (run.drafter / "model.safetensors").is_file()
    result = "".join(
        json.loads((elsewhere / "out.ipynb").read_text())["cells"][-1]["outputs"][0]["data"]["text/markdown"]
    )
    assert f"**Result.** {run.preset.train_steps} optimiser steps" in result
