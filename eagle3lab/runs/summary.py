"""The numbers of a run in words: what `eagle3lab run` prints at its end and what the report shows first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3lab.runs.directory import Run


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """One held-out set of `metrics.json`, ready to print. None = not measured."""

    name: str
    prompts: int | None
    k: int | None
    max_new_tokens: int | None
    accept_length: float | None
    interval: tuple[float, float] | None
    accept_rate: float | None
    joint: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    verify_steps: int | None
    accepted: int | None
    proposed: int | None
    lossless: bool | None
    repeat_share: float | None
    without_repeats: float | None
    lookup: float | None
    coverage: float | None
    differences: int | None = None
    controls: dict[str, float | None] = field(default_factory=dict)


def measured_sets(metrics: dict[str, Any]) -> list[MeasuredSet]:
    """The sets of `metrics.json`, headline first."""
    headline = metrics.get("headline")
    sets = metrics.get("sets", {})
    return [_measured(name, sets[name]) for name in sorted(sets, key=lambda name: (name != headline, name))]


def _measured(name: str, values: dict[str, Any]) -> MeasuredSet:
    counts, repeats = values.get("counts") or {}, values.get("repeats") or {}
    interval = values.get("accept_length_interval")
    differences = values.get("differences")
    return MeasuredSet(
        name=name,
        prompts=values.get("prompts"),
        k=values.get("k"),
        max_new_tokens=values.get("max_new_tokens"),
        accept_length=values.get("accept_length"),
        interval=None if interval is None else (interval[0], interval[1]),
        accept_rate=values.get("accept_rate"),
        joint=tuple(values.get("joint") or ()),
        conditional=tuple(values.get("conditional") or ()),
        verify_steps=counts.get("verify_steps"),
        accepted=counts.get("accepted"),
        proposed=counts.get("proposed"),
        lossless=values.get("lossless"),
        repeat_share=repeats.get("share_of_steps"),
        without_repeats=repeats.get("accept_length_without"),
        lookup=(values.get("lookup") or {}).get("accept_length"),
        coverage=values.get("coverage"),
        differences=None if differences is None else len(differences),
        controls={key: one.get("accept_length") for key, one in (values.get("controls") or {}).items()},
    )


def speed_line(metrics: dict[str, Any]) -> str:
    """Tokens per second with and without the drafter, or that it was not measured."""
    speed = metrics.get("timing", {}).get("speed")
    if not speed:
        return "speed: not measured"
    how = f"batch {speed['batch']}" + (f" in {speed['dtype']}" if "dtype" in speed else "")  # older runs do not say
    return (
        f"speed at {how} on this machine: {speed['plain_tokens_per_second']:.1f} tokens/s plain, "
        f"{speed['speculative_tokens_per_second']:.1f} with the drafter (x{speed['ratio']:.2f})"
    )


def summary_lines(run: Run) -> list[str]:
    """What `eagle3lab run` prints at its end: every set with its counts, baselines and controls, then cost."""
    metrics = run.metrics()
    lines: list[str] = []
    if (drafter := metrics.get("drafter", "drafter")) != "drafter":
        lines.append(f"measured drafter: {drafter} (not this run's own)")
    if note := metrics.get("meaningless"):
        lines.append(f"{note} ({same_text(metrics)})")
    elif sets := measured_sets(metrics):
        lines += [line for one in sets for line in set_lines(one)] + [speed_line(metrics)]
    else:
        lines += ["acceptance: not measured", speed_line(metrics)]
    timing = metrics.get("timing", {})
    if "total_seconds" in timing:
        memory = timing.get("peak_memory_bytes")
        told = f"{memory / 1e9:.2f} GB" if memory else "not measured"
        lines.append(f"notebooks: {timing['total_seconds']:.0f} s, peak memory of one kernel {told}")
    if run.status.truncated:
        lines.append("the run is truncated (--max-minutes): what is missing was not measured")
    return lines


def same_text(metrics: dict[str, Any]) -> str:
    """What can be said of a decoding whose acceptance means nothing: whether the text stayed the target's own."""
    sets = measured_sets(metrics)
    asked = sum(one.prompts or 0 for one in sets)
    differ = sum(one.differences or 0 for one in sets)
    told = f"the text equals plain greedy decoding on {asked - differ} of {asked} prompts"
    return told + (", the others part at near-ties of the target" if differ else "")


def set_lines(one: MeasuredSet) -> list[str]:
    """Four lines about one set; each number says which one it is."""
    settings = f"{one.prompts} prompts x {one.max_new_tokens} new tokens, k = {one.k}, greedy"
    same = "unknown"
    if one.lossless is not None:
        same = "yes" if one.lossless else f"no, {one.differences} prompts differ at near-ties"
    controls = ", ".join(f"{name} {number(value)}" for name, value in one.controls.items()) or "not measured"
    joint = ", ".join(percent(value) for value in one.joint) or "not measured"
    conditional = ", ".join(percent(value) for value in one.conditional) or "not measured"
    return [
        f"{one.name}: accept length {number(one.accept_length)} {interval(one.interval)} ({settings}; "
        f"{one.accepted} of {one.proposed} drafts accepted in {one.verify_steps} verify steps, "
        f"accept rate {percent(one.accept_rate)})",
        f"  by position: joint {joint}; conditional {conditional}; text equal to plain greedy decoding: {same}",
        f"  {percent(one.repeat_share)} of steps start inside a repeated 4-gram, accept length without them "
        f"{number(one.without_repeats)}; n-gram look-up {number(one.lookup)}; "
        f"draft vocabulary covers {percent(one.coverage)}",
        f"  controls (must fall): {controls}",
    ]


def number(value: float | None) -> str:
    """Two decimals, or `unknown`."""
    return "unknown" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """`12.3%`, or `unknown`."""
    return "unknown" if value is None else f"{value:.1%}"


def interval(value: tuple[float, float] | None) -> str:
    """`[1.50, 1.62]`, or that there is none."""
    return "[no interval]" if value is None else f"[{value[0]:.2f}, {value[1]:.2f}]"
