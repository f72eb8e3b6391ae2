"""`--states DIR`: a folder of captured hidden states. Headers of all shards are read; of the contents a bounded part.

Adds `states` (the manifest), `states_manifest_resid_pre`, `shards` (tokens, rows, state) and `shard_states` (what was
measured in the rows). With `--target` also `state_rows_argmax` and `tokens` of a few rows, and where the norm stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.safetensors_header import Header, HeaderError, layout_faults, read_header
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, list_folder, read_json
from eagle3lab.doctor.readers.states_rows import measure
from eagle3lab.doctor.readers.states_target import compare_with_target
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import id_list, items, mapping, whole

SHARD_LIMIT = 100_000
HASH_LIMIT = 1_000_000_000
"""Bytes that are hashed against the manifest, over all shards; beyond it sizes alone are compared."""
NAMES = ("input_ids", "loss_mask", "offsets", "aux", "last", "sample_id")


def read(value: str, facts: Facts) -> None:
    """Add the facts of one folder; a damaged shard is a state of that shard, not the end of the reading."""
    folder = existing(value, "--states")
    if not folder.is_dir():
        raise UsageError(f"--states {folder} is no folder", rule="a folder of captured states", fix="eagle3lab capture")
    try:
        files, outside = list_folder(folder, SHARD_LIMIT)
        parsed = read_json(folder / "manifest.json").value if (folder / "manifest.json").is_file() else None
    except ReadError as error:
        facts.broken(str(folder), error.what, fix="capture again")
        return
    if outside:
        facts.could_not(f"{len(outside)} entries of {folder.name}", "they are links that lead out of it")
    if not isinstance(parsed, dict):
        facts.broken(str(folder), "has no manifest.json that is a mapping", fix="eagle3lab capture writes it")
        parsed = {}
    facts.put("states", parsed, str(folder / "manifest.json"))
    points = id_list(parsed.get("points"))
    if points is not None and not facts.has("states_manifest_resid_pre"):
        facts.put("states_manifest_resid_pre", points, str(folder / "manifest.json"))
    shards, headers = _shards(folder, files, parsed)
    if shards:
        facts.put("shards", shards, str(folder))
    measured = measure(headers, parsed, facts)
    if measured:
        facts.put("shard_states", measured, str(folder))
    compare_with_target(headers, parsed, facts)


def _shards(folder: Path, files: list[Path], manifest: Mapping[str, Any]) -> tuple[list[Any], list[Header]]:
    """(one entry a shard of manifest or folder, headers of those that can be read)."""
    there = {path.name: path for path in files if path.suffix == ".safetensors" and not path.name.startswith(".")}
    listed = [mapping(item) for item in items(manifest.get("shards")) if isinstance(item, dict)]
    named = {str(item.get("name")): item for item in listed}
    budget = HASH_LIMIT
    shards: list[Any] = []
    headers: list[Header] = []
    for name in dict.fromkeys([*named, *sorted(there)]):
        entry: dict[str, Any] = {"name": name, "i": _index(name, len(shards))}
        path = there.get(name)
        if path is None:
            shards.append({**entry, "state": "missing"})
            continue
        header, entry["state"] = _state(path)
        size = path.stat().st_size
        digest = named.get(name, {}).get("sha256")
        if entry["state"] == "good" and isinstance(digest, str) and size <= budget:
            budget -= size
            entry["state"] = "good" if sha256_file(path) == digest else "another hash than the manifest's"
        if name not in named and manifest:
            entry["state"] = "not in the manifest" if entry["state"] == "good" else entry["state"]
        if header is not None:
            entry |= _counts(header)
            entry |= _layout(header, manifest)
            if entry["state"] in ("good", "not in the manifest"):
                headers.append(header)
        shards.append(entry)
    return shards, headers


def _index(name: str, place: int) -> int:
    digits = "".join(c for c in Path(name).stem if c.isdigit())
    return int(digits) if 0 < len(digits) < 10 else place


def _state(path: Path) -> tuple[Header | None, str]:
    try:
        header = read_header(path)
    except HeaderError as error:
        return None, f"{error.kind}: {error.what}"[:200]
    for fault in layout_faults(header):
        missing = (fault.needed or 0) - (fault.found or 0)
        text = f"truncated by {missing} bytes" if fault.kind == "short" else fault.message
        return header, text[:200]
    return header, "good"


def _counts(header: Header) -> dict[str, int]:
    """Tokens by `input_ids`, rows by `aux`."""
    found = {}
    for key, name in (("tokens", "input_ids"), ("hidden_rows", "aux")):
        entry = header.tensors.get(name)
        if entry is not None and entry.shape:
            found[key] = entry.shape[0]
    return found


def _layout(header: Header, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and shapes against the manifest: `problem` names the first disagreement, absent when there is none."""
    absent = [
        name for name in NAMES if name not in header.tensors and not (name == "last" and not manifest.get("last"))
    ]
    if absent:
        return {"problem": f"tensors are missing: {', '.join(absent)}"}
    points, hidden = id_list(manifest.get("points")), whole(manifest.get("hidden_size"))
    aux = header.tensors["aux"].shape
    if points and hidden and (len(aux) != 2 or aux[1] != len(points) * hidden):
        return {"problem": f"aux is {list(aux)}, needed [tokens, {len(points)} x {hidden} = {len(points) * hidden}]"}
    last = header.tensors.get("last")
    if last is not None and hidden and last.shape != (aux[0], hidden):
        return {"problem": f"last is {list(last.shape)}, needed [{aux[0]}, {hidden}]"}
    return {}
