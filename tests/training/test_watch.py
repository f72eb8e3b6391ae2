"""Rows, JSON lines, TensorBoard; and the stops: not finite, or a loss that stays where it began, with their causes."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from eagle3lab.core.errors import TrainingError, UsageError
from eagle3lab.training import trainer, watch
from eagle3lab.training.distributed import World
from eagle3lab.training.trainer import Watching
from eagle3lab.training.watch import Guard, Lines, Window, chain_length, fc_stds
from tests.training import jobs


@pytest.fixture
def states(tmp_path):
    return jobs.tiny_store(tmp_path / "states", greedy=True)


def seen(losses: list[float], norms: list[float] | None = None) -> torch.Tensor:
    return torch.tensor(list(zip(losses, norms or [1.0] * len(losses), strict=True)), dtype=torch.float64)


def test_rows_say_what_the_batches_said(states, tmp_path):
    """A row over 4 steps is the mean of 4 rows over one; shares are divided at the end only."""
    each = jobs.trainer(states, tmp_path / "a", steps=4, log_every=1).run().history
    (together,) = jobs.trainer(states, tmp_path / "b", steps=4, log_every=4).run().history
    for name in ("loss", "gradient_norm"):
        assert math.isclose(together[name], sum(row[name] for row in each) / 4, rel_tol=1e-12)
    for k in range(3):
        hits, counted = (sum(row[name][k] for row in each) for name in ("hits", "counted"))
        assert together["accuracy_by_step"][k] == hits / counted
    assert together["simulated_accept_length"] == chain_length(together["accuracy_by_step"])
    assert together["expected_acceptance_by_step"] == each[-1]["expected_acceptance_by_step"], "of the last step"
    assert together["learning_rate"] == each[-1]["learning_rate"]
    assert (
        together["tokens_per_second"] > 0 and together["model_flop_utilisation"] > 0 and together["seconds_left"] == 0
    )
    assert json.loads((tmp_path / "b" / watch.LINES).read_text()) == together


def test_expected_acceptance_counts_out_of_vocabulary_as_missed(states, tmp_path):
    """sum(min(p, q)) by hand on the first batch; dividing by trained pairs alone would be the wrong version."""
    made = jobs.trainer(states, tmp_path, steps=1)
    share = made.reader(0)
    batch, bare = share.batch, share.bare
    labels = made.choice(batch)[bare.teacher]
    with torch.no_grad():
        p = (batch.last[bare.teacher] @ made.teacher_head.T).softmax(-1)
        hidden = made.drafter(batch, 3)
        total, counted, trained = [], [], []
        for k in range(3):
            q = made.drafter.lm_head(hidden[k][bare.rows[k]]).softmax(-1)
            known = bare.counted[k] & (labels >= 0)
            total.append(float(torch.minimum(p, q).sum(-1)[known].sum()))
            counted.append(int(bare.counted[k].sum()))
            trained.append(int(known.sum()))
    found = made.run().history[0]["expected_acceptance_by_step"]
    assert trained[0] < counted[0]
    for k in range(3):
        assert math.isclose(found[k], total[k] / counted[k], rel_tol=1e-5)
        assert not math.isclose(found[k], total[k] / trained[k], rel_tol=1e-2)


def test_chain_length():
    assert chain_length([0.5, 0.5, 0.5]) == 1 + 0.5 + 0.25 + 0.125
    assert chain_length([0.5, None, 0.5]) == 1.5, "unknown is no hit"


@pytest.mark.parametrize("chain", [None, 1, 3])
def test_held_out_chains_may_be_longer_than_the_training(states, tmp_path, monkeypatch, chain):
    """The wrong version, chains as deep as the training whatever is served, is the first case."""
    made, seen = jobs.trainer(states, tmp_path, ttt_steps=2, chain=chain), []
    walk = trainer.walk_samples
    monkeypatch.setattr(trainer, "walk_samples", lambda *args, **more: seen.append(args[2]) or walk(*args, **more))
    made.evaluate(0)
    assert seen == [chain or 2] and made.result.held_out[0]["chains"] > 0


def test_held_out_samples_are_read_outside_of_the_drafters_precision(states, tmp_path):
    """Online, reading a sample runs the target: in the wrong version under the drafter's autocast."""
    made, seen = jobs.trainer(states, tmp_path, precision="bf16"), []
    original = type(made.store).__getitem__

    class Noted(type(made.store)):
        def __getitem__(self, index):
            seen.append(torch.is_autocast_enabled("cpu"))
            return original(self, index)

    made.store.__class__ = Noted
    made.evaluate(0)
    assert seen and not any(seen)
    with made._precision():
        assert torch.is_autocast_enabled("cpu"), "or the test could not fail"


def test_a_resume_with_another_patience_judges_nothing():
    """Losses from before the resume are not known: judged alone, a plateau after it would look stuck."""
    first = Guard(0)
    first.see(50, torch.full((50, 2), 2.0), lambda _: [])
    again = Guard(60)
    again.restore(first.state())
    again.see(80, torch.full((30, 2), 2.0), lambda _: [])
    assert again.step == 80
    with pytest.raises(TrainingError, match="it began at 2"):
        Guard(60).see(80, torch.full((80, 2), 2.0), lambda _: [])


def test_fc_ratio():
    fc = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    expected = [float(block.std(correction=0)) for block in fc.chunk(3, -1)]
    assert fc_stds(fc, 3, World()) == pytest.approx(expected, rel=1e-6)


