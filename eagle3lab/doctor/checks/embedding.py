"""The draft's embedding against the target's: shared, copied, half copied, or a fresh initialisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import HeaderError, map_tensor, widen
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.inventory import take
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import draft_of, target_of, whole

WHOLE_LIMIT = 4_000_000
"""Elements up to which every row is compared."""
SAMPLED_ROWS = 512
PADDED = 20
"""A vocabulary is padded by less than this part of its rows."""
TUNED_COSINE = 0.9
"""Mean cosine from which a draft's own embedding is the target's, trained further, and not another one."""
BF16_SLACK = 2.0**-8
"""Relative difference that rounding to bf16 can make (half a unit in the last place is 2^-9)."""
F16_SLACK = 2.0**-25
"""Difference that rounding to float16 can make below its smallest normal number."""


_TUNED_FIX = "nothing to do for vLLM if the draft was trained with its own embedding; SGLang serves the target's"


@dataclass(frozen=True)
class Comparison:
    """Rows of two embeddings. rows: row ids compared; equal, close: per row, exact and within bf16 rounding."""

    rows: np.ndarray
    equal: np.ndarray
    close: np.ndarray
    cosine: float
    max_difference: float
    draft_std: float
    target_std: float
    total: int
    not_finite: int


def matrix(facts: Facts, name: str, rows: np.ndarray | None) -> np.ndarray | None:
    """Rows [r, H] of an embedding fact as float64, from its values or its file; None when there are no contents."""
    if name in facts.tensors:
        header, tensor = facts.tensors[name]
        mapped = map_tensor(header, tensor)
        picked = mapped if rows is None else mapped[rows]
        return widen(header.tensors[tensor], picked).astype(np.float64)
    values = facts.mapping(name).get("values")
    if not isinstance(values, list):
        return None
    array = np.array(values, dtype=np.float64)
    return array if rows is None else array[rows]


def shape_of(facts: Facts, name: str) -> tuple[int, int] | None:
    """[rows, width] of an embedding fact."""
    if name in facts.tensors:
        header, tensor = facts.tensors[name]
        shape = header.tensors[tensor].shape
        return (shape[0], shape[1]) if len(shape) == 2 else None
    values = facts.mapping(name).get("values")
    if not isinstance(values, list) or not values or not all(isinstance(row, list) for row in values):
        return None
    widths = {len(row) for row in values}
    numbers = all(isinstance(x, (int, float)) for row in values for x in row)
    return (len(values), widths.pop()) if len(widths) == 1 and numbers else None


def _dtype(facts: Facts, name: str) -> str | None:
    if name in facts.tensors:
        header, tensor = facts.tensors[name]
        return header.tensors[tensor].dtype
    return facts.mapping(name).get("dtype")


def compare(facts: Facts) -> Comparison | None:
    """Compare the rows that both have, all of them or an even sample."""
    shapes = [shape_of(facts, name) for name in ("target_embed_tokens", "draft_embed_tokens")]
    if shapes[0] is None or shapes[1] is None or shapes[0][1] != shapes[1][1]:
        return None
    total, width = min(shapes[0][0], shapes[1][0]), shapes[0][1]
    rows = np.arange(total)
    if total * width > WHOLE_LIMIT:
        rows = np.unique(np.linspace(0, total - 1, SAMPLED_ROWS).astype(np.int64))
    target, draft = matrix(facts, "target_embed_tokens", rows), matrix(facts, "draft_embed_tokens", rows)
    if target is None or draft is None:
        return None
    finite = np.isfinite(target).all(axis=1) & np.isfinite(draft).all(axis=1)
    not_finite = int((~finite).sum())
    target, draft = np.where(finite[:, None], target, 0.0), np.where(finite[:, None], draft, 1.0)
    gap = np.abs(target - draft)
    norms = np.linalg.norm(target, axis=1) * np.linalg.norm(draft, axis=1)
    dots = (target * draft).sum(axis=1)
    cosines = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
    slack = F16_SLACK if "F16" in (_dtype(facts, "target_embed_tokens"), _dtype(facts, "draft_embed_tokens")) else 0.0
    close = (gap <= np.maximum(BF16_SLACK * np.maximum(np.abs(target), np.abs(draft)), slack)).all(axis=1)
    return Comparison(
        rows=rows,
        equal=(gap == 0).all(axis=1),
        close=close,
        cosine=float(cosines.mean()),
        max_difference=float(gap.max()),
        draft_std=float(draft.std()),
        target_std=float(target.std()),
        total=total,
        not_finite=not_finite,
    )


@check(
    code="embedding-differs",
    title="embed_tokens of the draft against the target's",
    reads=("draft_embed_tokens", "target_embed_tokens"),
    also=("tensor_parallel", "serve_with", "draft_config", "target"),
    rule="the draft's embedding is the target's, frozen; SGLang overwrites it with the target's rows, vLLM keeps it",
    fix="copy the target's embed_tokens into the draft, or leave the tensor out",
    symptom="fine in SGLang, near-zero acceptance in vLLM",
)
def embedding_differs(facts: Facts) -> Iterator[Finding]:
    """Equal rows, equal within bf16 rounding, half equal, or all different."""
    if facts["draft_embed_tokens"] is None or facts["target_embed_tokens"] is None:
        return
    try:
        seen = compare(facts)
    except HeaderError as problem:
        yield could_not("embed_tokens", problem.what)
        return
    if seen is None:
        sizes = [shape_of(facts, name) for name in ("draft_embed_tokens", "target_embed_tokens")]
        yield could_not("embed_tokens", f"its shape is {sizes[0]}, the target's {sizes[1]}")
        return
    equal, close, rows = int(seen.equal.sum()), int(seen.close.sum()), len(seen.rows)
    sampled = f" (sampled of {seen.total})" if rows < seen.total else ""
    if seen.not_finite:
        text = f"embed_tokens of draft or target holds NaN or infinity in {seen.not_finite} of {rows} rows{sampled}"
        yield error("embed_tokens.weight", text, rows=rows, not_finite=seen.not_finite)
    numbers: dict[str, Any] = {
        "rows": rows,
        "rows_equal": f"{equal}/{rows}",
        "rows_equal_within_bf16": close,
        "mean_cosine": round(seen.cosine, 6),
        "max_abs_diff": round(seen.max_difference, 9),
        "draft_std": round(seen.draft_std, 6),
        "target_std": round(seen.target_std, 6),
    }
    short = _lacking(facts)
    if close == rows and short:
        text = f"embed_tokens has {short[0]} rows, the target's {short[1]}: those are equal, the rest is lost"
        yield warning("embed_tokens.weight", text, actual=short[0], needed=short[1], **numbers)
    elif close == rows:
        how = "equal" if equal == rows else "equal within bf16 rounding"
        yield info("embed_tokens.weight", f"{close} of {rows} rows{sampled} are {how}", **numbers)
    elif close == 0:
        effect = "SGLang overwrites it with the target rows; vLLM keeps it"
        tuned = seen.cosine >= TUNED_COSINE and 0.5 < seen.draft_std / (seen.target_std or 1.0) < 2
        tell = warning if tuned or facts.engine_names() == ("sglang",) else error
        yield tell(
            "embed_tokens.weight",
            f"embed_tokens differs in every row: 0/{rows}{sampled} equal, std {seen.draft_std:.4g} against "
            f"{seen.target_std:.4g}, mean cosine {seen.cosine:.4g}; {effect}",
            **numbers,
            **({"fix": _TUNED_FIX} if tuned else {}),
            effect=effect,
        )
    else:
        first = int(seen.rows[int(np.argmin(seen.close))])
        shards = _shards(facts, seen)
        ranks = {f"rank{i}": "equal" if same else "different" for i, same in enumerate(shards)}
        apart = f"; {len(shards)} ranks would decide differently about sharing" if len(set(shards)) > 1 else ""
        yield warning(
            "embed_tokens.weight",
            f"embed_tokens is equal in {close} of {rows} rows{sampled}, first different row {first}{apart}",
            **numbers,
            first_differing_row=first,
            shards_equal=shards,
            **ranks,
        )


def _lacking(facts: Facts) -> tuple[int, int] | None:
    """(rows of the draft, of the target) when the draft lacks more than a padding at the target's end."""
    draft, target = (shape_of(facts, name) for name in ("draft_embed_tokens", "target_embed_tokens"))
    if draft is None or target is None or (target[0] - draft[0]) * PADDED < target[0]:
        return None
    beyond = matrix(facts, "target_embed_tokens", np.arange(draft[0], min(target[0], draft[0] + SAMPLED_ROWS)))
    return None if beyond is None or not beyond.any() else (draft[0], target[0])


