"""Small checkpoints for the tests of `eagle3lab.inspection`, written byte by byte so that every dtype is possible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from eagle3lab.inspection.formats import bfloat16_bits

_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "uint16": "BF16", "uint8": "F8_E4M3", "int64": "I64"}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None) -> Path:
    """Write arrays; uint16 is taken for bfloat16 bits and uint8 for float8 unless `dtypes` says otherwise."""
    header, chunks, position = {}, [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        dtype = (dtypes or {}).get(name) or _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
        chunks.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
    return path


def uniform(shape: tuple[int, int], seed: int) -> np.ndarray:
    """float32 draw of torch's default Linear initialisation, U(-a, a) with a = 1/sqrt(fan_in)."""
    rng = np.random.default_rng(seed)
    return ((rng.random(shape) * 2 - 1) / np.sqrt(shape[1])).astype(np.float32)


def save_fc(folder: Path, weights: np.ndarray, *, name: str = "fc.weight") -> Path:
    """Save float32 `weights` rounded to bfloat16 as `folder`/model.safetensors; returns the folder."""
    write_safetensors(folder / "model.safetensors", {name: bfloat16_bits(weights)})
    return folder
