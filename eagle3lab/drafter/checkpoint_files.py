"""The weight files of a drafter, read by their headers alone: where every tensor lies, under its canonical name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eagle3lab.core.errors import CheckpointError
from eagle3lab.core.files import atomic_write
from eagle3lab.core.safetensors_header import Header, TensorEntry, layout_faults, read_header
from eagle3lab.drafter.layouts import canonical_name, wrapper_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file. `name` as written there; bytes at `start`, `entry.end - entry.begin` of them."""

    path: Path
    name: str
    entry: TensorEntry
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.entry.end - self.entry.begin


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the one, those of its index, or the only one there is.

    Raises:
        CheckpointError: none, several without an index, or shards that the index names and the folder lacks.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if not found and any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has only pickled weights ({min(path.name for path in folder.glob('*.bin'))})",
            rule="this lab reads safetensors",
            fix="save it again with safe_serialization=True where it was trained",
        )
    what = f"{len(found)} safetensors files and no {INDEX}" if found else f"no {WEIGHTS}"
    raise CheckpointError(f"{folder} has {what}", rule=f"weights are {WEIGHTS}, or shards with {INDEX}")


def _indexed(folder: Path) -> list[Path]:
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in places.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has no readable weight_map ({error})", rule="an index maps tensors to files"
        ) from error
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if name not in outside and not (folder / name).is_file()]
    if outside or missing:
        what = f"names files outside the folder: {outside[0]}" if outside else f"names {missing[0]}, which is not there"
        raise CheckpointError(f"{path} {what}", rule="shards lie beside their index")
    return [folder / name for name in names]


def wrapper_in(folder: Path) -> str:
    """The training wrapper's prefix that every name in the files stands behind; empty when there is none."""
    return wrapper_of(name for path in weight_files(folder) for name in read_header(path).tensors)


def stored_tensors(folder: Path, *, wrapper: str = "") -> dict[str, StoredTensor]:
    """Canonical name -> tensor, over all files.

    Args:
        wrapper: prefix to take off every name. Only a conversion does: an engine would drop such names.

    Raises:
        CheckpointError: a file whose header and size disagree, or two tensors of one canonical name.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        header = read_header(path)
        if faults := layout_faults(header):
            raise CheckpointError(f"{path}: {faults[0].message}", fix=f"eagle3lab doctor {folder}")
        for entry in header.tensors.values():
            name = canonical_name(entry.name.removeprefix(wrapper))
            if name in found:
                raise CheckpointError(
                    f"{folder}: {found[name].name} and {entry.name} are the same tensor", rule="each is stored once"
                )
            found[name] = StoredTensor(path, entry.name, entry, header.data_start + entry.begin)
    return found


def headers_of(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape), what `layouts.tensor_problems` asks for."""
    return {name: (tensor.entry.dtype, tensor.entry.shape) for name, tensor in tensors.items()}


def read_bytes(tensor: StoredTensor) -> bytes:
    """The raw bytes of a small tensor, such as d2t."""
    with tensor.path.open("rb") as handle:
        handle.seek(tensor.start)
        return handle.read(tensor.size)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: copied from a file, or made here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: StoredTensor | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.size


def write_weights(path: Path, tensors: Iterable[NewTensor]) -> Header:
    """Write a safetensors file by copying bytes, whole or not at all; memory does not grow with the tensors.

    Returns:
        the header as read back.
    """
    ordered = list(tensors)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.size
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for tensor in ordered:
                if isinstance(tensor.source, bytes):
                    out.write(tensor.source)
                else:
                    _copy(tensor.source, out)

    atomic_write(path, fill)
    header = read_header(path)
    if faults := layout_faults(header):
        raise CheckpointError(f"{path} was written wrongly: {faults[0].message}", rule="report this")
    return header


def _copy(tensor: StoredTensor, out: BinaryIO) -> None:
    left = tensor.size
    with tensor.path.open("rb") as source:
        source.seek(tensor.start)
        while left:
            piece = source.read(min(left, _PIECE))
            if not piece:
                raise CheckpointError(
                    f"{tensor.path} ends inside {tensor.name} ({left} bytes short)",
                    fix=f"copy {os.fspath(tensor.path)} again",
                )
            out.write(piece)
            left -= len(piece)
