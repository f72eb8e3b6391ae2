"""Layer ids of a capture without a draft: the flag, its rule, and the points that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab import points
from eagle3lab.core.errors import PointsError
from eagle3lab.doctor.checks.launch import CAPTURE_METHODS
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.readers.launch import Launch, parse_args
from eagle3lab.doctor.readers.shell import UNKNOWN
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import given_twice, id_list, target_of

CAPTURE = "--enable-return-aux-hidden-states"
FLAG = "--return-aux-hidden-state-layer-ids"


@check(
    code="capture-flags",
    title="flags of a capture without a draft",
    reads=("launch_args",),
    also=("server",),
    rule=f"{CAPTURE} needs --speculative-algorithm EAGLE3, DFLASH or DSPARK and one pipeline stage; {FLAG} needs it",
    fix=f"{CAPTURE} --speculative-algorithm EAGLE3",
    symptom="SGLang stops at its start with a ValueError",
)
def capture_flags(facts: Facts) -> Iterator[Finding]:
    """What SGLang refuses before it looks at the target; a running server took its flags."""
    launch = parse_args(facts["launch_args"])
    if facts.engine_names() != ("sglang",) or facts.has("server"):
        return
    method, listed = launch.value("speculative-algorithm"), launch.has(FLAG.removeprefix("--"))
    if not launch.has(CAPTURE.removeprefix("--")):
        if listed and launch.complete():
            yield error(FLAG, f"{FLAG} without {CAPTURE}: SGLang does not start", fix=f"add {CAPTURE}")
        return
    settled = launch.complete() if method is None else not UNKNOWN.search(method)
    if settled and (method or "").upper() not in CAPTURE_METHODS:
        said = "no --speculative-algorithm" if method is None else f"--speculative-algorithm {method}"
        text = f"{CAPTURE} with {said}: SGLang does not start, the algorithm names what is captured"
        yield error("--speculative-algorithm", text, actual=method, fix="--speculative-algorithm EAGLE3", given=method)
    elif settled and (method or "").upper() != "EAGLE3" and not listed and launch.complete():
        yield error(FLAG, f"{CAPTURE} with {method} needs {FLAG}", fix=f"{FLAG} A B C", given=None)
    if (launch.number("pp") or 1) > 1:
        yield error("--pp", f"capture without a draft needs one pipeline stage, --pp is {launch.number('pp')}",
                    actual=launch.number("pp"), fix="--pp 1 and more tensor parallelism")  # fmt: skip


@check(
    code="capture-points",
    title="layer ids of a capture without a draft",
    reads=("launch_args", "target|target_config"),
    also=("states_manifest_resid_pre",),
    rule="ids of the flag are distinct, 0 or more and below n; the target's model file turns them into points",
    fix="eagle3lab points --blocks N --resid-pre A,B,C --engine sglang",
    symptom="a ValueError at start-up, or states of other layers than were asked for",
)
def capture_points(facts: Facts) -> Iterator[Finding]:
    """SGLang's flag; what vLLM extracts is named in its own config."""
    launch, target = parse_args(facts["launch_args"]), target_of(facts)
    if facts.engine_names() != ("sglang",) or not launch.has(FLAG.removeprefix("--")):
        return
    if not launch.has(CAPTURE.removeprefix("--")) and launch.complete():
        return  # SGLang stops, which capture-flags tells
    blocks = target.blocks if target else None
    ids = _ids(launch)
    if ids is None:
        text = f"{FLAG} {' '.join(launch.flags[FLAG.removeprefix('--')])[:60]!r} is no list of whole numbers"
        yield error(FLAG, text, actual=None)
        return
    repeated = given_twice(ids)
    outside = [i for i in ids if i < 0 or (blocks is not None and i >= blocks)]
    if repeated or outside:
        what = f"id {outside[0]} is out of range" if outside else f"id {repeated[0]} is given twice"
        below = f" and below {blocks}" if blocks else ""
        text = f"{FLAG} {ids}: {what}; ids are distinct, 0 or more{below}"
        yield error(FLAG, text, actual=ids, ids=ids, max=None if blocks is None else blocks - 1)
        return
    if not blocks or target is None or target.family not in points.FAMILIES:
        yield info(FLAG, f"{FLAG} {ids}: the family of the target decides which points these are", as_written=ids)
        return
    yield _captured(facts, ids, blocks, target.family)


def _captured(facts: Facts, ids: list[int], blocks: int, family: str) -> Finding:
    """The points of the list, against those of the states when there are some."""
    engine = facts.engines[0]
    try:
        got = points.captured(ids, blocks=blocks, engine="sglang", family=family, version=engine.version)
    except PointsError as problem:
        return error(FLAG, problem.what, actual=ids)
    wanted = id_list(facts.get("states_manifest_resid_pre"))
    told: dict[str, Any] = {
        "as_written": ids,
        "engine_captures_resid_pre": got.resid_pre,
        "server": got.resid_pre,
        "trained": wanted,
    }
    if len(got.resid_pre) < len(ids):
        text = f"{FLAG} {ids}: {len(got.resid_pre)} of {len(ids)} states are reached, {got.resid_pre}"
        return error(FLAG, text, actual=ids, captured=len(got.resid_pre), wanted=len(ids), **told)
    if wanted is not None and wanted != got.resid_pre:
        text = f"{FLAG} {ids} captures {got.resid_pre}, the states are of {wanted} (family {family})"
        return error(FLAG, text, actual=ids, **told)
    return info(FLAG, f"{FLAG} {ids} captures resid_pre {got.resid_pre} (family {family})", **told)


def _ids(launch: Launch) -> list[int] | None:
    words = " ".join(launch.flags[FLAG.removeprefix("--")]).replace(",", " ").strip("[] ").split()
    try:
        return [int(word) for word in words] or None
    except ValueError:
        return None
