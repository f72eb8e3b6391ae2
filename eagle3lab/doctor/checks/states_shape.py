"""Sizes of captured states: width against points and hidden size, order of the points, one mark of the mask a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.core.errors import PointsError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import id_list, mapping, target_of, whole
from eagle3lab.points import captured, check_points, compare

LISTED = 20


@check(
    code="states-width",
    title="width of the states against points and hidden size",
    reads=("width|shape",),
    also=("points", "H", "target", "target_config", "states_manifest_resid_pre", "shards", "with_last"),
    rule="a row of P points has P x H numbers, H the hidden size of the target",
    fix="capture again, and check the width where the states come in",
    symptom="fc cuts a row at the wrong places, or training stops at its first step",
)
def width(facts: Facts) -> Iterator[Finding]:
    """What is known of P and H decides; with one of them the width is still a multiple of it."""
    target = target_of(facts)
    of_target = target.hidden if target else None
    given = whole(facts.get("H"))
    if given and of_target and given != of_target:
        yield error("H", f"H is {given}, the target's hidden size {of_target}", actual=given, needed=of_target)
    hidden, count = given or of_target, _point_count(facts)
    for where, found in _widths(facts):
        evidence: dict[str, Any] = {"width": found, "points": count, "hidden_size": hidden}
        if count and hidden:
            needed = count * hidden
            with_last = facts.get("with_last") is True and found == needed + hidden
            if found != needed and not with_last:
                text = f"{where}: width {found} is not {count} x {hidden} = {needed}"
                more = "; it is one state more" if found == needed + hidden else ""
                yield error(where, text + more, actual=found, needed=needed, **evidence)
        elif (part := count or hidden) and (found % part or not found):
            what = f"{count} points" if count else f"the hidden size {hidden}"
            yield error(where, f"{where}: width {found} is no multiple of {what}", actual=found, **evidence)


def _point_count(facts: Facts) -> int | None:
    """How many points there are; `points` may be their number."""
    for name in ("points", "states_manifest_resid_pre"):
        given = facts.get(name)
        if isinstance(given, list):
            return len(given) or None
        if (count := whole(given)) is not None:
            return count if count > 0 else None
    return None


def _widths(facts: Facts) -> Iterator[tuple[str, int]]:
    """(where, width) of the states, and of shards that name their own."""
    shape = id_list(facts.get("shape")) or []
    if (found := whole(facts.get("width"))) is not None:
        yield "states", found
    elif len(shape) == 2:
        yield "states", shape[1]
    for index, raw in enumerate((facts.get("shards") or [])[:LISTED]):
        shard = mapping(raw)
        if (found := whole(shard.get("width"))) is not None:
            yield f"shard {str(shard.get('name', index))[:60]}", found


@check(
    code="states-points",
    title="order and range of the captured points",
    reads=("points|states_manifest_resid_pre",),
    also=("target", "target_config", "states"),
    rule="points are distinct, ascending, and 0 to n, the number of the target's blocks",
    fix="write the points ascending, each once, and capture again if the states were joined in another order",
    symptom="columns of fc belong to other layers than its training assumed",
)
def order(facts: Facts) -> Iterator[Finding]:
    """Engines join states in ascending layer order, whatever the list said."""
    target = target_of(facts)
    blocks = (target.blocks if target else None) or whole(facts.mapping("states").get("blocks"))
    seen: list[list[int]] = []
    for name in ("points", "states_manifest_resid_pre"):
        given = id_list(facts.get(name))
        if given is None or given in seen:
            continue
        seen.append(given)
        try:
            check_points(given, blocks if blocks and blocks > 0 else max([1, *given]))
        except PointsError as problem:
            known = f"; the target has {blocks} blocks" if blocks else ""
            yield error("points", f"{problem.what}{known}", actual=given, points=given, blocks=blocks)
    yield from _as_written(facts.mapping("states"))


def _as_written(manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """The two lists of a manifest: points, and the same as a checkpoint for the target's SGLang file writes them."""
    points, ids = id_list(manifest.get("points")), id_list(manifest.get("points_checkpoint"))
    blocks, family = whole(manifest.get("blocks")), manifest.get("family")
    if not points or not ids or not blocks or blocks < 1 or not isinstance(family, str):
        return
    try:
        meant = captured(ids, blocks=blocks, engine="sglang", family=family).resid_pre
    except PointsError:
        return  # a family that is not known here
    if difference := compare(meant, points, a_name="points_checkpoint", b_name="points"):
        text = f"points_checkpoint {ids} of a {family[:40]} target are the points {meant}, the manifest says {points}"
        yield error("points_checkpoint", f"{text}: {difference}"[:240], actual=ids, captured=meant, points=points)


@check(
    code="states-mask",
    title="loss mask against the rows of the states",
    reads=("shape",),
    also=("loss_mask",),
    rule="one mark of the mask a row, and at least one that is not 0",
    fix="write the mask with the states, from the same tokens",
    symptom="the loss is taken at other tokens than the assistant's, or at none",
)
def mask(facts: Facts) -> Iterator[Finding]:
    """Length and contents of the mask beside one table of states."""
    shape, marks = id_list(facts.get("shape")) or [], facts.get("loss_mask")
    if len(shape) != 2 or not isinstance(marks, list):
        return
    if len(marks) != shape[0]:
        text = f"loss_mask has {len(marks)} marks for {shape[0]} rows"
        yield error("loss_mask", text, actual=len(marks), needed=shape[0])
    if marks and not any(marks):
        yield error("loss_mask", "loss_mask is 0 everywhere: no token is supervised", actual=0)


@check(
    code="states-target",
    title="states against the size of their target",
    reads=("states",),
    also=("target", "target_config", "shards"),
    rule="the manifest's hidden size and number of blocks are those of the target, and its vocabulary has every token",
    fix="name the target that the states were captured from, or capture again",
    symptom="states of another model train a drafter that this target never agrees with",
)
def of_target(facts: Facts) -> Iterator[Finding]:
    """Sizes of the manifest beside those of the target's config."""
    target, manifest = target_of(facts), facts.mapping("states")
    for name, known in (("hidden_size", target and target.hidden), ("blocks", target and target.blocks)):
        said = whole(manifest.get(name))
        if said is not None and known and said != known:
            text = f"the manifest says {name} {said}, the target has {known}"
            yield error("manifest", text, actual=said, needed=known)
    vocabulary = target and target.vocab
    for shard in map(mapping, facts.get("shards") or []):
        largest = whole(shard.get("largest_id"))
        if largest is not None and vocabulary and largest >= vocabulary:
            text = f"{str(shard.get('name'))[:80]} holds token {largest}, the target's vocabulary has {vocabulary}"
            yield error(str(shard.get("name"))[:80], text, actual=largest, needed=vocabulary - 1)
            return
