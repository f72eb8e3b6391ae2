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


def normal(shape: tuple[int, int], std: float, seed: int) -> np.ndarray:
    """float32 N(0, std^2)."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(std)


def start_std(shape: tuple[int, int]) -> float:
    """std of torch's default Linear initialisation at this fan_in."""
    return 1 / np.sqrt(3 * shape[1])


def low_rank(shape: tuple[int, int], rank: int, std: float, seed: int) -> np.ndarray:
    """Random matrix of a rank, scaled to `std`."""
    rng = np.random.default_rng(seed)
    product = rng.standard_normal((shape[0], rank), dtype=np.float32) @ rng.standard_normal(
        (rank, shape[1]), dtype=np.float32
    )
    return product * np.float32(std / product.std())


def float8_round_trip(weights: np.ndarray, *, per_row: bool = False) -> np.ndarray:
    """bfloat16 weights -> float8 e4m3 with one scale (or one a row) -> float32, as dequantising leaves them."""
    from eagle3lab.inspection.formats import to_float32, value_table

    w = to_float32(bfloat16_bits(weights), "BF16").astype(np.float64)
    scale = np.abs(w).max(axis=1 if per_row else None, keepdims=True) / 448.0
    codes = value_table("F8_E4M3")
    codes = np.unique(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    out = np.empty_like(w, dtype=np.float32)
    for i in range(0, len(w), 64):
        part = w[i : i + 64]
        s = scale[i : i + 64] if per_row else scale
        out[i : i + 64] = codes[np.searchsorted(middles, part / s)] * s
    return out
