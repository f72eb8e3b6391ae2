"""Captured states from one form into another: our store, SpecForge's files, speculators' files.

The forms differ in the last state: SpecForge's is after the target's final norm, speculators' before it, ours says
which. Before to after applies the norm once; after to before is impossible and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from torch import Tensor

from eagle3lab.capture.final_norm import read_final_norm
from eagle3lab.capture.manifest import MANIFEST, StatesManifest, read_manifest
from eagle3lab.capture.shards import Sample
from eagle3lab.capture.specforge_format import read_specforge_folder, write_specforge
from eagle3lab.capture.speculators_format import (
    STATES,
    Row,
    missing_rows,
    read_speculators_folder,
    write_rows,
    write_speculators,
)
from eagle3lab.capture.store import Store
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import build_folder, require_space, write_text

Kind = Literal["eagle3lab", "specforge", "speculators"]
Last = Literal["pre_norm", "post_norm"]
LAST: dict[str, Last] = {"specforge": "post_norm", "speculators": "pre_norm"}
SIDECAR = "eagle3lab_states.json"
"""Our manifest beside exported files, which name neither target nor points; `shards` is empty in it."""


@dataclass(frozen=True)
class Moved:
    """What was written. points: `resid_pre`, None when the source does not say."""

    samples: int
    tokens: int
    points: list[int] | None
    notes: list[str] = field(default_factory=list)


def states_kind(folder: Path) -> Kind | None:
    """Which form of captured states lies in `folder`; None when none does."""
    if (folder / MANIFEST).is_file():
        return "eagle3lab"
    if next(folder.glob(f"{STATES}/hs_*.safetensors"), None) or next(folder.glob("hs_*.safetensors"), None):
        return "speculators"
    return "specforge" if next(folder.rglob("data_*.ckpt*"), None) else None


def convert_states(source: Path, destination: Path, to: str, *, target: Path | None = None) -> Moved:
    """Write the states in `source` into the new folder `destination`, whole or not at all.

    Args:
        to: `specforge` or `speculators`.
        target: folder of the target, whose final norm is needed from before to after.

    Raises:
        StoreError: a form that cannot be reached, a broken source, or a destination that exists.
    """
    if to not in LAST:
        raise StoreError(f"states are not converted to '{to}'", rule="--to specforge or --to speculators")
    if destination.exists():
        raise StoreError(f"{destination} exists", rule="a conversion writes a new folder", fix="name another one")
    kind = states_kind(source)
    if kind is None:
        raise StoreError(f"no captured states in {source}", rule="manifest.json, data_<i>.ckpt or hs_<i>.safetensors")
    if kind == to:
        raise StoreError(f"{source} is in {to}'s form already", rule="a conversion changes the form")
    samples, last, manifest, size = _open(source, kind)
    change = _change_of_last(source, last, LAST[to], target)
    require_space(destination, size, f"the states of {source}")
    counted = {"samples": 0, "tokens": 0}
    notes: list[str] = []

    def build(folder: Path) -> None:
        rows: list[Row] = []
        for index, sample in enumerate(samples):
            moved = replace(sample, last=change(sample.last))
            if to == "specforge":
                write_specforge(folder, index, moved)
            else:
                write_speculators(folder, index, moved)
                rows.append(Row(sample.input_ids.tolist(), sample.loss_mask.int().tolist()))
            counted["samples"] += 1
            counted["tokens"] += len(sample.input_ids)
        if to == "speculators":
            notes.append(write_rows(folder, rows))
        if manifest is not None:
            said = manifest.model_copy(update={"last": LAST[to], "shards": []})
            write_text(folder / SIDECAR, said.model_dump_json(indent=2) + "\n")

    build_folder(destination, build)
    if manifest is None:
        notes.append("the source names neither its target nor its points: nor does the result")
    elif to == "specforge" and len(manifest.points) != 3:
        notes.append(f"SpecForge trains on three points, these states have {len(manifest.points)}")
    if kind == "speculators" and (absent := missing_rows(source))[0]:
        notes.append(
            f"{len(absent[0])} of {absent[1]} rows have no states and are left out, the first is {absent[0][0]}"
        )
    return Moved(counted["samples"], counted["tokens"], None if manifest is None else manifest.points, notes)


def _open(source: Path, kind: Kind) -> tuple[Iterator[Sample], Last, StatesManifest | None, int]:
    """Samples, what their last state is, the manifest when there is one, and about how many bytes will be written."""
    size = sum(path.stat().st_size for path in source.rglob("*") if path.suffix in (".safetensors", ".ckpt", ".gz"))
    if kind == "eagle3lab":
        store = Store(source, verify=True)
        return iter(store), store.manifest.last, store.manifest, size
    samples = read_specforge_folder(source) if kind == "specforge" else read_speculators_folder(source)
    first = next(samples)
    manifest = None
    if (source / SIDECAR).is_file():
        manifest = read_manifest(source, SIDECAR)
        width = manifest.width
        if first.aux.shape[-1] != width:
            raise StoreError(
                f"{source}: states are {first.aux.shape[-1]} wide",
                rule=f"{SIDECAR} says {len(manifest.points)} points x {manifest.hidden_size} = {width}",
            )
    return chain([first], samples), LAST[kind], manifest, size


def _change_of_last(source: Path, have: Last, want: Last, target: Path | None) -> Callable[[Tensor], Tensor]:
    if have == want:
        return lambda last: last
    if want == "pre_norm":
        raise StoreError(
            f"the last state in {source} was captured after the target's final norm",
            rule="speculators needs it before the norm, and a norm cannot be undone",
            fix="capture again: eagle3lab capture --replies FILE --out FOLDER --last pre",
        )
    if target is None:
        raise StoreError(
            f"the last state in {source} was captured before the target's final norm",
            rule="SpecForge needs it after the norm, which is the target's",
            fix="add --target DIR",
        )
    return read_final_norm(target)
