"""Hashes that name things: files, folders, parameters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_file(path: Path, chunk: int = 1 << 22) -> str:
    """sha256 of a file, read in chunks of `chunk` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(chunk):
            digest.update(block)
    return digest.hexdigest()


def sha256_bytes(data: bytes) -> str:
    """sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """sha256 of `value` as canonical JSON (sorted keys, no spaces): equal parameters give equal names."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
