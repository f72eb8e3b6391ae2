"""Capture points: two lists of ids are compared by what each engine captures, never with each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor.captured import NESTED, TOP, View, views, written_lists
from eagle3lab.doctor.facts import Engine, Facts
from eagle3lab.doctor.findings import Finding, error, info, of_severity, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.tensor_names import shape_of, strip_prefix
from eagle3lab.doctor.views import draft_of, given_twice, id_list, target_of

_ALSO = ("draft_config", "draft_config_ids", "target", "target_config", "states_manifest_resid_pre", "draft_headers")
_OFF_BY_ONE = "about 0.10 of accept length for an off-by-one; acceptance does not fall to zero and nothing is logged"


def _trained(facts: Facts) -> list[int] | None:
    return id_list(facts.get("states_manifest_resid_pre"))


def _views(facts: Facts, engines: tuple[Engine, ...] | None = None) -> list[View]:
    """The engines' views; none of ids that are no list of whole numbers, which `points-key` tells."""
    given = facts.get("draft_config_ids")
    return [] if given is not None and id_list(given) is None else views(facts, engines)


def _fc_in(facts: Facts) -> int | None:
    headers = {strip_prefix(name): entry for name, entry in facts.mapping("draft_headers").items()}
    shape = shape_of(headers, "fc.weight")
    return shape[1] if shape and len(shape) == 2 else None


def _softened(facts: Facts, found: list[tuple[View, Finding]], judged: int) -> Iterator[Finding]:
    """Errors of one engine that another default engine does not share are warnings: the user has not chosen yet."""
    for _, finding in found:
        shared = facts.chosen or len(found) >= judged
        yield finding if shared or finding.severity != "error" else of_severity("warning", finding)


@check(
    code="points-captured",
    title="which hidden states each engine hands to fc",
    reads=("target|target_config",),
    also=_ALSO,
    rule="ids become points by the rule of the target's model file: eagle3lab points",
    fix="eagle3lab points --blocks N --ids A,B,C --engine E --family F",
)
def points_captured(facts: Facts) -> Iterator[Finding]:
    """Tell what is captured, for every engine that is judged; also for the V2 runner where it may be the one."""
    open_runner = facts.either_runner or not facts.chosen
    engines = (*facts.engines, Engine("vllm-v2")) if open_runner else facts.engines
    seen = _views(facts, engines)
    if not seen:
        return
    captured = {view.engine.name: view.resid_pre for view in seen}
    alone = len(seen) == 1
    text = "; ".join(f"{view.engine.label} captures resid_pre {view.resid_pre} ({view.rule})" for view in seen)
    yield info(
        "capture points",
        text,
        actual=captured,
        engine_captures_resid_pre=seen[0].resid_pre if alone else captured,
        engine_reads=seen[0].read if alone else {view.engine.name: view.read for view in seen},
        rule=seen[0].rule if alone else {view.engine.name: view.rule for view in seen},
    )
    ignored = [view for view in seen if open_runner and view.engine.name == "vllm-v2" and view.elsewhere]
    if ignored and ignored[0].read is None:
        keys = ", ".join(ignored[0].elsewhere)
        default = ignored[0].resid_pre
        yield info(
            keys,
            f"vLLM's V2 runner does not read {keys} and takes its default {default}; write the list at top level too",
            default_used=default,
        )


