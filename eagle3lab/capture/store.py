"""Hidden states on disk: shards that appear whole or not at all, and a reader that maps instead of loading.

A shard packs its samples end to end: `input_ids` int64 [T], `loss_mask` bool [T], `offsets` int64 [S+1],
`aux` [T, P*H], `last` [T, H], `sample_id` int64 [S]. No tensor per sample: a header of a million names cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3lab.capture.manifest import Shard, StatesManifest, read_manifest
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import atomic_write, require_space
from eagle3lab.core.hashes import sha256_file
from eagle3lab.points import compare

NAMES = ("input_ids", "loss_mask", "offsets", "aux", "last", "sample_id")


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


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"states-{index:05d}.safetensors"


class StoreWriter:
    """Writes the shards of one capture; used again on the same folder it resumes.

    Raises:
        StoreError: the folder holds a capture whose target, tokenizer, template, points or plan differ (named).
    """

    def __init__(self, folder: Path, manifest: StatesManifest) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest = manifest
        if (folder / "manifest.json").exists():
            found = read_manifest(folder)
            ours, theirs = manifest.identity(), found.identity()
            for name, value in ours.items():
                if theirs[name] != value:
                    raise StoreError(
                        f"{folder} was captured with {name} = {theirs[name]!r}, now {value!r}",
                        rule="a capture is resumed only with the same inputs",
                        fix="capture into another folder",
                    )
            self.manifest = found
            self._drop_damaged()
        else:
            manifest.write(folder)

    def done(self, index: int) -> bool:
        """Whether shard `index` is finished and whole."""
        return any(shard.name == shard_name(index) for shard in self.manifest.shards)

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Check and write one shard, then the manifest. Every sample: rows == tokens, width == P*H, finite."""
        for sample in samples:
            check_sample(sample, self.manifest)
        lengths = [len(sample.input_ids) for sample in samples]
        offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)
        dtype = getattr(torch, self.manifest.dtype)
        tensors = {
            "input_ids": torch.cat([sample.input_ids for sample in samples]),
            "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
            "offsets": offsets,
            "aux": torch.cat([sample.aux.to(dtype) for sample in samples]).contiguous(),
            "last": torch.cat([sample.last.to(dtype) for sample in samples]).contiguous(),
            "sample_id": torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        }
        require_space(self.folder, sum(t.numel() * t.element_size() for t in tensors.values()), "a shard of states")
        path = self.folder / shard_name(index)
        atomic_write(path, lambda temporary: save_file(tensors, temporary))
        shard = Shard(name=path.name, sha256=sha256_file(path), samples=len(samples), tokens=int(offsets[-1]))
        others = [other for other in self.manifest.shards if other.name != shard.name]
        self.manifest.shards = sorted([*others, shard], key=lambda item: item.name)
        self.manifest.write(self.folder)

    def _drop_damaged(self) -> None:
        """Forget shards that are missing or no longer match their hash; they are captured again."""
        good = [
            s
            for s in self.manifest.shards
            if (self.folder / s.name).is_file() and sha256_file(self.folder / s.name) == s.sha256
        ]
        if len(good) != len(self.manifest.shards):
            self.manifest.shards = good
            self.manifest.write(self.folder)
        for leftover in self.folder.glob(".states-*.tmp"):
            leftover.unlink()


def check_sample(sample: Sample, manifest: StatesManifest) -> None:
    """The boundary check: what the engine handed over is what the manifest promises.

    Raises:
        StoreError: naming the sample, the actual shape or value, the formula and its product.
    """
    tokens = len(sample.input_ids)
    expected = {"aux": (tokens, manifest.width), "last": (tokens, manifest.hidden_size), "loss_mask": (tokens,)}
    for name, shape in expected.items():
        actual = tuple(getattr(sample, name).shape)
        if actual != shape:
            hint = (
                f"{len(manifest.points)} points x {manifest.hidden_size} = {manifest.width}"
                if name == "aux"
                else "rows == tokens"
            )
            raise StoreError(f"sample {sample.sample_id}: {name} is {list(actual)}, needed {list(shape)}", rule=hint)
    for name in ("aux", "last"):
        bad = (~torch.isfinite(getattr(sample, name))).any(-1).nonzero()
        if len(bad):
            raise StoreError(
                f"sample {sample.sample_id}: {name} is not finite at token {int(bad[0])}", rule="states are finite"
            )


class Store:
    """Random access to captured samples. Shards are memory-mapped; memory does not grow with the folder.

    Args:
        folder: a folder of states.
        points: the drafter's points; states captured elsewhere are refused (an off-by-one is named as such).
        verify: also hash every shard.
    """

    def __init__(self, folder: Path, *, points: list[int] | None = None, verify: bool = False) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        if len(self.manifest.shards) != self.manifest.planned_shards:
            raise StoreError(
                f"{folder} has {len(self.manifest.shards)} of {self.manifest.planned_shards} shards",
                rule="a capture is used when it is complete",
                fix="eagle3lab capture again: it resumes",
            )
        if points is not None and (difference := compare(self.manifest.points, points)):
            raise StoreError(f"{folder}: {difference}", rule="states and drafter must have the same points")
        self._files: dict[str, safe_open] = {}
        self._index: list[tuple[str, int, int]] = []
        self.sample_ids: list[int] = []
        for shard in self.manifest.shards:
            path = folder / shard.name
            if verify and sha256_file(path) != shard.sha256:
                raise StoreError(
                    f"{path} has another sha256 than its manifest", fix="eagle3lab capture again: only it is redone"
                )
            offsets = self._tensor(shard.name, "offsets")[:]
            self._index += [(shard.name, int(a), int(b)) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
            self.sample_ids += self._tensor(shard.name, "sample_id")[:].tolist()

    def __len__(self) -> int:
        return len(self._index)

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return self._index[index][2] - self._index[index][1]

    def __getitem__(self, index: int) -> Sample:
        name, start, stop = self._index[index]
        parts = {key: self._tensor(name, key)[start:stop] for key in ("input_ids", "loss_mask", "aux", "last")}
        return Sample(self.sample_ids[index], **parts)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def _tensor(self, name: str, key: str):
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StoreError(
                    f"{self.folder / name} cannot be read ({error})", fix="eagle3lab capture again: only it is redone"
                ) from error
        return self._files[name].get_slice(key)
