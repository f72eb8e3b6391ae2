"""fc through a training, inspected at three moments, and the pair of numbers that was reported for Kimi's width."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3lab.core.errors import RunError
from eagle3lab.inspection import Inspection, inspect_checkpoint
from eagle3lab.inspection.distribution import distribution
from eagle3lab.inspection.record import snapshots
from eagle3lab.inspection.report import number
from eagle3lab.plots.fc import weight_histogram
from eagle3lab.plots.publish import Plot
from eagle3lab.runs.directory import Run
from eagle3lab.steps.fc import density, edges_for
from eagle3lab.steps.inspect import number_pair
from eagle3lab.targets.profiles import load_profile

KIMI_PAIR = ("7168x21504", "0.000000", "0.004037")
"""Shape, mean and std that were reported for a drafter of Kimi-K2.5."""


@dataclass(frozen=True, slots=True)
class FcAge:
    """fc at one moment of a training, inspected as if it were all there is."""

    name: str
    step: int
    found: Inspection


def fc_ages(run: Run) -> list[FcAge]:
    """fc of a run before the first step, at the snapshot nearest to half way, and after the last.

    Raises:
        RunError: the run's training left fewer than two snapshots.
    """
    run.require("train")
    left = snapshots(run.drafter)
    if len(left) < 2:
        raise RunError(f"{run.path.name} has {len(left)} snapshots of fc", rule="two or more", fix="train again")
    last = left[-1][0]
    inner = left[1:-1] or left[:1]
    half = min(inner, key=lambda one: abs(one[0] - last / 2))
    points = tuple(str(point) for point in load_profile(run.manifest.profile).model.points)
    named = (
        (f"untouched (step {left[0][0]})", left[0]),
        (f"on the way (step {half[0]} of {last})", half),
        (f"trained (step {last})", left[-1]),
    )
    return [FcAge(name, step, inspect_checkpoint(path, points=points)) for name, (step, path) in named]


FC_HEAD = ("fc", "what people print", "mean", "std", "std / that of the start", "excess kurtosis", "verdict")


def fc_rows(ages: list[FcAge]) -> list[tuple[object, ...]]:
    """One row an age: the two numbers as people print them, then what can be said of them."""
    start = ages[0].found.pooled.std
    return [
        (age.name, f"mean={m.mean:.6f}, std={m.std:.6f}", number(m.mean, m.mean_se), number(m.std, m.std_se),
         f"{m.std / start:.4f}" if start else None, number(m.kurtosis, m.kurtosis_se),
         ", ".join(age.found.verdict.labels))
        for age in ages
        for m in (age.found.pooled,)
    ]  # fmt: skip


def fc_histogram(ages: list[FcAge]) -> Plot:
    """The three distributions over each other, on a logarithmic scale."""
    edges = edges_for(max(age.found.pooled.std for age in ages))
    series = [{"label": age.name, "density": density(distribution(age.found.scan), edges)} for age in reversed(ages)]
    return weight_histogram(edges.tolist(), series, title="fc through a training", log=True)


def kimi_pair() -> tuple[list[tuple[object, ...]], list[str]]:
    """The reported pair at Kimi's width beside an untouched and a half-moved fc of that start, and what follows.

    The first two rows are arithmetic: the std of the start, and with half of the update that the pair implies.
    """
    found = number_pair(*KIMI_PAIR)
    start = next(one for one in found.families if one["name"] == found.nearest)["std"]
    half = (start**2 + (found.std**2 - start**2) / 4) ** 0.5
    named = ((f"untouched {found.nearest}", start), ("with half of the update", half), ("reported", found.std))
    rows = [(name, f"mean={found.mean:.6f}, std={std:.6f}", f"{std / start:.5f}") for name, std in named]
    return [tuple(row) for row in rows], [*found.follows[1:3], found.does_not_follow[-1]]


PAIR_HEAD = ("fc [7168, 21504]", "what people print", "std / that of the start")
