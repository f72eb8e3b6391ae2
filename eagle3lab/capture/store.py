"""Hidden states on disk: shards that appear whole or not at all, and a reader that maps instead of loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3lab.capture.manifest import MANIFEST, Shard, StatesManifest, read_manifest
from eagle3lab.capture.shards import Sample, check_sample, from_int8, pack, shard_name, write_shard
from eagle3lab.core.errors import StoreError
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.safetensors_header import STORED_AS
from eagle3lab.points import compare

__all__ = ["Sample", "Store", "StoreWriter", "shard_name"]


class StoreWriter:
    """Writes the shards of one capture; used again on the same folder it resumes.

    On resume every shard is hashed. One that is missing, truncated, changed or swapped is named to `note` and captured
    again; the good ones stay untouched.

    Raises:
        StoreError: the folder holds a capture whose target, tokenizer, template, points or plan differ (named).
    """

    def __init__(self, folder: Path, manifest: StatesManifest, *, note: Callable[[str], None] = print) -> None:
        self.folder, self.manifest, self.note = folder, manifest, note
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()  # of a killed writer
        if not (folder / MANIFEST).exists():
            manifest.write(folder)
            return
        self.manifest = read_manifest(folder)
        self._require_same(manifest)
        self._forget_damaged()

    def done(self, index: int) -> bool:
        """Whether shard `index` is finished and whole."""
        return any(shard.name == shard_name(index) for shard in self.manifest.shards)

    def pending(self) -> list[int]:
        """Shards of the plan that are still to be written."""
        return [index for index in range(self.manifest.planned_shards) if not self.done(index)]

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Check and write one shard, then the manifest. Every sample: rows == tokens, width == P*H, finite.

        Raises:
            StoreError: a sample breaks a check. DiskError: the disk is at its floor; finished shards stay good.
        """
        for sample in samples:
            check_sample(sample, points=len(self.manifest.points), hidden_size=self.manifest.hidden_size)
        tensors = pack(samples, getattr(torch, self.manifest.dtype))
        digest = write_shard(self.folder / shard_name(index), tensors)
        self.add(Shard(name=shard_name(index), sha256=digest, samples=len(samples), tokens=len(tensors["input_ids"])))

    def add(self, shard: Shard) -> None:
        """Enter a written shard into the manifest."""
        others = [other for other in self.manifest.shards if other.name != shard.name]
        self.manifest.shards = sorted([*others, shard], key=lambda item: item.name)
        self.manifest.write(self.folder)

    def forget(self, indices: Sequence[int]) -> None:
        """Take shards out of the manifest, so that they are captured again."""
        names = {shard_name(index) for index in indices}
        self.manifest.shards = [shard for shard in self.manifest.shards if shard.name not in names]
        self.manifest.write(self.folder)

    def _require_same(self, asked: StatesManifest) -> None:
        ours, theirs = asked.identity(), self.manifest.identity()
        for name in {**ours, **theirs}:
            found, value = theirs.get(name), ours.get(name)
            if found == value:
                continue
            difference = (
                compare(found or (), value or (), a_name="it", b_name="this capture") if name == "points" else None
            )
            raise StoreError(
                f"{self.folder} was captured with {name} = {found!r}, now {value!r}",
                rule=difference or "a capture is resumed only with the same inputs",
                fix="capture into another folder",
            )

    def _forget_damaged(self) -> None:
        owners = {shard.sha256: shard.name for shard in self.manifest.shards}
        good = []
        for shard in self.manifest.shards:
            fault = _fault(self.folder / shard.name, shard, owners)
            if fault is None:
                good.append(shard)
            else:
                self.note(f"{self.folder / shard.name} {fault}: captured again")
        if len(good) != len(self.manifest.shards):
            self.manifest.shards = good
            self.manifest.write(self.folder)


def _fault(path: Path, shard: Shard, owners: dict[str, str]) -> str | None:
    """What is wrong with a finished shard, or None. `owners`: sha256 -> name of the shard that should have it."""
    if not path.is_file():
        return "is missing"
    digest = sha256_file(path)
    if digest == shard.sha256:
        return None
    if digest in owners:
        return f"holds the bytes of {owners[digest]}"
    try:
        safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        return f"is truncated or not safetensors ({error})"
    return f"has sha256 {digest[:12]}, {shard.sha256[:12]} was written"


