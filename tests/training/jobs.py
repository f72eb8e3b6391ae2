"""Small trainings in processes of their own: forked from a server that has imported everything once."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.store import Sample, Store, StoreWriter
from eagle3lab.training.distributed import join
from eagle3lab.training.trainer import Trainer, TrainResult, TrainSettings, Watching
from tests.tiny import BLOCKS, HIDDEN, POINTS, VOCAB, tiny_drafter, tiny_target

SAMPLES, HELD_OUT = 20, 4
SETTINGS = {
    "steps": 12,
    "batch_tokens": 120,
    "ttt_steps": 3,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "log_every": 1,
    "evaluate_every": 4,
    "checkpoint_every": 3,
}


def manifest(shards: int, *, seed: int = 0, greedy: bool = False) -> StatesManifest:
    """Of states that the tiny target makes."""
    return StatesManifest(
        target_id="tiny",
        target_weight_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        template_sha256="0" * 64,
        points=POINTS,
        points_checkpoint=[1, 3, 4],
        blocks=BLOCKS,
        family="llama",
        hidden_size=HIDDEN,
        dtype="float32",
        last="post_norm",
        engine="test",
        corpus_sha256="0" * 64,
        greedy=greedy,
        seed=seed,
        planned_shards=shards,
    )


def tiny_store(
    folder: Path,
    *,
    seed: int = 0,
    samples: int = SAMPLES,
    shards: int = 1,
    greedy: bool = False,
    own_text: bool = False,
) -> Path:
    """States of the tiny target, fp32, 10 to 49 tokens a sample, the last two thirds supervised.

    Args:
        own_text: the supervised tokens are the target's own greedy choice, not random ones.
    """
    target = tiny_target()
    generator = torch.Generator().manual_seed(seed)
    writer, made = StoreWriter(folder, manifest(shards, seed=seed, greedy=greedy)), []
    for index in range(samples):
        length = int(torch.randint(10, 50, (), generator=generator))
        ids = torch.randint(0, VOCAB, (1, length), generator=generator)
        for place in range(length // 3 + 1, length if own_text else 0):
            ids[0, place] = target.logits(target.states(ids[:, :place])[0][0, -1]).argmax()
        last, states = target.states(ids, points=POINTS)
        made.append(Sample(index, ids[0], torch.arange(length) > length // 3, torch.cat(states, -1)[0], last[0]))
    each = -(-samples // shards)
    for index in range(shards):
        writer.write(index, made[index * each : (index + 1) * each])
    return folder


def trainer(
    states: Path, folder: Path, *, shards: int = 1, watching: Watching | None = None, **changes: Any
) -> Trainer:
    """A training of the tiny drafter on this process's ranks."""
    target, store = tiny_target(), Store(states)
    settings = TrainSettings(**(SETTINGS | changes))
    return Trainer(
        tiny_drafter(target), target, store, range(len(store) - HELD_OUT), range(len(store) - HELD_OUT, len(store)),
        settings, folder, world=join(shards), watching=watching or Watching(matrix_rate=1e9), note=lambda _: None,
    )  # fmt: skip


def train(states: Path, folder: Path, kill_at: int | None, shards: int, changes: dict[str, Any]) -> None:
    """Job: train or go on, and write `result.json`; SIGKILL itself right after step `kill_at`."""
    made = trainer(states, folder, shards=shards, **changes)
    made.resume()
    step = made.step

    def stepping(index: int, *args: Any, **kwargs: Any) -> Any:
        if kill_at is not None and index >= kill_at:
            os.kill(os.getpid(), 9)
        return step(index, *args, **kwargs)

    made.step = stepping  # type: ignore[method-assign]
    result = made.run()
    if made.world.leader:
        (folder / "result.json").write_text(json.dumps(_rows(result)))
    made.world.leave()


def _rows(result: TrainResult) -> dict[str, Any]:
    clock = ("tokens_per_second", "model_flop_utilisation", "seconds_left")
    history = [{name: value for name, value in row.items() if name not in clock} for row in result.history]
    return {"history": history, "held_out": result.held_out, "best": result.best}


def _ranked(rank: int, size: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    work(*args)


def launch(work: Callable[..., None], *args: Any, ranks: int = 1) -> list[int]:
    """Run `work(*args)` on `ranks` ranks; returns their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.preloaded"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=_ranked, args=(rank, ranks, port, work, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    return [process.exitcode for process in processes]


def trained(
    states: Path, folder: Path, *, ranks: int = 1, shards: int = 1, kill_at: int | None = None, **changes: Any
) -> Any:
    """Result of a training job, or None when it was killed."""
    codes = launch(train, states, folder, kill_at, shards, changes, ranks=ranks)
    if kill_at is not None:
        assert -9 in codes, codes
        return None
    assert codes == [0] * ranks, codes
    return json.loads((folder / "result.json").read_text())
