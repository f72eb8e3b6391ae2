"""States in 8 bits: half the disk, at an error that is measured and printed. Never the default.

A row is divided by its largest absolute value times 1/127 and rounded, each point's block of a row by itself: residual
streams grow with depth, and one scale for all points would leave the early ones a few levels. The largest values of a
residual stream are far above the rest, so the error of a row is a share of its outlier; look at what is printed, and
replay a drafter on both folders (`eagle3lab accept replay --states`), before you delete the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3lab.capture.manifest import Shard
from eagle3lab.capture.shards import from_int8, pack, to_int8, write_shard
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.core.errors import StoreError


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What was written.

    Attributes:
        bytes_before, bytes_after: of all shards.
        error: point (-1 = last) -> root mean square of the error over that of the state.
    """

    folder: Path
    samples: int
    bytes_before: int
    bytes_after: int
    error: dict[int, float]


def shrink(source: Path, destination: Path) -> Shrunk:
    """Write the states of `source` into `destination` in 8 bits, shard by shard; an interrupted call goes on.

    Raises:
        StoreError: `source` is no finished capture, or is in 8 bits already. DiskError: it does not fit.
    """
    store = Store(source, verify=True)
    if store.manifest.storage == "int8":
        raise StoreError(f"{source} is stored in int8 already", rule="states are rounded once")
    manifest = store.manifest.model_copy(update={"storage": "int8", "shards": []})
    writer = StoreWriter(destination, manifest)
    blocks, dtype = len(manifest.points), getattr(torch, manifest.dtype)
    squares = {point: [0.0, 0.0] for point in [*manifest.points, -1]}
    first = 0
    for index, shard in enumerate(store.manifest.shards):
        members = [store[place] for place in range(first, first + shard.samples)]
        first += shard.samples
        tensors = pack(members, dtype)
        for name, count in (("aux", blocks), ("last", 1)):
            levels, scale = to_int8(tensors[name], count)
            _add_errors(squares, tensors[name], from_int8(levels, scale, dtype), name, manifest.points)
            tensors |= {name: levels, f"{name}_scale": scale}
        if not writer.done(index):
            digest = write_shard(destination / shard.name, tensors)
            writer.add(Shard(name=shard.name, sha256=digest, samples=shard.samples, tokens=shard.tokens))
    error = {point: (wrong / all_of_it) ** 0.5 for point, (wrong, all_of_it) in squares.items()}
    sizes = [sum(path.stat().st_size for path in folder.glob("states-*")) for folder in (source, destination)]
    return Shrunk(destination, len(store), sizes[0], sizes[1], error)


def _add_errors(squares: dict[int, list[float]], exact: Tensor, rounded: Tensor, name: str, points: list[int]) -> None:
    names = points if name == "aux" else [-1]
    for point, whole, back in zip(names, exact.chunk(len(names), -1), rounded.chunk(len(names), -1), strict=True):
        squares[point][0] += float((back.float() - whole.float()).square().sum(dtype=torch.float64))
        squares[point][1] += float(whole.float().square().sum(dtype=torch.float64))
