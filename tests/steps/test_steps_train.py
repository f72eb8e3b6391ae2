"""A training that was cut short stays one, whoever goes on with its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.core.files import write_json
from eagle3lab.runs.directory import Run
from eagle3lab.steps.train import TRAINING, train_drafter


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
