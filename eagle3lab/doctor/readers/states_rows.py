"""Measure the rows of captured shards: finite, zero, clipped, repeated. Bounded, mapped, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import DTYPE_BYTES, Header, HeaderError, map_tensor, widen
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.rows import RowReport, equal_rows
from eagle3lab.doctor.views import id_list, whole

BYTE_BUDGET = 512_000_000
"""Bytes of states that one visit reads; a larger capture is looked at in evenly spread shards and rows."""
CHUNK = 8_000_000
GROUPS = 20


def measure(headers: list[Header], manifest: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """{shard: {"aux": report, "last": report, "dtype", "points", "block", "repeated", "looked_at", "rows"}}."""
    points, hidden = id_list(manifest.get("points")) or [], whole(manifest.get("hidden_size")) or 0
    total = sum(_bytes(header) for header in headers)
    share = min(1.0, BYTE_BUDGET / total) if total else 1.0
    found: dict[str, Any] = {}
    seen = rows = 0
    for header in headers:
        try:
            one = _measure_shard(header, points, hidden, share)
        except (HeaderError, OSError, ValueError) as error:
            facts.could_not(f"the rows of {header.path.name}", str(getattr(error, "what", error))[:160])
            continue
        if one:
            found[header.path.name] = one
            seen, rows = seen + one["looked_at"], rows + one["rows"]
    if seen < rows:
        facts.could_not(f"{rows - seen} of {rows} rows of states", f"a visit reads at most {BYTE_BUDGET} bytes of them")
    return found


def _bytes(header: Header) -> int:
    entries = [header.tensors[name] for name in ("aux", "last") if name in header.tensors]
    return sum(entry.needed_bytes or 0 for entry in entries)


def _measure_shard(header: Header, points: list[int], hidden: int, share: float) -> dict[str, Any]:
    found: dict[str, Any] = {"points": points, "block": hidden}
    for name in ("aux", "last"):
        entry = header.tensors.get(name)
        if entry is None or len(entry.shape) != 2 or entry.dtype not in ("BF16", "F16", "F32"):
            continue
        raw = map_tensor(header, name)
        count = max(1, int(len(raw) * share)) if len(raw) else 0
        report, step = RowReport(), max(1, CHUNK // max(entry.shape[1] * DTYPE_BYTES[entry.dtype], 1))
        for start in range(0, count, step):
            part = widen(entry, raw[start : min(start + step, count)]).astype(np.float32)
            report.add(part, block=hidden if name == "aux" and 0 < hidden <= entry.shape[1] else 0, dtype=entry.dtype)
        found |= {name: asdict(report), "dtype": entry.dtype, "looked_at": count, "rows": len(raw)}
        if name == "aux":
            found["repeated"] = _repeated(header, raw[:count])
    return found if "dtype" in found else {}


def _repeated(header: Header, raw: np.ndarray) -> list[list[int]]:
    """Bit-equal rows inside one sample whose tokens differ, as rows of the shard; zero rows are told elsewhere."""
    tokens, offsets = _ints(header, "input_ids"), _ints(header, "offsets")
    if tokens is None or offsets is None or len(tokens) < len(raw):
        return []
    found: list[list[int]] = []
    for start, stop in pairwise(offsets):
        if not 0 <= start < stop <= len(raw):
            continue
        for group in equal_rows(np.ascontiguousarray(row).tobytes() for row in raw[start:stop]):
            places = [int(start) + place for place in group]
            if len({int(tokens[place]) for place in places}) > 1 and raw[places[0]].any():
                found.append(places[:50])
        if len(found) >= GROUPS:
            break
    return found[:GROUPS]


def _ints(header: Header, name: str) -> np.ndarray | None:
    entry = header.tensors.get(name)
    if entry is None or len(entry.shape) != 1 or entry.dtype not in ("I64", "I32") or entry.count > 50_000_000:
        return None
    return np.asarray(map_tensor(header, name)).astype(np.int64)
