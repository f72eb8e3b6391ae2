"""Rotary settings: effective values as each reader sees them, and what a conversion lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.core.errors import closest
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import ROPE_THETA_DEFAULT, Rope, draft_of, mapping, real, rope_of, target_of, text_of, whole

_OTHER_NAMES = (
    "rope_base",
    "rotary_base",
    "rotary_emb_base",
    "rope_freq_base",
    "theta",
    "rotary_theta",
    "rope_theta_base",
)
"""Names under which other code keeps theta; no engine reads them in a Llama config."""
_ALIKE = 0.7
"""A type this much like a known one is that one misspelt."""
_KINDS = (
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "su", "mrope", "proportional"),
    *("deepseek_yarn", "deepseek_llama_scaling", "mllama4", "ntk", "xdrope", "openpangu"),
)
"""Types of scaling that transformers 5, SGLang 0.5.23 or vLLM 0.33.0 know."""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in {**a, **b} if a.get(key) != b.get(key)}


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config, whatever its layout, that holds the decoder's rotary settings."""
    return mapping(config.get("transformer_layer_config")) or text_of(config)


def _shown(rope: Rope) -> dict[str, Any] | None:
    """Scaling as {rope_type, ...} for a message, None without."""
    if rope.scaling is None:
        return None
    rest = {key: value for key, value in rope.scaling.items() if key not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": rope.kind, **rest}


@check(
    code="rope-values",
    title="settings of the scaling that no reader takes",
    reads=("draft_config|target|target_config",),
    also=("draft_config", "target", "target_config"),
    rule="rope_scaling is null or a mapping with a known type; its factor and lengths are numbers above 0",
    fix="write rope_scaling as the draft was trained",
    symptom="an error while the model is built, or no scaling at all",
)
def rope_values(facts: Facts) -> Iterator[Finding]:
    """A text instead of a mapping, a misspelt type, a factor that is none."""
    target = {**text_of(facts.mapping("target_config")), **facts.mapping("target")}
    for whose, config in (("", draft_of(facts).layer), (" of the target", target)):
        for key in ("rope_scaling", "rope_parameters"):
            if config.get(key) is not None:
                yield from _scaling_values(key + whose, config[key])


def _scaling_values(subject: str, value: Any) -> Iterator[Finding]:
    if not isinstance(value, Mapping):
        yield error(subject, f"{subject} is {value!r:.60}, null or a mapping is needed", actual=value)
        return
    for name in ("factor", "original_max_position_embeddings"):
        given = value.get(name)
        number = real(given) if name == "factor" else whole(given)
        if given is not None and (number is None or number <= 0):
            yield error(subject, f"{subject}: {name} is {given!r:.40}, a number above 0 is needed", actual=given)
    kind = value.get("rope_type", value.get("type"))
    if kind is None and value.get("factor") is not None:
        text = f"{subject} has a factor and no type: no reader scales by it"
        yield warning(subject, text, actual=None, fix='"rope_type": "yarn" (or linear, llama3, ...) beside the factor')
    elif kind is not None and kind not in _KINDS:
        near, alike = closest(str(kind), _KINDS)
        tell = error if alike >= _ALIKE or not isinstance(kind, str) else warning
        hint = f"; did you mean {near!r}?" if alike >= _ALIKE else ""
        yield tell(
            subject, f"{subject} has the type {kind!r:.40}, which no engine knows{hint}", actual=kind, nearest=near
        )


@check(
    code="rope-conversion",
    title="rotary settings lost or changed by a conversion",
    reads=("source_config", "converted_config"),
    rule="a conversion keeps theta and scaling as its reader will see them",
    fix="copy rope_theta and rope_scaling of the source into the converted config.json",
    symptom="acceptance falls with the length of the context",
)
def rope_conversion(facts: Facts) -> Iterator[Finding]:
    """Compare effective settings, whatever the spelling."""
    source: Mapping[str, Any] = facts.mapping("source_config")
    converted: Mapping[str, Any] = facts.mapping("converted_config")
    source, converted = _decoder(source), _decoder(converted)
    before, after = rope_of(source), rope_of(converted)
    if before.theta != after.theta:
        lost = "" if after.theta_found else " (none is written, so the default is taken)"
        yield error(
            "rope_theta",
            f"rope_theta was {before.theta:g} and is {after.theta:g}{lost}",
            actual=after.theta,
            before=before.theta,
            after=after.theta,
        )
    a, b = before.settings(), after.settings()
    changed = {key: pair for key, pair in _differences(a, b).items() if key != "theta"}
    if part := changed.pop("partial_rotary_factor", None):
        text = f"partial_rotary_factor was {part[0]:g} and is {part[1]:g} (1 when it is not written)"
        yield error("partial_rotary_factor", text, actual=part[1], before=part[0], after=part[1])
    if changed:
        if before.scaling is not None and after.scaling is None:
            text = f"rope_scaling lost: {before.label()} became null"
        elif before.scaling is None:
            text = f"rope_scaling added: null became {after.label()}"
        else:
            told = ", ".join(f"{key} {old} became {new}" for key, (old, new) in sorted(changed.items()))
            text = f"rope_scaling changed: {told}"
        yield error("rope_scaling", text, actual=_shown(after), before=_shown(before), after=_shown(after))
    if a == b and rope_of(converted, old_reader=True).settings() != a == rope_of(source, old_reader=True).settings():
        seen = rope_of(converted, old_reader=True)
        yield warning(
            "rope_parameters",
            f"rotary settings moved under rope_parameters: older readers look at top level only and see theta "
            f"{seen.theta:g} with {seen.label() or 'no scaling'}",
            they_see=seen.theta,
        )


@check(
    code="rope-readers",
    title="theta or scaling that some readers do not see",
    reads=("draft_config",),
    also=("target", "target_config"),
    rule="rope_theta and rope_scaling at top level are seen by every reader; rope_parameters only by transformers 5",
    fix="write rope_theta (and rope_scaling) at top level too",
    symptom="the draft rotates with theta 10000: acceptance falls with the length of the context",
)
def rope_readers(facts: Facts) -> Iterator[Finding]:
    """What an older reader sees against what a new one sees."""
    draft = draft_of(facts)
    config = draft.layer
    new, old = rope_of(config), rope_of(config, old_reader=True)
    parameters = mapping(config.get("rope_parameters"))
    top = real(config.get("rope_theta"))
    inner = real(parameters.get("rope_theta"))
    if top is not None and inner is not None and top != inner:
        yield error(
            "rope_theta",
            f"rope_theta is {top:g} at top level and {inner:g} under rope_parameters: readers differ",
            actual=top,
            fix="write the same theta in both places",
            top_level=top,
            rope_parameters=inner,
        )
    scaling = mapping(config.get("rope_scaling"))
    if scaling and parameters.get("rope_type") not in (None,) and "rope_type" in parameters:
        a = Rope(0.0, scaling, True).settings()
        b = rope_of({"rope_parameters": {**parameters, "rope_theta": 0.0}}).settings()
        if a != b:
            yield error(
                "rope_scaling",
                f"rope_scaling ({a['type']}) and rope_parameters ({b['type']}) differ: readers differ",
                fix="write the same scaling in both places",
                rope_scaling=dict(scaling),
                rope_parameters=dict(parameters),
            )
    if old.theta != new.theta:
        yield warning(
            "rope_theta",
            f"theta {new.theta:g} is only under {'rope_parameters' if inner is not None else 'rope_scaling'}: older "
            f"readers look at top level only and see {old.theta:g}",
            actual=new.theta,
            effective_theta=new.theta,
            they_see=old.theta,
        )
    if old.scaling is None and new.scaling is not None:
        yield warning(
            "rope_scaling",
            f"{new.label()} is only under rope_parameters: older readers look at top level only and see no scaling",
            actual=_shown(new),
            they_see=None,
        )
    if any(
        settings.get("rope_theta") is not None and real(settings["rope_theta"]) is None
        for settings in (config, parameters)
    ):
        return  # written and no number: `config-values` tells it
    other = next((key for key in _OTHER_NAMES if key in config), None)
    if not new.theta_found and other is not None:
        yield warning(
            other,
            f"{other} {config[other]} is not read: theta falls back to {ROPE_THETA_DEFAULT:g}",
            actual=config[other],
            fix=f"rename {other} to rope_theta",
            they_see=ROPE_THETA_DEFAULT,
        )
    elif not new.theta_found and draft.config.get("architectures"):
        text = f"rope_theta is not written: every reader takes {ROPE_THETA_DEFAULT:g}"
        yield info("rope_theta", text, effective_theta=ROPE_THETA_DEFAULT)


@check(
    code="rope-target",
    title="draft and target rotate differently",
    reads=("draft_config", "target|target_config"),
    rule="a draft may have its own theta and scaling; it is served with those it was trained with",
    fix="nothing to do if the draft was trained so",
)
def rope_target(facts: Facts) -> Iterator[Finding]:
    """Told, never judged: public drafters differ from their targets on purpose."""
    target, draft = target_of(facts), rope_of(draft_of(facts).layer)
    if target is None or not target.rope_known or not _states_rope(draft_of(facts).layer):
        return
    pairs = _differences(draft.settings(), target.rope.settings())
    if not pairs:
        return
    inner = [key for key in pairs if key not in ("theta", "type", "factor")]
    if set(pairs) == set(inner):
        told = ", ".join(f"rope_scaling.{key} {pairs[key][0]} against {pairs[key][1]}" for key in sorted(inner))
        text = f"draft rope differs from the target in {told}"
    else:
        text = (
            f"draft rope differs from target: theta {draft.theta:g} with {draft.label() or 'no scaling'} against "
            f"{target.rope.theta:g} with {target.rope.label() or 'no scaling'}"
        )
    yield info(
        "rope",
        text,
        draft=[draft.theta, draft.label()],
        target=[target.rope.theta, target.rope.label()],
        effective_theta=draft.theta,
        target_theta=target.rope.theta,
        differences=pairs,
    )


def _states_rope(config: Mapping[str, Any]) -> bool:
    return any(key in config for key in ("rope_theta", "rope_scaling", "rope_parameters"))


@check(
    code="rope-spellings",
    title="configs that must rotate alike",
    reads=("configs",),
    rule="`type` and `rope_type` name the same thing; only effective values count",
    fix="write the same theta and scaling in all of them",
)
def rope_spellings(facts: Facts) -> Iterator[Finding]:
    """Effective settings of several configs, compared."""
    ropes = [rope_of(_decoder(mapping(config))) for config in facts["configs"] or []]
    if len(ropes) < 2:
        return
    effective = [{"theta": rope.theta, "type": rope.kind, "factor": rope.factor} for rope in ropes]
    equal = all(rope.settings() == ropes[0].settings() for rope in ropes)
    told = "; ".join(f"theta {rope.theta:g}, {rope.label() or 'no scaling'}" for rope in ropes)
    if equal:
        yield info("rope", f"all configs rotate alike: {told}", effective=effective, equal=True)
    else:
        yield warning("rope", f"configs rotate differently: {told}", effective=effective, equal=False)
