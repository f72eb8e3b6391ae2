"""Layer ids written under a key, or in a place, that the engine does not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor.captured import NESTED, PLACES, TOP, View, meant, misspelt_lists, places_of, views
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import IDS_KEY, draft_of, id_list, target_of


@check(
    code="points-key",
    title="layer ids written where the engine does not read them",
    reads=("draft_config|draft_config_ids",),
    also=("target", "target_config", "states_manifest_resid_pre"),
    rule="SGLang reads the list under eagle_config, vLLM at top level first, vLLM's V2 runner at top level only",
    fix="write the list both under eagle_config and at top level, each in the form its engine needs",
    symptom="the default [2, n//2, n-3] is captured instead, with no message or one log line",
)
def points_key(facts: Facts) -> Iterator[Finding]:
    """A misspelt key, a place that this engine ignores, or a list that is none; harmless when the default is equal."""
    draft = draft_of(facts)
    yield from _malformed(facts)
    seen = [view for view in views(facts) if not (draft.speculators and view.engine.name == "sglang")]
    for view in seen:
        if view.read is None and view.elsewhere:
            key, ids = next(iter(view.elsewhere.items()))
            yield _ignored(facts, view, key, ids)
    if not seen:
        for key, ids in misspelt_lists(draft.config):
            yield warning(key, f"{key} is not a known key, nearest {IDS_KEY}", actual=ids, nearest=IDS_KEY)


def _malformed(facts: Facts) -> Iterator[Finding]:
    draft, given = draft_of(facts), "draft_config_ids"
    places = ((TOP, draft.config.get(IDS_KEY)), (NESTED, draft.eagle.get(IDS_KEY)), (given, facts.get(given)))
    for key, value in places:
        if value is not None and id_list(value) is None:
            yield error(key, f"{key} is {str(value)[:60]}, a list of whole numbers is needed", actual=value)


def _ignored(facts: Facts, view: View, key: str, ids: list[int]) -> Finding:
    target = target_of(facts)
    trained = id_list(facts.get("states_manifest_resid_pre"))
    wanted = trained if trained is not None else meant(key, ids, target, view.engine) if target else ids
    engine, default = view.engine.label, view.resid_pre
    places = places_of(draft_of(facts), view.engine)
    known = key in (NESTED, TOP) or key in {place for places in PLACES.values() for place in places}
    reader = "vLLM's V2 runner" if view.engine.name == "vllm-v2" else engine
    text = f"{key} is not read by {reader}" if known else f"{key} is not a known key, nearest {IDS_KEY}"
    numbers: dict[str, Any] = {
        "default_used": default,
        "wanted": wanted,
        "written": ids,
        "engine_reads": None,
        "engine_captures_resid_pre": default,
        "it_reads": list(places),
    }
    if not known:
        numbers["nearest"] = IDS_KEY
    where = f"{engine} reads {' or '.join(places)}"
    if default == wanted:
        tell = warning if facts.chosen else info
        return tell(key, f"{text}; ids {ids} are ignored, but the default {default} is the same", actual=ids, **numbers)
    tell = error if facts.chosen else warning
    return tell(key, f"{text}; {where} and takes its default {default} instead of {wanted}", actual=ids, **numbers)
