"""Runs in speculators' environment: load a drafter folder and a states folder with its own classes.

Argument: a folder with `drafter/`, `inputs.safetensors` (ids, aux, embedding) and `states/` (prepared.jsonl and files).
Leaves `outputs.safetensors`: logits of every step, and what the trainer's dataset returns for row 1.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.train.data import ArrowDataset

STEPS = 3
root = Path(sys.argv[1])
data = load_file(root / "inputs.safetensors")
config = Eagle3SpeculatorConfig.from_pretrained(str(root / "drafter"))
config.transformer_layer_config._attn_implementation = "eager"
model = Eagle3DraftModel(config).float().eval()
loaded = model.load_state_dict(load_file(root / "drafter" / "model.safetensors"), strict=False)
assert not loaded.unexpected_keys, loaded.unexpected_keys
assert set(loaded.missing_keys) <= {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
logits = []
model.lm_head.register_forward_hook(lambda module, arguments, output: logits.append(output[0]))
ids = data["ids"]
with torch.no_grad():
    model.embed_tokens.weight.copy_(data["embedding"])
    model(
        hidden_states=data["aux"][None],
        input_ids=torch.cat([ids[1:], ids.new_zeros(1)])[None],  # slot t embeds x_{t+1}
        document_ids=torch.zeros(1, len(ids), dtype=torch.int64),
        ttt_steps=STEPS,
    )
outputs = {f"logits_{step}": piece.contiguous() for step, piece in enumerate(logits)}

os.chdir(root / "states")
rows = load_dataset("json", data_files="prepared.jsonl", split="train").with_format("torch")
rows.save_to_disk(".")
row = ArrowDataset(max_len=64, datapath=".", on_missing="raise")._get_raw_data(1)
outputs |= {f"row_{name}": tensor.contiguous() for name, tensor in row.items()}
save_file(outputs, root / "outputs.safetensors")
