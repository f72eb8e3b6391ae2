"""The files between a test and a peer's own environment: safetensors both ways, a JSON of sizes, nothing else.

Imported by both sides, so it needs torch and safetensors alone. A folder holds

    batch.safetensors   per sample i: ids.i int64 [T], mask.i int64 [T], aux.i [T, P*H], pre.i and post.i [T, H] (the
                        last state before and after the final norm); target.embedding, target.head [V, H],
                        target.norm [H]; drafter.NAME for every tensor of the drafter, d2t, t2d
    config.json         sizes, `steps` (the K to run), `samples`
    out-K.safetensors   written by the peer: loss, step_loss [K], hits [K], counted [K], grad.NAME in our names
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def write_batch(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a folder for a peer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "batch.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def read_batch(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of a folder."""
    return load_file(folder / "batch.safetensors"), json.loads((folder / "config.json").read_text())


def write_answer(folder: Path, steps: int, numbers: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    """Write what a peer computed for K = `steps`; numbers: loss, step_loss, hits, counted."""
    tensors = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    tensors |= {f"grad.{name}": grad.detach().contiguous() for name, grad in gradients.items()}
    save_file(tensors, folder / f"out-{steps}.safetensors")


def read_answer(folder: Path, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers and gradients that a peer wrote."""
    tensors = load_file(folder / f"out-{steps}.safetensors")
    gradients = {name.removeprefix("grad."): t for name, t in tensors.items() if name.startswith("grad.")}
    return {name: t for name, t in tensors.items() if not name.startswith("grad.")}, gradients
