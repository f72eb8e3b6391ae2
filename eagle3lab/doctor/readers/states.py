"""`--states DIR`: a folder of captured hidden states. Headers of all shards are read; of the contents a bounded part.

Adds `states` (the manifest), `states_manifest_resid_pre`, `shards` (tokens, rows, state) and `shard_states` (what was
measured in the rows). With `--target` also `state_rows_argmax` and `tokens` of a few rows, and where the norm stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.core.errors import UsageError
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.safetensors_header import Header, HeaderError, layout_faults, read_header
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, list_folder, read_json
from eagle3lab.doctor.readers.states_layout import counts, look_at_ids, problems_of_header
from eagle3lab.doctor.readers.states_rows import measure
from eagle3lab.doctor.readers.states_target import compare_with_target
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import id_list, items, mapping
from eagle3lab.inspection.record import RECORD

SHARD_LIMIT = 100_000
FAULTS = 20
"""Faults of a manifest that are listed."""
HASH_LIMIT = 1_000_000_000
"""Bytes that are hashed against the manifest, over all shards; beyond it sizes alone are compared."""
IDS_LIMIT = 500_000_000
"""Bytes of ids, masks and offsets that are read, over all shards."""


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
    faults: list[str] = []
    if isinstance(parsed, dict):
        faults = manifest_faults(parsed)
    else:
        facts.broken(str(folder), "has no manifest.json that is a mapping", fix="eagle3lab capture writes it")
        parsed = {}
    facts.put("states", {**parsed, "faults": faults} if faults else parsed, str(folder / "manifest.json"))
    points = id_list(parsed.get("points"))
    known = facts.sources.get("states_manifest_resid_pre", RECORD)
    if points is not None and known.endswith(RECORD):  # what a drafter's record says gives way
        facts.put("states_manifest_resid_pre", points, str(folder / "manifest.json"))
    shards, headers = _shards(folder, files, parsed)
    _look_at_ids(shards, headers, facts)
    facts.put("shards", shards, str(folder))
    measured = measure(headers, parsed, facts)
    if measured:
        facts.put("shard_states", measured, str(folder))
    compare_with_target(headers, parsed, facts)


def manifest_faults(manifest: Mapping[str, Any]) -> list[str]:
    """What the lab's own reader refuses in a manifest, a text a field."""
    try:
        StatesManifest.model_validate(manifest)
    except ValidationError as error:
        told = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors()[:FAULTS]]
        return [f"{where}: {message}"[:160] for where, message in told]
    return []


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
            entry |= counts(header)
            if problems := list(problems_of_header(header, manifest)):
                entry["problem"] = "; ".join(problems)
            if entry["state"] in ("good", "not in the manifest"):
                headers.append(header)
        shards.append(entry)
    return shards, headers


def _look_at_ids(shards: list[Any], headers: list[Header], facts: Facts) -> None:
    """Add to the entries what is wrong with offsets, ids and mask, and how many tokens are supervised."""
    entries = {entry["name"]: entry for entry in shards}
    budget, left, before = IDS_LIMIT, 0, -1
    for header in headers:
        try:
            found = look_at_ids(header, budget, before)
        except HeaderError as error:
            facts.could_not(f"ids and mask of {header.path.name}", error.what[:160])
            continue
        budget, left = budget - found.bytes_read, left + (found.bytes_read == 0)
        entry = entries[header.path.name]
        if found.problems:
            entry["problem"] = "; ".join([*([entry["problem"]] if "problem" in entry else []), *found.problems])
        entry |= {name: value for name in ("supervised", "largest_id") if (value := getattr(found, name)) is not None}
        if entry["state"] == "good":
            before = found.last_sample if found.last_sample is not None else before
    if left:
        facts.could_not(f"ids and masks of {left} of {len(headers)} shards", f"at most {IDS_LIMIT} bytes are read")


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
