"""What each engine reads of the layer ids in a draft config, and what it then captures. No findings in here.

Places (facts read in SGLang 0.5.23, vLLM 0.33.0): SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids` only;
vLLM's V1 runner the top-level key, then the nested one; its V2 runner the top-level key, then `eagle_config.layer_ids`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3lab import points
from eagle3lab.core.errors import PointsError
from eagle3lab.doctor.facts import Engine, Facts
from eagle3lab.doctor.views import IDS_KEY, Draft, Target, draft_of, id_list, mapping, target_of

NESTED, TOP = f"eagle_config.{IDS_KEY}", IDS_KEY
V2_NESTED = "eagle_config.layer_ids"
PLACES = {"sglang": (NESTED,), "vllm": (TOP, NESTED), "vllm-v2": (TOP, V2_NESTED)}
"""Engine -> keys that it reads, in its order."""


def places_of(draft: Draft, engine: Engine) -> tuple[str, ...]:
    """Keys that the engine reads in this config: of the speculators format vLLM takes over the top-level list alone."""
    return (TOP,) if draft.speculators and engine.name != "sglang" else PLACES[engine.name]


@dataclass(frozen=True)
class View:
    """One engine's view of the ids.

    Fields:
        engine: which. read: the list that it reads, None for none. place: the key it was read from.
        elsewhere: key -> list written where this engine does not look (misspelt keys too).
        resid_pre: points that it captures; asked: points that it was asked for, before any got lost.
        refused, ambiguous, notes: see `points.Captured`; rule: the sentence that decided.
        family_known: False when the family would matter and is unknown.
        off: capture is switched off by `use_aux_hidden_state`.
    """

    engine: Engine
    read: list[int] | None
    place: str | None
    elsewhere: dict[str, list[int]]
    resid_pre: list[int]
    asked: list[int]
    refused: bool = False
    ambiguous: bool = False
    notes: tuple[str, ...] = ()
    rule: str = ""
    family_known: bool = True
    off: bool = False
    by_family: dict[str, list[int]] = field(default_factory=dict)


def written_lists(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Every well-formed list of ids under a key that some engine reads."""
    eagle = mapping(config.get("eagle_config"))
    places = {TOP: config.get(IDS_KEY), NESTED: eagle.get(IDS_KEY), V2_NESTED: eagle.get("layer_ids")}
    lists = {key: id_list(value) for key, value in places.items()}
    return {key: value for key, value in lists.items() if value is not None}


