"""Folders of captured states for tests: several shards of a small target, whole, in 8 bits, or with one fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eagle3lab.core.hashes import sha256_file

H, POINTS, VOCAB, BLOCKS = 32, [1, 4, 6], 61, 8
IDENTITY = {
    **{"schema_version": "eagle3lab-states/1", "target_id": "t", "target_revision": None, "engine": "transformers"},
    **{f"{name}_sha256": "0" for name in ("target_weight", "tokenizer", "template", "corpus")},
    **{"points_checkpoint": [0, 3, 5], "family": "llama", "engine_arguments": {}, "greedy": True, "seed": 0},
}
"""The other fields of a manifest."""
Sample = dict[str, np.ndarray]


def head() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 1, (VOCAB, H)).astype(np.float32)


def norm_weight() -> np.ndarray:
    return np.linspace(0.8, 1.3, H).astype(np.float32)


def sample(seed: int, length: int = 30) -> Sample:
    """`last` has RMSNorm's size, and its argmax under the head is the next token; a quarter of the text is not."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 1, (length, H)).astype(np.float32)
    last = rows / np.sqrt((rows**2).mean(1, keepdims=True)) * norm_weight()
    tokens = np.concatenate([[seed % VOCAB], (last[:-1] @ head().T).argmax(1)])
    tokens[3::4] = rng.integers(0, VOCAB, len(tokens[3::4]))
    aux = rng.normal(0, 3, (length, len(POINTS) * H)).astype(np.float32)
    return {"input_ids": tokens.astype(np.int64), "aux": aux, "last": last, "loss_mask": np.arange(length) > 1}


def shard(samples: list[Sample], first: int = 0) -> dict[str, np.ndarray]:
    parts = {name: np.concatenate([one[name] for one in samples]) for name in samples[0]}
    offsets = np.cumsum([0, *(len(one["input_ids"]) for one in samples)])
    return {**parts, "offsets": offsets.astype(np.int64), "sample_id": np.arange(len(samples)) + first}


def in_8_bits(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `eagle3lab states shrink` stores them: a scale a row and point."""
    found = dict(tensors)
    for name, blocks in (("aux", len(POINTS)), ("last", 1)):
        parts = tensors[name].reshape(len(tensors[name]), blocks, -1)
        scale = (np.abs(parts).max(-1) / 127).astype(np.float32)
        levels = np.rint(parts / np.maximum(scale, 1e-30)[..., None]).astype(np.int8)
        found |= {name: levels.reshape(tensors[name].shape), f"{name}_scale": scale}
    return found


def write(folder: Path, shards: list[dict[str, np.ndarray]], **manifest: Any) -> Path:
    """A folder of these shards. manifest: what it says otherwise."""
    folder.mkdir(parents=True)
    listed = []
    for index, tensors in enumerate(shards):
        path = folder / f"states-{index:05d}.safetensors"
        save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path)
        count = len(tensors["input_ids"])
        listed.append(
            {"name": path.name, "sha256": sha256_file(path), "samples": len(tensors["sample_id"]), "tokens": count}
        )
    said = {**IDENTITY, "points": POINTS, "hidden_size": H, "blocks": BLOCKS, "last": "post_norm", "dtype": "float32"}
    said |= {"planned_shards": len(shards), "shards": listed, **manifest}
    (folder / "manifest.json").write_text(json.dumps(said))
    return folder


def write_target(folder: Path, model_type: str = "llama", *, less: float = 0.0, **config: Any) -> Path:
    """A target whose norm's weight is stored as weight - less."""
    folder.mkdir()
    said = {"model_type": model_type, "num_hidden_layers": BLOCKS, "hidden_size": H, "vocab_size": VOCAB, **config}
    (folder / "config.json").write_text(json.dumps(said))
    values = {"lm_head.weight": head(), "model.norm.weight": norm_weight() - np.float32(less)}
    save_file(values, folder / "model.safetensors")
    return folder


def whole(count: int = 3) -> list[dict[str, np.ndarray]]:
    """Shards of two samples each."""
    return [shard([sample(10 * index + 1), sample(10 * index + 2, 20)], 2 * index) for index in range(count)]
