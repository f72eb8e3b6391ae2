"""Capture points, and the one conversion between them and every engine's layer ids.

`resid_pre[i]` is the residual stream that enters decoder block i (0-based) of a target with n blocks: un-normed,
hidden and residual summed, equal to transformers' `hidden_states[i]`. `resid_pre[0]` is the embedding, `resid_pre[n]`
the state after the last block and before the final norm (transformers' `hidden_states[n]` is after it).

Engines count differently, and which way is decided by the model file that is loaded. Read in SGLang 0.5.23
(`set_eagle3_layers_to_capture` of each model), vLLM 0.33.0, SpecForge a6b6b02 and speculators c05b95b. The first-id
rule of the DeepSeek files came with SGLang PR 25454; its first release is 0.5.13 (absent in the wheel 0.5.12.post1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle3lab.core.errors import PointsError, nearest

ENGINES = ("sglang", "vllm", "vllm-v2", "specforge", "speculators")
FIRST_ID_RULE_SINCE = (0, 5, 13)
"""First SGLang release whose DeepSeek files look at the first id; older ones add one to every list."""
NESTED_KEY = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP_LEVEL_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Family:
    """How one SGLang model file turns ids into capture points.

    rule: `first-id` (as written, plus one when the first id is 1), `plus-one`, or `gpt-oss` (plus one unless the
        largest id is n).
    out_of_reach: what becomes of an id that no block has: `packer` raises at the first forward pass, `index` raises at
        start-up, `list` returns fewer states without a word.
    final: whether `resid_pre[n]` can be captured.
    default_shift: added to the default list too (one model file does).
    """

    rule: Literal["first-id", "plus-one", "gpt-oss"] = "plus-one"
    out_of_reach: Literal["packer", "index", "list"] = "list"
    final: bool = False
    default_shift: int = 0


_DEEPSEEK = Family("first-id", "packer")
_LLAMA = Family()
_INDEXED = Family(out_of_reach="index")
_FINAL = Family(final=True)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("kimi_k25", "kimi_k2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _DEEPSEEK),
    "glm4_moe_lite": Family("first-id", "list"),
    **dict.fromkeys(
        (
            *("llama", "llama4", "mistral", "ministral3", "phi3", "apertus", "exaone_moe"),
            *("qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_vl_moe"),
            *("glm4_moe", "glm5_next", "bailing_moe", "bailing_moe_v2", "minimax_m2", "longcat_flash"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5"), _INDEXED),
    **dict.fromkeys(("gemma3", "gemma4", "minimax_m3"), _FINAL),
    "minimax_m3_vl": Family(final=True, default_shift=1),
    "gpt_oss": Family("gpt-oss", final=True),
}
"""Family name (transformers' `model_type`) -> rule of its SGLang model file."""

_ALIASES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "kimi_k26": "kimi_k25",
    "llama4_text": "llama4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_text": "qwen3_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
}


_CLASSES = {
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "Llama4ForConditionalGeneration": "llama4",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}
"""Class in `architectures` -> family: SGLang chooses the model file by the class."""


@dataclass(frozen=True)
class Captured:
    """What an engine really captures for a list of ids.

    resid_pre: ascending points.
    ambiguous: the engine guesses between two readings of the list, and the other one is as plausible.
    notes: the rule that decided, then everything odd, one sentence each.
    refused: the engine stops with an error; `resid_pre` then holds the points that it can reach.
    """

    resid_pre: list[int]
    ambiguous: bool
    notes: list[str] = field(default_factory=list)
    refused: bool = False


@dataclass(frozen=True)
class Written:
    """The list to write, the config key to write it under, and what to know about it."""

    ids: list[int]
    key: str
    notes: tuple[str, ...] = ()


