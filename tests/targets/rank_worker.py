"""One of several ranks: load a part of the target, run a fixed batch, and let rank 0 write what all agree on.

torchrun --nproc-per-node N tests/targets/rank_worker.py TARGET OUT
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.ranks import shared_sink
from eagle3lab.capture.store import StoreWriter
from eagle3lab.capture.transformers_engine import capture
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.ranks import leave, load_split, rank_table

POINTS = [2, 30, 58]
IDS = [[(7 * place + 3) % 256 for place in range(length)] for length in (12, 5)]


def kimi_manifest() -> StatesManifest:
    return StatesManifest(
        target_id="kimi-thin",
        target_weight_sha256="a" * 64,
        tokenizer_sha256="b" * 64,
        template_sha256="c" * 64,
        points=POINTS,
        points_checkpoint=POINTS,
        blocks=61,
        family="kimi_k25",
        hidden_size=7168,
        last="post_norm",
        engine="transformers",
        corpus_sha256="d" * 64,
        greedy=False,
        seed=0,
        planned_shards=2,
    )


def samples() -> list[Rendered]:
    return [Rendered(ids, [place > 2 for place in range(len(ids))]) for ids in IDS]


def main(target_folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    target = load_split(target_folder, dtype="float32")
    last, states = target.states(torch.tensor([IDS[0]]), points=POINTS)
    mine = torch.stack([last, *states])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    shares = rank_table(target)
    writes = 0

    class Counted(StoreWriter):
        def write(self, index, members) -> None:
            nonlocal writes
            writes += 1
            super().write(index, members)

    capture(target, samples(), shared_sink(lambda: Counted(out / "states", kimi_manifest())), [[0], [1]])
    counts: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, writes)
    if dist.get_rank() == 0:
        save_file({"states": mine}, out / "ranks.safetensors")
        spread = max(float((other - mine).abs().max()) for other in everyone)
        facts = {"spread": spread, "writes": counts, "shares": [asdict(share) for share in shares]}
        (out / "ranks.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
