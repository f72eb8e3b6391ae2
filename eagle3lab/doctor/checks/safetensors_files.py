"""Weight files on disk: are they the weights, do header and bytes agree, does the index agree with its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import HEADER_LIMIT
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import id_list, items, mapping, real, whole
from eagle3lab.doctor.weightfile import from_description, tensor_bytes

_DESCRIBED = ("header_text", "tensor", "tensors", "declared", "data_bytes")
"""Facts that describe one file, when they are not written under `file`."""
ZEROS_LIKELY = ["disk was full", "download stopped", "sparse copy"]
PACK = "pack many samples into one tensor with offsets"


@check(
    code="file-header-plan",
    title="header of a planned file",
    reads=("plan",),
    rule=f"readers refuse a header above {HEADER_LIMIT} bytes, about a million tensors",
    fix=PACK,
)
def header_plan(facts: Facts) -> Iterator[Finding]:
    """From a measured header, or from bytes a tensor."""
    plan = mapping(facts.get("plan"))
    tensors, measured = whole(plan.get("tensors")), real(plan.get("measured_header_bytes"))
    each = real(plan.get("header_bytes_per_tensor"))
    if not tensors or tensors < 0:
        return
    each = measured / tensors if measured is not None else each
    if each is None or not 1 <= each <= HEADER_LIMIT:  # not even a name fits below, nor any tensor above
        return
    total = round(each * tensors)
    evidence: dict[str, Any] = {
        "bytes_per_tensor": round(each, 2),
        "limit_bytes": HEADER_LIMIT,
        "tensors_that_fit_about": int(HEADER_LIMIT / each),
        "header_bytes_about": total,
        "refuse": total > HEADER_LIMIT,
    }
    if total > HEADER_LIMIT:
        text = f"header would be {total} bytes, limit {HEADER_LIMIT}"
        yield error("plan", text, actual=total, fix=PACK, **evidence)
        return
    share = 100 * total / HEADER_LIMIT
    told = warning if share > 90 else info
    yield told("plan", f"header would be {total} bytes, {share:.0f} % of the limit", **evidence)


@check(
    code="file-is-weights",
    title="weight file that is not the weights",
    reads=("file|weight_files|header_text|data_bytes",),
    also=("tensor", "declared", "bytes_hex"),
    rule="a safetensors file has a header, and bytes for exactly what the header declares",
    fix="fetch the file again",
    symptom="header too large, header too small, invalid JSON, or metadata does not cover the file",
)
def files_whole(facts: Facts) -> Iterator[Finding]:
    """One described file, or every weight file of a folder."""
    described = facts.get("file")
    if described is None and (facts.has("header_text") or facts.has("data_bytes")):
        described = {name: facts[name] for name in _DESCRIBED if facts.has(name)}
    found = [from_description(described)] if isinstance(described, Mapping) else []
    found += [dict(mapping(item)) for item in mapping(facts.get("weight_files")).values()]
    for item in found:
        yield from about_file(item)


def about_file(item: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about one file's facts (`weightfile`)."""
    name, size, kind = str(item.get("name"))[:200], item.get("size"), item.get("kind")
    number: dict[str, Any] = {k: item[k] for k in ("first_8_bytes_as_number",) if k in item}
    if kind == "git lfs pointer":
        real_size = whole(item.get("pointer_size"))
        told = "unknown" if real_size is None else f"{real_size / 1e9:.2f} GB"
        number |= {"kind_of_file": kind, "real_size": real_size, "size_text": told}
        text = f"Git LFS pointer, not the weights ({told})"
        yield error(name, text, actual=size, fix="git lfs pull: fetch the large file", **number)
    elif kind == "empty":
        yield error(name, f"{name}: file is empty", actual=0, size=0)
    elif kind == "zeros":
        likely = ", ".join(ZEROS_LIKELY)
        yield error(name, f"file is all zero ({size} bytes): {likely}", actual=size, size=size, likely=ZEROS_LIKELY)
    elif item.get("looks_like"):
        yield error(name, f"{name} is {str(item['looks_like'])[:80]}", actual=size, **number)
    elif item.get("reason") == "too-large":
        declared = item.get("header_bytes")
        numbers: dict[str, Any] = {"declared_header": declared, "limit": HEADER_LIMIT}
        if isinstance(declared, int) and declared <= (whole(size) or 0):
            text = f"declared header {declared} > {HEADER_LIMIT}: too many tensors, or not a safetensors file"
            yield error(name, text, actual=declared, fix=f"split the file, or {PACK}", **numbers,
                        likely="too many tensors", remedy="split the file")  # fmt: skip
        else:
            text = f"declared header {declared} > {HEADER_LIMIT} in a file of {size} bytes: not a safetensors file"
            yield error(name, text, actual=declared, **numbers, **number)
    elif kind == "unknown":
        yield info(name, f"could not check {name} because {item.get('problem')}")
    elif kind != "safetensors":
        problem = str(item.get("problem"))
        declared = {"declared_header": item["header_bytes"]} if "header_bytes" in item else {}
        yield error(name, problem if name in problem else f"{name}: {problem}", actual=size, **declared, **number)
    for fault in items(item.get("faults")):
        yield _about_fault(name, mapping(fault))
    more = (whole(item.get("fault_count")) or 0) - len(items(item.get("faults")))
    if more > 0:
        yield error(name, f"{name}: {more} more disagreements between header and bytes", actual=more)


def _about_fault(name: str, fault: Mapping[str, Any]) -> Finding:
    tensor = str(fault.get("tensor"))[:120]
    evidence: dict[str, Any] = {
        "tensor": tensor,
        "needed": fault.get("needed"),
        "found": fault.get("found"),
        "kind": fault.get("kind"),
    }
    text = str(fault.get("message"))[:240]
    text = text if tensor in text else f"{text} (last tensor {tensor})"
    return error(name, f"{name}: {text}", actual=fault.get("found"), **evidence)


