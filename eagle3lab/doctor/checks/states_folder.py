"""A folder of captured states: layout, contents of its rows, and where the final norm stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.capture.manifest import SCHEMA
from eagle3lab.doctor.checks.states import repeated, report_findings
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.rows import RowReport
from eagle3lab.doctor.views import given_twice, id_list, items, mapping, real, whole


@check(
    code="states-layout",
    title="shards against the manifest",
    reads=("shards", "states"),
    rule="every shard has input_ids, loss_mask, offsets, aux [T, P*H], last [T, H], sample_id; the manifest names it",
    fix="eagle3lab capture again: it redoes the named shards",
)
def layout(facts: Facts) -> Iterator[Finding]:
    """Shapes, counts, and whether the capture is finished."""
    manifest = mapping(facts.get("states"))
    yield from _manifest(manifest)
    shards = [mapping(item) for item in facts.get("shards") or []]
    for shard in shards:
        if shard.get("problem"):
            name = str(shard.get("name"))[:80]
            yield error(name, f"{name}: {str(shard['problem'])[:160]}", actual=str(shard["problem"])[:160])
    declared = {str(mapping(item).get("name")): mapping(item) for item in items(manifest.get("shards"))}
    for shard in shards:
        name, listed = str(shard.get("name"))[:80], declared.get(str(shard.get("name")), {})
        for what in ("tokens", "samples"):
            count, said = whole(shard.get(what)), whole(listed.get(what))
            if count is not None and said is not None and count != said:
                yield error(name, f"{name} has {count} {what}, the manifest says {said}", actual=count, needed=said)
    marked = [count for shard in shards if (count := whole(shard.get("supervised"))) is not None]
    total = sum(whole(shard.get("tokens")) or 0 for shard in shards if whole(shard.get("supervised")) is not None)
    if marked and total and not any(marked):
        text = f"0 of {total} tokens are supervised: loss_mask is 0 in {_every(len(marked))}"
        yield error("loss_mask", text, actual=0, tokens=total, fix="write the mask of the assistant's tokens again")
    planned = whole(manifest.get("planned_shards"))
    if planned is not None and len(declared) < planned:
        text = f"{len(declared)} of {planned} planned shards are written: the capture is not finished"
        yield warning("manifest", text, actual=len(declared), needed=planned, fix="eagle3lab capture again: it resumes")
    elif planned is not None and len(declared) > planned:
        text = f"the manifest lists {len(declared)} shards, {planned} were planned"
        yield error("manifest", text, actual=len(declared), needed=planned, fix="capture into another folder")


def _manifest(manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Fields that the lab's reader refuses, and shards that are listed twice."""
    faults = [str(fault) for fault in items(manifest.get("faults"))]
    if faults:
        more = f"; {len(faults)} such fields" if len(faults) > 1 else ""
        fix = "use the release of eagle3lab that wrote it, or capture again"
        text = f"manifest.json is none of {SCHEMA}: {faults[0][:160]}{more}"
        yield error("manifest", text, actual=faults[0], faults=faults, fix=fix)
    names = [str(mapping(item).get("name")) for item in items(manifest.get("shards"))]
    twice = given_twice(names)
    if twice:
        text = f"manifest.json lists {twice[0][:80]} {names.count(twice[0])} times"
        yield error("manifest", text, actual=twice[:20], fix="list every shard once, or capture again")


def _every(count: int) -> str:
    return "the only shard" if count == 1 else f"all {count} shards"


@check(
    code="states-contents",
    title="rows of captured shards",
    reads=("shard_states",),
    rule="every row is finite and not empty, and different tokens have different rows",
    fix="capture the named shards again",
    symptom="the loss becomes NaN, or acceptance stays near 1.00",
)
def contents(facts: Facts) -> Iterator[Finding]:
    """Findings about each shard's measured rows; largest values once for the whole folder."""
    largest: list[tuple[float, str]] = []
    for name, raw in mapping(facts.get("shard_states")).items():
        shard = mapping(raw)
        points, block = id_list(shard.get("points")) or [], whole(shard.get("block")) or 0
        for tensor in ("aux", "last"):
            report = report_of(shard.get(tensor))
            if report is None:
                continue
            where = f"{name[:80]} {tensor}"
            its_points, its_block = (points, block) if tensor == "aux" else ([], 0)
            for finding in report_findings(report, where, str(shard.get("dtype")), its_points, block=its_block):
                if finding.severity == "info":
                    largest.append((real(finding.evidence.get("largest")) or 0.0, f"{where}: {finding.message}"))
                else:
                    yield finding
        groups = [group for group in items(shard.get("repeated")) if isinstance(group, list) and group]
        if groups:
            yield repeated(groups[0], name[:80], groups)
        yield from _copies(name[:80], shard, points)
    if largest:
        value, text = max(largest)
        yield info("states", text, largest=value)


