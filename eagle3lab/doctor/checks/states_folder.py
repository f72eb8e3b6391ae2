"""A folder of captured states: layout, contents of its rows, and where the final norm stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.doctor.checks.states import repeated, report_findings
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.rows import RowReport
from eagle3lab.doctor.views import id_list, mapping, real, whole


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
    shards = [mapping(item) for item in facts.get("shards") or []]
    for shard in shards:
        if shard.get("problem"):
            name = str(shard.get("name"))[:80]
            yield error(name, f"{name}: {str(shard['problem'])[:160]}", actual=str(shard["problem"])[:160])
    declared = {str(mapping(item).get("name")): mapping(item) for item in manifest.get("shards") or []}
    for shard in shards:
        tokens, said = whole(shard.get("tokens")), whole(declared.get(str(shard.get("name")), {}).get("tokens"))
        if tokens is not None and said is not None and tokens != said:
            name = str(shard.get("name"))[:80]
            yield error(name, f"{name} has {tokens} tokens, the manifest says {said}", actual=tokens, needed=said)
    planned = whole(manifest.get("planned_shards"))
    if planned is not None and len(declared) < planned:
        text = f"{len(declared)} of {planned} planned shards are written: the capture is not finished"
        yield warning("manifest", text, actual=len(declared), needed=planned, fix="eagle3lab capture again: it resumes")


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
        groups = [group for group in shard.get("repeated") or [] if isinstance(group, list) and group]
        if groups:
            yield repeated(groups[0], name[:80], groups)
    if largest:
        value, text = max(largest)
        yield info("states", text, largest=value)


def report_of(raw: Any) -> RowReport | None:
    """The measured rows as a report; None when they are not one."""
    known = {key: value for key, value in mapping(raw).items() if key in RowReport.__dataclass_fields__}
    if not isinstance(raw, Mapping) or "rows" not in known:
        return None
    for name in ("nan_by_block", "zero_rows"):
        known[name] = {int(key): value for key, value in mapping(known.get(name)).items()}
    return RowReport(**known)


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
    evidence = {"rms": size, "declared": declared}
    if after == says_after:
        yield info("last", f"last stands {'after' if after else 'before'} the final norm, as declared", **evidence)
        return
    where = "after" if after else "before"
    text = f"last is declared {declared} and stands {where} the final norm (row size over the norm's weight {size:.3g})"
    yield error("last", text, actual=size, **evidence)