def test_nothing_counted_is_unknown():
    window = Window(1)
    sums = watch.StepSums(*(torch.zeros(1, dtype=torch.float64) for _ in range(4)))
    window.add(torch.tensor(1.0), torch.tensor(1.0), sums)
    window.fetch(World())
    assert window.row()["accuracy_by_step"] == [None]
    json.dumps(window.row(), allow_nan=False)


def test_lines_are_cut_at_the_checkpoint(states, tmp_path):
    jobs.trained(states, tmp_path, kill_at=11)
    before = (tmp_path / watch.LINES).read_text().splitlines()
    assert [json.loads(line)["step"] for line in before] == list(range(1, 12))
    jobs.trained(states, tmp_path)
    after = [json.loads(line) for line in (tmp_path / watch.LINES).read_text().splitlines()]
    assert [row["step"] for row in after] == list(range(1, 13))


def test_tensorboard(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = Lines(tmp_path, [], tensorboard=True)
    lines.write({"step": 10, "loss": 2.5, "accuracy_by_step": [0.25, None]})
    lines.close()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["accuracy_by_step/0", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 2.5)]


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        Lines(tmp_path, [], tensorboard=True)


def test_nan_stops_and_names_the_sample(states, tmp_path):
    made = jobs.trainer(states, tmp_path)
    bad = made.plan.step(2)[1]
    original = type(made.store).__getitem__

    class Broken(type(made.store)):
        def __getitem__(self, index):
            sample = original(self, index)
            if index == bad:
                sample.aux[5, 3] = float("nan")
            return sample

    made.store.__class__ = Broken
    with pytest.raises(TrainingError, match=rf"at step 3; .*likely: sample {bad}: aux is not finite at token 5"):
        made.run()
    steps = [row["step"] for row in made.result.history]
    assert steps == [1, 2], "nothing of the bad step is written"


def test_a_rate_too_high_is_named():
    guard = Guard(0)
    norms = [1.0, 1.1, 0.9, 1.0, 40.0, float("inf")]
    with pytest.raises(TrainingError, match=r"learning rate too high: the gradient norm rose from 0\.95 to 40"):
        guard.see(6, seen([2.0] * 5 + [float("nan")], norms), lambda _: [])


def test_nan_between_rows_is_never_saved(states, tmp_path):
    """log_every 10, checkpoint_every 3: the checkpoint looks first."""
    made = jobs.trainer(states, tmp_path, log_every=10)
    original = made.step

    def stepping(step, *args, **kwargs):
        loss, norm, sums = original(step, *args, **kwargs)
        return (loss * float("nan") if step == 4 else loss), norm, sums

    made.step = stepping
    with pytest.raises(TrainingError, match=r"loss nan, .* at step 5"):
        made.run()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000003"]


def noisy(start: float, end: float, steps: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [end + (start - end) * math.exp(-step / 25) + chance.gauss(0, 0.4) for step in range(steps)]


@pytest.mark.parametrize("seed", range(10))
def test_stuck_and_falling_losses_are_told_apart(seed):
    for start, end in ((18.0, 13.0), (10.0, 9.0), (3.0, 2.0)):
        guard = Guard(100)
        guard.see(150, seen(noisy(start, end, 150, seed)), lambda _: [])
        assert guard.step == 150 and guard.losses == []
    guard = Guard(100)
    with pytest.raises(TrainingError, match="after 100 steps, it began at"):
        guard.see(150, seen(noisy(9.0, 9.0, 150, seed)), lambda _: [])
    Guard(0).see(150, seen(noisy(9.0, 9.0, 150, seed)), lambda _: [])


STUCK = {"steps": 60, "stuck_after": 30, "log_every": 10, "checkpoint_every": 0, "evaluate_every": 0}


def test_stuck_by_a_rate_of_nothing(states, tmp_path):
    with pytest.raises(TrainingError, match="likely: learning_rate 1e-12 is too low"):
        jobs.trainer(states, tmp_path, learning_rate=1e-12, **STUCK).run()


def test_stuck_causes_in_the_states(states, tmp_path):
    from eagle3lab.training.causes import of_stuck_loss

    made = jobs.trainer(states, tmp_path)
    made.guard.norms = [1.0]
    original = type(made.store).__getitem__

    def with_change(change):
        class Changed(type(made.store)):
            def __getitem__(self, index):
                sample = original(self, index)
                change(sample)
                return sample

        made.store.__class__ = Changed
        return " ".join(of_stuck_loss(made))

    def same_block(sample):
        sample.aux[:, 32:64] = sample.aux[:1, 32:64].clone()

    def same_last(sample):
        sample.last[:] = sample.last[:1].clone()

    assert "states at point 4 are the same" in with_change(same_block)
    assert "point 2" not in with_change(same_block)
    assert "the last state is the same at every token" in with_change(same_last)


def test_stuck_cause_in_the_teacher(tmp_path):
    """Text that the target did not write is no greedy text; text that it did write raises no suspicion."""
    from eagle3lab.training.causes import of_stuck_loss

    made = jobs.trainer(jobs.tiny_store(tmp_path / "random", greedy=True), tmp_path)
    made.guard.norms = [1.0]
    assert "the teacher chooses the target's own greedy text in" in " ".join(of_stuck_loss(made))
    own = jobs.trainer(jobs.tiny_store(tmp_path / "own", greedy=True, own_text=True), tmp_path)
    own.guard.norms = [1.0]
    assert of_stuck_loss(own) == []


def test_too_little_memory_by_option(states, tmp_path):
    with pytest.raises(TrainingError, match="training needs about"):
        jobs.trainer(states, tmp_path, watching=Watching(matrix_rate=1e9, memory_bytes=0)).run()
