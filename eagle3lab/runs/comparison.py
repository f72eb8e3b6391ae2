"""Several runs side by side: which ones, how each differs from a baseline on the same prompts, which are worth it.

A difference is paired: both drafters on the same prompts, the same prompts drawn for both in the bootstrap. Runs that
were measured in different ways (draft steps, reply length, target, prompts) are not set against each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.intervals import Comparison, compare
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.core.files import read_json
from eagle3lab.core.paths import runs_folder
from eagle3lab.runs.directory import Run
from eagle3lab.runs.sweep_runs import RECORD, same_code

NEWEST = 24
"""Runs that are taken when nobody names any; more make figures that nobody reads."""

SETTINGS = ("k", "temperature", "max_new_tokens")
"""Settings of a measurement that change its accept length."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run whose acceptance was measured, under the name it has in this comparison.

    Fields:
        label: what sets it apart from the others. metrics: its `metrics.json`.
    """

    run: Run
    label: str
    metrics: dict[str, Any]

    @property
    def headline(self) -> str:
        """Name of its headline set."""
        return str(self.metrics.get("headline"))

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """Set -> its metrics."""
        found: dict[str, dict[str, Any]] = self.metrics.get("sets", {})
        return found

    def way(self, name: str) -> dict[str, Any]:
        """How set `name` was measured; accept lengths that were measured in different ways do not compare."""
        inputs, metrics = self.run.manifest.inputs, self.sets.get(name, {})
        way = {key: metrics.get(key) for key in SETTINGS}
        return way | {"target": inputs.get("target"), "file of prompts": inputs.get(f"held_out_{name}")}

    @property
    def own_drafter(self) -> bool:
        """Whether the drafter is the one that this run trained."""
        return bool(self.metrics.get("drafter", "drafter") == "drafter")

    @property
    def training_seconds(self) -> float | None:
        """Seconds of the training of the measured drafter; None when it was trained elsewhere or not timed."""
        seconds: float | None = self.metrics.get("timing", {}).get("training_seconds")
        return seconds if self.own_drafter else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One run against the baseline on one set. `comparison` is None where the two cannot be compared: `why` not."""

    set: str
    label: str
    comparison: Comparison | None
    why: str | None = None

    @property
    def verdict(self) -> str:
        """`longer`, `shorter`, `cannot be told apart`, or why nothing can be said."""
        if self.comparison is None:
            return f"not comparable: {self.why}"
        if self.comparison.differs is None:
            return "no interval: one common prompt"
        if not self.comparison.differs:
            return "cannot be told apart"
        return "longer" if self.comparison.difference > 0 else "shorter"


def choose_runs(
    asked: str, *, profile: str, preset: str, seed: int, batch: bool, note: Callable[[str], None] = print
) -> list[Run]:
    """The runs to compare.

    Args:
        asked: run directories or sweeps (folder or sweep.json), by path or name under `runs/`, with commas between.
            Empty: in Jupyter the newest measured runs of `profile`; in batch those of these very parameters by this
            very code, as in every notebook here, which may be none. Nothing is run for a comparison.

    Raises:
        RunError: a named run is not there, or its acceptance was not measured.
    """
    if asked.strip():
        found: dict[Path, Run] = {}
        for word in (part.strip() for part in asked.split(",") if part.strip()):
            for run in _named(word, note):
                run.require("accept")
                found.setdefault(run.path, run)
        return list(found.values())
    ready = [run for run in Run.all() if run.step_state("accept") == "ok"]
    if batch:
        ready = [
            run
            for run in ready
            if (run.manifest.profile, run.manifest.preset, run.manifest.seed) == (profile, preset, seed)
            and not run.manifest.overrides
            and same_code(run)
        ]
        note(f"{len(ready)} finished runs of {profile}, preset {preset}, seed {seed} by this code")
        return ready[::-1]
    ready = [run for run in ready if run.manifest.profile == profile]
    note(f"the newest {min(len(ready), NEWEST)} of {len(ready)} measured runs of {profile}; set runs = ... for others")
    return ready[:NEWEST][::-1]


def _named(word: str, note: Callable[[str], None]) -> list[Run]:
    path = Path(word).expanduser()
    for place in (path, runs_folder() / path):
        record = place if place.name == RECORD else place / RECORD
        if record.is_file():
            rows = read_json(record)["jobs"]
            good = [row["run"] for row in rows if row["state"] == "ok" and row["accept_length"] is not None]
            note(f"{len(good)} of {len(rows)} jobs of {record.parent.name} are ok and measured")
            return [Run.open(one) for one in good]
    return [Run.open(word)]


