"""Measure the rows of captured shards: finite, zero, clipped, repeated. Bounded, mapped, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import DTYPE_BYTES, Header, HeaderError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.states_layout import integers
from eagle3lab.doctor.readers.states_values import states, stored
from eagle3lab.doctor.rows import RowReport, equal_rows
from eagle3lab.doctor.views import id_list, whole

BYTE_BUDGET = 512_000_000
"""Bytes of states that one visit reads; a larger capture is looked at in evenly spread shards and rows."""
CHUNK = 8_000_000
GROUPS = 20
BLOCKS = 16
"""Points that are compared with each other."""

Seen = dict[tuple[str, bytes], tuple[str, int, bytes]]
"""(tensor, digest of a sample's states) -> (shard, first row, digest of its tokens)."""


def measure(headers: list[Header], manifest: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """{shard: {"aux": report, "last": report, "dtype", "points", "block", "repeated", "same_as", "equal_points",
    "flat_points", "looked_at", "rows"}}."""
    points, hidden = id_list(manifest.get("points")) or [], whole(manifest.get("hidden_size")) or 0
    total = sum(_bytes(header) for header in headers)
    share = min(1.0, BYTE_BUDGET / total) if total else 1.0
    found: dict[str, Any] = {}
    samples: Seen = {}
    seen = rows = 0
    for header in headers:
        try:
            one = _measure_shard(header, points, hidden, share)
            if one:
                one |= _samples(header, one["looked_at"], samples)
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
        if entry is None or len(entry.shape) != 2:
            continue
        rows = entry.shape[0]
        count = max(1, int(rows * share)) if rows else 0
        block = hidden if name == "aux" and 0 < hidden <= entry.shape[1] else 0
        report, step = RowReport(), max(1, CHUNK // max(entry.shape[1] * DTYPE_BYTES.get(entry.dtype, 1), 1))
        pairs = _pairs(entry.shape[1], block) if count else []
        flat = {pair[0] for pair in pairs} | {pair[1] for pair in pairs} if count > 1 else set()
        top = None
        for start in range(0, count, step):
            part = states(header, name, start, min(start + step, count))
            report.add(part, block=block, dtype=entry.dtype)
            pairs = [pair for pair in pairs if _equal(part, pair, block)]
            top = part[:1] if top is None else top
            flat = {place for place in flat if _same(part, top, place, block)}
        found |= {name: asdict(report), "dtype": entry.dtype, "looked_at": count, "rows": rows}
        if name == "aux":
            found["equal_points"] = pairs if report.zero_row_count < count else []
            found["flat_points"] = sorted(flat) if flat and _several_tokens(header) else []
    return found if "dtype" in found else {}


def _pairs(width: int, block: int) -> list[list[int]]:
    return [list(pair) for pair in combinations(range(min(width // block, BLOCKS)), 2)] if block else []


def _equal(rows: np.ndarray, pair: list[int], block: int) -> bool:
    """Whether two blocks of columns are the same in all rows."""
    one, other = (rows[:, place * block : (place + 1) * block] for place in pair)
    return bool((one[:1] == other[:1]).all() and (one == other).all())


def _same(rows: np.ndarray, top: np.ndarray, place: int, block: int) -> bool:
    """Whether a block of columns is the first row's in all rows."""
    columns = slice(place * block, (place + 1) * block)
    return bool((rows[-1:, columns] == top[:, columns]).all() and (rows[:, columns] == top[:, columns]).all())


def _several_tokens(header: Header) -> bool:
    tokens = integers(header, "input_ids")
    return tokens is not None and bool((np.asarray(tokens) != tokens[0]).any())


def _samples(header: Header, looked_at: int, seen: Seen) -> dict[str, Any]:
    """Bit-equal rows inside a sample, and samples whose states are those of another text; zero rows are told elsewhere.

    `repeated`: rows of the shard whose tokens differ. `same_as`: {tensor, row, shard, other_row}.
    """
    tokens, offsets = integers(header, "input_ids"), integers(header, "offsets")
    if tokens is None or offsets is None:
        return {}
    repeated: list[list[int]] = []
    same: list[dict[str, Any]] = []
    for start, stop in pairwise(np.asarray(offsets).tolist()):
        if not 0 <= start < stop <= min(looked_at, len(tokens)):
            continue
        text = _digest(np.asarray(tokens[start:stop], dtype=np.int64).tobytes())
        for name in ("aux", "last"):
            if name not in header.tensors or header.tensors[name].shape[0] < stop:
                continue
            rows = [_digest(row) if any(row) else b"" for row in stored(header, name, start, stop)]
            if name == "aux":
                groups = ([start + place for place in group] for group in equal_rows(rows) if rows[group[0]])
                repeated += [group[:50] for group in groups if len({int(tokens[place]) for place in group}) > 1]
            if not any(rows):
                continue
            shard, other, of_text = seen.setdefault((name, _digest(b"".join(rows))), (header.path.name, start, text))
            if of_text != text:
                same.append({"tensor": name, "row": start, "shard": shard, "other_row": other})
        if len(repeated) >= GROUPS and len(same) >= GROUPS:
            break
    return {"repeated": repeated[:GROUPS], "same_as": same[:GROUPS]}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
