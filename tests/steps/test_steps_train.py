"""A training that was cut short is gone on with, a finished one is not; a run keeps its loss mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.core.files import write_json
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import find_preset
from eagle3lab.steps import verbs
from eagle3lab.steps.train import TRAINING, train_drafter, train_settings


@pytest.mark.parametrize("truncated", [True, False])
def test_only_a_truncated_training_is_gone_on_with(
    truncated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured with its drafter goes with it; a finished training and its measurements stay."""
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path))
    run = Run.create("smollm2", "quick")
    for step in ("capture", "accept"):
        with run.recording(step):
            pass
    with run.recording("train"):
        facts = {"history": [], "held_out": [], "parameters": 1, "seconds": 1.0, "truncated": truncated}
        write_json(run.path / TRAINING, facts)

    def going_on(_: str) -> None:
        raise UsageError("the training goes on")

    monkeypatch.setattr("eagle3lab.steps.train.load_profile", going_on)
    if truncated:
        with pytest.raises(UsageError, match="goes on"):
            train_drafter(run)
    else:
        assert not train_drafter(run).truncated
    states = [run.step_state(step) for step in ("capture", "train", "accept")]
    assert states == (["ok", "error", "missing"] if truncated else ["ok"] * 3)


def test_the_convention_is_a_parameter_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps its mask: with another one it would train another drafter under the same name."""
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path))
    run = Run.create("smollm2", "quick", {"convention": "specforge"})
    assert train_settings(run.preset, 0, 3, "float32").convention == "specforge"
    assert train_settings(find_preset("quick"), 0, 3, "float32").convention == "served"
    with pytest.raises(UsageError, match=r"--convention served: .* was made for 'specforge'.*without --run"):
        verbs.train(str(run.path), "smollm2", "quick", convention="served", max_minutes=None, note=print)
    with pytest.raises(UsageError, match=r"convention is 'specforg'; did you mean 'specforge'\?"):
        Run.create("smollm2", "quick", {"convention": "specforg"})
