"""One training step of SpecForge 0.2.0, in its own environment: python specforge_step.py FOLDER

Its own path from an offline sample to the loss: `normalize_offline_sample`, the padding collator, `TargetHead` and
`Eagle3TrainStrategy.forward_loss`. Its Triton loss runs in Triton's interpreter; torch.compile is off (no effect on
the arithmetic in fp32).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from exchange import read_batch, write_answer
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from transformers import LlamaConfig


def build(folder: Path, tensors: dict, config: dict) -> tuple[LlamaForCausalLMEagle3, TargetHead]:
    """Their drafter with our weights, and their target head with the target's, both fp32."""
    shape = LlamaConfig(**config["llama"])
    shape.draft_vocab_size, shape.target_hidden_size = config["draft_vocab_size"], config["llama"]["hidden_size"]
    draft = LlamaForCausalLMEagle3(shape, attention_backend="sdpa").float()
    state = {name.removeprefix("drafter."): t for name, t in tensors.items() if name.startswith("drafter.")}
    state |= {"embed_tokens.weight": tensors["target.embedding"], "d2t": tensors["d2t"], "t2d": tensors["t2d"]}
    draft.load_state_dict(state, strict=True)
    draft.freeze_embedding()
    shape.save_pretrained(folder / "target")
    head = TargetHead(str(folder / "target"))
    head.fc.weight.data = tensors["target.head"]
    head.freeze_weights()
    return draft, head


def main(folder: Path) -> None:
    """Answer every K of the configuration."""
    torch.set_num_threads(1)
    tensors, config = read_batch(folder)
    draft, head = build(folder, tensors, config)
    samples = []
    for i in range(config["samples"]):
        stored = {
            "input_ids": tensors[f"ids.{i}"],
            "loss_mask": tensors[f"mask.{i}"],
            "aux_hidden_state": tensors[f"aux.{i}"][None],
            "hidden_state": tensors[f"post.{i}"][None],
        }
        samples.append(normalize_offline_sample(stored, max_len=2048))
    batch = TrainBatch([], "eagle3", DataCollatorWithPadding()(samples), {"target_repr": "hidden_state"})
    for steps in config["steps"]:
        model = OnlineEagle3Model(draft, length=steps, attention_backend="sdpa")
        draft.zero_grad()
        output = Eagle3TrainStrategy(model, target_head=head).forward_loss(batch)
        output.loss.backward()
        numbers = {
            "loss": output.loss.detach(),
            "step_loss": torch.stack(output.metrics["plosses"]),
            "hits": torch.stack(output.metrics["acc_corrects"]),
            "counted": torch.stack(output.metrics["acc_denoms"]),
        }
        write_answer(folder, steps, numbers, {n: p.grad for n, p in draft.named_parameters() if p.requires_grad})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
