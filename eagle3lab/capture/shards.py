"""One shard of states: its tensors, its boundary checks, its bytes.

A shard packs its samples end to end: `offsets` int64 [S+1], `sample_id` int64 [S], `input_ids` int64 [T],
`aux` [T, P*H], `last` [T, H], `loss_mask` bool [T]. No tensor per sample: a header of a million names cannot be read.

This file also runs inside an engine (`eagle3lab.capture.sglang_hook`), so it needs nothing but torch and safetensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import atomic_write, require_space

NAMES = ("offsets", "sample_id", "input_ids", "aux", "last", "loss_mask")
"""Tensors of a shard, in file order: wide integers first keep every tensor aligned."""

CHUNK = 8 << 20
ALIGNMENT = 64
LEVELS = 127
"""Of an 8-bit state: -127 to 127."""
DTYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """States of one conversation of T tokens.

    Attributes:
        sample_id: row of the corpus.
        input_ids: int64 [T]; loss_mask: bool [T]; aux: [T, P*H]; last: [T, H].
    """

    sample_id: int
    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle copies: a sample is a view of a mapped shard, and pickling the view would carry the whole shard."""
        parts = (self.input_ids, self.loss_mask, self.aux, self.last)
        return Sample, (self.sample_id, *(part.clone() for part in parts))


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"states-{index:05d}.safetensors"


def bytes_per_token(points: int, hidden_size: int, itemsize: int = 2) -> int:
    """Bytes of one token: aux, last, its id and its mask. Kimi-K2.5 in bf16: 57,344 of states + 9."""
    return (points + 1) * hidden_size * itemsize + 9


def check_sample(sample: Sample, *, points: int, hidden_size: int) -> None:
    """The boundary check: what the engine handed over is what the manifest promises.

    Raises:
        StoreError: naming the sample, the actual shape or value, the formula and its product.
    """
    tokens, width = len(sample.input_ids), points * hidden_size
    expected = {"aux": (tokens, width), "last": (tokens, hidden_size), "loss_mask": (tokens,)}
    for name, shape in expected.items():
        actual = tuple(getattr(sample, name).shape)
        if actual != shape:
            formula = f"{points} points x {hidden_size} = {width}"
            hint = formula if name == "aux" and actual[-1:] != shape[-1:] else "rows == tokens"
            raise StoreError(f"sample {sample.sample_id}: {name} is {list(actual)}, needed {list(shape)}", rule=hint)
    check_finite(sample.sample_id, sample.aux, sample.last)


def check_finite(sample_id: int, aux: Tensor, last: Tensor) -> None:
    """`StoreError` that names the sample, the tensor and the first token whose state is not finite."""
    for name, states in (("aux", aux), ("last", last)):
        # One pass without a mask: a sum is finite unless a value is not, or it overflows (rare, then looked at).
        if torch.isfinite(states.sum(dtype=torch.float32)):
            continue
        bad = (~torch.isfinite(states)).any(-1).nonzero()
        if len(bad):
            raise StoreError(
                f"sample {sample_id}: {name} is not finite at token {int(bad[0])}", rule="states are finite"
            )


def pack(samples: Sequence[Sample], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one shard, states in `dtype`."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids))
    return {
        "offsets": torch.tensor(offsets, dtype=torch.int64),
        "sample_id": torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        "input_ids": torch.cat([sample.input_ids for sample in samples]),
        "aux": torch.cat([sample.aux.to(dtype) for sample in samples]),
        "last": torch.cat([sample.last.to(dtype) for sample in samples]),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
    }


def to_int8(states: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """int8 of the shape of `states` [T, blocks * H], and float32 scales [T, blocks]."""
    parts = states.float().unflatten(-1, (blocks, -1))
    scale = parts.abs().amax(-1) / LEVELS
    levels = (parts / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.int8)
    return levels.flatten(-2), scale


def from_int8(levels: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [T, blocks * H] in `dtype`."""
    return (levels.unflatten(-1, (scale.shape[-1], -1)).float() * scale[..., None]).flatten(-2).to(dtype)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, whole or not at all; returns its sha256.

    The bytes are hashed by a second thread while they are written, straight from the tensors' memory: no copy of a
    shard that may be gigabytes, and no second reading of the file. The same tensors give the same bytes.

    Raises:
        DiskError: the file would leave less than the floor free.
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    require_space(path.parent, sum(sizes.values()), f"shard {path.name}")
    parts: list[bytes | memoryview] = [
        header_bytes({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    ]
    parts += [_memory(tensor, sizes[name]) for name, tensor in tensors.items() if sizes[name]]

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as handle:
            for chunk in _chunks(parts):
                while chunk:  # an unbuffered write may take less than it was given
                    chunk = chunk[handle.write(chunk) :]

    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_digest, parts)
        atomic_write(path, write)
        return digest.result()


def header_bytes(layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Length and JSON header of a safetensors file with these tensors, padded so that the data start aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in layout.items():
        size = dtype.itemsize
        for length in shape:
            size *= length
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _memory(tensor: Tensor, size: int) -> memoryview:
    # Not through numpy: it has no bfloat16, and an engine's environment may do without it.
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _chunks(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(parts):
        digest.update(chunk)
    return digest.hexdigest()
