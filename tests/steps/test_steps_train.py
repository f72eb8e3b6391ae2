"""A training that was cut short stays one, whoever goes on with its run, and so does its loss mask."""

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
def test_a_truncated_training_is_told_again(truncated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path))
    run = Run.create("smollm2", "quick")
    with run.recording("train"):
        facts = {"history": [], "held_out": [], "parameters": 1, "seconds": 1.0, "truncated": truncated}
        write_json(run.path / TRAINING, facts)
    run.set_truncated(False)  # as a chain of notebooks does when it goes on
    assert train_drafter(run).truncated == truncated
    assert run.status.truncated == truncated


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
