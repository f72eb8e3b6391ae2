"""Our training step as an arm: FOLDER specforge|speculators fp32|bf16 THREADS.

The second word is the mask convention and loss that the arm computes, so that its loss can equal that peer's.
bf16: autocast over fp32 weights, as our trainer does.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from training_arm import adamw, serve, train_step  # noqa: E402

from eagle3lab.drafter.attention import ttt_attention  # noqa: E402
from eagle3lab.drafter.config import DraftConfig  # noqa: E402
from eagle3lab.drafter.model import Eagle3Drafter  # noqa: E402
from eagle3lab.drafter.packed import Packed  # noqa: E402
from eagle3lab.training.conventions import pack_for, supervise  # noqa: E402
from eagle3lab.training.estimate import step_flops  # noqa: E402
from eagle3lab.training.loss import Supervision, ttt_loss  # noqa: E402
from tests.parity.peers.exchange import read_batch  # noqa: E402

KIND = {"specforge": "ce", "speculators": "kl"}


def trained_only(supervision: Supervision) -> Supervision:
    """Without pairs of weight 0 and teachers of none: what has to be computed."""
    trained = supervision.weights != 0
    kept = trained.any(0)
    return dataclasses.replace(supervision, teacher=supervision.teacher[kept], counted=trained)


def attention_seconds(batch: Packed, config: DraftConfig, steps: int, dtype: torch.dtype) -> Callable[[], float]:
    """Forward and backward of the attention calls of one step on random numbers: their own term of the time."""

    def made(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, config.head_dim).to(dtype).requires_grad_()

    rows, heads, narrow = len(batch.active), config.num_attention_heads, config.num_key_value_heads

    def run() -> float:
        key, value = made(batch.tokens, narrow), made(batch.tokens, narrow)
        later = [(made(rows, narrow), made(rows, narrow)) for _ in range(steps - 1)]
        query, spent = made(rows, heads), 0.0
        for step in range(steps):
            started = time.perf_counter()
            output = ttt_attention(query, key, value, later[:step], batch.segments, config.head_dim**-0.5)
            output.backward(torch.ones_like(output))
            spent += time.perf_counter() - started
        return spent

    return run


def main(folder: Path, convention: str, precision: str, threads: int) -> None:
    """Build and serve."""
    torch.set_num_threads(threads)
    tensors, config = read_batch(folder)
    steps, dtype = config["steps"][0], torch.bfloat16 if precision == "bf16" else torch.float32
    drafter = Eagle3Drafter(DraftConfig(**config["drafter"]), tensors["target.embedding"], tensors["d2t"])
    for name, parameter in drafter.named_parameters():
        parameter.data = tensors[f"drafter.{name}"]
    samples = range(config["samples"])
    ids, aux, last, mask, choice = (
        torch.cat([tensors[f"{name}.{i}"] for i in samples]) for name in ("ids", "aux", "post", "mask", "choice")
    )
    offsets = [0, *torch.tensor([len(tensors[f"ids.{i}"]) for i in samples]).cumsum(0).tolist()]
    batch = pack_for(convention, steps, ids, aux.to(dtype), last.to(dtype), offsets, mask.bool())
    head = tensors["target.head"][drafter.kept_ids].to(dtype)
    labels = drafter.draft_ids(choice)
    del tensors, aux, last
    optimizer = adamw([p for p in drafter.parameters() if p.requires_grad])

    def loss() -> torch.Tensor:
        supervision = supervise(convention, batch, steps, labels)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            hidden = drafter(batch, steps)
        hidden = [h.to(dtype) for h in hidden]
        return ttt_loss(hidden, drafter.lm_head.weight, head, batch.last, supervision, kind=KIND[convention])[0]

    needed = step_flops(drafter, batch, trained_only(supervise(convention, batch, steps, labels)), steps)
    serve(
        lambda: train_step(optimizer, loss),
        precision,
        attention_seconds(batch, drafter.config, steps, dtype),
        flops=needed,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
