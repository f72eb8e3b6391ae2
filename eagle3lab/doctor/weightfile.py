"""One weight file as plain facts: what it is, what its header declares, what is wrong with it. No findings in here.

`from_path` looks at a real file, `from_description` at one that is described in words (`{"size": 0}`, `{"tensor": ...,
"declared": [0, 16], "data_bytes": 12}`); both give the same mapping:

    name, size, kind (safetensors | git lfs pointer | empty | zeros | short | not safetensors), header_bytes,
    pointer_size, first_8_bytes_as_number, tensors {name: [dtype, shape]}, bytes (of the tensors),
    faults [{kind, tensor, message, needed, found}], problem (one line, when the header cannot be read)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lab.core.foreign_files import looks_like
from eagle3lab.core.safetensors_header import (
    HEADER_LIMIT,
    PEEK,
    Header,
    HeaderError,
    bytes_of,
    header_length,
    layout_faults,
    parse_header,
    read_header,
)
from eagle3lab.doctor.views import mapping, whole

FAULTS_LISTED = 50
_POINTER = re.compile(rb"(?:\xef\xbb\xbf)?\s*version https?://\S*git-lfs")
_POINTER_SIZE = re.compile(rb"^size (\d{1,20})\s*$", re.MULTILINE)
_SPARSE = re.compile(r"(\d+)\s*bytes")


def from_path(path: Path) -> dict[str, Any]:
    """Facts of a real file. At most its header is read, plus a few kilobytes to see whether it is all zero."""
    try:
        return from_header(read_header(path))
    except HeaderError as error:
        return from_error(path, error)


def from_header(header: Header) -> dict[str, Any]:
    """Facts of a file whose header was read."""
    return _readable(header.path.name, header)


def from_error(path: Path, error: HeaderError) -> dict[str, Any]:
    """Facts of a file whose header could not be read: what its first bytes tell. Only a regular file is opened."""
    if error.kind == "not-a-file":
        return {"name": path.name, "size": None, "kind": "unreadable", "problem": error.what, "reason": error.kind}
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            start = handle.read(PEEK)
    except OSError as problem:
        return {"name": path.name, "size": None, "kind": "unreadable", "problem": str(problem.strerror or problem)}
    return _unreadable(path.name, size, start, error)


def from_description(described: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a described file; an unclear description gives kind `unknown`."""
    name = str(described.get("name", "model.safetensors"))
    if isinstance(described.get("tensor"), Mapping) or isinstance(described.get("tensors"), Mapping):
        return _described_tensors(name, described)
    if isinstance(described.get("header_text"), str):
        raw = _encoded(described["header_text"])
        return _from_bytes(name, len(raw).to_bytes(8, "little") + raw, described)
    for key, decode in (("bytes_hex", bytes.fromhex), ("text", _encoded), ("first_8_bytes_hex", bytes.fromhex)):
        if isinstance(described.get(key), str):
            try:
                return _from_bytes(name, decode(described[key]), described)
            except ValueError:
                return {"name": name, "size": None, "kind": "unknown", "problem": f"{key} is not hexadecimal"}
    size = whole(described.get("size"))
    if size == 0:
        return _from_bytes(name, b"", described)
    return {"name": name, "size": size, "kind": "unknown", "problem": "the description tells no contents"}


def _encoded(text: str) -> bytes:
    """Text as a file would hold it; half a surrogate pair, which no file can, becomes a question mark."""
    return text.encode("utf-8", "replace")


