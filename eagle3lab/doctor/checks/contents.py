"""Values in the draft's tensors: finite, not constant, and not as they were initialised. Big ones are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eagle3lab.core.errors import Eagle3LabError
from eagle3lab.core.safetensors_header import Header, HeaderError, TensorEntry, map_tensor, widen, written_share
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.tensor_names import is_buffer, is_map, is_scale

SAMPLE = 65_536
"""Values looked at in a tensor that is larger than this: SAMPLE / 16 values at each of 16 even places."""
PLACES = 16
FC_LIMIT = 64_000_000
"""Bytes of fc up to which it is inspected in full; above, `eagle3lab inspect` is the command for it."""
FC_ENOUGH = 10_000
"""Entries below which a family of initialisation cannot be told from another."""
NEAR_ZERO = 0.05
"""Mean of a norm's weights that no norm has: they start at 1 and move by tenths."""
FLOATS = ("F16", "BF16", "F32", "F64")


def sample(header: Header, entry: TensorEntry) -> tuple[np.ndarray, bool]:
    """Values of a tensor as float32 or float64, flat; True when they are all of them."""
    flat = map_tensor(header, entry.name).reshape(-1)
    if entry.count <= SAMPLE:
        return widen(entry, flat), True
    length = SAMPLE // PLACES
    starts = np.linspace(0, entry.count - length, PLACES).astype(np.int64)
    return np.concatenate([widen(entry, flat[start : start + length]) for start in starts]), False


def _float_tensors(facts: Facts) -> Iterator[tuple[Header, TensorEntry]]:
    for header in facts.draft_files:
        for entry in header.tensors.values():
            skip = is_map(entry.name) or is_buffer(entry.name) or is_scale(entry.name)
            if entry.dtype in FLOATS and entry.count and not skip:
                yield header, entry


@check(
    code="contents-values",
    title="values that are not finite, all zero or constant",
    reads=("draft_headers",),
    rule="every weight is finite and varies; a norm may be all ones",
    fix="export the draft again from a checkpoint that works: eagle3lab inspect DRAFT",
    symptom="accept length near 1.00, or NaN logits",
)
def contents_values(facts: Facts) -> Iterator[Finding]:
    """Look at samples; files with holes were never written in full and are only named."""
    holes = {header.path for header in facts.draft_files if written_share(header.path) < 0.9}
    for path in sorted(holes):
        share = written_share(path)
        yield could_not(f"the values in {path.name}", f"{share:.0%} of the file is on disk, the rest are holes")
    for header, entry in _float_tensors(facts):
        if header.path in holes:
            continue
        try:
            values, complete = sample(header, entry)
        except HeaderError as problem:
            yield could_not(f"the values of {entry.name}", problem.what)
            continue
        finding = _judge(entry, values, complete)
        if finding is not None:
            yield finding


def _judge(entry: TensorEntry, values: np.ndarray, complete: bool) -> Finding | None:
    seen = f"of {len(values)}" + ("" if complete else " sampled")
    bad = int((~np.isfinite(values)).sum())
    if bad:
        first = int(np.argmax(~np.isfinite(values)))
        nan = int(np.isnan(values).sum())
        return error(
            entry.name,
            f"{entry.name} holds {nan} NaN and {bad - nan} infinite values {seen}",
            actual=bad,
            nan=nan,
            inf=bad - nan,
            first=first if complete else None,
        )
    low, high = float(values.min()), float(values.max())
    if low != high or entry.count == 1:  # one number cannot vary
        return None
    if low == 0.0 and entry.name.endswith("bias"):
        return info(entry.name, f"{entry.name} is all zero: as initialised", actual=0.0)
    if low == 0.0:
        return error(
            entry.name, f"{entry.name} is all zero ({len(values)} values {seen})", actual=0.0, shape=entry.shape
        )
    if len(entry.shape) == 1:
        text = f"{entry.name} is constant {low:g}: as initialised, or never trained"
        return info(entry.name, text, actual=low)
    return error(entry.name, f"{entry.name} is constant {low:g}", actual=low, shape=entry.shape)


