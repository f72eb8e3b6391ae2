"""SpecForge 0.2.0's training step as an arm: FOLDER full|compact fp32|bf16 THREADS, in its own environment.

Its own model, collator, target head and strategy, put together as in `tests/parity/peers/specforge_step.py`. Its Triton
loss needs a GPU; the torch reference of the same file takes its place, without torch.compile (its own loss arithmetic).
bf16: weights and states in bf16, as its backend trains them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "parity" / "peers")]

import specforge_step as parity  # noqa: E402  (sets its environment before torch is read)
import torch  # noqa: E402
from exchange import read_batch  # noqa: E402
from specforge.algorithms.eagle3 import model as eagle3  # noqa: E402
from specforge.core.loss import _compute_loss  # noqa: E402
from training_arm import adamw, serve, train_step  # noqa: E402


def main(folder: Path, path: str, precision: str, threads: int) -> None:
    """Build and serve."""
    torch.set_num_threads(threads)
    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    tensors, config = read_batch(folder)
    draft, head = parity.build(folder, tensors, config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    draft, head = draft.to(dtype), head.to(dtype)
    samples = [
        parity.normalize_offline_sample(
            {
                "input_ids": tensors[f"ids.{i}"],
                "loss_mask": tensors[f"mask.{i}"],
                "aux_hidden_state": tensors[f"aux.{i}"][None].to(dtype),
                "hidden_state": tensors[f"post.{i}"][None].to(dtype),
            },
            max_len=1 << 20,
        )
        for i in range(config["samples"])
    ]
    batch = parity.TrainBatch([], "eagle3", parity.DataCollatorWithPadding()(samples), {"target_repr": "hidden_state"})
    del tensors, samples
    model = parity.OnlineEagle3Model(draft, length=config["steps"][0], attention_backend="sdpa")
    strategy = parity.Eagle3TrainStrategy(model, target_head=head, compact_teacher=path == "compact")
    optimizer = adamw([p for p in draft.parameters() if p.requires_grad])
    serve(lambda: train_step(optimizer, lambda: strategy.forward_loss(batch).loss), precision)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