def _copies(name: str, shard: Mapping[str, Any], points: list[int]) -> Iterator[Finding]:
    """States of another text, and points that hold the numbers of another point."""
    for one in map(mapping, items(shard.get("same_as"))[:1]):
        row, other, where = whole(one.get("row")), whole(one.get("other_row")), str(one.get("shard"))[:80]
        text = f"{name} and {where} hold the same states for different tokens: {one.get('tensor')} of the sample at row"
        text += f" {row} is that of the sample at row {other}"
        yield error(name, text, actual=row, shards=[where, name], samples=len(items(shard.get("same_as"))))
    for place in (id_list(shard.get("flat_points")) or [])[:1]:
        point = str(points[place]) if place < len(points) else f"block {place}"
        text = f"{name}: the columns of point {point} are the same in every row: that layer was not captured"
        yield error(name, text, actual=place, point=point)
    for pair in map(id_list, items(shard.get("equal_points"))[:1]):
        if pair is not None and len(pair) == 2:
            named = [str(points[place]) if place < len(points) else f"block {place}" for place in pair]
            text = f"{name}: the columns of points {named[0]} and {named[1]} are bit-equal in every row"
            yield error(name, text, actual=pair, points=named, fix="capture again: one layer was stored twice")


def report_of(raw: Any) -> RowReport | None:
    """Measured rows as a report, anything of the wrong type left out; None when they are not one."""
    given = mapping(raw)
    if whole(given.get("rows")) is None:
        return None
    counts = {key: whole(given.get(key)) or 0 for key in _COUNTS}
    nan_rows, inf_at, largest = id_list(given.get("nan_rows")), items(given.get("inf_at")), items(given.get("largest"))
    places = [pair for pair in map(id_list, inf_at) if pair is not None and len(pair) == 2]
    numbers = [number for number in map(real, largest) if number is not None]
    return RowReport(
        **counts,
        nan_rows=nan_rows or [],
        nan_by_block={block: whole(n) or 0 for block, n in _by_number(given.get("nan_by_block"))},
        inf_at=places,
        zero_rows={row: id_list(blocks) or [] for row, blocks in _by_number(given.get("zero_rows"))},
        largest=numbers if len(numbers) == 3 else None,
    )


_COUNTS = ("rows", "width", "nan_row_count", "inf_values", "zero_row_count", "at_max")


def _by_number(raw: Any) -> Iterator[tuple[int, Any]]:
    """Items whose key is a number (JSON made it a text)."""
    for key, value in mapping(raw).items():
        if str(key).isascii() and str(key).isdigit() and len(str(key)) < 19:
            yield int(key), value


@check(
    code="states-norm",
    title="final norm of the last state",
    reads=("states", "state_rows_argmax"),
    rule="`last` stands where the manifest says: after the final norm, a row over the norm's weight has size 1",
    fix="correct `last` in the manifest's writer and capture again; a norm applied twice cannot be undone",
    symptom="the teacher's distribution is wrong: 25 % acceptance instead of 40 % in one public report",
)
def norm_position(facts: Facts) -> Iterator[Finding]:
    """Size of the rows after division by the target's norm weight, against what the manifest declares."""
    norm = mapping(mapping(facts.get("states")).get("norm"))
    size, declared = real(norm.get("rms")), str(norm.get("declared"))
    if size is None:
        return
    after = abs(size - 1) < 0.05
    says_after = declared.startswith(("post", "after"))
    evidence: dict[str, Any] = {"rms": size, "declared": declared}
    if after == says_after:
        yield info("last", f"last stands {'after' if after else 'before'} the final norm, as declared", **evidence)
        return
    where = "after" if after else "before"
    text = f"last is declared {declared} and stands {where} the final norm (row size over the norm's weight {size:.3g})"
    yield error("last", text, actual=size, **evidence)
