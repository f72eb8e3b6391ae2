"""A capture of seconds: 24 short conversations of a random 8-block Llama, in six shards; and a process to kill."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch

from eagle3lab.capture import shards
from eagle3lab.capture.manifest import MANIFEST, StatesManifest
from eagle3lab.capture.store import StoreWriter
from eagle3lab.capture.transformers_engine import capture, plan_shards
from eagle3lab.core import files
from eagle3lab.corpus.chat import Rendered
from tests.tiny import BLOCKS, HIDDEN, POINTS, VOCAB, tiny_target

TOKENS_PER_SHARD = 160


def conversations(seed: int = 0, count: int = 24) -> list[Rendered]:
    """Conversations of 5 to 40 tokens; the first third of each is the prompt."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        length = draw.randint(5, 40)
        ids = [draw.randrange(2, VOCAB) for _ in range(length)]
        made.append(Rendered(ids, [place >= length // 3 for place in range(length)]))
    return made


def split(samples: list[Rendered]) -> list[list[int]]:
    return plan_shards([len(sample.input_ids) for sample in samples], TOKENS_PER_SHARD)


def manifest(**changes: Any) -> StatesManifest:
    values: dict[str, Any] = {
        "target_id": "tiny",
        "target_weight_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "template_sha256": "c" * 64,
        "points": POINTS,
        "points_checkpoint": [point - 1 for point in POINTS],
        "blocks": BLOCKS,
        "family": "llama",
        "hidden_size": HIDDEN,
        "last": "post_norm",
        "engine": "transformers",
        "corpus_sha256": "d" * 64,
        "greedy": True,
        "seed": 0,
        "planned_shards": len(split(conversations())),
    }
    return StatesManifest(**(values | changes))


def run_capture(folder: Path, **changes: Any) -> list[str]:
    """Capture into `folder` or finish what is there; returns what the writer noted."""
    torch.set_num_threads(1)
    samples, notes = conversations(), []
    writer = StoreWriter(folder, manifest(**changes), note=notes.append)
    capture(tiny_target(), samples, writer, split(samples), batch_tokens=128)
    return notes


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def capture_until(folder: Path, stage: str) -> None:
    """Capture, and die by SIGKILL at a stage of the third shard; `naive` writes in place, without a rename."""
    count = 0
    replace = files.os.replace

    def counted_replace(source: Path, destination: Path) -> None:
        nonlocal count
        count += Path(destination).name == shards.shard_name(2)
        if count == 1 and stage == "before rename":
            die()
        replace(source, destination)
        if count == 1 and stage == "before manifest":
            die()
        if count and stage == "after manifest" and Path(destination).name == MANIFEST:
            die()

    # written in place the third shard is there while it is written; with a rename only those before it are
    seen = shards.shard_name(2 if stage == "naive" else 1)

    def dying_chunks(parts: list[Any]) -> Any:
        for number, part in enumerate(parts):
            if number == 3 and (Path(folder) / seen).exists():
                die()
            yield memoryview(part)

    files.os.replace = counted_replace
    if stage in ("inside", "naive"):
        shards._digest = lambda parts: hashlib.sha256(b"".join(parts)).hexdigest()  # the hash reads chunks as well
        shards._chunks = dying_chunks
    if stage == "naive":
        shards.atomic_write = lambda path, writer: writer(path)
    run_capture(folder)


def start(function: Any, *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Run `function` in a process that has torch loaded already, so that a kill hits the capture and not an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.capture.capturing"])
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process
