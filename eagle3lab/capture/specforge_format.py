"""SpecForge's offline feature files: one `torch.save` dictionary a sample.

    <root>/rows_<a>-<a+G>/data_<i>.ckpt[.gz]      G = 2000, a = floor(i/G)*G

    input_ids [T] int64 · loss_mask [T] int64 · aux_hidden_state [1, T, P*H] · hidden_state [1, T, H]

`aux_hidden_state` is before any norm, points ascending; `hidden_state` is the last state *after* the final norm. The
files name neither points nor target: our manifest goes beside them. SpecForge's loader swaps the two keys, cuts to its
max_len and clears the last entry of the mask; none of that is done here. It sorts paths as text, so data_10 comes
before data_2 there. Source: SpecForge a6b6b02, offline_reader.py and the writer beside it.

The files are pickles: they are read with `weights_only=True` alone, and whatever that refuses is refused.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from eagle3lab.capture.shards import Sample, check_sample
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import atomic_write

GROUP = 2000
KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
UNPACKED_LIMIT = 1 << 34
"""Bytes that one gzipped file may unpack to (16 GiB, far above any sample): a small file must not fill the memory."""
_BROKEN = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError,
           zipfile.BadZipFile, zlib.error, struct.error)  # fmt: skip
"""What torch.load raises on bytes that it did not write; the restricted unpickler checks few of them itself."""
_NAME = re.compile(r"^data_(\d+)\.ckpt(\.gz)?$")


def specforge_path(root: Path, index: int, *, group: int = GROUP, compressed: bool = False) -> Path:
    """Where sample `index` lies."""
    first = index // group * group
    return root / f"rows_{first}-{first + group}" / f"data_{index}.ckpt{'.gz' if compressed else ''}"


def specforge_files(root: Path) -> dict[int, Path]:
    """Sample number -> file, in numeric order.

    Raises:
        StoreError: no such file, or one number twice.
    """
    found: dict[int, Path] = {}
    for path in root.rglob("*.ckpt*"):
        if match := _NAME.match(path.name):
            number = int(match[1])
            if number in found:
                raise StoreError(f"{root} has sample {number} twice", rule=f"{found[number].name} and {path.name}")
            found[number] = path
    if not found:
        raise StoreError(f"no data_<i>.ckpt below {root}", rule="SpecForge writes rows_<a>-<b>/data_<i>.ckpt")
    return dict(sorted(found.items()))


def write_specforge(root: Path, index: int, sample: Sample, *, group: int = GROUP, compressed: bool = False) -> Path:
    """Write one sample, whole or not at all: SpecForge takes a file that exists for a finished one.

    Args:
        sample: `last` after the final norm.
    """
    path = specforge_path(root, index, group=group, compressed=compressed)
    # Clones: a sample is a view of a shard, and torch.save would write the whole storage behind it.
    data = {
        "input_ids": sample.input_ids.to(torch.int64).clone(),
        "loss_mask": sample.loss_mask.to(torch.int64).clone(),
        "aux_hidden_state": sample.aux[None].clone(),
        "hidden_state": sample.last[None].clone(),
    }

    def fill(temporary: Path) -> None:
        if compressed:
            # mtime 0: the same sample gives the same bytes
            with temporary.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as handle:
                torch.save(data, cast("IO[bytes]", handle))
        else:
            torch.save(data, temporary)

    atomic_write(path, fill)
    return path


def read_specforge(path: Path, index: int) -> Sample:
    """Read one file; `last` of the sample is after the final norm.

    Raises:
        StoreError: not a plain dictionary of tensors, a key that is missing, shapes that disagree, or not finite.
    """
    data = _load(path)
    if not isinstance(data, dict) or any(not isinstance(data.get(key), Tensor) for key in KEYS):
        have = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise StoreError(f"{path} holds {have}", rule="tensors " + ", ".join(KEYS))
    ids, mask = (_flat(path, key, data[key]) for key in KEYS[:2])
    aux, last = (_rows(path, key, data[key]) for key in KEYS[2:])
    hidden = last.shape[-1]
    if hidden == 0 or aux.shape[-1] % hidden:
        raise StoreError(f"{path}: aux_hidden_state is {aux.shape[-1]} wide", rule=f"a multiple of {hidden}")
    sample = Sample(index, ids.to(torch.int64), mask != 0, aux, last)
    check_sample(sample, points=aux.shape[-1] // hidden, hidden_size=hidden)
    return sample


def read_specforge_folder(root: Path) -> Iterator[Sample]:
    """All samples below a folder, by number."""
    return (read_specforge(path, number) for number, path in specforge_files(root).items())


def _load(path: Path) -> Any:
    try:
        source: Path | BinaryIO = io.BytesIO(_unpacked(path)) if path.suffix == ".gz" else path
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StoreError(
            f"{path} holds more than tensors and is not loaded",
            rule="a pickle can run any code: files are read with weights_only=True",
            fix="write it again as a plain dictionary of tensors",
        ) from error
    except _BROKEN as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(
            f"{path} is truncated or not a torch file ({reason})", fix="delete it and write it again"
        ) from error


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as handle:
        data = handle.read(UNPACKED_LIMIT + 1)
    if len(data) > UNPACKED_LIMIT:
        raise StoreError(f"{path} unpacks to more than {UNPACKED_LIMIT} bytes", rule="one sample a file")
    return data


def _flat(path: Path, key: str, tensor: Tensor) -> Tensor:
    flat = tensor.squeeze(0) if tensor.dim() == 2 and tensor.shape[0] == 1 else tensor
    if flat.dim() != 1 or flat.is_floating_point() or flat.is_complex():
        raise StoreError(f"{path}: {key} is {flat.dtype} {list(tensor.shape)}", rule="integers [T]")
    return flat


def _rows(path: Path, key: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise StoreError(f"{path}: {key} is {tensor.dtype} {list(tensor.shape)}", rule="floating point [1, T, width]")
    return tensor
