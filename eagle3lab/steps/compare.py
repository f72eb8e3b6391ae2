"""What notebook 07 shows: several runs against a baseline on the same prompts, and what their training cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.hashes import sha256_json
from eagle3lab.core.paths import runs_folder
from eagle3lab.plots import comparison as plots
from eagle3lab.plots.publish import Plot
from eagle3lab.runs.comparison import (
    Measured,
    Pair,
    baseline_first,
    choose_runs,
    machines,
    measured,
    on_front,
    pairs,
    seed_spread,
)
from eagle3lab.runs.directory import Run
from eagle3lab.runs.injected import refuse_unknown
from eagle3lab.runs.parameters import validate
from eagle3lab.runs.resolve import in_batch
from eagle3lab.runs.summary import interval, number
from eagle3lab.steps.show import markdown_table, say

NOTEBOOK = "07_compare_runs"
LISTED = 6
"""Runs of the Pareto front that the result names."""


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Runs side by side.

    Attributes:
        runs: the baseline first; may be empty. pairs: every other run against it, set by set.
        left_out: lines about runs whose acceptance means nothing. folder: where the figures go.
    """

    runs: list[Measured]
    pairs: list[Pair]
    left_out: list[str]
    folder: Path

    @property
    def set(self) -> str:
        """The headline set of the baseline; "" without a run."""
        return self.runs[0].headline if self.runs else ""


@dataclass(frozen=True, slots=True)
class NoPlot:
    """Stands where a figure has nothing to show; publishing it says why."""

    why: str

    def publish(self, folder: Path, name: str) -> None:
        """Say why there is no figure; nothing is written."""
        say(f"*{self.why}*")


def compare_runs(
    *,
    profile: str = "smollm2",
    preset: str = "quick",
    run: str = "",
    seed: int = 0,
    runs: str = "",
    note: Callable[[str], None] = print,
) -> ComparedRuns:
    """Read the runs and compare them; see `eagle3lab.runs.comparison.choose_runs` for what `runs` may be.

    Args:
        run: the baseline; "" = the first of those that most others compare with.
    """
    values = {"profile": profile, "preset": preset, "run": run, "seed": seed, "runs": runs}
    refuse_unknown(NOTEBOOK)
    validate(NOTEBOOK, values)
    found = choose_runs(runs, profile=profile, preset=preset, seed=seed, batch=in_batch(), note=note)
    baseline = Run.open(run) if run else None
    if baseline is not None:
        baseline.require("accept")
        found = found if any(one.path == baseline.path for one in found) else [baseline, *found]
    good, left_out = measured(found)
    good = baseline_first(good, None if baseline is None else baseline.path)
    names = [one.run.path.name for one in good]
    folder = runs_folder() / f"compare-{sha256_json(names)[:6]}"
    return ComparedRuns(good, pairs(good[0], good[1:]) if good else [], left_out, folder)


def runs_table(found: ComparedRuns) -> str:
    """One line a run: accept length of every set with its interval, training time, amounts of training."""
    sets = list(dict.fromkeys(name for one in found.runs for name in one.sets))
    rows = []
    for one in found.runs:
        lengths = [_length(one.sets.get(name)) for name in sets]
        seconds = None if one.training_seconds is None else f"{one.training_seconds:.0f}"
        steps = one.metrics.get("training", {}).get("steps") if one.own_drafter else None
        rows.append([one.label, *lengths, seconds, steps])
    head = ["run", *(f"accept length, {name}" for name in sets), "training s", "steps"]
    return markdown_table(head, rows) if rows else "No run."


def _length(metrics: dict[str, Any] | None) -> str | None:
    if not metrics or metrics.get("accept_length") is None:
        return None
    ends = metrics.get("accept_length_interval")
    return f"{number(metrics['accept_length'])} {interval(None if ends is None else (ends[0], ends[1]))}"


def pairs_table(found: ComparedRuns) -> str:
    """One line a run and set: difference from the baseline with its paired interval."""
    rows: list[Sequence[object]] = []
    for pair in found.pairs:
        known = pair.comparison
        shown = ["unknown"] * 3
        if known is not None:
            ends = (
                "[no interval]" if known.interval is None else f"[{known.interval[0]:+.3f}, {known.interval[1]:+.3f}]"
            )
            shown = [f"{known.difference:+.3f}", ends, str(known.prompts)]
        rows.append([pair.set, pair.label, *shown, pair.verdict])
    head = ["set", "run", "minus baseline", "95 % interval", "common prompts", "so"]
    return markdown_table(head, rows) if rows else "No second run to set beside the baseline."


def differences(found: ComparedRuns) -> Plot | NoPlot:
    """Figure of the paired differences."""
    rows = []
    for pair in found.pairs:
        if pair.comparison is not None:
            low, high = pair.comparison.interval or (None, None)
            row = {"set": pair.set, "run": pair.label, "difference": pair.comparison.difference}
            rows.append(row | {"low": low, "high": high, "prompts": pair.comparison.prompts})
    if not rows:
        return NoPlot("No figure: no two runs here can be compared.")
    return plots.differences(rows, found.runs[0].label)


