"""A bounded reader of safetensors headers: it trusts nothing in the file and reads no tensor data.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}`, then the data, whose byte 0
is the first after the header. The official reader refuses headers above 100,000,000 bytes; so does this one, and it
also refuses what a JSON parser lets through: a name written twice, numbers that are not integers, offsets outside.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from eagle3lab.core.errors import CheckpointError
from eagle3lab.core.foreign_files import looks_like

FETCH_AGAIN = "fetch the file again, or write it with safetensors"
HEADER_LIMIT = 100_000_000
"""Bytes: the limit of the format's reference reader."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
DTYPE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, **{name: 8 * size for name, size in DTYPE_BYTES.items()}}
"""Every dtype of the format's reference reader (0.8.0), also those whose numbers share bytes."""
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Types of weights and states: name in configs and manifests -> name in headers."""
_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "BF16": "<u2",
}


class HeaderError(CheckpointError):
    """A file that is not readable as safetensors.

    kind: empty | short | pointer | zeros | too-large | truncated-header | json | structure | not-a-file
    details: numbers for a finding.
    """

    def __init__(self, kind: str, what: str, *, rule: str = "", fix: str = "", **details: Any) -> None:
        super().__init__(what, rule=rule, fix=fix)
        self.kind = kind
        self.details = details


def bytes_of(dtype: str, count: int) -> int | None:
    """Bytes of `count` numbers, a begun one counted; None for a dtype this reader does not know."""
    bits = DTYPE_BITS.get(dtype)
    return None if bits is None else -(-bits * count // 8)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header: dtype as spelt in the file, shape, byte range [begin, end) after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that dtype and shape need, a begun one counted; None for a dtype this reader does not know."""
        return bytes_of(self.dtype, self.count)

    @property
    def spare_bits(self) -> int:
        """Bits of the last byte that are filled, when it is not filled up: readers refuse such a tensor."""
        return DTYPE_BITS.get(self.dtype, 0) * self.count % 8


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Fields:
        path: the file. file_bytes: its size. data_start: offset of the first data byte.
        tensors: name -> entry, in file order. metadata: the text map, {} when absent.
        duplicates: names (of tensors or of metadata) that stand twice in the JSON; the last one is kept.
    """

    path: Path
    file_bytes: int
    data_start: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    duplicates: tuple[str, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes after the header that are really there."""
        return self.file_bytes - self.data_start

    @property
    def declared_bytes(self) -> int:
        """Bytes after the header that the entries claim."""
        return max((entry.end for entry in self.tensors.values()), default=0)

    def as_facts(self) -> dict[str, list[Any]]:
        """name -> [dtype, shape], the form of `draft_headers`."""
        return {entry.name: [entry.dtype, list(entry.shape)] for entry in self.tensors.values()}


