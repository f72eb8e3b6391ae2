"""Served capture end to end against a stand-in server: the same folder contents as capture in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3lab.capture.plan import HOOK_FILE
from eagle3lab.capture.served import agreement, capture_served, head_weight
from eagle3lab.capture.sglang_hook import create
from eagle3lab.capture.shards import shard_name
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.core.errors import ServerError, StoreError
from eagle3lab.corpus.chat import Rendered
from tests.capture.capturing import conversations, manifest, run_capture, split
from tests.capture.fake_sglang import Engine, FakeServer
from tests.tiny import POINTS, tiny_target

TARGET = tiny_target()


def target_states(ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    last, states = TARGET.states(ids[None], points=POINTS)
    return [state[0] for state in states], last[0]


def greedy_conversations() -> list[Rendered]:
    """Conversations whose replies are the target's own greedy text, so that its states predict them."""
    made = []
    for sample in conversations():
        prompt = sample.input_ids[: len(sample.input_ids) // 3 + 1]
        ids = list(prompt)
        while len(ids) < len(sample.input_ids):
            ids.append(int(TARGET.logits(TARGET.states(torch.tensor([ids]))[0][:, -1]).argmax()))
        made.append(Rendered(ids, [place >= len(prompt) for place in range(len(ids))]))
    return made


SAMPLES = greedy_conversations()


def share(path: Path, head: torch.Tensor = TARGET.head.weight) -> float:
    agreeing, checked = agreement(path, head)
    return agreeing / checked


class Scene:
    def __init__(self, folder: Path) -> None:
        self.exchange, self.states = folder / "exchange", folder / "states"
        self.engine = Engine(create({"exchange": str(self.exchange)}), target_states)
        self.notes: list[str] = []

    def capture(self, **options: object) -> dict[int, float]:
        writer = StoreWriter(self.states, manifest(engine="sglang"), note=self.notes.append)
        with FakeServer(self.engine) as server:
            self.server = server
            given = {"head": TARGET.head.weight, "concurrency": 5, "receipt_seconds": 10.0, "note": self.notes.append}
            return capture_served(
                SAMPLES, writer, split(SAMPLES), server=server.url, exchange=self.exchange, **(given | options)
            )


def test_the_same_samples_and_states_as_in_process(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    rates = scene.capture()
    store = Store(scene.states, points=POINTS, verify=True)
    assert len(store) == len(SAMPLES)
    assert rates.keys() == set(range(len(split(SAMPLES))))
    assert min(rates.values()) > 0.95
    worst = 0.0
    for index, sample in enumerate(SAMPLES):
        found = store[index]
        assert found.input_ids.tolist() == sample.input_ids
        assert found.loss_mask.tolist() == sample.loss_mask
        aux, last = target_states(found.input_ids)
        worst = max(worst, float((found.aux - torch.cat(aux, -1)).abs().max() / torch.cat(aux, -1).abs().max()))
        worst = max(worst, float((found.last - last).abs().max() / last.abs().max()))
    assert worst < 2**-8
    assert [path.name for path in scene.exchange.iterdir()] == [HOOK_FILE], "the exchange is cleaned up"


def test_resume_redoes_only_what_is_missing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.capture()
    stamps = {path.name: path.stat().st_mtime_ns for path in scene.states.glob("states-*")}
    (scene.states / shard_name(1)).unlink()
    scene.capture()
    assert scene.server.requests == len(split(SAMPLES)[1])
    again = {path.name: path.stat().st_mtime_ns for path in scene.states.glob("states-*")}
    assert {name for name in stamps if stamps[name] != again[name]} == {shard_name(1)}
    Store(scene.states, verify=True)
    scene.capture()
    assert scene.server.requests == 0


def test_without_the_hook_nothing_is_sent(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (scene.exchange / HOOK_FILE).unlink()
    with pytest.raises(ServerError, match="without the capture hook"):
        scene.capture()
    assert scene.server.requests == 0


def test_a_hook_that_sees_nothing_is_an_error(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engine.hook = lambda *_: None
    with pytest.raises(ServerError, match="has not written states-00000"):
        scene.capture(receipt_seconds=0.2)


def test_the_hooks_reason_reaches_the_user_and_the_next_try_works(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.engine.states = lambda ids: (target_states(ids)[0][:2], target_states(ids)[1])
    with pytest.raises(StoreError, match="3 points x 32 = 96"):
        scene.capture()
    scene.engine.states = target_states
    scene.capture()
    Store(scene.states, verify=True)


def test_an_outlier_shard_is_refused_and_redone(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    wrong = {tuple(SAMPLES[sample].input_ids) for sample in split(SAMPLES)[2]}

    def swapped(ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        aux, last = target_states(ids)
        belongs = any(sample[: len(ids)] == tuple(ids.tolist()) for sample in wrong)
        return aux, last.flip(0) if belongs else last

    scene.engine.states = swapped
    with pytest.raises(StoreError, match=r"states-00002\.safetensors 0\.\d+; the best shard has"):
        scene.capture()
    scene.engine.states = target_states
    scene.capture()
    store = Store(scene.states, verify=True)
    rates = [share(scene.states / shard.name) for shard in store.manifest.shards]
    assert min(rates) > 0.95


def test_agreement_counts_supervised_positions_alone(tmp_path: Path) -> None:
    run_capture(tmp_path / "random")  # random text: the target predicts it about once in 97 tokens
    assert share(tmp_path / "random" / shard_name(0)) < 0.3
    scene = Scene(tmp_path)
    scene.capture()
    assert share(scene.states / shard_name(0), TARGET.head.weight.roll(1, 0)) < 0.3
    _, checked = agreement(scene.states / shard_name(0), TARGET.head.weight)
    assert checked == sum(sum(SAMPLES[sample].loss_mask) for sample in split(SAMPLES)[0])
    assert agreement(scene.states / shard_name(0), TARGET.head.weight, positions=10) == (10, 10)


def test_the_head_of_a_folder_is_found_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(StoreError, match="lm_head"):
        head_weight(tmp_path)
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    assert head_weight(tmp_path).sum() == 4
    save_file({"language_model.lm_head.weight": torch.zeros(2, 2)}, tmp_path / "b.safetensors")
    assert head_weight(tmp_path).sum() == 0
