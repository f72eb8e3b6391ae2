"""Captured states against the target that they are said to come from: its head and its final norm, by a few rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import Header, HeaderError, map_tensor, read_header, widen
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, list_folder
from eagle3lab.doctor.views import mapping, real

SAMPLES, ROWS = 8, 24
HEAD_BYTES = 3_000_000_000
"""Largest head that is read; above it the comparison is said to be left out."""
HEAD_ROWS = 4096
FILES = 300


def compare_with_target(headers: list[Header], manifest: Mapping[str, Any], facts: Facts) -> None:
    """Add `state_rows_argmax` and `tokens` (rows of a few samples under the target's head) and `states.norm`."""
    source = facts.sources.get("target_config") or facts.sources.get("target_embed_tokens", "").rpartition(":")[0]
    if not source or not headers:
        return
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    try:
        target = _tensors(folder)
        rows = _sampled(headers[0])
    except (ReadError, HeaderError, OSError) as error:
        facts.could_not("states against the target", str(getattr(error, "what", error))[:160])
        return
    norm = _vector(target, ("model.norm.weight", "norm.weight"))
    head = _find(target, ("lm_head.weight",)) or _find(target, ("embed_tokens.weight",))
    if not rows or head is None:
        facts.could_not("states against the target", "there is no head in its files, or no whole sample in the states")
        return
    if norm is not None:
        _norm_position(rows, norm, manifest, facts)
    entry = head[0].tensors[head[1]]
    if (entry.needed_bytes or 0) > HEAD_BYTES or len(entry.shape) != 2:
        facts.could_not("states against the target's head", f"it has shape {list(entry.shape)}, more than is read")
        return
    if entry.shape[1] != rows[0][1].shape[1]:
        facts.broken("states", f"rows of `last` have {rows[0][1].shape[1]} numbers, the head reads {entry.shape[1]}")
        return
    pre_norm = str(manifest.get("last")).startswith(("pre", "before"))
    eps = real(mapping(facts.get("target_config")).get("rms_norm_eps")) or 1e-6
    stacked = np.concatenate([states for _, states in rows])
    with np.errstate(all="ignore"):  # damaged states are told as such elsewhere
        if pre_norm and norm is not None:
            stacked = stacked / np.sqrt((stacked**2).mean(axis=1, keepdims=True) + eps) * norm
        best = _argmax(stacked, *head)
    bounds = np.cumsum([0, *(len(states) for _, states in rows)])
    argmax = [best[a:b].tolist() for a, b in pairwise(bounds)]
    facts.put("state_rows_argmax", argmax, f"{headers[0].path} under {head[0].path.name}:{head[1]}")
    facts.put("tokens", [tokens for tokens, _ in rows], str(headers[0].path))


def _sampled(header: Header) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, rows of `last`) of the replies of a few samples: row t goes with token t + 1."""
    if not {"input_ids", "offsets", "last"} <= header.tensors.keys():
        return []
    tokens, offsets = np.asarray(map_tensor(header, "input_ids")), np.asarray(map_tensor(header, "offsets"))
    last = map_tensor(header, "last")
    mask = np.asarray(map_tensor(header, "loss_mask")) if "loss_mask" in header.tensors else None
    found = []
    for start, stop in pairwise(offsets.tolist()):
        if not 0 <= start < stop <= min(len(tokens), len(last)) or stop - start < 3:
            continue
        first = start
        if mask is not None and len(mask) == len(tokens) and mask[start:stop].any():
            first = max(start, start + int(mask[start:stop].argmax()) - 1)
        end = min(first + ROWS, stop - 1)
        if end > first:
            rows = widen(header.tensors["last"], last[first:end]).astype(np.float32)
            found.append(([int(token) for token in tokens[first : end + 1]], rows))
        if len(found) == SAMPLES:
            break
    return found


def _norm_position(rows: list[tuple[list[int], np.ndarray]], norm: np.ndarray, manifest: Mapping[str, Any],
                   facts: Facts) -> None:  # fmt: skip
    """After RMSNorm a row divided by the norm's weight has root mean square 1; before it, it almost never has."""
    stacked = np.concatenate([states for _, states in rows])
    if not np.isfinite(norm).all():
        return
    usable = np.abs(norm) > 1e-3 * np.abs(norm).max()
    if stacked.shape[1] != len(norm) or usable.sum() < 8:
        return
    with np.errstate(all="ignore"):
        sizes = np.sqrt(((stacked[:, usable] / norm[usable]) ** 2).mean(axis=1))
    if not np.isfinite(sizes).all():
        return  # told as rows that are not finite
    measured = {"declared": manifest.get("last"), "rms": float(np.median(sizes)), "spread": float(sizes.std())}
    facts.values["states"] = {**facts.mapping("states"), "norm": measured}


def _argmax(rows: np.ndarray, header: Header, name: str) -> np.ndarray:
    entry, head = header.tensors[name], map_tensor(header, name)
    top = np.full(len(rows), -np.inf, dtype=np.float32)
    best = np.zeros(len(rows), dtype=np.int64)
    for start in range(0, len(head), HEAD_ROWS):
        logits = rows @ widen(entry, head[start : start + HEAD_ROWS]).astype(np.float32).T
        place = logits.argmax(axis=1)
        value = logits[np.arange(len(rows)), place]
        better = value > top
        top, best = np.where(better, value, top), np.where(better, place + start, best)
    return best


def _tensors(folder: Path) -> list[Header]:
    files = [path for path in list_folder(folder)[0] if path.suffix == ".safetensors"][:FILES]
    return [read_header(path) for path in files]


def _find(headers: list[Header], names: tuple[str, ...]) -> tuple[Header, str] | None:
    for header in headers:
        for name in header.tensors:
            if any(name == wanted or name.endswith("." + wanted) for wanted in names):
                return header, name
    return None


def _vector(headers: list[Header], names: tuple[str, ...]) -> np.ndarray | None:
    """The final norm's weight: the shortest name that fits, so that no layer's norm is taken for it."""
    hits = [(header, name) for header in headers for name in header.tensors
            if name in names or name.endswith(".model.norm.weight")]  # fmt: skip
    if not hits:
        return None
    header, name = min(hits, key=lambda hit: len(hit[1]))
    entry = header.tensors[name]
    return widen(entry, map_tensor(header, name)).astype(np.float32) if len(entry.shape) == 1 else None