def _from_bytes(name: str, data: bytes, described: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of contents in memory; `size`, or a note such as `sparse, 132095304 bytes long`, tells what follows."""
    note = _SPARSE.search(str(described.get("then", "")))
    declared_size = whole(described.get("size"))
    extra = whole(described.get("data_bytes")) or 0
    size = max(declared_size or 0, int(note[1]) if note else 0, len(data) + extra)
    path = Path(name)
    try:
        length = header_length(path, data[:8], size, HEADER_LIMIT)
        tensors, metadata, duplicates = parse_header(path, data[8 : 8 + length])
    except HeaderError as error:
        return _unreadable(name, size, data, error)
    return _readable(name, Header(path, size, 8 + length, tensors, metadata, duplicates))


def _described_tensors(name: str, described: Mapping[str, Any]) -> dict[str, Any]:
    """{"tensor": {name, dtype, shape}, "declared": [a, b], "data_bytes": n}, or "tensors": {name: [dtype, shape]}."""
    one = mapping(described.get("tensor"))
    entries: dict[str, Any] = {}
    at = 0
    if one:
        declared = described.get("declared")
        shape = one.get("shape")
        spanned = declared if isinstance(declared, list) else [0, tensor_bytes(one.get("dtype"), shape) or 0]
        entries[str(one.get("name", "w"))] = {"dtype": one.get("dtype"), "shape": shape, "data_offsets": spanned}
    for key, raw in mapping(described.get("tensors")).items():
        dtype, shape = raw if isinstance(raw, list) and len(raw) == 2 else (None, None)
        size = tensor_bytes(dtype, shape) or 0
        entries[str(key)] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if described.get("metadata") is not None:
        entries["__metadata__"] = described["metadata"]
    raw = json.dumps(entries, default=str).encode()
    padding = whole(described.get("header_padded_with_spaces_to"))
    raw += b" " * (-len(raw) % padding) if padding and 0 < padding <= 4096 else b""
    data = whole(described.get("data_bytes"))
    size = 8 + len(raw) + (at if data is None else data)
    try:
        tensors, metadata, duplicates = parse_header(Path(name), raw)
    except HeaderError as error:
        return _unreadable(name, size, len(raw).to_bytes(8, "little") + raw, error)
    return _readable(name, Header(Path(name), size, 8 + len(raw), tensors, metadata, duplicates))


def _readable(name: str, header: Header) -> dict[str, Any]:
    faults = layout_faults(header)
    if any(fault.kind == "shape-bytes" for fault in faults):  # the file's size then only repeats the same fault
        faults = [fault for fault in faults if fault.kind not in ("short", "extra")] or faults
    return {
        "name": name,
        "size": header.file_bytes,
        "kind": "safetensors",
        "header_bytes": header.data_start - 8,
        "tensors": header.as_facts(),
        "bytes": header.data_bytes,
        "fault_count": len(faults),
        "faults": [
            {"kind": f.kind, "tensor": f.tensor, "message": f.message, "needed": _told(f.needed), "found": f.found}
            for f in faults[:FAULTS_LISTED]
        ],
    }


def _unreadable(name: str, size: int, start: bytes, error: HeaderError) -> dict[str, Any]:
    kinds = {"pointer": "git lfs pointer", "empty": "empty", "zeros": "zeros", "short": "short"}
    kind = kinds.get(error.kind, "not safetensors")
    if start:  # a length of 0 alone is no file of zeros
        kind = "zeros" if not any(start) else "not safetensors" if kind == "zeros" else kind
    if _POINTER.match(start):
        kind = "git lfs pointer"
    found: dict[str, Any] = {"name": name, "size": size, "kind": kind, "problem": error.what, "reason": error.kind}
    looks = None if kind == "git lfs pointer" else looks_like(start)
    if looks is not None:
        found["looks_like"] = looks
    if len(start) >= 8:
        found["first_8_bytes_as_number"] = _told(int.from_bytes(start[:8], "little"))
    if "declared" in error.details:
        found["header_bytes"] = _told(error.details["declared"])
    pointer = _POINTER_SIZE.search(start)
    if kind == "git lfs pointer":
        found["pointer_size"] = int(pointer[1]) if pointer else None
    return found


def _told(number: int | None) -> int | str | None:
    """A number that no artefact can hold as text: it is evidence, not a quantity."""
    return number if number is None or number < 2**62 else str(number)


def tensor_bytes(dtype: Any, shape: Any) -> int | None:
    """Bytes of a tensor; None when the dtype is unknown or the shape no list of whole numbers."""
    if not isinstance(shape, list):
        return None
    count = 1
    for item in shape:
        length = whole(item)
        if length is None or length < 0:
            return None
        count *= length
    return bytes_of(str(dtype), count)