@check(
    code="file-index",
    title="index against its shards",
    reads=("index", "files"),
    rule="every tensor of the index is in the file it names, every file is named, total_size is the sum of all bytes",
    fix="fetch the missing files, or write the index again",
    symptom="missing tensors stay random, or a file that is not there",
)
def index_and_files(facts: Facts) -> Iterator[Finding]:
    """Missing shards, lost and stray tensors, stray files, and the total."""
    index, files = mapping(facts.get("index")), mapping(facts.get("files"))
    weight_map = {str(k): str(v) for k, v in mapping(index.get("weight_map")).items()}
    if not weight_map:
        yield error("index", "the index has no weight_map", actual=str(index)[:80])
        return
    yield from _missing_files(weight_map, files)
    for name in sorted(set(weight_map.values()) & files.keys()):
        if files[name] is None:
            continue
        inside = mapping(files[name])
        lost = [key for key, where in weight_map.items() if where == name and key not in inside]
        stray = [key for key in inside if weight_map.get(key) != name]
        if lost:
            text = f"{name} lacks {len(lost)} tensors that the index puts there: {', '.join(lost[:3])}"
            yield error(name, text, actual=len(lost), tensors_lost=lost[:100])
        if stray:
            text = f"{name} holds {len(stray)} tensors that the index does not put there: {', '.join(stray[:3])}"
            yield warning(name, text, actual=len(stray), stray_tensors=stray[:100])
    strays = sorted(set(map(str, files)) - set(weight_map.values()))
    for name in strays:
        count = len(mapping(files[name]))
        text = f"stray file {name}: no index entry names it ({count} tensors)"
        yield warning(name, text, actual=count, tensors=count, stray=strays, fix=f"remove {name}, or index it")
    yield from _total(index, weight_map, files)


def _missing_files(weight_map: Mapping[str, str], files: Mapping[str, Any]) -> Iterator[Finding]:
    missing = sorted(set(weight_map.values()) - set(map(str, files)))
    for name in missing:
        lost = [key for key, where in weight_map.items() if where == name]
        text = f"{name} is missing: {len(lost)} tensors are lost"
        yield error(name, text, actual=None, tensors=len(lost), missing_files=missing, tensors_lost=lost[:100])


def _total(index: Mapping[str, Any], weight_map: Mapping[str, str], files: Mapping[str, Any]) -> Iterator[Finding]:
    declared = whole(mapping(index.get("metadata")).get("total_size"))
    named = set(weight_map.values())
    if declared is None or named - set(map(str, files)) or any(files[name] is None for name in named):
        return
    entries = [
        entry for name in named for key, entry in mapping(files[name]).items() if weight_map.get(key, name) == name
    ]
    sizes = [
        tensor_bytes(entry[0], entry[1]) if isinstance(entry, list) and len(entry) == 2 else None for entry in entries
    ]
    if any(size is None for size in sizes):
        yield info("total_size", "could not check total_size because a dtype or shape is not known")
        return
    found = sum(size or 0 for size in sizes)
    if found != declared:
        text = f"total_size in the index is {declared}, the tensors have {found} bytes"
        yield warning("total_size", text, actual=declared, declared=declared, found=found, fix=f"write {found}")


DECODED = 1_000_000
_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


@check(
    code="file-values",
    title="values of a tensor given byte by byte",
    reads=("tensor",),
    rule="bf16 is the upper half of float32; every value is finite",
    fix="write the tensor again",
)
def values(facts: Facts) -> Iterator[Finding]:
    """Decode a floating-point tensor; count what is not finite."""
    tensor = mapping(facts.get("tensor"))
    dtype, shape, text = tensor.get("dtype"), id_list(tensor.get("shape")), tensor.get("bytes_hex")
    needed = tensor_bytes(dtype, tensor.get("shape"))
    if not isinstance(text, str) or shape is None or needed is None or needed > 8 * DECODED:
        return
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        yield error("tensor", "bytes_hex is not hexadecimal", actual=text[:40])
        return
    if len(raw) != needed:
        message = f"shape {shape} {dtype} needs {needed} bytes, has {len(raw)}"
        yield error("tensor", message, actual=len(raw), needed=needed, found=len(raw))
        return
    if dtype != "BF16" and dtype not in _NUMPY:
        yield info("tensor", f"{dtype} is not decoded")
        return
    decoded = decode(raw, str(dtype)).reshape(shape)
    bad = np.argwhere(~np.isfinite(decoded))
    signs = np.signbit(decoded)
    evidence: dict[str, Any] = {
        "values": [_plain(v) for v in np.ravel(decoded)]
        if decoded.ndim < 2
        else [[_plain(v) for v in np.ravel(r)] for r in decoded],
        "nan_values": int(np.isnan(decoded).sum()),
        "sign_of_last_is_negative": bool(signs.flat[-1]) if decoded.size else None,
    }
    if not len(bad):
        yield info("tensor", f"{decoded.size} finite values", **evidence)
        return
    place = [int(axis) for axis in bad[0]]
    where: dict[str, Any] = (
        {"row": place[0], "column": place[-1]} if len(place) > 1 else {"place": place[0] if place else 0}
    )
    count = evidence["nan_values"]
    what = f"{count} NaN" if count else f"{len(bad)} infinite"
    yield error("tensor", f"{what}, first at {place}", actual=len(bad), **where, **evidence)


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Little-endian floats as float32 (float64 for F64), flat."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, _NUMPY[dtype]).astype(np.float64 if dtype == "F64" else np.float32)


def _plain(value: Any) -> Any:
    number = float(value)
    return number if number or not np.signbit(number) else "-0.0"
