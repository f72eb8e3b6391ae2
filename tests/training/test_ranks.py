"""Several ranks train as one: the same batch a step, the same curve, checkpoints that any number of ranks continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3lab.core.errors import TrainingError
from eagle3lab.training import batches, checkpoints
from eagle3lab.training.batches import BatchPlan, deal
from eagle3lab.training.distributed import join
from tests.training import jobs

SHORT = {"steps": 8, "evaluate_every": 0}


@pytest.fixture(scope="module")
def alone(states, tmp_path_factory):
    return jobs.trained(states, tmp_path_factory.mktemp("alone"))


def apart(ours: dict, theirs: dict) -> float:
    """Largest relative difference of two curves: loss, gradient norm, and loss of every TTT step."""
    pairs = []
    for one, other in zip(ours["history"], theirs["history"], strict=True):
        assert one["step"] == other["step"] and one["counted"] == other["counted"]
        pairs += [(one[name], other[name]) for name in ("loss", "gradient_norm")]
        pairs += zip(one["loss_by_step"], other["loss_by_step"], strict=True)
        pairs += zip(one["expected_acceptance_by_step"], other["expected_acceptance_by_step"], strict=True)
        pairs += zip(one["fc_std_ratio_by_point"], other["fc_std_ratio_by_point"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_curve_equals_one_ranks(states, alone, tmp_path, ranks, shards):
    together = jobs.trained(states, tmp_path, ranks=ranks, shards=shards)
    assert apart(together, alone) < 1e-5
    for one, other in zip(together["held_out"], alone["held_out"], strict=True):
        assert one["chains"] == other["chains"] and one["accepted"] == other["accepted"]
    names = {path.suffix for path in (tmp_path / "checkpoints").glob("*/*")}
    assert names == {".safetensors", ".json"}, "nothing that would have to be unpickled"


def test_some_rank_had_nothing_to_do(states):
    """The comparison above includes steps in which a rank only computed along."""
    made = BatchPlan([10] * 3 + [70] * 3, range(6), 75, 0)
    assert [] in deal(made.step(0), made.lengths, 4)
    store = jobs.trainer(states, states.parent / "unused")
    hands = [deal(store.plan.step(step), store.plan.lengths, 4) for step in range(12)]
    assert any([] in hand for hand in hands)


def _own_divisor(states: Path, folder: Path) -> None:
    """Job, the usual mistake: every rank divides by its own supervised tokens, then gradients are averaged."""
    made = jobs.trainer(states, folder, **SHORT)
    original = batches.supervise

    def alone(*args, counts, **kwargs):
        own = original(*args, counts=None, **kwargs) if args[1].mask.any() else original(*args, counts=counts, **kwargs)
        return batches.replace(own, weights=own.weights / made.world.size)

    batches.supervise = alone
    result = made.run()
    if made.world.leader:
        (folder / "result.json").write_text(json.dumps(jobs._rows(result)))
    made.world.leave()


def test_own_divisor_is_caught(states, tmp_path):
    right = jobs.trained(states, tmp_path / "right", **SHORT)
    assert jobs.launch(_own_divisor, states, tmp_path, ranks=2) == [0, 0]
    wrong = json.loads((tmp_path / "result.json").read_text())
    assert apart(wrong, right) > 1e-2


@pytest.mark.parametrize("convention", ["specforge", "speculators"])
def test_other_conventions_divide_by_the_whole_too(states, tmp_path, convention):
    # specforge divides by the padded batch
    one = jobs.trained(states, tmp_path / "one", convention=convention, **SHORT)
    two = jobs.trained(states, tmp_path / "two", ranks=2, convention=convention, **SHORT)
    assert apart(two, one) < 1e-5


def test_four_ranks_checkpoint_resumes_on_two_and_on_one(states, alone, tmp_path):
    jobs.trained(states, tmp_path, ranks=4, shards=4, kill_at=5)
    found = checkpoints.newest(tmp_path, print)
    assert found.step in (3, 4) and len(found.state["files"]) == 4
    jobs.trained(states, tmp_path, ranks=2, shards=2, kill_at=8)
    assert len(checkpoints.newest(tmp_path, print).state["files"]) == 2
    notes: list[str] = []
    last = jobs.trainer(states, tmp_path)
    last.note = notes.append
    assert last.resume() and last.result.steps_done >= 6
    assert "world_size was 2, now 1" in notes[0] and "shards was 2, now 1" in notes[1]
    assert apart(jobs._rows(last.run()), alone) < 1e-5


def test_one_ranks_checkpoint_resumes_on_two(states, alone, tmp_path):
    jobs.trained(states, tmp_path, kill_at=7)
    assert apart(jobs.trained(states, tmp_path, ranks=2, shards=2), alone) < 1e-5


def test_two_ranks_resume_exactly(states, tmp_path):
    """Between equal numbers of ranks a resume is exact to the bit here too."""
    straight = jobs.trained(states, tmp_path / "straight", ranks=2, shards=2)
    jobs.trained(states, tmp_path / "killed", ranks=2, shards=2, kill_at=7)
    assert jobs.trained(states, tmp_path / "killed", ranks=2, shards=2) == straight


def test_bf16(states, tmp_path):
    one = jobs.trained(states, tmp_path / "one", precision="bf16", **SHORT)
    two = jobs.trained(states, tmp_path / "two", ranks=2, shards=2, precision="bf16", **SHORT)
    assert apart(two, one) < 3e-2


def _failing(states: Path, folder: Path) -> None:
    """Job: rank 1 cannot go on, and says so; rank 0 must not wait for ever."""
    made = jobs.trainer(states, folder, **SHORT)

    def failed() -> str:
        raise TrainingError("no such thing")

    try:
        made.world.lead(failed)
    except TrainingError as error:
        (folder / f"rank-{made.world.rank}").write_text(str(error))
    made.world.leave()


def test_an_error_of_rank_0_reaches_all(states, tmp_path):
    assert jobs.launch(_failing, states, tmp_path, ranks=2) == [0, 0]
    assert (tmp_path / "rank-0").read_text() == "no such thing"
    assert (tmp_path / "rank-1").read_text() == "rank 0: no such thing"


def test_shards_must_divide(monkeypatch):
    with pytest.raises(TrainingError, match="--shards 2 on 1 ranks"):
        join(2)


def test_every_step_is_dealt_out_whole():
    lengths = torch.randint(5, 90, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = BatchPlan(lengths, range(60), 300, 3)
    for step in range(30):
        for ranks in (1, 2, 3, 8):
            hands = deal(plan.step(step), lengths, ranks)
            assert len(hands) == ranks and sorted(m for hand in hands for m in hand) == sorted(plan.step(step))
            heaviest = max(sum(lengths[m] for m in hand) for hand in hands)
            assert heaviest <= sum(lengths[m] for m in plan.step(step)) / ranks + max(lengths)
    assert deal(plan.step(0), lengths, 1) == [plan.step(0)], "one rank keeps the plan's order"
