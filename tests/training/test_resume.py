"""Killed at any moment and started again, a training gives the very numbers of an uninterrupted one."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from eagle3lab.core.errors import TrainingError
from eagle3lab.doctor.checks.training_run import DATA_KEYS, LAYOUT_KEYS, ORDER_KEYS, PARTS
from eagle3lab.training import checkpoints
from tests.training import jobs

UNEVEN = {"log_every": 2, "checkpoint_every": 3}
"""Rows and checkpoints at different steps: a checkpoint falls between two rows."""


@pytest.fixture(scope="module")
def straight(states, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return jobs.trained(states, folder, **UNEVEN), _files(folder)


def _files(folder: Path) -> dict[str, bytes]:
    """Snapshots and the weights of the checkpoints that are left, by path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("**/*.safetensors")}


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_steps(states, straight, tmp_path, seed):
    chance = random.Random(seed)
    kills = sorted(chance.sample(range(1, 12), 3))
    for step in kills:
        jobs.trained(states, tmp_path, kill_at=step, **UNEVEN)
    assert jobs.trained(states, tmp_path, **UNEVEN) == straight[0], kills
    assert _files(tmp_path) == straight[1]


def _kill_in(place: str, states: Path, folder: Path) -> None:
    """Job: die inside the second checkpoint."""
    made, name = jobs.trainer(states, folder, **UNEVEN), place.removesuffix(" after")
    owner = os if name == "replace" else checkpoints
    original, calls = getattr(owner, name), []

    def dying(*args: object, **kwargs: object) -> object:
        if name != "replace" or str(args[0]).endswith(".part"):
            calls.append(args)
        if len(calls) < 2:
            return original(*args, **kwargs)
        if place.endswith(" after"):
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, dying)
    made.run()


@pytest.mark.parametrize("place", ["_write_tensors", "_write_tensors after", "replace", "replace after", "_prune"])
def test_killed_while_writing_a_checkpoint(states, straight, tmp_path, place):
    assert jobs.launch(_kill_in, place, states, tmp_path) == [-9]
    assert jobs.trained(states, tmp_path, **UNEVEN) == straight[0]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def _forget(what: str, states: Path, folder: Path) -> None:
    """Job: a resume that restores less than everything."""
    made = jobs.trainer(states, folder, **UNEVEN)
    assert made.resume()
    if what == "optimizer":
        made.optimizer.state.clear()
    elif what == "step":
        made.result.steps_done = 0
    elif what == "window":
        made.window.clear()
    result = made.run()
    (folder / "losses").write_text(str([row["loss"] for row in result.history]))


@pytest.mark.parametrize("what", ["optimizer", "step", "window"])
def test_wrong_versions_are_caught(states, straight, tmp_path, what):
    jobs.trained(states, tmp_path, kill_at=5, **UNEVEN)
    assert jobs.launch(_forget, what, states, tmp_path) == [0]
    assert (tmp_path / "losses").read_text() != str([row["loss"] for row in straight[0]["history"]])


def test_last_three_and_best_stay(states, tmp_path):
    result = jobs.trained(states, tmp_path, checkpoint_every=1)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    best = result["best"]["step"]
    expected = {9, 10, 11} | ({best} if 0 < best < 12 else set())
    assert kept == [f"step-{step:06d}" for step in sorted(expected)]


def test_best_stays(tmp_path):
    """Seven checkpoints whose second is the best: it stays with the newest three."""
    root = tmp_path / "checkpoints"
    for step in range(1, 8):
        (root / f"step-{step:06d}").mkdir(parents=True)
    checkpoints._prune(root, {"step": 2})
    assert [int(path.name[5:]) for path in sorted(root.iterdir())] == [2, 5, 6, 7]


@pytest.mark.parametrize("end", [3, 4, 5])
def test_ended_by_the_clock(states, straight, tmp_path, monkeypatch, end):
    """--max-minutes leaves no trace in what follows: at a checkpoint, at a row with a replay, between all of them."""
    monkeypatch.setattr("eagle3lab.training.estimate.Meter.seconds", lambda meter: float(made.result.steps_done))
    made = jobs.trainer(states, tmp_path, **UNEVEN)
    result = made.run(max_seconds=end - 0.5)
    assert result.truncated and result.steps_done == end == result.history[-1]["step"] == result.held_out[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step-{end:06d}").is_dir()  # no step is done twice
    assert jobs.trained(states, tmp_path, **UNEVEN) == straight[0]
    left = _files(tmp_path)
    same = [name for name in straight[1] if name in left]  # the early end's own checkpoint may have pushed one out
    assert len(same) >= len(straight[1]) - 1 and all(left[name] == straight[1][name] for name in same)


@pytest.fixture
def interrupted(states, tmp_path):
    jobs.trained(states, tmp_path / "run", kill_at=8)
    return tmp_path / "run"


def test_seconds_are_those_of_all_stretches(states, interrupted):
    made = jobs.trainer(states, interrupted)
    assert made.resume() and made.result.seconds > 0
    made.result.seconds += 1000  # as if the first stretch had been a long one
    assert made.run().seconds > 1000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "data_seed was 0, now 1"),
        ({"steps": 14}, "steps was 12, now 14"),
        ({"learning_rate": 1e-3}, "learning_rate was 0.003, now 0.001"),
        ({"convention": "specforge"}, "convention was served, now specforge"),
    ],
)
def test_changed_settings_refuse(states, interrupted, change, named):
    with pytest.raises(TrainingError, match=named):
        jobs.trainer(states, interrupted, **change).resume()