def measured(runs: Sequence[Run]) -> tuple[list[Measured], list[str]]:
    """The runs under short labels, and one line for each that says by itself that its acceptance means nothing."""
    metrics = {run.path: run.metrics() for run in runs}
    empty = [run for run in runs if metrics[run.path].get("meaningless")]
    kept = [run for run in runs if run not in empty and metrics[run.path].get("sets")]
    left_out = [f"{run.path.name}: {metrics[run.path]['meaningless']}" for run in empty]
    found = zip(kept, labels(kept, [metrics[run.path] for run in kept]), strict=True)
    return [Measured(run, label, metrics[run.path]) for run, label in found], left_out


def labels(runs: Sequence[Run], metrics: Sequence[dict[str, Any]]) -> list[str]:
    """What differs between the runs, in words; with the time of its making where that does not set a run apart."""
    names = dict.fromkeys(name for run in runs for name in run.manifest.overrides)
    facts = []
    for run, found in zip(runs, metrics, strict=True):
        manifest = run.manifest
        fact = {"profile": manifest.profile, "preset": manifest.preset, "seed": manifest.seed}
        fact |= {name: getattr(run.preset, name) for name in names}
        drafter = found.get("drafter", "drafter")
        facts.append(fact | ({} if drafter == "drafter" else {"checkpoint": Path(drafter).name}))
    keys = dict.fromkeys(key for fact in facts for key in fact)
    varied = [key for key in keys if len({str(fact.get(key)) for fact in facts}) > 1] or ["preset", "seed"]
    texts = [", ".join(f"{key} {_shown(fact[key])}" for key in varied if key in fact) for fact in facts]
    return [
        f"{text} ({run.path.name.partition('-')[0]})" if texts.count(text) > 1 else text
        for text, run in zip(texts, runs, strict=True)
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(baseline: Measured, others: Sequence[Measured]) -> list[Pair]:
    """Every other run against `baseline`, set by set."""
    return [_pair(name, baseline, other) for name in baseline.sets for other in others if name in other.sets]


def _pair(name: str, baseline: Measured, other: Measured) -> Pair:
    a, b = baseline.sets[name], other.sets[name]
    mine, theirs = baseline.way(name), other.way(name)
    if differing := [key for key in mine if mine[key] != theirs[key]]:
        key = differing[0]
        known = f"{key} is {mine[key]} and {theirs[key]}" if key in SETTINGS else f"another {key}"
        return Pair(name, other.label, None, known)
    try:
        return Pair(name, other.label, compare(AcceptanceCounts.from_json(a), AcceptanceCounts.from_json(b)))
    except AcceptanceError as error:
        return Pair(name, other.label, None, error.what)


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which of the (cost, value) points no other beats: none is at most as costly and at least as good, and better.

    on_front([(1, 1), (2, 3), (3, 2)]) is [True, True, False]: the third costs more than the second and is worse.
    """

    def beaten(x: float, y: float) -> bool:
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)

    return [not beaten(x, y) for x, y in points]


def seed_spread(runs: Sequence[Measured], name: str) -> tuple[float, int] | None:
    """Largest difference of accept length on set `name` between runs that differ in their seed alone.

    Returns:
        (difference, runs in that group), None without two such runs.
    """
    groups: dict[Any, list[tuple[int, float]]] = defaultdict(list)
    for one in runs:
        length = one.sets.get(name, {}).get("accept_length")
        if length is not None and one.own_drafter:
            manifest = one.run.manifest
            groups[(manifest.profile, one.run.preset, manifest.code_sha256)].append((manifest.seed, length))
    found = [
        (max(length for _, length in group) - min(length for _, length in group), len(group))
        for group in groups.values()
        if len({seed for seed, _ in group}) > 1
    ]
    return max(found, default=None)


def machines(runs: Sequence[Measured]) -> int:
    """How many different machines (processor and cores) the runs were made on."""
    return len({(one.run.manifest.machine.get("processor"), one.run.manifest.machine.get("cores")) for one in runs})


def baseline_first(runs: list[Measured], chosen: Path | None) -> list[Measured]:
    """`runs` with the baseline first: the one at `chosen`, or the first of those that most others compare with."""
    if not runs:
        return runs
    ways = [(one.headline, one.way(one.headline)) for one in runs]
    places = [place for place, one in enumerate(runs) if one.run.path == chosen]
    first = places[0] if places else max(range(len(runs)), key=lambda place: (ways.count(ways[place]), -place))
    return [runs[first], *runs[:first], *runs[first + 1 :]]
