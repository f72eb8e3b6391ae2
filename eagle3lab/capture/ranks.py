"""Capture with a target that is split over several processes: all compute, rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.shards import Sample
from eagle3lab.capture.store import StoreWriter
from eagle3lab.core.errors import Eagle3LabError, StoreError
from eagle3lab.targets import ranks


class Sink(Protocol):
    """Where captured shards go: `StoreWriter`, or nowhere on ranks that only compute."""

    manifest: StatesManifest

    def pending(self) -> list[int]:
        """Shards still to be captured; the same on all ranks."""
        ...

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Take the samples of one shard."""
        ...


class Follower:
    """The sink of a rank that computes along: every rank has the same states, one of them writes."""

    def __init__(self, manifest: StatesManifest, pending: list[int]) -> None:
        self.manifest, self._pending = manifest, pending

    def pending(self) -> list[int]:
        """What rank 0 found missing when it opened the folder."""
        return self._pending

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Nothing: rank 0 writes."""


def shared_sink(open_writer: Callable[[], StoreWriter]) -> Sink:
    """Open the folder on rank 0 and tell the others what is missing; in one process simply open it.

    Raises:
        StoreError: on every rank, when rank 0 cannot open the folder; no rank waits for one that has left.
    """
    if not dist.is_initialized():
        return open_writer()
    word: list[object] = [None]
    writer, failure = None, None
    if ranks.rank() == 0:
        try:
            writer = open_writer()
            word = [(writer.manifest, writer.pending())]
        except Eagle3LabError as error:
            failure, word = error, [str(error)]
    dist.broadcast_object_list(word, src=0)
    if failure is not None:
        raise failure
    if isinstance(word[0], str):
        raise StoreError(f"rank 0: {word[0]}")
    return writer or Follower(*word[0])  # type: ignore[misc]