def cost_rows(found: ComparedRuns) -> list[dict[str, Any]]:
    """Runs with a known training time, measured as the baseline was, and which of them no other beats."""
    rows: list[dict[str, Any]] = []
    for one in found.runs:
        metrics = one.sets.get(found.set, {})
        alike = one.way(found.set) == found.runs[0].way(found.set)
        if alike and one.training_seconds is not None and metrics.get("accept_length") is not None:
            low, high = metrics.get("accept_length_interval") or (None, None)
            row: dict[str, Any] = {"run": one.label, "training_seconds": one.training_seconds}
            rows.append(row | {"accept_length": metrics["accept_length"], "low": low, "high": high})
    front = on_front([(row["training_seconds"], row["accept_length"]) for row in rows])
    return [row | {"front": good} for row, good in zip(rows, front, strict=True)]


def cost_and_length(found: ComparedRuns) -> Plot | NoPlot:
    """Figure of training time and accept length."""
    rows = cost_rows(found)
    return plots.cost_and_length(rows) if rows else NoPlot("No figure: no run here has a training time.")


def words(found: ComparedRuns) -> str:
    """Result of notebook 07."""
    left = "".join(f"\n\nLeft out, {line}." for line in found.left_out)
    if not found.runs:
        return (
            "**Result.** There is no finished run to compare. Make some with `eagle3lab sweep FILE` or "
            f"`eagle3lab run`, then set `runs` to their names or to the sweep's folder.{left}"
        )
    first = found.runs[0]
    if len(found.runs) == 1:
        return (
            f"**Result.** There is one run, {first.label}: accept length {_length(first.sets.get(found.set))} on "
            f"**{found.set}**. A comparison needs a second one.{left}"
        )
    lines = [_differences_in_words(found), *_cost_in_words(found), _cautions(found)]
    return "**Result.** " + "\n\n".join(line for line in lines if line) + left


def _differences_in_words(found: ComparedRuns) -> str:
    chosen = [pair for pair in found.pairs if pair.set == found.set]
    good = [(pair, pair.comparison) for pair in chosen if pair.comparison is not None]
    text = f"Against the baseline **{found.runs[0].label}** on **{found.set}**, "
    if not good:
        whys = "; ".join(dict.fromkeys(pair.verdict for pair in chosen)) or "the others were not measured on it"
        return f"{text}nothing can be said: {whys}."
    counts = {name: sum(pair.verdict == name for pair, _ in good) for name in ("longer", "shorter")}
    rest = len(good) - sum(counts.values())
    text += (
        f"{counts['longer']} of {len(good)} drafters have a longer accept length, {counts['shorter']} a shorter one, "
        f"and {rest} cannot be told apart (95 % intervals, paired over {_prompts(known.prompts for _, known in good)})."
    )
    best, known = max(good, key=lambda item: item[1].difference)
    ends = "no interval" if known.interval is None else f"{known.interval[0]:+.2f} to {known.interval[1]:+.2f}"
    text += f" The largest difference is {known.difference:+.2f} ({ends}), of **{best.label}**."
    if skipped := len(chosen) - len(good):
        text += f" Not compared, as measured in another way or on other prompts: {skipped}."
    return text


def _prompts(counts: Any) -> str:
    known = sorted(set(counts))
    return f"{known[0]} prompts" if len(known) == 1 else f"{known[0]} to {known[-1]} prompts"


def _cost_in_words(found: ComparedRuns) -> list[str]:
    rows = cost_rows(found)
    if len(rows) < 2:
        return ["Fewer than two that compare have a training time: what the difference costs is unknown."]
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["training_seconds"])
    shown = front if len(front) <= LISTED else [*front[: LISTED - 1], front[-1]]
    named = "; ".join(
        f"{row['run']} ({row['training_seconds']:.0f} s, {number(row['accept_length'])})" for row in shown
    )
    rest = "" if shown is front else f", and {len(front) - LISTED} between the last two"
    text = f"In training time and accept length together, {len(front)} of {len(rows)} are beaten by no other: "
    text += f"{named}{rest}."
    if (count := machines(found.runs)) > 1:
        text += f" They come from {count} different machines, so their times do not compare."
    return [text]


def _cautions(found: ComparedRuns) -> str:
    text = "An interval tells how much the choice of prompts matters, for these very trainings"
    spread = seed_spread(found.runs, found.set)
    if spread is None:
        text += "; how much another seed would move them is not measured here."
    else:
        text += f"; seeds alone move the accept length by up to {spread[0]:.2f} (among {spread[1]} runs)."
    many = sum(pair.comparison is not None for pair in found.pairs)
    if many >= 5:
        text += f" Of {many} comparisons at this level, about {many / 20:.0f} would stand out by chance alone."
    if (codes := len({one.run.manifest.code_sha256 for one in found.runs})) > 1:
        text += f" The runs were made by {codes} states of the code."
    return text