class Store:
    """Random access to captured samples. Shards are memory-mapped; memory does not grow with the folder.

    A store can be pickled or forked into worker processes: each maps the shards for itself.

    Args:
        folder: a folder of states.
        points: the drafter's points; states captured elsewhere are refused (an off-by-one is named as such).
        verify: also hash every shard.

    Raises:
        StoreError: not a complete capture, other points, or a shard that is damaged (named).
    """

    live = False

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
        self._files: dict[str, Any] = {}
        self._index: list[tuple[str, int, int]] = []
        self.sample_ids: list[int] = []
        owners = {shard.sha256: shard.name for shard in self.manifest.shards}
        for shard in self.manifest.shards:
            if verify and (fault := _fault(folder / shard.name, shard, owners)):
                raise StoreError(f"{folder / shard.name} {fault}", fix="eagle3lab capture again: only it is redone")
            self._enter(shard)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [stop - start for _, start, stop in self._index]

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return self._index[index][2] - self._index[index][1]

    def input_ids(self, index: int) -> torch.Tensor:
        """int64 [T] of sample `index`, without touching its states."""
        name, start, stop = self._index[index]
        return self._slice(name, "input_ids")[start:stop]

    def loss_mask(self, index: int) -> torch.Tensor:
        """bool [T] of sample `index`, without touching its states."""
        name, start, stop = self._index[index]
        return self._slice(name, "loss_mask")[start:stop]

    def __getitem__(self, index: int) -> Sample:
        name, start, stop = self._index[index]
        parts = {key: self._slice(name, key)[start:stop] for key in ("input_ids", "loss_mask", "aux", "last")}
        if self.manifest.storage == "int8":
            dtype = getattr(torch, self.manifest.dtype)
            for key in ("aux", "last"):
                parts[key] = from_int8(parts[key], self._slice(name, f"{key}_scale")[start:stop], dtype)
        return Sample(self.sample_ids[index], **parts)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def _enter(self, shard: Shard) -> None:
        for key in ("offsets", "sample_id"):
            self._require(shard.name, key, "I64", None)
        offsets = self._slice(shard.name, "offsets")[:].tolist()
        ids = self._slice(shard.name, "sample_id")[:].tolist()
        if len(ids) != shard.samples or offsets[-1] != shard.tokens:
            raise StoreError(
                f"{self.folder / shard.name} holds {len(ids)} samples and {offsets[-1]} tokens, "
                f"its manifest says {shard.samples} and {shard.tokens}",
                rule="shards do not change places",
                fix="eagle3lab capture again: only it is redone",
            )
        if offsets[0] or any(left > right for left, right in pairwise(offsets)):
            raise StoreError(
                f"{self.folder / shard.name}: offsets {offsets[:4]}...",
                rule="from 0, ascending",
                fix="eagle3lab capture again: only it is redone",
            )
        stored = "I8" if self.manifest.storage == "int8" else STORED_AS[self.manifest.dtype]
        self._require(shard.name, "input_ids", "I64", [shard.tokens])
        self._require(shard.name, "loss_mask", "BOOL", [shard.tokens])
        self._require(shard.name, "aux", stored, [shard.tokens, self.manifest.width])
        self._require(shard.name, "last", stored, [shard.tokens, self.manifest.hidden_size])
        before = self.sample_ids[-1:] + ids
        if any(left >= right for left, right in pairwise(before)):
            raise StoreError(
                f"{self.folder / shard.name} holds samples {ids[0]} to {ids[-1]} after sample {before[0]}",
                rule="samples ascend over the shards; two shards were swapped",
                fix="eagle3lab capture again: only they are redone",
            )
        self._index += [(shard.name, start, stop) for start, stop in pairwise(offsets)]
        self.sample_ids += ids

    def _require(self, name: str, key: str, dtype: str, shape: list[int] | None) -> None:
        """Dtype and shape of a tensor, by the header alone; None: any list that is not empty."""
        part = self._slice(name, key)
        found_dtype, found = part.get_dtype(), list(part.get_shape())
        if found_dtype != dtype or (len(found) != 1 or not found[0] if shape is None else found != shape):
            raise StoreError(
                f"{self.folder / name}: {key} is {found_dtype} {found}, needed {dtype} {shape or '[1 or more]'}",
                rule="tokens, points and width are the manifest's",
                fix="eagle3lab capture again: only it is redone",
            )

    def _slice(self, name: str, key: str) -> Any:
        try:
            if name not in self._files:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            return self._files[name].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{self.folder / name} cannot be read ({error})", fix="eagle3lab capture again: only it is redone"
            ) from error
