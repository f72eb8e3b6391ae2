"""A drafter from one layout into another: names and config change, the bytes of every tensor do not.

Needs neither torch nor the memory for the weights: tensors are copied from file to file. What the other side cannot
express, or would drop without a word, is refused in one line.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.errors import CheckpointError
from eagle3lab.core.files import build_folder, require_space, write_json
from eagle3lab.drafter.checkpoint_files import (
    WEIGHTS,
    NewTensor,
    StoredTensor,
    headers_of,
    read_bytes,
    stored_tensors,
    wrapper_in,
    write_weights,
)
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.layouts import (
    EMBEDDING,
    MAPS,
    WEIGHT_DTYPES,
    Layout,
    identity_maps,
    kept_mask,
    map_problem,
    name_in,
    refuse_limits,
    tensor_problems,
)
from eagle3lab.drafter.layouts_read import Parsed, parse_config
from eagle3lab.drafter.layouts_write import write_config

RECORD = "eagle3lab_training.json"
"""Beside the checkpoint: how the drafter started and was trained (init recipe, seed, hash of the initial fc)."""
_NUMPY = {"I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1"}
_NEED_MAPS = ("sglang", "specforge")
"""Layouts in which maps of an equal vocabulary may stand; vLLM refuses them."""


@dataclass(frozen=True)
class Converted:
    """What was written. source: layout read; tensors, bytes: copied; renamed: of them under another name."""

    source: Layout
    layout: Layout
    config: DraftConfig
    tensors: int
    bytes: int
    renamed: int
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    source: Path,
    destination: Path,
    layout: Layout,
    *,
    target: Path | None = None,
    family: str | None = None,
    blocks: int | None = None,
    verifier: str | None = None,
) -> Converted:
    """Write the drafter in `source` into the new folder `destination`, whole or not at all.

    Args:
        target, family, blocks: see `layouts_read.parse_config`; needed when the ids' target is not recorded.
        verifier: name of the target to write into a speculators config.

    Raises:
        CheckpointError: a broken source, something that `layout` cannot hold, or a destination that exists.
        PointsError: points that the engine of `layout` cannot capture.
    """
    if destination.exists():
        raise CheckpointError(f"{destination} exists", rule="a conversion writes a new folder", fix="name another one")
    parsed = parse_config(source, target=target, family=family, blocks=blocks)
    wrapper = wrapper_in(source)
    tensors = stored_tensors(source, wrapper=wrapper)
    config, notes = parsed.config, list(parsed.notes)
    if wrapper:
        notes.append(f"every name stood behind '{wrapper}', which no engine knows: taken off")
    if problems := tensor_problems(config, headers_of(tensors)):
        raise CheckpointError(f"{source}: {'; '.join(problems)}", fix=f"eagle3lab doctor {source}")
    refuse_limits(config, layout)
    maps = _check_maps(source, config, tensors)
    carried = dict(parsed.carried)
    if layout == "speculators" and verifier is not None:
        carried["speculators"] = _with_verifier(carried.get("speculators", {}), config, verifier)
    new = _new_tensors(parsed, tensors, maps, layout, carried)
    written = write_config(config, layout, dtype=WEIGHT_DTYPES[tensors["fc.weight"].entry.dtype], carried=carried)
    size = sum(tensor.size for tensor in new)
    require_space(destination, size, f"the drafter of {source}")

    def build(folder: Path) -> None:
        write_weights(folder / WEIGHTS, new)
        if (source / RECORD).is_file():
            shutil.copyfile(source / RECORD, folder / RECORD)
        write_json(folder / "config.json", written)
        if parse_config(folder).config != config:
            raise CheckpointError(f"{source} does not read back the same from {layout}", rule="report this")

    build_folder(destination, build)
    if EMBEDDING in tensors:
        notes.append(f"{EMBEDDING} is carried over: SGLang uses the target's instead, vLLM uses this one")
    if layout == "speculators" and not written["speculators_config"]["verifier"].get("name_or_path"):
        notes.append("the verifier's name is unknown and written as null; name it with --verifier")
    renamed = sum(isinstance(t.source, StoredTensor) and t.source.name != t.name for t in new)
    return Converted(parsed.layout, layout, config, len(new), size, renamed, notes)


def _new_tensors(
    parsed: Parsed,
    tensors: Mapping[str, StoredTensor],
    maps: Mapping[str, np.ndarray],
    layout: Layout,
    carried: dict[str, Any],
) -> list[NewTensor]:
    """The tensors of the new file, sorted by name. Adds `maps` to `carried` when identity maps are left out."""
    config = parsed.config
    left_out = identity_maps(config, tensors) if layout not in _NEED_MAPS else []
    if left_out and "d2t" in maps and maps["d2t"].any():
        raise CheckpointError(
            f"d2t gives the target's ids in another order, and {layout} has no map for a whole vocabulary",
            rule="what the other side would drop is not written",
            fix="--to sglang",
        )
    new = [
        NewTensor(name_in(layout, name, config.architecture), t.entry.dtype, t.entry.shape, t)
        for name, t in tensors.items()
        if name not in left_out
    ]
    reduced = config.draft_vocab_size != config.vocab_size
    wanted: set[str] = set()
    if layout in _NEED_MAPS and not reduced:
        wanted = set(carried.pop("maps", [])) | (set(MAPS) if layout == "specforge" else set())
    elif reduced and layout in ("specforge", "speculators"):
        wanted = {"t2d"}  # both trainers refuse a d2t without it; it follows from d2t
    for name in sorted(wanted - tensors.keys()):
        d2t = maps.get("d2t", np.zeros(config.draft_vocab_size, dtype="<i8"))
        values = d2t.astype("<i8") if name == "d2t" else kept_mask(config, d2t)
        new.append(NewTensor(name, MAPS[name][0], values.shape, values.tobytes()))
    if left_out:
        carried["maps"] = left_out
    return sorted(new, key=lambda tensor: tensor.name)


def _check_maps(source: Path, config: DraftConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    maps = {
        name: np.frombuffer(read_bytes(tensors[name]), dtype=_NUMPY[tensors[name].entry.dtype])
        for name in MAPS
        if name in tensors
    }
    d2t = maps.get("d2t", np.zeros(config.draft_vocab_size, dtype="<i8"))
    if problem := map_problem(config, d2t, maps.get("t2d")):
        raise CheckpointError(f"{source}: {problem}", rule="d2t[i] = target id - i", fix=f"eagle3lab doctor {source}")
    return maps


def _with_verifier(carried: Mapping[str, Any], config: DraftConfig, verifier: str) -> dict[str, Any]:
    """The carried part of a speculators config with the verifier's name in it."""
    fresh = write_config(config, "speculators", dtype="")["speculators_config"]
    earlier = carried.get("speculators_config", fresh)
    named = {**earlier.get("verifier", {}), "name_or_path": verifier}
    return {**carried, "speculators_config": {**fresh, **earlier, "verifier": named}}
