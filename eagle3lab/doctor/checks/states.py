"""Contents of captured states: finite rows, and rows that belong to their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from eagle3lab.doctor.checks.disk import dtype_of
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.recipes import contents
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.row_copies import copied_rows, unclear_copies
from eagle3lab.doctor.rows import FLOAT_MAX, RowReport, agreement, from_values
from eagle3lab.doctor.views import id_list, items, mapping, real, whole

OUTLIER = 0.35
"""Agreement below this share of the best shard's is no ordinary spread: chat and code differ by less than half."""
NONE_AGREES = 0.1
"""Best agreement below which nothing is in its place: there is no shard to measure the others by."""
FITS = 0.2
"""Agreement with another sample's tokens that is no accident: unrelated texts share a few per cent."""
COSINE = 0.99
ACCIDENT = 1e-4
"""Chance below which a low rate is no accident."""
ROUNDING = 1e-3
"""By so much a cosine of rows in bf16 may pass 1."""


def report_findings(report: RowReport, where: str, dtype: str, points: Sequence[int], mask: Sequence[Any] = (),
                    *, block: int = 0) -> Iterator[Finding]:  # fmt: skip
    """Findings about measured rows. where: prefix of messages; points: id of each block; mask: loss mask by row."""
    count = max(len(points), report.width // block if block else 1, 1)
    names = [str(points[b]) if b < len(points) else f"block {b}" for b in range(count)]
    if report.nan_row_count:
        rows = report.nan_rows or [0]
        masked = bool(mask) and all(not mask[row] for row in rows if row < len(mask))
        said = f"row {rows[0]}" if len(rows) == 1 else f"{report.nan_row_count} rows, first {rows[0]}"
        blocks = {names[b]: count for b, count in report.nan_by_block.items() if count and b < len(names)}
        yield error(
            where, f"NaN in {said} of {report.rows}" + (", where the mask is 0" if masked else ""),
            actual=report.nan_row_count, nan_rows=rows, nan_share=f"{report.nan_row_count}/{report.rows}",
            blocks=blocks, token_positions=rows, masked=masked, mask_covers_it=masked,
            note="0 x NaN is NaN: a zero mask does not save it",
        )  # fmt: skip
    if report.inf_values:
        row, column = report.inf_at[0] if report.inf_at else (0, 0)
        point = _point(column, block, points)
        yield error(
            where, f"inf at row {row}, column {column}, point {point}; {report.inf_values} in all",
            actual="inf", inf_values=report.inf_values, row=row, column=column, point=point,
        )  # fmt: skip
    if report.zero_row_count and report.zero_rows:
        row, empty = next(iter(report.zero_rows.items()))
        all_points = len(empty) >= max(len(points), 1)
        there = f"all {len(empty)} points" if all_points else "point " + ", ".join(names[b] for b in empty)
        more = f"; {report.zero_row_count} such rows" if report.zero_row_count > 1 else ""
        yield warning(where, f"row {row} is zero in {there}{more}", zero_rows=list(report.zero_rows), zero_points=there)
    if report.at_max and dtype in FLOAT_MAX:
        top = FLOAT_MAX[dtype]
        yield warning(where, f"{report.at_max} values at {top:g}, the largest of {dtype}: likely clipped; store bf16",
                      actual=report.at_max, at_max=report.at_max, likely="clipped; store bf16")  # fmt: skip
    if report.largest and not (report.nan_row_count or report.inf_values or report.at_max):
        value, row, column = report.largest[0], int(report.largest[1]), int(report.largest[2])
        text = f"largest value {value:g} at row {row}, column {column}, point {_point(column, block, points)}"
        yield info(where, text, largest=value, row=row, column=column)


def _point(column: int, block: int, points: Sequence[int]) -> Any:
    index = column // block if block else 0
    return points[index] if index < len(points) else "unknown"


@check(
    code="states-finite",
    title="NaN, infinite, zero and clipped rows",
    reads=("shape", "recipe|values"),
    also=("dtype", "points", "H", "loss_mask"),
    rule="every row is finite, none is empty or a copy; a zero mask does not help, because 0 x NaN is NaN",
    fix="capture the sample again; store bf16",
    symptom="the loss becomes NaN",
)
def finite(facts: Facts) -> Iterator[Finding]:
    """Contents given in full, or by a recipe."""
    shape = id_list(facts.get("shape")) or []
    given = facts.get("values")
    points = id_list(facts.get("points")) or []
    block = whole(facts.get("H")) or (shape[1] // len(points) if points and len(shape) == 2 else 0)
    recipe = str(facts.get("recipe") or "")
    dtype = dtype_of(facts.get("dtype") or "F32") or "F32"
    if given is not None:
        values, groups = from_values(given), []
    else:
        found = contents(recipe, shape, points=points, block=block, dtype=dtype)
        values, groups = found or (None, copied_rows(recipe, shape[0] if shape else 0))
    if not facts.has("state_rows_argmax"):  # else told beside the tokens
        for group in groups:
            yield repeated(group, "states", [group])
    if values is None:
        yield info("recipe", "could not check the states because their contents are not understood")
        return
    report = RowReport()
    block = block if 0 < block <= values.shape[1] else 0
    report.add(values, block=block, dtype=dtype)
    mask = facts.get("loss_mask")
    yield from report_findings(report, "states", dtype, points, mask if isinstance(mask, list) else (), block=block)


@check(
    code="states-swapped",
    title="states stored under another sample's tokens",
    reads=("state_rows_argmax", "tokens"),
    also=("recipe", "head"),
    rule="one row a token; the target's head on row t gives the token at t + 1; no two tokens share a bit-equal row",
    fix="capture the named samples again, one request at a time",
    symptom="loss falls, acceptance stays near 1.00",
)
def swapped(facts: Facts) -> Iterator[Finding]:
    """Agreement of every sample with its own tokens and, where it is low, with the others'."""
    tokens = [id_list(item) for item in facts.get("tokens") or []]
    states = [id_list(item) for item in facts.get("state_rows_argmax") or []]
    if len(tokens) != len(states) or None in tokens or None in states:
        yield error("tokens", f"{len(tokens)} token lists for {len(states)} lists of states", actual=len(states))
        return
    text_of, seen = [t or [] for t in tokens], [s or [] for s in states]
    own = [agreement(s, t) for s, t in zip(seen, text_of, strict=True)]
    best = {str(i): _best(i, seen[i], text_of, own[i]) for i in range(len(seen))}
    evidence: dict[str, Any] = {"next_token_agreement": own, "best_match_of_states": best}
    moved = {int(i): j for i, j in best.items() if j is not None and int(i) != j}
    pairs = sorted({(min(i, j), max(i, j)) for i, j in moved.items() if moved.get(j) == i})
    for i, j in pairs:
        yield error("samples", f"samples {i} and {j} are swapped: each holds the states of the other", **evidence)
    for i, j in moved.items():
        if moved.get(j) != i:
            yield error("samples", f"sample {i} holds the states of sample {j}", **evidence)
    late = {
        i: by
        for i in range(len(seen))
        if i not in moved and (by := _displaced(seen[i], text_of[i], own[i])) is not None
    }
    for i, by in late.items():
        place = "t" if by == 0 else f"t + {by}"
        text = f"sample {i}: the head on row t gives the token at {place}, not at t + 1: its rows are displaced by one"
        yield error("samples", text, actual=by, needed=1, sample=i, **evidence)
    wrong = [i for i in range(len(seen)) if i not in moved and len(text_of[i]) - len(seen[i]) not in (0, 1)]
    for i in wrong:
        text = f"sample {i} has {len(seen[i])} rows of states for {len(text_of[i])} tokens"
        yield error("samples", text, actual=len(seen[i]), needed=len(text_of[i]), **evidence)
    if not moved and not wrong and not late:
        counts = [min(len(s), len(t) - 1) for s, t in zip(seen, text_of, strict=True)]
        known = [(rate, count) for rate, count in zip(own, counts, strict=True) if rate is not None]
        yield from _outliers([rate for rate, _ in known], "samples", evidence, [count for _, count in known])
    recipe, rows = str(facts.get("recipe") or ""), max(map(len, seen), default=0)
    for group in copied_rows(recipe, rows):
        yield repeated(group, "states", [group])
    for part in unclear_copies(recipe, rows):
        yield info("recipe", f"could not check repeated rows because {part[:80]!r} does not say which rows are equal")


def _best(index: int, states: list[int], tokens: list[list[int]], own: float | None) -> int | None:
    """Sample whose tokens fit these states best; its own when no other fits clearly better."""
    if own is None:
        return None
    if own >= 0.5 or len(tokens) > 200:
        return index
    rates = [(agreement(states, other) or 0.0, -place) for place, other in enumerate(tokens)]
    top, place = max(rates)
    counted = top * min(len(states), len(tokens[-place]) - 1)
    return -place if (top >= 0.5 or (top >= FITS and counted >= 2)) and top > 2 * own else index


def _displaced(states: list[int], tokens: list[int], own: float | None) -> int | None:
    """0 or 2 when the head on row t gives the token at t + 0 or t + 2 instead of t + 1; else None."""
    for by in (0, 2):
        share = agreement(states, tokens, by) or 0.0
        if min(len(states), len(tokens) - by) > 1 and share >= 0.5 and share > 2 * (own or 0.0):
            return by
    return None


def repeated(group: list[int], where: str, groups: list[list[int]]) -> Finding:
    """The finding about bit-equal rows."""
    in_turn = len(group) > 2 and group[-1] - group[0] == len(group) - 1
    text = f"rows {f'{group[0]} to {group[-1]}' if in_turn else _listed(group[:8])} are bit-equal for different tokens"
    return error(where, text, actual=group, rows=group, repeated_rows=groups)


@check(
    code="states-agreement",
    title="next-token agreement by shard",
    reads=("next_token_agreement_by_shard",),
    also=("states",),
    rule="agreement of the target's head with the text is alike in all shards",
    fix="capture the named shards again",
    symptom="loss falls, acceptance stays near 1.00",
)
def by_shard(facts: Facts) -> Iterator[Finding]:
    """Outliers against the best shard."""
    rates = [real(rate) for rate in facts.get("next_token_agreement_by_shard") or []]
    known = [rate for rate in rates if rate is not None]
    if len(known) != len(rates):
        yield error("agreement", "agreement holds something that is no number", actual=str(rates)[:80])
        return
    if (beyond := next((rate for rate in known if not 0 <= rate <= 1), None)) is not None:
        yield error("agreement", f"agreement holds {beyond:g}, a share lies between 0 and 1", actual=beyond)
        return
    compared = [mapping(one) for one in items(facts.mapping("states").get("compared"))]
    counts = [whole(one.get("rows")) or 0 for one in compared] if len(compared) == len(known) else []
    names = [str(one.get("name"))[:80] for one in compared] if counts else []
    yield from _outliers(known, "shards", {"rates": known}, counts, names)


def _outliers(
    rates: list[float], what: str, evidence: dict[str, Any], counts: Sequence[int] = (), names: Sequence[str] = ()
) -> Iterator[Finding]:
    """Rates far below the best. counts: rows behind each rate; with them an outlier is no accident of a few rows."""
    if not rates:
        return
    top = max(rates)
    usual = max(sorted(rates)[len(rates) // 2], top / 2)
    bad = [index for index, rate in enumerate(rates) if rate < OUTLIER * top]
    if counts:
        bad = [index for index in bad if _accident(rates[index], counts[index], usual) < ACCIDENT]
    if top < NONE_AGREES:
        text = f"no {what.rstrip('s')} agrees with its text (best {top:.2f}): norm position, points or head are wrong"
        yield warning(what, text, actual=top, **evidence)
    elif bad:
        named = _listed([names[index] for index in bad[:8]] if names else bad)
        noun = what if len(bad) > 1 else what.rstrip("s")
        belong = "do not belong to their" if len(bad) > 1 else "does not belong to its"
        said = ", ".join(f"{rates[index]:.2f}" for index in bad[:5])
        text = f"{noun} {named} {belong} tokens: agreement {said}, best {top:.2f}"
        yield error(what, text, actual=[rates[index] for index in bad], outliers=bad, **evidence)
    else:
        yield info(what, f"agreement {min(rates):.2f} to {top:.2f}", **evidence)


def _accident(rate: float, count: int, usual: float) -> float:
    """Chance of so few hits or fewer among `count` rows that agree as usual."""
    if not 0 < usual < 1:
        return 0.0 if usual and count else 1.0
    hits = round(rate * count)
    return sum(math.comb(count, k) * usual**k * (1 - usual) ** (count - k) for k in range(hits + 1))


def _listed(named: Sequence[Any]) -> str:
    """`1`, `1 and 2`, `1, 2 and 5`."""
    head, last = ", ".join(map(str, named[:-1])), str(named[-1])
    return f"{head} and {last}" if head else last


@check(
    code="states-same",
    title="same states under different tokens",
    reads=("shards",),
    rule="different token lists have different states",
    fix="capture both again",
)
def same(facts: Facts) -> Iterator[Finding]:
    """Shards with one hash and several token lists."""
    seen: dict[str, tuple[str, Any]] = {}
    for index, raw in enumerate(facts.get("shards") or []):
        shard = mapping(raw)
        digest, tokens, name = shard.get("states_hash"), shard.get("tokens"), str(shard.get("name", index))
        if digest is None or tokens is None:
            continue
        other = seen.setdefault(str(digest), (name, tokens))
        if other[1] != tokens:
            text = f"{other[0]} and {name} hold the same states for different tokens"
            yield error("shards", text, actual=str(digest)[:64], shards=[other[0], name])


@check(
    code="states-batch-1",
    title="rows against a capture at batch 1",
    reads=("cosine_to_batch_1",),
    also=("threshold", "rows_compared"),
    rule="a row is the same whatever else is in the batch: cosine at least 0.99",
    fix="capture again, one request at a time",
)
def batch_one(facts: Facts) -> Iterator[Finding]:
    """Cosine of each stored row with the same row captured alone."""
    cosines = [real(value) for value in facts.get("cosine_to_batch_1") or []]
    if not cosines:
        yield could_not("the rows against batch 1", "no cosine is given")
        return
    limit = real(facts.get("threshold")) or COSINE
    impossible = [index for index, value in enumerate(cosines) if value is not None and abs(value) > 1 + ROUNDING]
    if impossible:
        index = impossible[0]
        text = f"row {index}: {cosines[index]:g} is no cosine, they lie within -1 and 1"
        yield error("rows", text, actual=cosines[index], rows=impossible, fix="compare again: normalise both rows")
    said = whole(facts.get("rows_compared"))
    if said is not None and said != len(cosines):
        text = f"{said} rows are said to be compared, {len(cosines)} cosines are given"
        yield warning("rows", text, actual=len(cosines), needed=said, fix="give the cosine of every row")
    bad = [index for index, value in enumerate(cosines) if value is None or value < limit]
    if not bad and not impossible:
        yield info("rows", f"{len(cosines)} rows agree with a capture at batch 1", threshold=limit)
        return
    if not bad:
        return
    named = ", ".join(map(str, bad[:8]))
    values = [cosines[index] for index in bad]
    text = f"rows {named} differ from a capture at batch 1: cosine below {limit:g}"
    yield error("rows", text, actual=values, cosine=values, rows=bad, threshold=limit)
