"""Checkpoints as an inventory of mapped tensors: one safetensors file, several, or an index with shards.

Headers are read by `eagle3lab.core.safetensors_header`; bytes are touched only when a tensor is asked for. Nothing is
ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.errors import CheckpointError, nearest
from eagle3lab.core.safetensors_header import layout_faults, read_header
from eagle3lab.inspection.formats import STORAGE

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FETCH = "fetch the checkpoint again"
_GIVE = "give the drafter's folder or its .safetensors file"


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header of its file declares it. `start` is the absolute offset of its first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    def raw(self) -> np.ndarray:
        """Stored bits, shape `shape`, dtype `STORAGE[dtype]`, mapped from the file and read-only."""
        return self._mapped

    @cached_property
    def _mapped(self) -> np.ndarray:
        """One map for all readers: a new one would fault every page in again."""
        if self.dtype not in STORAGE:
            readable = ", ".join(sorted(STORAGE))
            raise CheckpointError(f"{self.name} is stored as {self.dtype}", rule=f"readable: {readable}")
        dtype = np.dtype(STORAGE[self.dtype])
        if self.size == 0:
            return np.empty(self.shape, dtype=dtype)
        try:
            return np.memmap(self.file, dtype=dtype, mode="r", offset=self.start, shape=self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot map {self.name} in {self.file} ({error})", fix=_FETCH) from error


@dataclass
class Checkpoint:
    """Inventory of a checkpoint.

    `repeated` holds the tensors of names that more than one file carries (tensor-parallel shards), in file order;
    `tensors` then has the first of them. `config` is the parsed `config.json` beside the weights, if there is one.
    """

    path: Path
    files: list[Path]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    repeated: dict[str, list[Tensor]] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder that holds the weights."""
        return self.path if self.path.is_dir() else self.path.parent

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"no tensor {name} in {self.path}", rule=nearest(name, self.tensors))
        return self.tensors[name]

    def parts(self, name: str) -> list[Tensor]:
        """Every tensor of that name, one a file."""
        return self.repeated.get(name) or [self[name]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors.values())


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Inventory of a safetensors file or of a folder that holds one, several, or an index with shards.

    Raises:
        CheckpointError: nothing there, a pickle, a truncated or foreign file, a shard that the index names and the
            folder lacks.
    """
    path = Path(path)
    if path.is_dir():
        checkpoint = _open_folder(path)
    elif path.is_file():
        if path.suffix in PICKLES:
            raise CheckpointError(
                f"{path} is a pickle", rule="only safetensors is read, nothing is unpickled",
                fix="save the weights with safetensors.torch.save_file in the environment that made them",
            )  # fmt: skip
        checkpoint = Checkpoint(path=path, files=[path])
    else:
        raise CheckpointError(f"no file or folder {path}", fix=_GIVE)
    checkpoint.config = _config(checkpoint.folder / "config.json")
    for file in checkpoint.files:
        _add_file(checkpoint, file)
    if not checkpoint.tensors:
        raise CheckpointError(f"{path} holds no tensor", fix=_GIVE)
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLES)
        beside = f", only the pickle {pickles[0]}" if pickles else ""
        raise CheckpointError(f"no .safetensors file in {folder}{beside}", rule="nothing is unpickled", fix=_GIVE)
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return Checkpoint(path=folder, files=files)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} has no weight_map ({error!r})", fix=_FETCH) from error
    here = {file.name for file in files}
    if missing := sorted(named - here):
        lost = [name for name, file in weight_map.items() if str(file) == missing[0]]
        raise CheckpointError(
            f"{folder}: {missing[0]} is missing ({len(lost)} tensors, first {lost[0]})",
            rule="every file of the index must be there", fix=_FETCH,
        )  # fmt: skip
    stray = sorted(here - named)
    notes = [f"not read, no index entry names it: {name}" for name in stray]
    return Checkpoint(path=folder, files=[file for file in files if file.name in named], notes=notes)


def _add_file(checkpoint: Checkpoint, file: Path) -> None:
    header = read_header(file)
    if faults := layout_faults(header):
        raise CheckpointError(f"{file}: {faults[0].message}", fix=_FETCH)
    for entry in header.tensors.values():
        tensor = Tensor(entry.name, entry.dtype, entry.shape, file, header.data_start + entry.begin)
        if entry.name in checkpoint.tensors:
            checkpoint.repeated.setdefault(entry.name, [checkpoint.tensors[entry.name]]).append(tensor)
        else:
            checkpoint.tensors[entry.name] = tensor


def _config(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error})", fix="repair it, or move the .safetensors file to a folder of its own"
        ) from error
    return value if isinstance(value, dict) else None
