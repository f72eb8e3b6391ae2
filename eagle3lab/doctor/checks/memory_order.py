"""An array that is not row-major, handed to a writer that takes raw memory."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.memoryorder import array_of, as_raw_memory, row_major, view_of
from eagle3lab.doctor.registry import check


@check(
    code="file-memory-order",
    title="array that is not row-major",
    reads=("save", "a"),
    also=("safetensors",),
    rule="safetensors stores row-major bytes; its numpy writer (0.8.0) takes the memory as it lies",
    fix="numpy.ascontiguousarray before writing, and read a row back",
    symptom="states of one layer appear under another, without any error",
)
def memory_order(facts: Facts) -> Iterator[Finding]:
    """What was given, and what the raw memory reads as."""
    array = array_of(str(facts.get("a") or ""))
    view = None if array is None else view_of(str(facts.get("save") or ""), array)
    if view is None:
        yield info("save", "could not check the memory order because the array is not described as arange and a view")
        return
    want = view.tolist()
    if row_major(view):
        yield info("save", f"{facts['save']} is row-major", want=want)
        return
    stored = as_raw_memory(view)
    yield error(
        "save",
        f"what was read back is not what was given: {facts['save']} is not row-major",
        actual=None if stored is None else stored.tolist(),
        want=want,
        reason="not row-major",
    )
