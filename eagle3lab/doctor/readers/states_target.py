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
from eagle3lab.doctor.readers.states_values import scales_of, states
from eagle3lab.doctor.views import real, text_of
from eagle3lab.targets.norms import adds_one

SAMPLES, ROWS = 8, 24
"""Samples of a shard that are compared, and rows of a sample."""
SHORT = 8
"""Rows of a sample that are compared at least, also when its first reply is shorter: one row says nothing."""
HEAD_BYTES = 3_000_000_000
"""Largest head that is read; above it the comparison is said to be left out."""
PRODUCTS = 1_000_000_000_000
"""Products of a number of a row and one of the head that a visit computes: 850 rows for Kimi-K2.5, some 20 seconds."""
MOST_ROWS = 8192
HEAD_ROWS = 4096
FILES = 300
NEAR = 0.05
"""So far from 1 a row after the norm may be."""

Rows = list[tuple[list[int], np.ndarray]]
"""(tokens, rows of `last`) of a few samples of one shard."""


def compare_with_target(headers: list[Header], manifest: Mapping[str, Any], facts: Facts) -> None:
    """Add `state_rows_argmax` and `tokens` (rows of the first shard under the target's head), `states.norm`, and with
    several shards `next_token_agreement_by_shard` with `states.compared`."""
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
    form = adds_one(facts.mapping("target_config"))
    if norm is not None:
        position = _norm_position(rows, _coarseness(headers[0]), norm, form, manifest, facts)
        facts.values["states"] = {**facts.mapping("states"), **({"norm": position} if position else {})}
    entry = head[0].tensors[head[1]]
    if (entry.needed_bytes or 0) > HEAD_BYTES or len(entry.shape) != 2:
        facts.could_not("states against the target's head", f"it has shape {list(entry.shape)}, more than is read")
        return
    if entry.shape[1] != rows[0][1].shape[1]:
        facts.broken("states", f"rows of `last` have {rows[0][1].shape[1]} numbers, the head reads {entry.shape[1]}")
        return
    pre_norm = str(manifest.get("last")).startswith(("pre", "before"))
    if pre_norm and norm is not None and form is None:
        facts.could_not("states against the target's head", "the form of this model type's final norm is not known")
        return
    shards = _shards(headers, rows, entry.count, facts)
    eps = real(text_of(facts.mapping("target_config")).get("rms_norm_eps")) or 1e-6
    stacked = np.concatenate([states for _, samples in shards for _, states in samples])
    with np.errstate(all="ignore"):  # damaged states are told as such elsewhere
        if pre_norm and norm is not None:
            stacked = stacked / np.sqrt((stacked**2).mean(axis=1, keepdims=True) + eps) * (norm + bool(form))
        best = _argmax(stacked, *head)
    bounds = np.cumsum([0, *(len(states) for _, samples in shards for _, states in samples)])
    argmax = [best[a:b].tolist() for a, b in pairwise(bounds)]
    facts.put("state_rows_argmax", argmax[: len(rows)], f"{headers[0].path} under {head[0].path.name}:{head[1]}")
    facts.put("tokens", [tokens for tokens, _ in rows], str(headers[0].path))
    if len(shards) > 1:
        _agreement_by_shard(shards, argmax, facts, str(headers[0].path.parent))


