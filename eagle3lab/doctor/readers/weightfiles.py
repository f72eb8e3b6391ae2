"""Weight files of a folder as facts: `weight_files`, what each of them is, and `index` with `files`, who holds what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lab.core.safetensors_header import HEADER_LIMIT, Header, HeaderError, read_header
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, read_json
from eagle3lab.doctor.weightfile import from_error, from_header

PARSED = 16_000_000
"""Bytes of a header that are parsed: 100,000 tensors, far more than a drafter or one shard of a target has."""


def read_headers(files: list[Path], facts: Facts) -> list[Header]:
    """Headers that can be read; what every file is goes into `weight_files`, where the checks judge it."""
    found: list[Header] = []
    described = dict(facts.mapping("weight_files"))
    for path in files:
        try:
            header = read_header(path, limit=PARSED)
        except HeaderError as error:
            told = from_error(path, error)
            if _only_too_long(told):
                why = f"has a header of {told['header_bytes']} bytes, at most {PARSED} are parsed"
                facts.broken(str(path), why, actual=told["header_bytes"])
            else:
                described[str(path)] = told
        else:
            found.append(header)
            described[str(path)] = from_header(header)
    if described:
        facts.put("weight_files", described, str(files[0].parent) if files else "")
    return found


def _only_too_long(told: dict[str, Any]) -> bool:
    """Whether a header is within the format's limit and in the file, and only longer than what is parsed here."""
    declared = told.get("header_bytes")
    if told.get("reason") != "too-large" or "looks_like" in told or not isinstance(declared, int):
        return False
    return declared <= min(HEADER_LIMIT, told["size"] or 0)


def add_index(folder: Path, entries: list[Path], facts: Facts) -> None:
    """`index` and the tensors of every safetensors file beside it; files that cannot be read are told elsewhere."""
    index = next((entry for entry in entries if entry.name.endswith(".safetensors.index.json")), None)
    if index is None:
        return
    try:
        value = read_json(index).value
    except ReadError:
        return  # told where the index is read for its shards
    if not isinstance(value, dict):
        return
    tensors: dict[str, object] = {}
    for path in (entry for entry in entries if entry.suffix == ".safetensors"):
        try:
            tensors[path.name] = read_header(path, limit=PARSED).as_facts()
        except HeaderError:
            tensors[path.name] = None  # there, but not to be looked into: `file-is-weights` tells what it is
    facts.put("index", value, str(index))
    facts.put("files", tensors, str(folder))