@check(
    code="contents-twice",
    title="one tensor in several files with other values",
    reads=("draft_headers",),
    also=("index",),
    rule="without an index engines load every .safetensors file of the folder, and what is read last stays",
    fix="leave one file of weights in the folder, or write model.safetensors.index.json and cut the files apart",
    symptom="another drafter than the one that was trained, without a message",
)
def contents_twice(facts: Facts) -> Iterator[Finding]:
    """Equal copies are harmless; with an index `file-index` tells. Mistral's consolidated file is not loaded."""
    if facts.has("index"):
        return
    holders: dict[str, list[Header]] = {}
    for header in facts.draft_files:
        if not header.path.name.startswith("consolidated") and written_share(header.path) >= 0.9:
            for name in header.tensors:
                holders.setdefault(name, []).append(header)
    apart: dict[tuple[str, ...], list[str]] = {}
    for name, headers in holders.items():
        if any(_differ(headers[0], other, name) for other in headers[1:]):
            apart.setdefault(tuple(header.path.name for header in headers), []).append(name)
    for files, names in apart.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = f"{', '.join(names[:3])}{more} in {' and in '.join(files)}, with other values, and no index"
        yield error(", ".join(files), text, actual=len(names), tensors=names[:100], files=list(files))


def _differ(one: Header, other: Header, name: str) -> bool:
    """Whether two files hold different tensors of a name; values are compared where `sample` looks."""
    first, second = one.tensors[name], other.tensors[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    try:
        return sample(one, first)[0].tobytes() != sample(other, second)[0].tobytes()
    except HeaderError:
        return False  # `file-is-weights` tells


def _made_up(facts: Facts) -> bool:
    """Whether the norms, which start at one, are scattered around zero: random numbers stand in for every tensor."""
    norms = [(h, e) for h, e in _float_tensors(facts) if len(e.shape) == 1 and e.name.endswith("norm.weight")]
    means = [float(np.abs(np.mean(sample(header, entry)[0]))) for header, entry in norms]
    return bool(means) and max(means) < NEAR_ZERO


@check(
    code="contents-untouched",
    title="fc as it was initialised",
    reads=("draft_headers",),
    also=("draft_config",),
    rule="a trained fc differs from every family of initialisation",
    fix="eagle3lab inspect DRAFT shows the evidence; train the drafter, or export the trained step",
    symptom="accept length near 1: an untrained fc is a random projection, and loads perfectly",
)
def contents_untouched(facts: Facts) -> Iterator[Finding]:
    """Ask `inspection` for the verdict on fc, when it can be read in full in short time."""
    place = next(
        ((h, e) for h, e in _float_tensors(facts) if e.name == "fc.weight" or e.name.endswith(".fc.weight")), None
    )
    if place is None or place[1].count < FC_ENOUGH or written_share(place[0].path) < 0.9:
        return
    header, entry = place
    command = f"eagle3lab inspect {header.path.parent}"
    if (entry.needed_bytes or 0) > FC_LIMIT:
        text = f"fc.weight has {entry.count:,} entries, too many to judge here: {command}"
        yield info("fc.weight", text, fix=command)
        return
    from eagle3lab.inspection import inspect_checkpoint

    try:
        verdict = inspect_checkpoint(Path(header.path), tensor=entry.name).verdict
    except Eagle3LabError as problem:
        yield could_not("whether fc was trained", problem.what)
        return
    labels = ", ".join(verdict.labels)
    untouched = [label for label in verdict.labels if label.startswith("AT-INIT")]
    if untouched and _made_up(facts):
        text = f"fc.weight looks drawn at random ({labels}), and so do the norms: no drafter, a file made for a test"
        yield info("fc.weight", text, labels=labels)
    elif untouched:
        yield warning("fc.weight", f"fc.weight is untouched since initialisation: {labels}", fix=command, labels=labels)
    elif any(label.startswith("DEAD") for label in verdict.labels):
        yield error("fc.weight", f"fc.weight is dead: {labels}", fix=command, labels=labels)
    else:
        yield info("fc.weight", f"fc.weight: {labels}", labels=labels)