def _shards(headers: list[Header], first: Rows, head_size: int, facts: Facts) -> list[tuple[str, Rows]]:
    """(name, rows) of as many shards as the head is multiplied for, spread evenly; the others are said to be left."""
    found = [(headers[0].path.name, first)]
    most = min(MOST_ROWS, PRODUCTS // max(head_size, 1)) - sum(len(rows) for _, rows in first)
    others = headers[1:]
    room = min(len(others), max(most // ROWS, 0))
    samples = min(SAMPLES, max(most // (ROWS * room), 1)) if room else 0
    chosen = [others[place * len(others) // room] for place in range(room)]
    width = first[0][1].shape[1]
    for header in chosen:
        try:
            rows = [one for one in _sampled(header, samples, replies=True) if one[1].shape[1] == width]
        except (HeaderError, OSError) as error:
            facts.could_not(f"{header.path.name} against the target", str(getattr(error, "what", error))[:160])
            continue
        if rows:
            found.append((header.path.name, rows))
        else:
            facts.could_not(f"{header.path.name} against the target", "no whole sample in it has a supervised token")
    if left := len(others) - room:
        why = f"a visit multiplies at most {max(most, 0)} more rows with a head of this size"
        facts.could_not(f"{left} of {len(headers)} shards against the target", why)
    return found


def _agreement_by_shard(shards: list[tuple[str, Rows]], argmax: list[list[int]], facts: Facts, source: str) -> None:
    """Share of rows whose argmax is the next token, for every shard that was compared."""
    rates, compared, at = [], [], 0
    for name, samples in shards:
        pairs = [
            (best, token)
            for (tokens, _), row in zip(samples, argmax[at : at + len(samples)], strict=True)
            for best, token in zip(row, tokens[1:], strict=True)
        ]
        at += len(samples)
        rates.append(sum(best == token for best, token in pairs) / len(pairs))
        compared.append({"name": name, "rows": len(pairs)})
    facts.put("next_token_agreement_by_shard", rates, source)
    facts.values["states"] = {**facts.mapping("states"), "compared": compared}


def _sampled(header: Header, most: int = SAMPLES, *, replies: bool = False) -> Rows:
    """(tokens, rows of `last`) of the replies of a few samples: row t goes with token t + 1.

    replies: leave a shard without any supervised token out, since prompts agree less than replies do.
    """
    names = {"input_ids", "offsets", "last"}
    if not names <= header.tensors.keys() or any(len(header.tensors[name].shape) != 1 for name in names - {"last"}):
        return []
    tokens, offsets = np.asarray(map_tensor(header, "input_ids")), np.asarray(map_tensor(header, "offsets"))
    length = header.tensors["last"].shape[0] if header.tensors["last"].shape else 0
    mask = np.asarray(map_tensor(header, "loss_mask")) if "loss_mask" in header.tensors else None
    if mask is not None and len(mask) != len(tokens):
        mask = None
    if mask is not None and not mask.any():
        if replies:
            return []
        mask = None
    found = []
    for start, stop in pairwise(offsets.tolist()):
        if not 0 <= start < stop <= min(len(tokens), length) or stop - start < 3:
            continue
        first, end = start, stop - 1
        if mask is not None:
            marks = mask[start:stop]
            if not marks.any():
                continue
            first = max(start, start + int(marks.argmax()) - 1)
            end = min(end, first + max(_run(marks), SHORT))
        end = min(end, first + ROWS)
        if end > first:
            rows = states(header, "last", first, end)
            found.append(([int(token) for token in tokens[first : end + 1]], rows))
        if len(found) == most:
            break
    return found


def _run(marks: np.ndarray) -> int:
    """Length of the first reply."""
    rest = marks[int(marks.argmax()) :]
    return len(rest) if rest.all() else int((rest == 0).argmax())


def _coarseness(header: Header) -> float:
    """Step between two levels of `last` in 8 bits, the median over rows; 0 for other dtypes."""
    if header.tensors["last"].dtype != "I8":
        return 0.0
    return float(np.median(np.asarray(scales_of(header, "last")[:MOST_ROWS])))


def _norm_position(rows: Rows, step: float, norm: np.ndarray, form: bool | None, manifest: Mapping[str, Any],
                   facts: Facts) -> dict[str, Any] | None:  # fmt: skip
    """After RMSNorm a row divided by the norm's weight has root mean square 1; before it, it almost never has.

    form: whether the norm adds one to its stored weight; None tries both. step: columns whose weight is below two steps
    of an 8-bit state are left out, their rounding is no smaller than they are.
    """
    stacked = np.concatenate([states for _, states in rows])
    if not np.isfinite(norm).all() or stacked.shape[1] != len(norm):
        return None
    sizes = [_sizes(stacked, norm + add, step) for add in ((0, 1) if form is None else (int(form),))]
    known = [size for size in sizes if size is not None and np.isfinite(size).all()]  # else told as rows not finite
    if not known:
        if step and all(size is None for size in sizes):
            facts.could_not("the place of the final norm", "the steps of 8 bits are as large as most of its weights")
        return None
    best = min(known, key=lambda size: abs(float(np.median(size)) - 1))
    if form is None and abs(float(np.median(best)) - 1) >= NEAR:
        facts.could_not("the place of the final norm", "the form of this model type's final norm is not known")
        return None
    return {"declared": manifest.get("last"), "rms": float(np.median(best)), "spread": float(best.std())}


def _sizes(rows: np.ndarray, weight: np.ndarray, step: float) -> np.ndarray | None:
    """Root mean square of each row over the weight; None when too few columns can be divided."""
    usable = np.abs(weight) > max(1e-3 * np.abs(weight).max(), 2 * step)
    if usable.sum() < max(8, len(weight) // 2 if step else 0):
        return None
    with np.errstate(all="ignore"):
        return np.sqrt(((rows[:, usable] / weight[usable]) ** 2).mean(axis=1))


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
