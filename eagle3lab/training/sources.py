"""Samples that are not a finished folder: made by the target in this very job, or still being captured by another."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lab.capture.manifest import MANIFEST, StatesManifest, read_manifest
from eagle3lab.capture.shards import Sample, shard_name
from eagle3lab.capture.transformers_engine import capture_batch
from eagle3lab.core.errors import StoreError
from eagle3lab.corpus.chat import Rendered
from eagle3lab.points import compare
from eagle3lab.targets.model import Target

POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0
"""How long a folder may stay unwritten by anybody: the other process may only just be starting."""


class OnlineStates:
    """States made by the target whenever a sample is asked for; nothing is kept, nothing is written.

    Args:
        samples: rendered conversations; a sample's id is its place here.
        manifest: what the states would be captured with.
    """

    live = True

    def __init__(self, target: Target, samples: Sequence[Rendered], manifest: StatesManifest) -> None:
        self.target, self.samples, self.manifest = target, samples, manifest

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        points, pre_norm = self.manifest.points, self.manifest.last == "pre_norm"
        sample = capture_batch(self.target, self.samples, [index], points, pre_norm=pre_norm)[index]
        dtype = getattr(torch, self.manifest.dtype)  # as rounded as the stored ones
        return replace(sample, aux=sample.aux.to(dtype), last=sample.last.to(dtype))

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return len(self.samples[index].input_ids)

    def input_ids(self, index: int) -> Tensor:
        """int64 [T] of sample `index`."""
        return torch.tensor(self.samples[index].input_ids)

    def loss_mask(self, index: int) -> Tensor:
        """bool [T] of sample `index`."""
        return torch.tensor(self.samples[index].loss_mask)


class FollowedStates:
    """A folder of states that another process is still capturing; a sample that is not there yet is waited for.

    Args:
        manifest: what the folder is captured with; another one is refused.
        shards: which samples each shard holds (`plan_shards`).

    Raises:
        StoreError: the folder is captured with something else, a shard does not hold its samples, or nobody captures.
    """

    live = False

    def __init__(
        self,
        folder: Path,
        samples: Sequence[Rendered],
        manifest: StatesManifest,
        shards: Sequence[Sequence[int]],
        *,
        note: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.samples, self.manifest, self.note = folder, samples, manifest, note
        self._place: dict[int, tuple[int, int]] = {}
        for number, members in enumerate(shards):
            start = 0
            for member in members:
                self._place[member] = number, start
                start += self.length(member)
        self._identity = manifest.identity()
        self._files: dict[int, Any] = {}
        self._stopped = threading.Event()

    def stop_waiting(self) -> None:
        """Nobody asks any more: a sample that is waited for is given up."""
        self._stopped.set()

    def __len__(self) -> int:
        return len(self.samples)

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return len(self.samples[index].input_ids)

    def input_ids(self, index: int) -> Tensor:
        """int64 [T] of sample `index`."""
        return torch.tensor(self.samples[index].input_ids)

    def loss_mask(self, index: int) -> Tensor:
        """bool [T] of sample `index`."""
        return torch.tensor(self.samples[index].loss_mask)

    def __getitem__(self, index: int) -> Sample:
        shard, start = self._place[index]
        if shard not in self._files:
            self._files[shard] = self._open(shard)
        rows = slice(start, start + self.length(index))
        try:
            parts = {
                name: self._files[shard].get_slice(name)[rows] for name in ("input_ids", "loss_mask", "aux", "last")
            }
        except SafetensorError as error:
            raise StoreError(f"{self.folder / shard_name(shard)} cannot be read ({error})") from error
        if parts["input_ids"].tolist() != list(self.samples[index].input_ids):
            raise StoreError(
                f"{self.folder / shard_name(shard)} holds other tokens than sample {index}",
                rule="both processes plan the same shards",
                fix="eagle3lab capture again",
            )
        return Sample(index, **parts)

    def _open(self, shard: int) -> Any:
        """Wait until the manifest names the shard: then it is whole."""
        started, told = time.monotonic(), False
        while not self._written(shard):
            late = time.monotonic() - started > GRACE_SECONDS
            # Asked in this order: the last shard may be written, and its lock let go, in between.
            if late and not self._somebody_captures() and not self._written(shard):
                raise StoreError(
                    f"shard {shard + 1} of {self.manifest.planned_shards} is not in {self.folder}",
                    rule="another process captures while this one trains, and none does",
                    fix="eagle3lab capture --run RUN, in another shell",
                )
            if not told:
                self.note(f"waiting for shard {shard + 1} of {self.manifest.planned_shards}")
                told = True
            if self._stopped.wait(POLL_SECONDS):
                raise StoreError("the training has ended")
        return safe_open(self.folder / shard_name(shard), framework="pt")

    def _written(self, shard: int) -> bool:
        if not (self.folder / MANIFEST).is_file():
            return False
        found = read_manifest(self.folder)
        if found.identity() != self._identity:
            difference = compare(found.points, self.manifest.points)
            raise StoreError(
                f"{self.folder} is captured with other inputs", rule=difference or "target, corpus and points are equal"
            )
        self.manifest = found
        return any(one.name == shard_name(shard) for one in found.shards)

    def _somebody_captures(self) -> bool:
        """Whether the folder's lock is held (`core.files.folder_lock`)."""
        lock = self.folder.with_name(f".{self.folder.name}.lock")
        if not lock.is_file():
            return False
        with lock.open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False
