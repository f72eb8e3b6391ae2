"""A head that stays the target's rows, and the feature term: in a whole training, over ranks and after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3lab.core.errors import TrainingError
from eagle3lab.training.trainer import Trainer
from tests.training import jobs

WITH = {"train_lm_head": False, "feature_weight": 3.0, "head_rows": 30, "full_head_share": 0.0, "log_every": 2}


@pytest.fixture(scope="module")
def straight(states: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """An uninterrupted training of one rank."""
    return jobs.trained(states, tmp_path_factory.mktemp("straight"), **WITH)


def test_the_head_stays_and_the_term_falls(states: Path, tmp_path: Path) -> None:
    made = jobs.trainer(states, tmp_path, **WITH)
    head, fc = made.drafter.lm_head.weight.clone(), made.drafter.fc.weight.clone()
    rows = made.run().history
    assert torch.equal(made.drafter.lm_head.weight, head) and not torch.equal(made.drafter.fc.weight, fc)
    hardly = jobs.trainer(states, tmp_path / "hardly", **WITH | {"feature_weight": 1e-6}).run().history
    with_it, without_it = (sum(one[-1]["feature_error_by_step"]) for one in (rows, hardly))
    assert with_it < 0.95 * without_it, "the term is what brings the states nearer"
    without = jobs.trainer(states, tmp_path / "without", **WITH | {"feature_weight": 0.0}).run().history
    assert without[-1]["feature_error_by_step"] is None


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_train_as_one(states: Path, straight: dict, tmp_path: Path, shards: int) -> None:
    together = jobs.trained(states, tmp_path, ranks=2, shards=shards, **WITH)
    for one, other in zip(together["history"], straight["history"], strict=True):
        for name in ("loss", "gradient_norm", "feature_error_by_step"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), (one["step"], name)
    other_weight = jobs.trained(states, tmp_path / "other", **WITH | {"feature_weight": 2.0})
    assert other_weight["history"][-1]["loss"] != pytest.approx(straight["history"][-1]["loss"], rel=1e-4)


def test_killed_and_resumed(states: Path, straight: dict, tmp_path: Path) -> None:
    jobs.trained(states, tmp_path, kill_at=7, **WITH)
    assert jobs.trained(states, tmp_path, **WITH) == straight


def test_states_of_another_size_are_refused(states: Path, tmp_path: Path) -> None:
    made = jobs.trainer(states, tmp_path)
    made.drafter.config = made.drafter.config.model_copy(update={"hidden_size": 48})
    with pytest.raises(TrainingError, match="a drafter of hidden size 48 and a target of"):
        Trainer(
            made.drafter, None, made.store, made.train, [], replace(made.settings, feature_weight=1.0), tmp_path
        )  # fmt: skip