def test_changed_data_refuses(interrupted, tmp_path):
    other = jobs.tiny_store(tmp_path / "other", seed=1)
    with pytest.raises(TrainingError, match="states_sha256 was"):
        jobs.trainer(other, interrupted).resume()


def test_changed_points_refuse(states, interrupted):
    made = jobs.trainer(states, interrupted)
    made.store.manifest.points = [2, 4, 6]
    with pytest.raises(TrainingError, match=r"points was \[2, 4, 5\], now \[2, 4, 6\]"):
        made.resume()


def test_what_only_shows_may_change(states, interrupted):
    assert jobs.trainer(states, interrupted, log_every=5, evaluate_every=0, checkpoint_every=0, stuck_after=0).resume()


def test_damaged_checkpoint_is_passed_over(states, interrupted):
    notes: list[str] = []
    newest = max((interrupted / "checkpoints").iterdir())
    weights = newest / checkpoints.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    made = jobs.trainer(states, interrupted)
    made.note = notes.append
    assert made.resume() and made.result.steps_done < int(newest.name[5:])
    assert len(notes) == 1 and checkpoints.WEIGHTS in notes[0] and "passed over" in notes[0]
    for path in (interrupted / "checkpoints").iterdir():
        (path / checkpoints.STATE).write_text("{")
    assert not made.resume()


def test_unreadable_weights_are_an_error(states, interrupted):
    newest = max((interrupted / "checkpoints").iterdir())
    weights = newest / checkpoints.WEIGHTS
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(TrainingError, match="cannot be read"):
        jobs.trainer(states, interrupted).resume()


def test_doctor_agrees(interrupted, states):
    """A checkpoint tells the doctor's facts under the names of its checks; both judge a change alike."""
    run = checkpoints.newest(interrupted, print).state["run"]
    assert all(run[part] for part in PARTS) and run["scheduler"]["last_step"] == run["step"]
    names = set(jobs.trainer(states, interrupted).identity())
    assert names & set(LAYOUT_KEYS) - {"batch_tokens"} == names & set(checkpoints.MAY_DIFFER) - {"shards"}
    assert "data_seed" in ORDER_KEYS and {"points", "states_sha256", "convention"} <= names & set(DATA_KEYS)


def test_cases(tmp_path):
    """The case file's own inputs: refuse where it says error, note where it says warn, silence where it passes."""
    cases = yaml.safe_load((Path(__file__).parents[1] / "cases" / "data" / "training_run.yaml").read_text())["cases"]
    judged = 0
    for case in cases:
        given, now = case["input"].get("run", {}), case["input"].get("resume_with")
        if now is None:
            continue
        notes: list[str] = []
        found = checkpoints.Checkpoint(tmp_path, {"run": given})
        if case["severity"] == "error":
            with pytest.raises(TrainingError, match="data_seed was 1, now 2"):
                checkpoints.require_same(found, now, notes.append)
        else:
            checkpoints.require_same(found, now, notes.append)
        assert bool(notes) == (case["severity"] == "warn")
        judged += 1
    assert judged == 3


def test_disk_full_keeps_the_last(states, tmp_path, monkeypatch):
    from eagle3lab.core.errors import DiskError

    made = jobs.trainer(states, tmp_path, steps=9, evaluate_every=0)
    original = checkpoints.require_space
    calls: list[int] = []

    def full(folder: Path, needed: int, what: str) -> None:
        calls.append(needed)
        original(folder, needed if len(calls) == 1 else 1 << 60, what)

    monkeypatch.setattr(checkpoints, "require_space", full)
    with pytest.raises(DiskError, match="checkpoint of step 6"):
        made.run()
    assert calls[0] > 50_000
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000003"]
    shutil.rmtree(tmp_path)
