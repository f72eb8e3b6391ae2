"""Presets: how much work a run does. A preset fixes steps and tokens, never seconds: it means the same everywhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from eagle3lab.core.conventions import Convention
from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.core.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The amounts of one run.

    Fields:
        name: what `--preset` calls it.
        train_samples: training responses that are captured and trained on; None takes every one there is.
        train_steps: optimiser steps.
        batch_tokens: tokens of one optimiser step.
        draft_vocab_size: Vd, rows of the drafter's head.
        ttt_steps: K, the steps of training-time test.
        learning_rate: peak of the cosine schedule.
        convention: loss mask and its normalisation (`eagle3lab.training.conventions`).
        precision: what capture and training compute in: bf16, fp32, or auto: the target's own type where this processor
            is faster in it, else fp32 (`eagle3lab.core.precision`).
        head_rows: rows of the drafter's head that one step's loss is taken over; 0 = all.
        train_lm_head: whether the head is trained; if not, it stays the target's rows.
        feature_weight: of the feature term (`eagle3lab.training.loss`); 0 = none.
        eval_prompts: held-out prompts of each set (`own` and `fresh`) that acceptance is measured on.
        max_new_tokens: tokens generated for one evaluation prompt, or until the target ends by itself.
        humaneval: whether HumanEval's 164 prompts are measured too.
        control_prompts: prompts of each control (fc zeroed, fc columns shuffled, untrained drafter).
    """

    name: str
    train_samples: int | None
    train_steps: int
    batch_tokens: int
    draft_vocab_size: int
    ttt_steps: int
    learning_rate: float
    head_rows: int
    eval_prompts: int
    max_new_tokens: int
    humaneval: bool
    control_prompts: int
    train_lm_head: bool = True
    feature_weight: float = 0.0
    convention: Convention = "served"
    precision: Precision = "auto"


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="quick",
            train_samples=30,
            train_steps=40,
            batch_tokens=256,
            draft_vocab_size=8192,
            ttt_steps=2,
            learning_rate=2e-3,
            head_rows=1536,
            train_lm_head=False,
            feature_weight=10.0,
            eval_prompts=4,
            max_new_tokens=24,
            humaneval=False,
            control_prompts=1,
        ),
        Preset(
            name="default",
            train_samples=500,
            train_steps=1800,
            batch_tokens=256,
            draft_vocab_size=8192,
            ttt_steps=2,
            learning_rate=3e-3,
            head_rows=1536,
            train_lm_head=False,
            feature_weight=10.0,
            eval_prompts=64,
            max_new_tokens=128,
            humaneval=False,
            control_prompts=12,
        ),
        Preset(
            name="long",
            train_samples=8000,
            train_steps=8500,
            batch_tokens=512,
            draft_vocab_size=16384,
            ttt_steps=3,
            learning_rate=3e-3,
            head_rows=1536,
            eval_prompts=64,
            max_new_tokens=128,
            humaneval=True,
            control_prompts=16,
        ),
    )
}

MAY_BE_ZERO = ("head_rows", "feature_weight", "control_prompts")
OVERRIDABLE = tuple(field.name for field in dataclasses.fields(Preset) if field.name != "name")
"""Amounts that `eagle3lab run -p NAME=VALUE` and a sweep may change for one run."""


def find_preset(name: str) -> Preset:
    """The preset called `name`; an unknown one is a `UsageError` that names the nearest."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", rule=nearest(name, PRESETS), fix="eagle3lab run --preset default")
    return PRESETS[name]


def with_overrides(preset: Preset, overrides: dict[str, Any]) -> Preset:
    """`preset` with some amounts replaced.

    Raises:
        UsageError: a name that is no amount, a value of another type, or an amount that is not positive.
    """
    hints = get_type_hints(Preset)
    for name, value in overrides.items():
        if name not in OVERRIDABLE:
            raise UsageError(f"unknown parameter '{name}'", rule=nearest(name, OVERRIDABLE))
        check_amount(name, value, hints[name])
    return dataclasses.replace(preset, **overrides)


def check_amount(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that does not have the declared type of the amount `name`, or is not positive."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"parameter {name} is {value!r}", rule=nearest(str(value), get_args(kind)))
        return
    allowed: tuple[type, ...] = getattr(kind, "__args__", (kind,))
    # bool is a subclass of int: True is no number of steps. An int is a good float.
    fits = type(value) in allowed or (float in allowed and type(value) is int)
    names = " or ".join("None" if one is type(None) else one.__name__ for one in allowed)
    if not fits:
        raise UsageError(f"parameter {name} is {value!r} ({type(value).__name__})", rule=f"{name} is {names}")
    if type(value) in (int, float) and not (0 < value < float("inf")) and name not in MAY_BE_ZERO:
        raise UsageError(f"parameter {name} is {value!r}", rule=f"{name} is above 0")
    if name in MAY_BE_ZERO and value < 0:
        raise UsageError(f"parameter {name} is {value!r}", rule=f"{name} is 0 or more")