def default_points(blocks: int) -> list[int]:
    """[2, n//2, n-3], the points that every engine takes when no list is given. `PointsError` below 7 blocks."""
    _check_blocks(blocks)
    points = [2, blocks // 2, blocks - 3]
    if blocks < 7:
        raise PointsError(
            f"the default points of {blocks} blocks are {points}: unsorted or duplicate",
            rule="[2, n//2, n-3] is ascending only for n >= 7 blocks",
            fix="name the points yourself: eagle3lab points --blocks N --resid-pre A,B,C --engine E",
        )
    return points


def check_points(resid_pre: Sequence[int], blocks: int) -> None:
    """Refuse (`PointsError`) a list that is empty, out of 0..n, duplicated or not ascending."""
    _check_blocks(blocks)
    points = _integers(resid_pre, "capture points")
    rule = f"ascending, distinct, 0 <= point <= n, n = {blocks} blocks"
    outside = [point for point in points if not 0 <= point <= blocks]
    if not points:
        raise PointsError(f"no capture points in {points}", rule=rule)
    if outside:
        raise PointsError(f"capture points {points}: {outside} out of range", rule=rule)
    if len(set(points)) != len(points):
        raise PointsError(f"capture points {points}: duplicate", rule=rule)
    if points != sorted(points):
        raise PointsError(f"capture points {points}: not ascending", rule=rule, fix=f"write {sorted(points)}")


def family_of(config: Mapping[str, Any]) -> str | None:
    """Family of a target's config.json by its `model_type`, its text config's, or its class; None when unknown."""
    text = config.get("text_config")
    sources = (config, text if isinstance(text, Mapping) else {})
    names = [source.get("model_type") for source in sources]
    classes = config.get("architectures")
    names += [_CLASSES.get(name) for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    for name in names:
        if isinstance(name, str) and (name := _ALIASES.get(name, name)) in FAMILIES:
            return name
    return None


def captured(
    ids: Sequence[int] | None, *, blocks: int, engine: str, family: str | None = None, version: str | None = None
) -> Captured:
    """The points that `engine` captures when `ids` is written where it reads them (None: no list there).

    Args:
        blocks: n, the number of decoder blocks of the target.
        family: `model_type` of the target; None applies the Kimi/DeepSeek rule and says so.
        version: of SGLang, for the first-id rule; ignored by the other engines.

    Raises:
        PointsError: unknown engine or family, unreadable version, or ids that are not integers.
    """
    _check_blocks(blocks)
    _check_engine(engine)
    kind, notes = _family(family, engine)
    listed = None if ids is None else _integers(ids, "layer ids")
    if listed is not None and not listed:
        return Captured([], False, ["an empty list captures nothing; leave the key out for the default points"], True)
    if listed is not None and min(listed) < 0:
        return Captured([], False, [f"ids {listed}: a layer id is never negative"], True)
    if engine in ("sglang", "specforge"):
        return _through_sglang(listed, blocks, engine, kind, version, notes)
    return _through_vllm(listed, blocks, engine, kind, notes)


def written(
    resid_pre: Sequence[int], *, blocks: int, engine: str, family: str | None = None, version: str | None = None
) -> list[Written]:
    """The inverse of `captured`: which list to write, under which key, so that `engine` captures `resid_pre`.

    Raises:
        PointsError: the points are invalid, or no list makes this engine capture them.
    """
    check_points(resid_pre, blocks)
    _check_engine(engine)
    points = list(resid_pre)
    kind, notes = _family(family, engine)
    key = NESTED_KEY if engine in ("sglang", "specforge") else TOP_LEVEL_KEY
    candidates = [points]
    if engine in ("sglang", "specforge"):
        candidates.append([point - 1 for point in points])
        if kind.rule == "first-id" and points[0] == 1:
            # Only the first id is looked at and order has no effect, so a list that ends with 1 is taken as written.
            candidates.append([*points[1:], 1])
    for ids in candidates:
        if min(ids) < 0:
            continue
        got = captured(ids, blocks=blocks, engine=engine, family=family, version=version)
        if got.resid_pre == points and not got.refused:
            extra = ["unsorted on purpose: a list that starts with 1 gets one added"] if ids != sorted(ids) else []
            return [Written(ids, key, (*notes, *extra))]
    reasons = captured(points, blocks=blocks, engine=engine, family=family, version=version).notes
    raise PointsError(
        f"{engine} cannot capture resid_pre {points} of n = {blocks} blocks (family {family or 'not given'})",
        rule=reasons[-1] if reasons else "",
        fix=f"take points that it reaches, such as {default_points(blocks)}" if blocks >= 7 else "",
    )


def compare(
    a: Sequence[int], b: Sequence[int], *, a_name: str = "the states", b_name: str = "the drafter"
) -> str | None:
    """None when the points of `a` and `b` are equal, else one sentence that names an off-by-one if it is one."""
    left, right = list(a), list(b)
    if left == right:
        return None
    head = f"{a_name} have points {left}, {b_name} has {right}"
    if len(left) != len(right):
        return f"{head}: {len(left)} points against {len(right)}"
    if sorted(left) == sorted(right):
        return f"{head}: the same points in another order; engines join them ascending"
    steps = [x - y for x, y in zip(left, right, strict=True)]
    way = "higher" if 1 in steps else "lower"
    if set(steps) in ({1}, {-1}):
        return f"{head}: all points one {way} (an off-by-one: block inputs taken for outputs, or the reverse)"
    if set(steps) in ({0, 1}, {0, -1}):
        moved = [y for y, step in zip(right, steps, strict=True) if step]
        return f"{head}: one {way} at {moved} (an off-by-one at {len(moved)} of {len(steps)} points)"
    return f"{head}: differences {steps}"


def _through_sglang(
    ids: list[int] | None, blocks: int, engine: str, kind: Family, version: str | None, notes: list[str]
) -> Captured:
    if engine == "specforge":
        if ids is None:
            ids = [point - 1 for point in default_points(blocks)]
            notes.append(f"no list: SpecForge writes [1, n//2-1, n-4] = {ids} and captures through SGLang")
        elif len(ids) != 3:
            return Captured([], False, [*notes, f"{len(ids)} ids {ids}: SpecForge takes exactly three"], True)
    if ids is None:
        asked = [point + kind.default_shift for point in default_points(blocks)]
        shift = ", and this model file adds one to it" if kind.default_shift else ""
        return Captured(asked, False, [*notes, f"no list: the default [2, n//2, n-3]{shift} = {asked}"])
    old = kind.rule == "first-id" and engine == "sglang" and _older_than_first_id_rule(version)
    plus = [i + 1 for i in ids]
    if kind.rule == "first-id" and not old:
        adds = ids[0] == 1
        notes.append("first id is 1: one is added to every id" if adds else "first id is not 1: used as written")
        if engine == "sglang" and version is None and not adds:
            notes.append(f"SGLang before 0.5.13 (PR 25454) adds one to every id here: {sorted(plus)}")
    elif kind.rule == "gpt-oss":
        adds = max(ids) != blocks
        what = "not n: one is added to every id" if adds else "n: used as written"
        notes.append(f"gpt_oss, n = {blocks}: the largest id is {what}")
    else:
        adds = True
        notes.append(
            f"SGLang {version} is older than 0.5.13 (PR 25454) and adds one to every id in this family"
            if old
            else "this model family adds one to every id in SGLang"
        )
    asked = plus if adds else ids
    ambiguous = False
    if kind.rule == "first-id" and not old and blocks >= 7 and sorted(asked) != default_points(blocks):
        ambiguous = True
        other, meaning = (ids, "inputs") if adds else (plus, "outputs")
        notes.append(f"ambiguous: the first id is a guess; meant as block {meaning}, {ids} are {sorted(other)}")
    last = blocks if kind.final else blocks - 1
    resid_pre, refused = _reach(asked, ids, last, blocks, kind.out_of_reach, notes)
    return Captured(resid_pre, ambiguous, notes, refused)


def _through_vllm(ids: list[int] | None, blocks: int, engine: str, kind: Family, notes: list[str]) -> Captured:
    tail = f"speculators' launcher also appends n = {blocks}, the verifier's last state, which is not a point of fc"
    extra = [tail] if engine == "speculators" else []
    if ids is None:
        points = default_points(blocks)
        return Captured(points, False, [*notes, f"no list: the default [2, n//2, n-3] = {points}", *extra])
    notes.append("vLLM uses every id as written")
    resid_pre, refused = _reach(ids, ids, blocks, blocks, "list", notes)
    if kind.rule == "first-id" and 0 in ids:
        notes.append("id 0: vLLM's DeepSeek code adds None to the embedding and fails")
        resid_pre, refused = [point for point in resid_pre if point], True
    return Captured(resid_pre, False, notes + extra, refused)


def _reach(
    asked: list[int], ids: list[int], last: int, blocks: int, beyond: str, notes: list[str]
) -> tuple[list[int], bool]:
    """(points met while the engine walks over the blocks, whether it stops with an error); appends to `notes`."""
    reached = sorted({i for i in asked if 0 <= i <= last})
    outside = [i for i in asked if i > last]
    refused = False
    if ids != sorted(ids):
        notes.append(f"order in the list has no effect: {ids} is joined in ascending layer order, {reached}")
    if outside:
        names = ", ".join(map(str, outside))
        notes.append(f"id {names} is out of range: the last point reached is {last} of n = {blocks} blocks")
    if blocks in reached:
        notes.append(f"point {blocks} of n = {blocks} blocks is the state after the last block, before the final norm")
    if len(set(asked)) < len(asked):
        notes.append(f"duplicate ids in {ids}: each point is captured once")
    if len(reached) < len(asked):
        count = f"captured {len(reached)} of {len(asked)}"
        refused = beyond == "packer" or (beyond == "index" and bool(outside))
        if refused:
            error = "RuntimeError at the first forward pass" if beyond == "packer" else "IndexError at start-up"
            notes.append(f"refused: {error}, {count}")
        else:
            notes.append(f"{count}: fc gets {len(reached)} x H numbers a token, not {len(asked)} x H")
    for step, way in ((1, "higher"), (-1, "lower")):
        if blocks >= 7 and [point - step for point in reached] == default_points(blocks):
            side = "inputs" if step == 1 else "outputs"
            notes.append(
                f"all points one {way} than the default {default_points(blocks)}: was the list meant as {side}?"
            )
    return reached, refused


def _family(family: str | None, engine: str) -> tuple[Family, list[str]]:
    if family is None and engine in ("sglang", "specforge"):
        return _DEEPSEEK, ["family not given: the Kimi/DeepSeek rule is used; name it with --family"]
    if family is None:
        return _LLAMA, ["family not given: ids of this engine do not depend on it"]
    name = _ALIASES.get(family, family)
    if name not in FAMILIES:
        raise PointsError(f"unknown model family '{family}'", rule=nearest(family, FAMILIES))
    return FAMILIES[name], []


def _older_than_first_id_rule(version: str | None) -> bool:
    if version is None:
        return False
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise PointsError(f"unreadable engine version '{version}'", rule="a release such as 0.5.23")
    return tuple(int(part or 0) for part in match.groups()) < FIRST_ID_RULE_SINCE


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise PointsError(f"unknown engine '{engine}'", rule=nearest(engine, ENGINES))


def _check_blocks(blocks: int) -> None:
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
        raise PointsError(f"{blocks!r} blocks", rule="the number of decoder blocks is an integer >= 1")


def _integers(values: Sequence[int], what: str) -> list[int]:
    if isinstance(values, str) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise PointsError(f"{what} {values!r}", rule="a list of integers, such as 2,30,58")
    return list(values)
