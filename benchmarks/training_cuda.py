"""Kimi's own drafter on a GPU: seconds, model FLOP utilisation and peak memory of a training step; JSON in `results/`.

    python benchmarks/training_cuda.py [--json benchmarks/results/training-cuda-kimi.json]

H 7168, 64 heads of 128, 18432 wide MLP, Vd 32000, 21,504-wide states, T 2048 and 8192, K 7, bf16 with fp32 masters. The
rate is that of a large bf16 matrix product on the same device, timed in the same run. Without CUDA the file says "not
measured". `--tiny` runs the same code on the CPU at toy sizes, to see that it runs; it writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from training_arm import adamw, train_step  # noqa: E402
from training_ours import trained_only  # noqa: E402

from eagle3lab.drafter.config import DraftConfig  # noqa: E402
from eagle3lab.drafter.model import Eagle3Drafter, kept_to_d2t  # noqa: E402
from eagle3lab.steps.plan import drafter_shape  # noqa: E402
from eagle3lab.targets.profiles import load_profile  # noqa: E402
from eagle3lab.training.batches import moved  # noqa: E402
from eagle3lab.training.conventions import pack_for, supervise  # noqa: E402
from eagle3lab.training.estimate import matrix_rate, step_flops  # noqa: E402
from eagle3lab.training.loss import ttt_loss  # noqa: E402

BAR = 0.45
STEPS = 7
LENGTHS = (2048, 8192)
ROUNDS = 5
PROFILE = load_profile("kimi-k2.5")
SHAPE = drafter_shape(PROFILE)
KIMI = {
    "hidden_size": SHAPE.hidden_size,
    "target_hidden_size": SHAPE.target_hidden_size,
    "points": PROFILE.model.points,
    "target_blocks": PROFILE.model.blocks,
    "target_family": PROFILE.model.family,
    "intermediate_size": SHAPE.intermediate_size,
    "num_attention_heads": SHAPE.attention_heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "head_dim": SHAPE.head_dim,
    "vocab_size": SHAPE.vocab_size,
    "draft_vocab_size": SHAPE.draft_vocab_size,
}
TINY = {
    **KIMI,
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "draft_vocab_size": 256,
}


def measure(shape: dict[str, Any], length: int, device: torch.device) -> dict[str, Any]:
    """One length: medians over ROUNDS steps after two to warm up."""
    torch.manual_seed(0)
    config = DraftConfig(**shape)
    kept = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
    with device:
        embedding = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        drafter = Eagle3Drafter(config, embedding, kept_to_d2t(kept).to(device))
        head = torch.randn(config.draft_vocab_size, config.hidden_size, dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (length,))
    mask = torch.arange(length) >= round(0.27 * length)
    aux, last = torch.randn(length, config.fc_in).bfloat16(), torch.randn(length, config.hidden_size).bfloat16()
    batch = pack_for("served", STEPS, ids, aux, last, [0, length], mask)
    choice = torch.randint(0, config.draft_vocab_size, (length,))
    bare = supervise("served", batch, STEPS, choice)
    flops = step_flops(drafter, batch, trained_only(bare), STEPS)
    batch, supervision = moved(batch, device), moved(bare, device)
    optimizer = adamw(list(drafter.parameters()))

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = drafter(batch, STEPS)
        hidden = [h.bfloat16() for h in hidden]
        return ttt_loss(hidden, drafter.lm_head.weight, head, batch.last, supervision)[0]

    cuda, seconds = device.type == "cuda", []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
    for _ in range(2 + ROUNDS):
        started = time.perf_counter()
        train_step(optimizer, loss)  # reads the loss, and so waits for the device
        seconds.append(time.perf_counter() - started)
    rate, median = matrix_rate(device, torch.bfloat16), statistics.median(seconds[2:])
    found = {
        "tokens": length,
        "steps": STEPS,
        "rounds": ROUNDS,
        "median_seconds": median,
        "fastest_seconds": min(seconds[2:]),
        "slowest_seconds": max(seconds[2:]),
        "flops": flops,
        "matrix_rate": rate,
        "model_flop_utilisation": flops / median / rate,
        "bar": BAR,
    }
    if cuda:
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "level_bytes": level}
    return found


def main() -> None:
    """Measure or say that it was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "training-cuda-kimi.json")
    parser.add_argument("--tiny", action="store_true")
    words = parser.parse_args()
    if words.tiny:
        print(json.dumps(measure(TINY, 96, torch.device("cpu"))))
        return
    found: dict[str, Any] = {"arm": "Kimi-K2.5 drafter, CUDA", "torch": torch.__version__, "result": "not measured"}
    if torch.cuda.is_available():
        found |= {"hardware": torch.cuda.get_device_name(), "result": []}
        for length in LENGTHS:
            found["result"].append(measure(KIMI, length, torch.device("cuda")))
    else:
        found["reason"] = "no CUDA device on this machine"
    text = json.dumps(found, indent=1)
    print(text)
    words.json.parent.mkdir(parents=True, exist_ok=True)
    words.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