def read_header(path: Path, *, limit: int = HEADER_LIMIT) -> Header:
    """Read and check the header of a safetensors file; at most `limit` + 8 bytes are read.

    Raises `HeaderError` when it cannot be parsed. Sizes that do not add up are not an exception: see `layout_faults`.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HeaderError("not-a-file", f"{path} is not a regular file", rule="weights are regular files")
        with path.open("rb") as handle:
            first = handle.read(8)
            size = status.st_size
            length = header_length(path, first, size, limit)
            raw = handle.read(length)
            tensors, metadata, duplicates = parse_header(path, raw)
    except OSError as error:
        raise HeaderError(
            "not-a-file", f"{path} cannot be read ({error.strerror})", rule="weights are readable"
        ) from error
    except HeaderError as error:
        raise error if error.kind == "not-a-file" else _told(path, error) from error
    return Header(path, size, 8 + length, tensors, metadata, duplicates)


PEEK = 4096
"""First bytes by which a file that is no safetensors is known."""


def _told(path: Path, error: HeaderError) -> HeaderError:
    """The error with what the file is instead (a zip, an HTML page, GGUF), when that can be told, and what to do."""
    with path.open("rb") as handle:
        looks = looks_like(handle.read(PEEK))
    what, rule, fix = error.what, error.rule, error.fix or FETCH_AGAIN
    if error.kind != "pointer" and looks is not None:
        what, rule = f"{path} is {looks}", "weights are safetensors"
    return HeaderError(error.kind, what, rule=rule, fix=fix, **error.details)


def header_length(path: Path, first: bytes, size: int, limit: int) -> int:
    """Declared header length from the first 8 bytes of a file of `size` bytes; `HeaderError` when it cannot be one."""
    if size == 0:
        raise HeaderError("empty", f"{path} is empty (0 bytes)", rule="a safetensors file has a header", size=0)
    if first.startswith(b"version "):
        raise HeaderError("pointer", f"{path} is a Git LFS pointer, not the weights", fix="git lfs pull", size=size)
    if len(first) < 8:
        raise HeaderError("short", f"{path} has {size} bytes", rule="the first 8 are the header length", size=size)
    length = int.from_bytes(first, "little")
    if length == 0:
        raise HeaderError("zeros", f"{path} declares a header of 0 bytes", rule="a header is JSON", size=size)
    if length > limit:
        raise HeaderError(
            "too-large",
            f"{path} declares a header of {length} bytes",
            rule=f"limit {limit}",
            declared=length,
            limit=limit,
        )
    if 8 + length > size:
        raise HeaderError(
            "truncated-header",
            f"{path} declares a header of {length} bytes and has {size - 8} after the first 8",
            rule="the header is in the file",
            declared=length,
            size=size,
        )
    return length


def parse_header(path: Path, raw: bytes) -> tuple[dict[str, TensorEntry], dict[str, str], tuple[str, ...]]:
    """Parse the JSON of a header (`raw`, without the 8 length bytes); see `Header` for what comes back."""
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                duplicates.append(key)
            seen[key] = value
        return seen

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise HeaderError("json", f"{path}: the header is not UTF-8 (byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HeaderError("json", f"{path}: the header is not JSON ({text})", size=8 + len(raw)) from error
    if not isinstance(parsed, dict):
        raise HeaderError("structure", f"{path}: the header is a {type(parsed).__name__}", rule="a JSON object")
    metadata = parsed.pop("__metadata__", None)
    if metadata is None:  # the format's own reader takes null for absent
        metadata = {}
    if not isinstance(metadata, dict):
        raise HeaderError("structure", f"{path}: __metadata__ is a {type(metadata).__name__}", rule="text to text")
    wrong = next((key for key, value in metadata.items() if not isinstance(value, str)), None)
    if wrong is not None:
        text = f"__metadata__ has {str(metadata[wrong])[:40]} ({type(metadata[wrong]).__name__}) at {wrong[:60]!r}"
        raise HeaderError("structure", f"{path}: {text}", rule="text to text", fix="write it as text")
    tensors = {name: _entry(path, name, value) for name, value in parsed.items()}
    return tensors, metadata, tuple(duplicates)


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    def whole(items: Any) -> TypeGuard[list[int]]:
        return isinstance(items, list) and all(type(item) is int and 0 <= item < 2**63 for item in items)

    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and whole(shape) and whole(offsets) and len(offsets) == 2):
        raise HeaderError(
            "structure",
            f"{path}: tensor {name[:80]!r}: {str(dtype)[:20]}, shape {str(shape)[:40]}, offsets {str(offsets)[:36]}",
            rule="a text, whole numbers, two whole numbers",
            tensor=name,
        )
    return TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


@dataclass(frozen=True, slots=True)
class LayoutFault:
    """Sizes that do not add up. kind: shape-bytes | short | extra | overlap | hole | dtype | duplicate."""

    kind: str
    tensor: str
    message: str
    needed: int | None = None
    found: int | None = None


def layout_faults(header: Header) -> list[LayoutFault]:
    """All disagreements between shapes, byte ranges and the file's size, most telling first."""
    faults = [LayoutFault("duplicate", name, f"{name} stands twice in the header") for name in header.duplicates]
    cursor, last = 0, ""
    for entry in sorted(header.tensors.values(), key=lambda item: (item.begin, item.end)):
        spanned = entry.end - entry.begin
        needed = entry.needed_bytes
        if needed is None:
            faults.append(LayoutFault("dtype", entry.name, f"tensor {entry.name}: unknown dtype {entry.dtype}"))
        elif needed != spanned:
            text = f"tensor {entry.name}: shape {list(entry.shape)} {entry.dtype} needs {needed} bytes, has {spanned}"
            faults.append(LayoutFault("shape-bytes", entry.name, text, needed, spanned))
        elif entry.spare_bits:
            text = f"tensor {entry.name}: shape {list(entry.shape)} {entry.dtype} does not end with a whole byte"
            faults.append(LayoutFault("shape-bytes", entry.name, text, needed, spanned))
        if entry.begin != cursor:
            kind = "overlap" if entry.begin < cursor else "hole"
            text = f"tensor {entry.name} begins at {entry.begin}, the one before it ends at {cursor}"
            faults.append(LayoutFault(kind, entry.name, text, cursor, entry.begin))
        if entry.end >= cursor:
            cursor, last = entry.end, entry.name
    missing = header.declared_bytes - header.data_bytes
    if missing > 0:
        text = f"short by {missing} bytes: tensors need {header.declared_bytes}, the file has {header.data_bytes}"
        faults.append(LayoutFault("short", last, text, header.declared_bytes, header.data_bytes))
    elif missing < 0:
        text = f"{-missing} extra bytes: tensors need {header.declared_bytes}, the file has {header.data_bytes}"
        faults.append(LayoutFault("extra", last, text, header.declared_bytes, header.data_bytes))
    return faults


def map_tensor(header: Header, name: str) -> np.ndarray:
    """The tensor as a read-only memory map with its shape; BF16 comes as its raw uint16 (see `widen`).

    Raises `HeaderError` when the bytes are not all there or the dtype has no numpy twin.
    """
    entry = header.tensors.get(name)
    if entry is None:
        raise HeaderError("structure", f"{header.path} has no tensor {name!r}", rule="names are those of the header")
    if entry.dtype not in _NUMPY:
        raise HeaderError("structure", f"{header.path}: {name} is {entry.dtype}", rule="read as " + ", ".join(_NUMPY))
    needed = entry.needed_bytes
    if needed != entry.end - entry.begin or entry.end > header.data_bytes:
        raise HeaderError(
            "structure",
            f"{header.path}: {name} needs {needed} bytes, {entry.end - entry.begin} are declared",
            tensor=name,
        )
    if entry.count == 0:
        return np.empty(entry.shape, dtype=_NUMPY[entry.dtype])
    start = header.data_start + entry.begin
    return np.memmap(header.path, dtype=_NUMPY[entry.dtype], mode="r", offset=start, shape=entry.shape)


def widen(entry: TensorEntry, raw: np.ndarray) -> np.ndarray:
    """Raw values of `map_tensor` (or rows of it) as float32 where the dtype is BF16, unchanged otherwise."""
    if entry.dtype != "BF16":
        return np.asarray(raw)
    return (np.asarray(raw).astype(np.uint32) << 16).view(np.float32)


def written_share(path: Path) -> float:
    """Share of the file that is really on disk; below 1 the file has holes, which read as zeros."""
    status = os.stat(path)
    return min(1.0, status.st_blocks * 512 / status.st_size) if status.st_size else 1.0