@check(
    code="points-differ",
    title="points that are served against points that were trained",
    reads=("states_manifest_resid_pre", "target|target_config"),
    also=_ALSO,
    rule="the server hands fc the same hidden states as training did",
    fix="eagle3lab points --blocks N --resid-pre A,B,C --engine E tells the list to write",
    symptom=_OFF_BY_ONE,
)
def points_differ(facts: Facts) -> Iterator[Finding]:
    """Compare what an engine captures with the manifest of the states."""
    trained = _trained(facts)
    if trained is None:
        return
    # an engine that falls back to its default because the list stands elsewhere is told by `points-key`
    judged = [view for view in _views(facts) if not view.off and not (view.read is None and view.elsewhere)]
    found: list[tuple[View, Finding]] = []
    for view in judged:
        if view.by_family:
            yield from _unknown_family(view, trained)
            continue
        if view.resid_pre == trained or len(set(view.asked)) != len(view.asked):
            continue
        same_length = len(view.resid_pre) == len(trained)
        difference = [a - b for a, b in zip(view.resid_pre, trained, strict=True)] if same_length else None
        target = target_of(facts)
        family = target.family if target else None
        lists = written_lists(draft_of(facts).config)
        found.append(
            (
                view,
                error(
                    "capture points",
                    f"{view.engine.label} captures {view.resid_pre}, the states were captured at {trained}"
                    + (f", difference {difference}" if difference else "")
                    + f": {view.rule}"
                    + (f" (family {family})" if family and view.engine.name == "sglang" else ""),
                    actual=view.resid_pre,
                    server=view.resid_pre,
                    trained=trained,
                    difference=difference,
                    as_written=view.read,
                    family=family,
                    top_level=lists.get(TOP),
                    nested=lists.get(NESTED),
                ),
            )
        )
    yield from _softened(facts, found, len(judged))


def _unknown_family(view: View, trained: list[int]) -> Iterator[Finding]:
    """SGLang with a family that nobody named: right under some rule is no fault, wrong under all is one."""
    right = [name for name, got in view.by_family.items() if got == trained]
    told = "; ".join(f"{name}: {got}" for name, got in view.by_family.items())
    if right:
        yield info(
            "capture points",
            f"the family of the target decides what {view.engine.label} captures ({told}); right: {', '.join(right)}",
            trained=trained,
            by_family=view.by_family,
            fix="give --target with its config.json",
        )
    else:
        yield error(
            "capture points",
            f"{view.engine.label} captures other points than {trained} whatever the family of the target is ({told})",
            trained=trained,
            by_family=view.by_family,
        )


@check(
    code="points-ambiguous",
    title="a list of ids that can be read two ways",
    reads=("target|target_config",),
    also=_ALSO,
    rule="SGLang's Kimi/DeepSeek files guess by the first id: 1 means block outputs, anything else block inputs",
    fix="give --states with the manifest of the training states, or retrain with the list [2, n//2, n-3]",
    symptom=_OFF_BY_ONE,
)
def points_ambiguous(facts: Facts) -> Iterator[Finding]:
    """No manifest settles the list, and the other reading is as plausible."""
    if _trained(facts) is not None:
        return
    for view in _views(facts):
        if view.read is None or view.refused or view.by_family:
            continue
        hint = next((note for note in view.notes if note.startswith("all points one")), None)
        if hint is not None and not view.ambiguous:
            yield info("capture points", f"{view.engine.label} with ids {view.read}: {hint}", as_written=view.read)
        if not view.ambiguous:
            continue
        plus = sorted(i + 1 for i in view.read)
        tell = warning if facts.chosen and len(view.read) > 1 else info
        yield tell(
            "capture points",
            f"ids {view.read} are ambiguous: {view.engine.label} captures {view.resid_pre}; as written they are "
            f"{sorted(view.read)}, if block outputs were meant {plus}",
            actual=view.read,
            as_written=sorted(view.read),
            if_outputs=plus,
        )


@check(
    code="points-range",
    title="ids out of range, repeated, or fewer states than fc reads",
    reads=("target|target_config",),
    also=_ALSO,
    rule="ids are distinct and reachable: states captured x width = columns of fc",
    fix="eagle3lab points --blocks N --ids A,B,C --engine E",
    symptom="a count message at the first forward pass, or a wrong width: with one state left fc is skipped in silence",
)
def points_range(facts: Facts) -> Iterator[Finding]:
    """Ids that no block has, the boundary after the last block, repeats, and a default that collides on a toy."""
    target = target_of(facts)
    fc_in = _fc_in(facts)
    state = draft_of(facts).target_hidden(target)
    seen = _views(facts)
    found: list[tuple[View, Finding]] = []
    for view in seen:
        if view.off:
            continue
        finding = _range_fault(view, target.blocks if target and target.blocks else 0, state, fc_in)
        if finding is None and fc_in == draft_of(facts).states * (state or 0):
            finding = _width_fault(view, state or 0, fc_in)  # else `width-fc` tells it
        if finding is not None:
            found.append((view, finding))
    yield from _softened(facts, found, len(seen))


