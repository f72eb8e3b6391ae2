"""Speed of capture against bare prefill of the same batches, and of shard writing against a plain sequential write.

    python benchmarks/bench_capture.py [--profile smollm2] [--tokens 4096] [--dtype float32] [--device cpu] [--rounds 5]

Both sides of a pair run in turn, so that a busy moment falls on both; the order is swapped every round. Printed: the
median ratio of the pairs with their range. Bare prefill is the target's decoder alone, without head, hooks, copies or
disk. The plain write is one file, the same bytes, the same chunks, fsync. Without CUDA the GPU's line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.shards import CHUNK, write_shard
from eagle3lab.capture.store import StoreWriter
from eagle3lab.capture.transformers_engine import _batches, capture, plan_shards
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import Profile, load_profile

BATCH_TOKENS = 4096
LEAST = {"capture": 0.95, "write": 0.8}
"""Ratios that the project promises."""


def main() -> None:
    """Parse words, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens captured a round")
    parser.add_argument("--write-mb", type=int, default=512, help="size of the written shard")
    parser.add_argument("--dtype", default=compute_type("auto", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default a temporary folder")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="bench-capture-", dir=given.folder))
    try:
        found: dict[str, Any] = {"write": bench_write(place, given.write_mb, given.rounds)}
        if given.device == "cuda" and not torch.cuda.is_available():
            found["capture"] = "not measured: no CUDA device"
        else:
            profile = load_profile(given.profile)
            target = load_target(fetched_folder(profile), dtype=given.dtype, device=given.device)
            found["capture"] = bench_capture(target, profile, place, given.tokens, given.rounds)
    finally:
        shutil.rmtree(place)
    found |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": given.device}
    print(json.dumps(found, indent=2) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def bench_capture(target: Target, profile: Profile, place: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Ratio of speeds, capture over prefill; above 1 would mean that capture is faster."""
    draw = random.Random(0)
    samples: list[Rendered] = []
    while sum(len(sample.input_ids) for sample in samples) < tokens:
        length = draw.randint(60, 400)
        samples.append(Rendered([draw.randrange(profile.model.vocab_size) for _ in range(length)], [True] * length))
    shards = plan_shards([len(sample.input_ids) for sample in samples], max(1024, tokens // 4))
    batches = [
        padded(samples, batch).to(target.device)
        for members in shards
        for batch in _batches(members, samples, BATCH_TOKENS)
    ]
    done = 0

    def prefill() -> None:
        with torch.inference_mode():
            for batch in batches:
                target.backbone(input_ids=batch, use_cache=False)
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    def store() -> None:
        nonlocal done
        done += 1
        writer = StoreWriter(place / f"states-{done}", manifest(profile, len(shards)))
        capture(target, samples, writer, shards, batch_tokens=BATCH_TOKENS)
        shutil.rmtree(place / f"states-{done}")

    prefill()  # warm
    return paired(prefill, store, rounds, "capture") | {"tokens": sum(len(s.input_ids) for s in samples)}


def bench_write(place: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Ratio of speeds, a shard with its sha256 over a plain sequential write of the same bytes."""
    data = torch.randint(-(2**31), 2**31, (megabytes << 17,), dtype=torch.int64)
    raw = memoryview(data.numpy()).cast("B")

    def plain() -> None:
        with (place / "plain").open("wb", buffering=0) as handle:
            for start in range(0, len(raw), CHUNK):
                handle.write(raw[start : start + CHUNK])
            os.fsync(handle.fileno())
        (place / "plain").unlink()

    def shard() -> None:
        write_shard(place / "shard.safetensors", {"input_ids": data})
        (place / "shard.safetensors").unlink()

    plain()
    return paired(plain, shard, rounds, "write") | {"bytes": len(raw)}


def paired(base: Callable[[], None], ours: Callable[[], None], rounds: int, name: str) -> dict[str, Any]:
    """Median and range of base seconds over our seconds."""
    ratios, seconds = [], []
    for number in range(rounds):
        order = (base, ours) if number % 2 == 0 else (ours, base)
        took = {}
        for work in order:
            started = time.monotonic()
            work()
            took[work] = time.monotonic() - started
        ratios.append(took[base] / took[ours])
        seconds.append([took[base], took[ours]])
    ratio = statistics.median(ratios)
    return {
        "ratio": round(ratio, 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "promised": LEAST[name],
        "kept": ratio >= LEAST[name],
        "seconds": [[round(value, 3) for value in pair] for pair in seconds],
    }


def padded(samples: list[Rendered], members: list[int]) -> torch.Tensor:
    """int64 [B, longest], right-padded with 0, as capture does it."""
    width = max(len(samples[member].input_ids) for member in members)
    return torch.tensor([samples[m].input_ids + [0] * (width - len(samples[m].input_ids)) for m in members])


def manifest(profile: Profile, shards: int) -> StatesManifest:
    """Of a capture that nobody keeps."""
    shape, none = profile.model, "0" * 64
    return StatesManifest(
        target_id=shape.id, target_weight_sha256=none, tokenizer_sha256=none, template_sha256=none,
        points=shape.points, points_checkpoint=shape.points, blocks=shape.blocks, family=shape.family,
        hidden_size=shape.hidden_size, dtype=shape.dtype, last="post_norm", engine="transformers",
        corpus_sha256=none, greedy=False, seed=0, planned_shards=shards,
    )  # fmt: skip


if __name__ == "__main__":
    main()
