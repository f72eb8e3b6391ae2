"""A target whose hidden states are not those of the plain model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, text_of

_ROTATIONS = ("rotation", "rotate", "hadamard", "quarot", "spinquant", "spin_quant")


@check(
    code="target-rotated",
    title="quantised or rotated target",
    reads=("target_config",),
    rule="a draft reads the hidden states of the weights that are served; a rotation of them is another input",
    fix="capture and train with the very target that is served",
    symptom="acceptance near zero although points, keys and maps are right",
)
def target_rotated(facts: Facts) -> Iterator[Finding]:
    """A rotation in the quantisation settings is a warning, quantisation alone is told."""
    config = facts.mapping("target_config")
    text = text_of(config)
    settings = mapping(config.get("quantization_config")) or mapping(text.get("quantization_config"))
    if not settings:
        return
    method = settings.get("quant_method") or settings.get("quant_algo") or "unnamed"
    key = next(_rotating(settings), None)
    if key is not None:
        yield warning(
            "quantization_config",
            f"the target is quantised ({method}) with a rotation ({key}): its hidden states may be rotated, and "
            "a draft trained on plain ones reads noise",
            actual=key,
            quantised=str(method),
        )
    else:
        told = f"the target is quantised ({method}): capture with the very weights that are served"
        yield info("quantization_config", told, quantised=str(method))


def _rotating(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that switch a rotation on, by their name or by a value that names one."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _rotating(value, name + ".")
            continue
        named = bool(value) and any(word in str(key).lower() for word in _ROTATIONS)
        method = isinstance(value, str) and any(word in value.lower() for word in _ROTATIONS[2:])
        if named or method:
            yield name
