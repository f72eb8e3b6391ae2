"""One training step of speculators 0.9.0, in its own environment: python speculators_step.py FOLDER

Its own path: `shift_batch` and `CollateFn` pack the samples into one row, `Eagle3DraftModel.forward` gives the loss.
Dense attention and the eager loss stand for flex attention and Triton, which have no CPU backward; both are its own.
lm_head is trained, so that its gradient is compared too (frozen by default; `embed` stays frozen).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from exchange import read_batch, write_answer
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaConfig

PADDING = 5
"""Slots of padding at the end of the packed row (document id -1), so that padding is exercised."""


def ours(name: str) -> str:
    """Our name of their parameter."""
    return name.replace("layers.0.", "midlayer.")


def build(tensors: dict, config: dict) -> Eagle3DraftModel:
    """Their drafter with our weights and the verifier's norm and head, fp32."""
    shape = LlamaConfig(**config["llama"])
    shape._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=shape,
            draft_vocab_size=config["draft_vocab_size"],
            norm_before_residual=False,
            norm_before_fc=False,
            norm_output=False,
            eagle_aux_hidden_state_layer_ids=config["points"],
        )
    ).float()
    model.load_vocab_mappings(tensors["t2d"], tensors["d2t"])
    state = {
        name: tensors[f"drafter.{ours(name)}"]
        for name, _ in model.named_parameters()
        if f"drafter.{ours(name)}" in tensors
    }
    state |= {
        "embed_tokens.weight": tensors["target.embedding"],
        "verifier_norm.weight": tensors["target.norm"],
        "verifier_lm_head.weight": tensors["target.head"][tensors["t2d"]],
        "d2t": tensors["d2t"],
        "t2d": tensors["t2d"],
    }
    model.load_state_dict(state, strict=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed_tokens", "verifier_")))
    return model.train()


def main(folder: Path) -> None:
    """Answer every K of the configuration."""
    torch.set_num_threads(1)
    tensors, config = read_batch(folder)
    model = build(tensors, config)
    samples = []
    for i in range(config["samples"]):
        length = len(tensors[f"ids.{i}"])
        samples.append(
            {
                "input_ids": tensors[f"ids.{i}"],
                "loss_mask": tensors[f"mask.{i}"],
                "hidden_states": tensors[f"aux.{i}"],
                "verifier_last_hidden_states": tensors[f"pre.{i}"],
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    width = sum(len(sample["input_ids"]) - 1 for sample in samples) + PADDING
    collate = CollateFn(
        width, config["llama"]["hidden_size"], len(config["points"]), dtype=torch.float32, preprocess=shift_batch
    )
    row = collate(samples)
    for steps in config["steps"]:
        model.zero_grad()
        _, loss, metrics = model(
            hidden_states=row["hidden_states"],
            input_ids=row["input_ids"],
            document_ids=row["document_ids"],
            loss_mask=row["loss_mask"],
            position_ids=row["position_ids"],
            verifier_last_hidden_states=row["verifier_last_hidden_states"],
            ttt_steps=steps,
            ttt_step_loss_decay=1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        loss.backward()
        numbers = {
            "loss": loss.detach(),
            "step_loss": torch.stack([metrics[f"loss_{k}_sum"] for k in range(steps)]),
            # full_acc counts a chain: right at this step and at all before it
            "hits": torch.stack([metrics[f"full_acc_{k}_sum"] for k in range(steps)]),
            "counted": torch.stack([metrics[f"full_acc_{k}_total"] for k in range(steps)]),
        }
        write_answer(folder, steps, numbers, {ours(n): p.grad for n, p in model.named_parameters() if p.requires_grad})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
