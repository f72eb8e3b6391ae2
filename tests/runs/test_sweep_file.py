"""Sweep files: strict reading, jobs that are equal however they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eagle3lab.core.errors import Eagle3LabError
from eagle3lab.runs.directory import Run
from eagle3lab.runs.sweep import Sweep, read_sweep


@pytest.fixture
def read(tmp_path: Path):
    def write(text: str) -> Sweep:
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        return read_sweep(path)

    return write


def test_a_grid_is_every_combination_in_the_order_of_the_file(read) -> None:
    sweep = read("grid:\n  learning_rate: [1e-3, 0.004]\n  seed: [0, 7]\nfixed: {train_steps: 5}\n")
    assert [(job.overrides, job.seed) for job in sweep.jobs] == [
        ({"learning_rate": 0.001, "train_steps": 5}, 0),
        ({"learning_rate": 0.001, "train_steps": 5}, 7),
        ({"learning_rate": 0.004, "train_steps": 5}, 0),
        ({"learning_rate": 0.004, "train_steps": 5}, 7),
    ]
    assert [job.number for job in sweep.jobs] == [1, 2, 3, 4] and len({job.sha256 for job in sweep.jobs}) == 4
    assert sweep.jobs[1].label == "learning_rate=0.001 seed=7"


def test_a_job_has_the_hash_of_the_run_it_makes(read) -> None:
    (job,) = read("list: [{train_steps: 5, seed: 3}]").jobs
    run = Run.create(job.profile, job.preset, job.overrides, job.seed)
    assert run.manifest.parameters_sha256 == job.sha256


def test_equal_parameters_are_one_job_however_they_are_written(read) -> None:
    # 40 steps and a seed of 0 are what quick has anyway; 1 and 1.0 are one learning rate.
    sweep = read(
        "list: [{}, {train_steps: 40}, {seed: 0}, {learning_rate: 1}, {learning_rate: 1.0}, {learning_rate: 1e+0}]"
    )
    assert [job.overrides for job in sweep.jobs] == [{}, {"learning_rate": 1.0}] and sweep.repeated == 4
    # 41 steps are another job: the comparison is not blind.
    assert len(read("list: [{}, {train_steps: 41}]").jobs) == 2


def test_notebooks_run_in_their_own_order(read) -> None:
    names = ["03_train_drafter", "01_load_target", "02_capture_hidden_states"]
    assert read(json.dumps({"grid": {"seed": [0]}, "notebooks": names})).notebooks == tuple(sorted(names))
    assert len(read("grid: {seed: [0]}").notebooks) == 6


def test_a_users_own_profile_counts_by_its_contents(read, tmp_path: Path, monkeypatch) -> None:
    from eagle3lab.targets.profiles import PROFILE_FOLDER

    own = tmp_path / "own.toml"
    own.write_text((PROFILE_FOLDER / "smollm2.toml").read_text())
    monkeypatch.chdir(tmp_path)
    (job,) = read("profile: own.toml\ngrid: {seed: [0]}").jobs
    assert job.profile == str(own), "kernels run in another folder"
    own.write_text(own.read_text() + "\n# changed\n")
    (other,) = read("profile: own.toml\ngrid: {seed: [0]}").jobs
    assert job.profile_sha256 and job.profile_sha256 != other.profile_sha256


CLUSTER = "grid: {seed: [0]}\nexecutor: submitit\nsubmitit: "
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds None (NoneType); a mapping"),
        ("[1, 2]", "holds [1, 2] (list)"),
        ("grid: {seed: [0]", "is not YAML"),
        ("grid: {seed: [0]}\ngrid: {seed: [1]}", "key 'grid' stands twice"),
        ("grid: {seed: [0], seed: [1]}", "key 'seed' stands twice"),
        ("grid: {seed: [!!python/name:os.system x]}", "is not YAML"),
        ("gird: {seed: [0]}", "unknown key 'gird' (str); did you mean 'grid'?"),
        ("profile: smollm2", "has neither grid nor list"),
        ("grid: {seed: [0]}\nlist: [{}]", "has both grid and list"),
        ("grid: {}", "asks for 0 jobs"),
        ("list: []", "asks for 0 jobs"),
        ("grid: {seed: []}", "grid.seed is empty"),
        ("grid: {seed: 0}", "grid.seed is 0 (int); input should be a valid list"),
        ("list: [3]", "list.0 is 3 (int)"),
        ("grid: {learning_rat: [1e-3]}", "unknown parameter 'learning_rat' (str); did you mean 'learning_rate'?"),
        ("grid: {1: [2]}", "is 1 (int)"),
        ("grid: {preset: [quick]}", "unknown parameter 'preset'"),
        ("grid: {seed: [zero]}", "seed is 'zero' (str)"),
        ("grid: {seed: [true]}", "seed is True (bool)"),
        ("grid: {seed: [-1]}", "seed is -1 (int)"),
        ("grid: {train_steps: [4.0]}", "train_steps is 4.0 (float); train_steps is int"),
        ("grid: {train_steps: ['4']}", "train_steps is '4' (str)"),
        ("grid: {train_steps: [1e3]}", "train_steps is 1000.0 (float)"),
        ("grid: {learning_rate: [.nan]}", "learning_rate is nan"),
        ("grid: {learning_rate: [-1e-3]}", "learning_rate is -0.001"),
        ("grid: {train_steps: [[4]]}", "train_steps is [4] (list)"),
        ("grid: {seed: [0]}\nfixed: {seed: 1}", "seed is fixed and swept"),
        ("grid: {seed: [0]}\npreset: quik", "unknown preset 'quik'; did you mean 'quick'?"),
        ("grid: {seed: [0]}\nprofile: smolm2", "unknown profile 'smolm2'; did you mean 'smollm2'?"),
        ("grid: {seed: [0]}\nworkers: 0", "workers is 0 (int); input should be greater than or equal to 1"),
        ("grid: {seed: [0]}\nworkers: '2'", "workers is '2' (str)"),
        ("grid: {seed: [0]}\nmax_minutes: .inf", "max_minutes is inf"),
        ("grid: {seed: [0]}\nexecutor: slurm", "executor is 'slurm' (str)"),
        ("grid: {seed: [0]}\nexecutor: submitit", "submitit has no timeout_min"),
        ("grid: {seed: [0]}\nsubmitit: {timeout_min: 5}", "submitit options with executor: local"),
        (CLUSTER + "{timeout_min: -5}", "submitit.timeout_min is -5 (int); a whole number above 0"),
        (CLUSTER + "{timeout_min: 2.5}", "submitit.timeout_min is 2.5 (float); a whole number above 0"),
        (CLUSTER + "{timeout_min: 5, mem_gb: .inf}", "submitit.mem_gb is inf (float); a number above 0"),
        (CLUSTER + "{timeout_min: 5, nodes: true}", "submitit.nodes is True (bool)"),
        ("grid: {seed: [0]}\nnotebooks: [03_train]", "did you mean '03_train_drafter'?"),
        ("grid: {seed: [0]}\nnotebooks: [03_train_drafter]", "03_train_drafter without 02_capture_hidden_states"),
        ("grid: {seed: [0]}\nnotebooks: []", "notebooks is []"),
        (f"grid: {{seed: {list(range(101))}, train_steps: {list(range(1, 101))}}}", "asks for 10100 jobs"),
        (BOMB, "unfolds to more than"),
        ("[" * 5000, "sweep.yaml"),
    ],
)
def test_bad_files_are_one_line_and_exit_2(read, text: str, words: str) -> None:
    with pytest.raises(Eagle3LabError, match=re.escape(words)) as caught:
        read(text)
    assert caught.value.exit_code == 2 and len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(Eagle3LabError, match="cannot be read"):
        read_sweep(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Eagle3LabError, match="not UTF-8"):
        read_sweep(tmp_path / "binary.yaml")
    with pytest.raises(Eagle3LabError, match="not a regular file"):
        read_sweep(tmp_path)
