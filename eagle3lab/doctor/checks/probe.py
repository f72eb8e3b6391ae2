"""Lines of the probe hook in a server log: was fc called, at what width, with the file's weights?

Written by `eagle3lab.capture.sglang_probe` inside SGLang, one line a model and rank, read here as text from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.readers.bounded import ReadError, parse_json
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import items, mapping, real, whole

PREFIX = "eagle3lab probe: "
LINE_LIMIT, RANK_LIMIT = 40_000, 1024
NAMES = ("fc", "lm_head", "d2t")
"""Tensors of the drafter that the probe compares."""

Lines = list[Mapping[str, Any]]


def probe_lines(text: str, part: str) -> Lines:
    """The last line of every rank for `part` (draft, target or failed), by rank. What is no JSON object is left out."""
    found: dict[int, Mapping[str, Any]] = {}
    for line in text.splitlines():
        _, prefix, body = line.partition(PREFIX)
        if not prefix or len(body) > LINE_LIMIT:
            continue
        try:
            value = mapping(parse_json(body, "probe").value)
        except ReadError:
            continue
        rank = whole(value.get("rank"))
        if value.get("part") == part and rank is not None and (rank in found or len(found) < RANK_LIMIT):
            found[rank] = value
    return [found[rank] for rank in sorted(found)]


@check(
    code="probe-fc",
    title="live probe: fc of the running drafter",
    reads=("log",),
    rule="the first forward of every rank calls the draft's fc with all captured states side by side",
    fix="restart the server with --speculative-algorithm EAGLE3",
    symptom="the server starts, text is right, nothing is logged, accept length is 1.00",
)
def called(facts: Facts) -> Iterator[Finding]:
    """fc was called at a width, or never; the target handed over its states, or none."""
    text = str(facts.get("log") or "")
    for line in probe_lines(text, "failed"):
        yield could_not(f"rank {line.get('rank')} of the running server", str(line.get("error"))[:200])
    targets = {line.get("rank"): line for line in probe_lines(text, "target")}
    drafts = probe_lines(text, "draft")
    if targets and not drafts:
        text = "the probe saw the target and no drafter: the server does not speculate with one"
        yield warning("probe", text, ranks=len(targets), fix="start it with --speculative-draft-model-path DRAFT")
    for group in _alike(drafts, _called).values():
        line, ranks = group[0], _ranks(group)
        target = mapping(targets.get(line.get("rank")))
        states = [one for item in items(target.get("aux")) if (one := whole(mapping(item).get("width"))) is not None]
        evidence: dict[str, Any] = {
            "called": _called(line)[0],
            "width": whole(mapping(line.get("fc")).get("width")),
            "given": whole(mapping(line.get("given")).get("width")),
            "fc_columns": _columns(line),
            "target_states": states,
            "captures": target.get("captures"),
            "ranks": len(group),
        }
        width, dtype = evidence["width"], str(mapping(line.get("fc")).get("dtype"))[:20]
        if not evidence["called"]:
            given = f"it got {evidence['given']} numbers a token" if evidence["given"] else "it got no states"
            none = "; the target recorded no states" if target and not states else ""
            message = f"fc never called: {given}, fc reads {evidence['fc_columns']}{none}: EAGLE, not EAGLE3 ({ranks})"
            yield error("fc", message, actual=evidence["given"], **evidence)
            continue
        parts = f" = {len(states)} x {states[0]}" if states and sum(states) == width and len(set(states)) == 1 else ""
        ids = f", SGLang's ids {target.get('captures')}" if items(target.get("captures")) else ""
        yield info("fc", f"fc input {width}{parts}, {dtype}{ids} ({ranks})", actual=width, **evidence)


@check(
    code="probe-weights",
    title="live probe: loaded weights of the drafter against its file",
    reads=("log",),
    rule="loaded fc, lm_head and d2t are the file's, cast to the engine's dtype; a rank holds its own rows",
    fix="eagle3lab doctor --draft DRAFT --engine sglang lists the names that the engine knows",
    symptom="fc at its initialisation, or another head: accept length near 1.00",
)
def weights(facts: Facts) -> Iterator[Finding]:
    """Every tensor equals the file, differs from it (with both means and stds), or was not compared."""
    drafts = probe_lines(str(facts.get("log") or ""), "draft")
    equal = [name for name in NAMES if drafts and all(_weight(line, name).get("equal") is True for line in drafts)]
    if equal:
        digests = {name: str(mapping(_weight(drafts[0], name).get("loaded")).get("sha256"))[:64] for name in equal}
        yield info("weights", f"{', '.join(equal)} equal the file ({_ranks(drafts)})", actual=equal, sha256=digests)
    for name in NAMES:
        for line in drafts:
            if _weight(line, name).get("equal") is not True:
                yield from _unequal(name, line)


def _unequal(name: str, line: Mapping[str, Any]) -> Iterator[Finding]:
    weight = _weight(line, name)
    loaded, file = mapping(weight.get("loaded")), mapping(weight.get("file"))
    rank, why = f"rank {line.get('rank')}", str(weight.get("why") or "")[:120]
    evidence: dict[str, Any] = {"rank": line.get("rank"), "loaded": loaded, "file": file, "why": why}
    if weight.get("equal") is None:
        # A drafter with the target's whole vocabulary has no map, and may share the target's head.
        missing = not file and loaded and name == "fc"
        if missing or (file and not loaded):
            yield error(name, f"loaded {name} is not the file's: {why} ({rank})", **evidence)
        elif loaded:
            yield could_not(f"loaded {name} on {rank}", why or "the probe does not tell")
        return
    if not _called(line)[0] and name == "lm_head":
        text = f"the drafter's head is the target's, {_shape(loaded)}; the file's {_shape(file)} is not used ({rank})"
        yield error(name, text, fix="--speculative-algorithm EAGLE3", **evidence)
        return
    text = f"loaded {name} {_shape(loaded)} {_moments(loaded)} is not the file's {_shape(file)} {_moments(file)}"
    if file.get("known") is False:
        text += f": the engine does not know the name {str(file.get('name'))[:80]} and drops it"
    yield error(name, f"{text} ({rank})", actual=real(weight.get("max_difference")), **evidence)


def _called(line: Mapping[str, Any]) -> tuple[bool, Any, Any]:
    fc = mapping(line.get("fc"))
    return fc.get("called") is True, str(fc.get("width")), str(fc.get("dtype"))


def _alike(lines: Lines, key: Any) -> dict[Any, Lines]:
    groups: dict[Any, Lines] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def _columns(line: Mapping[str, Any]) -> int | None:
    shape = items(mapping(_weight(line, "fc").get("loaded")).get("shape"))
    return whole(shape[-1]) if shape else None


def _weight(line: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return mapping(mapping(line.get("weights")).get(name))


def _ranks(lines: Lines) -> str:
    numbers = [line.get("rank") for line in lines]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks, {numbers[0]} to {numbers[-1]}"


def _shape(tensor: Mapping[str, Any]) -> str:
    return str(items(tensor.get("shape"))[:4])


def _moments(tensor: Mapping[str, Any]) -> str:
    mean, std = real(tensor.get("mean")), real(tensor.get("std"))
    return "" if mean is None or std is None else f"mean {mean:.6f} std {std:.6f}"