def misspelt_lists(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """(key, ids) for keys that look like the ids' key and are none, also inside a misspelt `eagle_config`."""
    inner = [(f"{key}.", value) for key, value in config.items() if isinstance(value, Mapping)]
    for prefix, place in (("", config), *inner):
        at_home = prefix in ("", "eagle_config.")
        for key, value in place.items():
            ids = id_list(value)
            known = key == IDS_KEY or (key == "layer_ids" and prefix == "eagle_config.")
            if ids and (_alike(str(key)) if at_home and not known else key == IDS_KEY and not at_home):
                yield prefix + str(key), ids


def _alike(key: str) -> bool:
    plain = key.lower().replace("-", "_")
    close = difflib.SequenceMatcher(None, plain, IDS_KEY).ratio() > 0.8
    return close or ("layer" in plain and any(word in plain for word in ("aux", "eagle", "capture")))


def meant(key: str, ids: list[int], target: Target, engine: Engine) -> list[int]:
    """Points that the writer of `key` had in mind: the nested key is SGLang's, the top-level one vLLM's."""
    owner = {NESTED: Engine("sglang"), TOP: Engine("vllm")}.get(key, engine)
    return capture(ids, target, owner).resid_pre


def views(facts: Facts, engines: tuple[Engine, ...] | None = None) -> list[View]:
    """One view an engine; empty when the number of blocks is unknown or nothing was said about ids."""
    target = target_of(facts)
    if target is None or not target.blocks or target.blocks < 1:
        return []
    if not facts.has("draft_config_ids") and not _says_eagle3(facts):
        return []
    return [_view(facts, target, engine) for engine in engines or facts.engines]


def _says_eagle3(facts: Facts) -> bool:
    draft = draft_of(facts)
    return draft.eagle3_class or bool(written_lists(draft.config)) or bool(draft.eagle)


def _view(facts: Facts, target: Target, engine: Engine) -> View:
    draft = draft_of(facts)
    if facts.has("draft_config_ids"):
        place: str | None = PLACES[engine.name][0]
        read, elsewhere = id_list(facts["draft_config_ids"]), {}
    else:
        lists, places = written_lists(draft.config), places_of(draft, engine)
        # an empty list is a list to SGLang, and none to vLLM
        place = next((key for key in places if key in lists and (lists[key] or engine.name == "sglang")), None)
        read = lists.get(place) if place else None
        elsewhere = {key: ids for key, ids in lists.items() if key not in places}
        elsewhere |= dict(misspelt_lists(draft.config))
    off = "use_aux_hidden_state" in draft.eagle and not draft.eagle["use_aux_hidden_state"]
    got = capture(read, target, engine)
    by_family = {} if target.family in points.FAMILIES or engine.name != "sglang" else _by_family(read, target, engine)
    return View(
        engine=engine,
        read=read,
        place=place if read is not None else None,
        elsewhere=elsewhere,
        resid_pre=got.resid_pre,
        asked=asked(read, target, engine),
        refused=got.refused,
        ambiguous=got.ambiguous,
        notes=tuple(got.notes),
        rule=_deciding(got.notes),
        family_known=not by_family,
        off=off,
        by_family=by_family,
    )


def _deciding(notes: list[str]) -> str:
    words = ("used as written", "one is added", "adds one", "default", "as written")
    return next((note for note in notes if any(word in note for word in words)), notes[0] if notes else "")


def capture(ids: list[int] | None, target: Target, engine: Engine, family: str | None = None) -> points.Captured:
    """`points.captured`, with the default of a toy of fewer than 7 blocks spelt out instead of refused."""
    blocks = target.blocks or 0
    family = family or (target.family if target.family in points.FAMILIES else None)
    if ids is None and blocks < 7:
        default = [2, blocks // 2, blocks - 3]
        reach = sorted({i for i in default if 0 <= i < blocks})
        return points.Captured(reach, False, [f"no list: the default [2, n//2, n-3] = {default}"], len(reach) < 3)
    try:
        return points.captured(ids, blocks=blocks, engine=engine.name, family=family, version=engine.version)
    except PointsError as error:
        return points.Captured([], False, [error.what], True)


def asked(ids: list[int] | None, target: Target, engine: Engine, family: str | None = None) -> list[int]:
    """The points that the engine looks for, before unreachable and repeated ones get lost, in the order written.

    Found by asking for the same list on a target so deep that every point is reached.
    """
    blocks = target.blocks or 0
    family = family or (target.family if target.family in points.FAMILIES else None)
    if ids is None:
        shift = points.FAMILIES[family].default_shift if family and engine.name == "sglang" else 0
        return [point + shift for point in (2, blocks // 2, blocks - 3)]
    if not ids:
        return []
    shift = 0
    if engine.name == "sglang":
        if family == "gpt_oss":
            shift = int(max(ids) != blocks)
        else:
            deep = max(*ids, blocks, 1) + 10
            probe = points.captured(
                sorted({max(i, 0) for i in ids}) if ids[0] == min(ids) else [max(i, 0) for i in ids],
                blocks=deep,
                engine="sglang",
                family=family,
                version=engine.version,
            )
            shift = max(probe.resid_pre) - max(max(i, 0) for i in ids) if probe.resid_pre else 0
    return [i + shift for i in ids]


def _by_family(ids: list[int] | None, target: Target, engine: Engine) -> dict[str, list[int]]:
    """What SGLang would capture under each of its rules, when the family is unknown."""
    names = {"Kimi/DeepSeek-like": "deepseek_v3", "Llama-like": "llama", "gpt_oss": "gpt_oss"}
    return {name: capture(ids, target, engine, family).resid_pre for name, family in names.items()}
