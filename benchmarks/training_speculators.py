"""speculators 0.9.0's training step as an arm: FOLDER sdpa fp32|bf16 THREADS, in its own environment.

Its own collator, model and loss, put together as in `tests/parity/peers/speculators_step.py`, lm_head trained.
bf16: autocast over fp32 weights, as its trainer does.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "parity" / "peers")]

import speculators_step as parity  # noqa: E402
import torch  # noqa: E402
from exchange import read_batch  # noqa: E402
from training_arm import adamw, serve, train_step  # noqa: E402


def main(folder: Path, precision: str, threads: int) -> None:
    """Build and serve."""
    torch.set_num_threads(threads)
    tensors, config = read_batch(folder)
    model = parity.build(tensors, config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    samples, width = [], 0
    for i in range(config["samples"]):
        length = len(tensors[f"ids.{i}"])
        width += length - 1
        samples.append(
            {
                "input_ids": tensors[f"ids.{i}"],
                "loss_mask": tensors[f"mask.{i}"],
                "hidden_states": tensors[f"aux.{i}"].to(dtype),
                "verifier_last_hidden_states": tensors[f"pre.{i}"].to(dtype),
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    collate = parity.CollateFn(
        width, config["llama"]["hidden_size"], len(config["points"]), dtype=dtype, preprocess=parity.shift_batch
    )
    row = collate(samples)
    del tensors, samples
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return model(
                **{
                    name: row[name]
                    for name in (
                        "hidden_states",
                        "input_ids",
                        "document_ids",
                        "loss_mask",
                        "position_ids",
                        "verifier_last_hidden_states",
                    )
                },
                ttt_steps=config["steps"][0],
                ttt_step_loss_decay=1.0,
                loss_config=parity.resolve_loss_config("kl_div", "eager"),
            )[1]

    serve(lambda: train_step(optimizer, loss), precision)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
