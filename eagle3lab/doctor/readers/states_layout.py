"""One shard of states against its manifest and itself: names, shapes, dtypes, offsets, mask, ids. No findings here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import STORED_AS, Header, map_tensor
from eagle3lab.doctor.views import id_list, whole

NAMES = ("input_ids", "loss_mask", "offsets", "aux", "last", "sample_id")
LISTS = {"input_ids": "I64", "loss_mask": "BOOL", "offsets": "I64", "sample_id": "I64"}
"""Dtypes of the lists."""
ENTRIES = 50_000_000
"""Longest list of ids, marks or offsets that is read."""


def counts(header: Header) -> dict[str, int]:
    """Tokens by `input_ids`, rows by `aux`, samples by `sample_id`."""
    found = {}
    for key, name in (("tokens", "input_ids"), ("hidden_rows", "aux"), ("samples", "sample_id")):
        entry = header.tensors.get(name)
        if entry is not None and entry.shape:
            found[key] = entry.shape[0]
    return found


def problems_of_header(header: Header, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Disagreements of names, shapes and dtypes with the manifest."""
    absent = [
        name for name in NAMES if name not in header.tensors and not (name == "last" and not manifest.get("last"))
    ]
    if absent:
        yield f"tensors are missing: {', '.join(absent)}"
        return
    points, hidden = id_list(manifest.get("points")), whole(manifest.get("hidden_size"))
    aux, last = header.tensors["aux"].shape, header.tensors.get("last")
    if points and hidden and (len(aux) != 2 or aux[1] != len(points) * hidden):
        yield f"aux is {list(aux)}, needed [tokens, {len(points)} x {hidden} = {len(points) * hidden}]"
    elif last is not None and hidden and last.shape != (*aux[:1], hidden):
        yield f"last is {list(last.shape)}, needed {[*aux[:1], hidden]}"
    yield from _dtypes(header, manifest)
    for name, kind in LISTS.items():
        if header.tensors[name].dtype != kind:
            yield f"{name} is {header.tensors[name].dtype}, needed {kind}"
    tokens, marks = header.tensors["input_ids"].shape, header.tensors["loss_mask"].shape
    if tokens != marks:
        yield f"loss_mask is {list(marks)}, input_ids {list(tokens)}: one mark a token"
    offsets, samples = header.tensors["offsets"].shape, header.tensors["sample_id"].shape
    if len(offsets) != 1 or len(samples) != 1 or offsets[0] != samples[0] + 1:
        yield f"offsets is {list(offsets)} for sample_id {list(samples)}: one more offset than samples"
    elif not samples[0]:
        yield "no sample is in it"


def _dtypes(header: Header, manifest: Mapping[str, Any]) -> Iterator[str]:
    """States in the manifest's dtype; in 8 bits with a scale for each row and point."""
    small = manifest.get("storage") == "int8"
    said = str(manifest.get("dtype"))
    needed = "I8" if small else STORED_AS.get(said)
    points = len(id_list(manifest.get("points")) or [])
    for name, blocks in (("aux", points), ("last", 1)):
        entry = header.tensors.get(name)
        if entry is None:
            continue
        if needed and entry.dtype != needed:
            yield f"{name} is {entry.dtype}, the manifest says {'storage int8' if small else said}"
        scale = header.tensors.get(f"{name}_scale")
        if entry.dtype == "I8" and (scale is None or (blocks and scale.shape != (*entry.shape[:1], blocks))):
            found = "missing" if scale is None else str(list(scale.shape))
            yield f"{name}_scale is {found}: one scale a row and point, {[*entry.shape[:1], blocks]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """What is wrong with offsets, ids, mask and sample ids of a shard; None where they were not read.

    Fields:
        problems: one text each. supervised: marks of the mask. largest_id: of the tokens. last_sample: its last sample.
        bytes_read: 0 when the budget was too small.
    """

    problems: tuple[str, ...] = ()
    supervised: int | None = None
    largest_id: int | None = None
    last_sample: int | None = None
    bytes_read: int = 0


def look_at_ids(header: Header, budget: int, before: int) -> Ids:
    """Read the lists of a shard, nothing beyond the budget. before: the last sample of the shard before it, or -1."""
    parts = {name: integers(header, name) for name in ("offsets", "input_ids", "loss_mask", "sample_id")}
    found = {name: np.asarray(part) for name, part in parts.items() if part is not None}
    size = sum(part.nbytes for part in found.values())
    if size > budget:
        return Ids()  # a shard without a byte of them has been told as one without tensors
    problems = []
    if "offsets" in found and "input_ids" in found:
        problems += _offsets(found["offsets"].astype(np.int64), len(found["input_ids"]))
    if "input_ids" in found and (negative := np.flatnonzero(found["input_ids"] < 0)).size:
        place = int(negative[0])
        problems.append(f"input_ids holds {int(found['input_ids'][place])} at place {place}: an id is never negative")
    samples = found.get("sample_id", np.empty(0, dtype=np.int64)).astype(np.int64)
    if (falls := np.flatnonzero(np.diff(samples, prepend=before) <= 0)).size:
        place = int(falls[0])
        earlier = int(samples[place - 1]) if place else before
        follows = f"sample {int(samples[place])} follows sample {earlier}"
        problems.append(f"{follows}: samples ascend over the shards, each once" if earlier >= 0 else follows)
    return Ids(
        problems=tuple(problems),
        supervised=int(np.count_nonzero(found["loss_mask"])) if "loss_mask" in found else None,
        largest_id=int(found["input_ids"].max()) if "input_ids" in found and len(found["input_ids"]) else None,
        last_sample=int(samples.max()) if len(samples) else None,
        bytes_read=size,
    )


def _offsets(offsets: np.ndarray, tokens: int) -> list[str]:
    found = []
    if len(offsets) and offsets[0] != 0:
        found.append(f"offsets begin at {int(offsets[0])}, not at 0")
    if (falls := np.flatnonzero(np.diff(offsets) < 0)).size:
        place = int(falls[0])
        found.append(f"offsets fall from {int(offsets[place])} to {int(offsets[place + 1])}")
    if len(offsets) and offsets[-1] != tokens:
        found.append(f"offsets end at {int(offsets[-1])}, there are {tokens} tokens")
    return found


def integers(header: Header, name: str) -> np.ndarray | None:
    """A list of whole numbers or marks, mapped; None when it is absent, of another kind or too long."""
    entry = header.tensors.get(name)
    kinds = ("I64", "I32", "U8", "I8", "BOOL")
    if entry is None or len(entry.shape) != 1 or entry.dtype not in kinds or entry.count > ENTRIES:
        return None
    return map_tensor(header, name)
