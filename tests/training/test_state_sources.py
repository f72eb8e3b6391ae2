"""Training on what is not a finished folder: states made in the job, and states that are still being captured."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.capture.transformers_engine import capture_batch, plan_shards
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import folder_lock
from eagle3lab.corpus.chat import Rendered
from eagle3lab.training import sources
from eagle3lab.training.batches import BatchPlan, ahead
from eagle3lab.training.sources import FollowedStates, OnlineStates
from eagle3lab.training.trainer import Trainer, TrainSettings, Watching
from tests.tiny import VOCAB, tiny_drafter, tiny_target
from tests.training import jobs

SAMPLES = 24


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def corpus() -> list[Rendered]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(SAMPLES):
        length = int(torch.randint(12, 40, (), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        made.append(Rendered(ids, [place > length // 3 for place in range(length)]))
    return made


@pytest.fixture(scope="module")
def shards(corpus) -> list[list[int]]:
    return plan_shards([len(sample.input_ids) for sample in corpus], 150)


def write(writer: StoreWriter, target, corpus, shards, index: int) -> None:
    writer.write(index, [capture_batch(target, corpus, [m], writer.manifest.points)[m] for m in shards[index]])


@pytest.fixture
def stored(target, corpus, shards, tmp_path):
    folder = tmp_path / "stored"
    writer = StoreWriter(folder, jobs.manifest(len(shards)))
    for index in range(len(shards)):
        write(writer, target, corpus, shards, index)
    return Store(folder)


def curve(target, states, folder: Path, first_epoch=None, **changes) -> tuple[list[float], list]:
    settings = TrainSettings(**(jobs.SETTINGS | {"checkpoint_every": 0} | changes))
    made = Trainer(
        tiny_drafter(target), target, states, range(SAMPLES - 4), range(SAMPLES - 4, SAMPLES), settings, folder,
        watching=Watching(matrix_rate=1e9), first_epoch=first_epoch, note=lambda _: None,
    )  # fmt: skip
    result = made.run()
    return [row["loss"] for row in result.history], result.held_out


def test_online_equals_stored(target, corpus, stored, tmp_path):
    online = OnlineStates(target, corpus, jobs.manifest(1))
    before = set(tmp_path.rglob("*.safetensors"))
    assert curve(target, online, tmp_path / "online") == curve(target, stored, tmp_path / "disk")
    new = {path.parent.name for path in set(tmp_path.rglob("*.safetensors")) - before}
    assert new == {"fc_snapshots"}, "no states on disk"
    # the wrong version: the states of the neighbouring point
    wrong = jobs.manifest(1).model_copy(update={"points": [2, 4, 6]})
    assert curve(target, OnlineStates(target, corpus, wrong), tmp_path / "wrong") != curve(
        target, stored, tmp_path / "x"
    )


def groups(shards) -> list[list[int]]:
    found = [[member for member in shard if member < SAMPLES - 4] for shard in shards]
    return [one for one in found if one]


def test_first_epoch_goes_by_shards(corpus, shards):
    lengths = [len(sample.input_ids) for sample in corpus]
    plan = BatchPlan(lengths, range(SAMPLES - 4), 60, 0, groups(shards))
    order, steps = [], 0
    while plan.position(steps)[0] == 0:
        order += plan.step(steps)
        steps += 1
    assert sorted(order) == list(range(SAMPLES - 4))
    owner = {member: number for number, shard in enumerate(shards) for member in shard}
    assert [owner[m] for m in order] == sorted(owner[m] for m in order), "no shard is needed before its turn"
    assert order != sorted(order), "but within a shard the order is random"
    plain = BatchPlan(lengths, range(SAMPLES - 4), 60, 0)
    beginning = [member for step in range(3) for member in plain.step(step)]
    assert any(owner[m] > 1 for m in beginning), "the usual order would wait for the last shard at once"


def test_training_runs_while_capture_goes_on(target, corpus, shards, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "POLL_SECONDS", 0.02)
    folder, notes, first_step = tmp_path / "growing", [], []
    followed = FollowedStates(folder, corpus, jobs.manifest(len(shards)), shards, note=notes.append)

    def capturing() -> None:
        with folder_lock(folder):
            writer = StoreWriter(folder, jobs.manifest(len(shards)))
            for index in range(len(shards)):
                time.sleep(0.1)
                write(writer, target, corpus, shards, index)
                if index == 1:  # the last shards appear only after the first step was done
                    while not first_step:
                        time.sleep(0.01)

    thread = threading.Thread(target=capturing)
    thread.start()
    settings = {"batch_tokens": 60, "steps": 16}
    original = Trainer.step

    def stepping(self, step, *args, **kwargs):
        first_step.append(step)
        return original(self, step, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", stepping)
    losses, held_out = curve(target, followed, tmp_path / "a", groups(shards), **settings)
    thread.join()
    assert notes and notes[0] == f"waiting for shard 1 of {len(shards)}"
    again, held_again = curve(target, stored, tmp_path / "b", groups(shards), **settings)
    assert losses == again and held_out == held_again, "when shards appear does not matter"
    assert len(followed.manifest.shards) == len(shards)


def test_nobody_captures(corpus, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sources, "GRACE_SECONDS", 0.05)
    followed = FollowedStates(tmp_path / "x", corpus, jobs.manifest(len(shards)), shards, note=lambda _: None)
    with pytest.raises(StoreError, match=r"shard 1 of \d+ is not in .*next: eagle3lab capture"):
        followed[0]


def test_a_training_that_ends_does_not_wait_for_a_shard(corpus, shards, tmp_path, monkeypatch):
    """The wrong version waits for the reading thread, which waits for another process."""
    monkeypatch.setattr(sources, "POLL_SECONDS", 60)
    notes = []
    followed = FollowedStates(tmp_path / "x", corpus, jobs.manifest(len(shards)), shards, note=notes.append)
    with folder_lock(tmp_path / "x"):
        shares = ahead(lambda step: followed[0] if step else "ready", range(3), end=followed.stop_waiting)
        assert next(shares) == (0, "ready")
        while not notes:
            time.sleep(0.01)
        started = time.monotonic()
        shares.close()
    assert notes == [f"waiting for shard 1 of {len(shards)}"] and time.monotonic() - started < 20


def test_other_inputs_and_other_tokens_are_refused(target, corpus, shards, stored):
    def follow(manifest: StatesManifest, samples: list[Rendered]) -> FollowedStates:
        return FollowedStates(stored.folder, samples, manifest, shards, note=lambda _: None)

    good = follow(jobs.manifest(len(shards)), corpus)
    assert torch.equal(good[3].aux, stored[3].aux) and torch.equal(good.loss_mask(3), stored.loss_mask(3))
    moved = jobs.manifest(len(shards)).model_copy(update={"points": [2, 4, 6]})
    with pytest.raises(StoreError, match="captured with other inputs"):
        follow(moved, corpus)[0]
    swapped = [Rendered(list(reversed(sample.input_ids)), sample.loss_mask) for sample in corpus]
    with pytest.raises(StoreError, match="other tokens than sample 0"):
        follow(jobs.manifest(len(shards)), swapped)[0]


def test_the_reader_leaves_the_other_cores_to_the_training():
    """Two teams of OpenMP threads on the same cores wait for each other: a step took 1.5 times as long."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen = [(made, torch.get_num_threads()) for _, made in ahead(lambda _: torch.get_num_threads(), range(3))]
    finally:
        torch.set_num_threads(before)
    assert seen == [(1, 3)] * 3, "one thread in the reader, three in the caller"