def _range_fault(view: View, blocks: int, state: int | None, fc_in: int | None) -> Finding | None:
    asked, captured = view.asked, view.resid_pre
    width = len(captured) * state if state else None
    numbers: dict[str, Any] = {
        "ids": view.read if view.read is not None else asked,
        "engine_asks_resid_pre": asked,
        "engine_captures_resid_pre": captured,
        "max": blocks,
        "captured": len(captured),
        "wanted": len(asked),
        "distinct": len(set(asked)),
        "width": width,
        "captured_width": width,
        "fc_in": fc_in,
    }
    against = f": width {width} against fc {fc_in}" if width and fc_in and width != fc_in else ""
    lost = f"{len(captured)} of {len(asked)} states are captured{against}"
    name = view.engine.label
    if view.read == []:
        return error("capture points", f"the list of ids is empty: {name} captures nothing", actual=[], **numbers)
    negative = [i for i in view.read or [] if i < 0]
    if negative:
        text = f"id {', '.join(map(str, negative))} is out of range: ids are 0 to {blocks} for {blocks} blocks"
        return error("capture points", text, actual=view.read, **numbers)
    repeated = given_twice(asked)
    if repeated and view.read is None:
        text = f"the default ids {asked} of {blocks} blocks are repeated and unsorted, {len(set(asked))} distinct"
        return error("capture points", f"{text}; {lost}", actual=asked, **numbers, default=asked)
    if repeated:
        twice = given_twice(view.read or [])
        text = f"id {', '.join(map(str, twice))} is given twice: {len(set(asked))} distinct of {len(asked)} wanted"
        return error("capture points", f"{text}; {name}: {lost}", actual=view.read, **numbers)
    beyond = [i for i in asked if i > blocks or i < 0]
    if beyond:
        text = f"id {', '.join(map(str, beyond))} is out of range, at most {blocks} for {blocks} blocks"
        return error("capture points", f"{text}; {name}: {lost}", actual=view.read, **numbers)
    if view.by_family and view.read is not None:
        return None  # whether the last ids are reached depends on the family
    unreached = [i for i in asked if i not in captured]
    if unreached:
        text = f"id {', '.join(map(str, unreached))} is never reached by {name}'s capture loop, n = {blocks} blocks"
        return error("capture points", f"{text}; {lost}", actual=view.read, **numbers)
    if blocks in captured:
        fits = width == fc_in if width and fc_in else None
        text = f"id {blocks} of {blocks} blocks is the state after the last block, before the final norm"
        numbers |= {"boundary": blocks, "before_final_norm": True, "width_ok": fits}
        return warning("capture points", f"{text}; older engines do not capture it", actual=view.read, **numbers)
    return None


def _width_fault(view: View, state: int, fc_in: int) -> Finding | None:
    """A number of states written apart from the list (`num_aux_hidden_states`) that fits fc, but not the list."""
    width = len(view.resid_pre) * state
    if width == fc_in:
        return None
    text = f"{view.engine.label} captures {len(view.resid_pre)} states, width {width} against fc {fc_in}"
    return error(
        "capture points", text, actual=view.resid_pre, captured=len(view.resid_pre), width=width, captured_width=width,
        fc_in=fc_in, engine_captures_resid_pre=view.resid_pre,
    )  # fmt: skip


@check(
    code="points-order",
    title="ids written out of order",
    reads=("target|target_config",),
    also=_ALSO,
    rule="states are joined in ascending layer order whatever the order of the list",
    fix="write the list ascending, and train fc with its columns low, mid, high",
)
def points_order(facts: Facts) -> Iterator[Finding]:
    """A permuted list is not a permuted fc."""
    for view in _views(facts):
        if view.read and view.read != sorted(view.read) and len(set(view.read)) == len(view.read) and not view.off:
            yield warning(
                "capture points",
                f"order in the list has no effect: {view.read} is joined ascending, {view.resid_pre}",
                actual=view.read,
                written=view.read,
                joined=view.resid_pre,
                engine_reads=view.read,
            )
            return
