"""What storing states needs: disk for a plan, range of a dtype for a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import DTYPE_BYTES
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.rows import FLOAT_MAX
from eagle3lab.doctor.views import real, whole

SPELLINGS = {
    **dict.fromkeys(("BF16", "BFLOAT16"), "BF16"),
    **dict.fromkeys(("F16", "FP16", "FLOAT16", "HALF"), "F16"),
    **dict.fromkeys(("F32", "FP32", "FLOAT32", "FLOAT"), "F32"),
    **dict.fromkeys(("F64", "FP64", "FLOAT64", "DOUBLE"), "F64"),
    **dict.fromkeys(("F8_E4M3", "FP8", "FLOAT8_E4M3FN", "F8_E4M3FN"), "F8_E4M3"),
    **dict.fromkeys(("F8_E5M2", "FLOAT8_E5M2"), "F8_E5M2"),
}
HALF_STEP = {"F8_E4M3": 1 / 28, "F8_E5M2": 1 / 14}
"""Half the distance to the number after the largest, as a share of it: up to there a value is rounded down."""


def dtype_of(name: object) -> str | None:
    """The dtype in safetensors spelling, None when it is unknown."""
    text = str(name).upper().removeprefix("TORCH.")
    return SPELLINGS.get(text, text if text in DTYPE_BYTES else None)


@check(
    code="states-disk",
    title="disk for the planned capture",
    reads=("tokens_each", "conversations", "H", "points"),
    also=("with_last", "dtype", "disk_free_bytes"),
    rule="bytes = conversations x tokens x H x (points + 1 with the last state) x bytes a number, and they fit",
    fix="fewer conversations or points, a larger disk, or eagle3lab states shrink (half the bytes)",
)
def disk(facts: Facts) -> Iterator[Finding]:
    """The arithmetic of a plan, against the free bytes when they are known."""
    sizes = [whole(facts.get(name)) for name in ("conversations", "tokens_each", "H")]
    given = facts.get("points")
    points = len(given) if isinstance(given, list) else whole(given)
    dtype = dtype_of(facts.get("dtype") or "BF16")
    if points is None or None in sizes or min(size for size in sizes if size is not None) < 0 or dtype is None:
        named = {name: facts.get(name) for name in ("conversations", "tokens_each", "H", "points", "dtype")}
        text = f"the plan cannot be computed from {str(named)[:160]}"
        yield error("plan", text, actual=str(named)[:160], fix="give whole numbers and a dtype")
        return
    conversations, tokens, hidden = (size or 0 for size in sizes)
    per_token = hidden * (points + bool(facts.get("with_last"))) * DTYPE_BYTES[dtype]
    each, total = per_token * tokens, per_token * tokens * conversations
    free = whole(facts.get("disk_free_bytes"))
    evidence: dict[str, Any] = {
        "bytes_per_token": per_token,
        "bytes_per_conversation": each,
        "mib_per_conversation": each / 1024**2,
        "bytes_total": total,
        "tb_total": round(total / 1e12, 2),
        "conversations_that_fit": None if free is None or not each else free // each,
        "refuse": free is not None and total > free,
    }
    text = f"the plan needs {total} bytes on disk ({total / 1e12:.2f} TB)"
    if free is None:
        yield info("disk", f"{text}; free space is unknown", **evidence)
    elif total > free:
        fit = evidence["conversations_that_fit"]
        yield error("disk", f"{text}, {free} are free: {fit} of {conversations} conversations fit", actual=free,
                    needed=total, free=free, **evidence)  # fmt: skip
    else:
        yield info("disk", f"{text}, {free} are free", needed=total, free=free, **evidence)


@check(
    code="states-overflow",
    title="value against the range of the dtype it is stored in",
    reads=("value", "dtype_after"),
    also=("dtype_before",),
    rule="fp16 ends at 65504; bf16 has the range of fp32",
    fix="store bf16",
)
def overflow(facts: Facts) -> Iterator[Finding]:
    """What a value becomes when it is stored."""
    value, after = real(facts.get("value")), dtype_of(facts.get("dtype_after"))
    top = FLOAT_MAX.get(after or "")
    if value is None or after is None or top is None:
        named = f"{facts.get('value')!r} as {facts.get('dtype_after')!r}"[:80]
        yield warning("value", f"cannot tell what {named} becomes", actual=named)
        return
    if after == "F16":
        with np.errstate(over="ignore"):
            stored = float(np.float16(value))
        lost = not np.isfinite(stored)
    else:
        lost, stored = abs(value) > top * (1 + HALF_STEP.get(after, 0.0)), value
    if lost:
        # F8_E4M3 has no infinity: torch stores its largest value, others NaN
        becomes = ("-" if value < 0 else "") + (f"{top:g}" if after == "F8_E4M3" else "inf")
        text = f"overflow when storing: {value:g} as {after} becomes {becomes}, the largest is {top:g}"
        yield error("value", text, actual=value, value=value, max=top, becomes=becomes)
    elif value != 0 and stored == 0:
        yield warning("value", f"{value:g} as {after} becomes 0: below its range", actual=value, becomes=0.0)
    else:
        yield info("value", f"{value:g} fits {after}", becomes=stored)