def _shards(facts: Facts, seen: Comparison) -> list[bool]:
    """Whether each tensor-parallel rank's slice of rows is equal throughout."""
    ranks = whole(facts.get("tensor_parallel")) or 1
    ranks = ranks if 1 <= ranks <= 64 else 1
    owner = seen.rows * ranks // max(seen.total, 1)
    return [bool(seen.close[owner == rank].all()) for rank in range(ranks)]


@check(
    code="embedding-missing",
    title="no embed_tokens, and whether the target's can be shared",
    reads=("draft_config|draft_embed_tokens",),
    also=("draft_config", "draft_headers", "target", "target_config", "draft_embed_tokens", "serve_with"),
    rule="a draft without embed_tokens borrows the target's rows, which needs equal widths",
    fix="export the draft with its embed_tokens.weight",
    symptom="near-zero acceptance: the embedding stays uninitialised",
)
def embedding_missing(facts: Facts) -> Iterator[Finding]:
    """Absent is right when widths are equal."""
    draft, target = draft_of(facts), target_of(facts)
    inventory = take(facts)
    said_absent = facts.has("draft_embed_tokens") and facts["draft_embed_tokens"] is None
    not_in_file = (
        inventory is not None
        and inventory.whole
        and not any(name.endswith("embed_tokens.weight") for name in inventory.headers)
        and not facts.has("draft_embed_tokens")
    )
    if not (said_absent or not_in_file):
        return
    width, wanted = draft.hidden, draft.target_hidden(target)
    if width and wanted and width != wanted:
        effect = "left uninitialised"
        yield error(
            "embed_tokens.weight",
            f"embed_tokens.weight is missing and cannot be shared: the draft is {width} wide, the target {wanted}; "
            f"it is {effect}",
            actual=None,
            draft=width,
            target=wanted,
            effect=effect,
        )
    elif said_absent:
        yield info("embed_tokens.weight", "no embed_tokens in the draft: the embedding comes from the target")
