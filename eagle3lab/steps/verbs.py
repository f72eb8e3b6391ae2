"""`eagle3lab capture` and `eagle3lab train`: single steps of a run, without notebooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.runs.directory import Run
from eagle3lab.steps.capture import capture_states
from eagle3lab.steps.corpus import prepare_corpus
from eagle3lab.steps.corpus_build import progress_line
from eagle3lab.steps.fetch import fetch_for
from eagle3lab.steps.train import Source, progress_text, train_drafter
from eagle3lab.training.distributed import join
from eagle3lab.training.trainer import Watching


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Lines for a person and the same facts for a program."""

    lines: list[str]
    facts: dict[str, Any]
    exit_code: int = 0

    def as_text(self) -> str:
        """The lines."""
        return "\n".join(self.lines)

    def as_json(self) -> dict[str, Any]:
        """The facts."""
        return self.facts


def capture(run_directory: str | None, profile: str, preset: str, *, note: Callable[[str], None]) -> StepOutcome:
    """Capture the states of a run, doing the steps before it when they are missing."""
    run = _run(run_directory, profile, preset)
    _before(run, ("fetch", "corpus"), note)
    say = progress_line(note, every=20_000)
    done = capture_states(run, progress=lambda tokens, total: say(f"captured (of {total})", tokens), note=note)
    speed = done.tokens_per_second
    lines = [
        f"states: {done.folder}",
        f"{done.samples} samples, {done.tokens} tokens, {done.width} numbers a token, {done.bytes / 1e6:.0f} MB",
        f"{speed:.0f} tokens/s" if speed is not None else "nothing to do: these states were there already",
        f"run: {run.path}",
    ]
    facts = {"run": str(run.path), "states": str(done.folder), "samples": done.samples, "tokens": done.tokens,
             "width": done.width, "bytes": done.bytes, "tokens_per_second": speed}  # fmt: skip
    return StepOutcome(lines, facts)


def train(
    run_directory: str | None,
    profile: str,
    preset: str,
    *,
    convention: str | None,
    max_minutes: float | None,
    note: Callable[[str], None],
    source: Source = "stored",
    shards: int = 1,
    watching: Watching | None = None,
) -> StepOutcome | None:
    """Train the drafter of a run, doing the steps before it when they are missing.

    Returns:
        None on ranks other than 0: there is one result, and one who prints it.
    """
    if max_minutes is not None and not 0 < max_minutes < float("inf"):
        raise UsageError(f"--max-minutes {max_minutes}", rule="minutes are above 0")
    world = join(shards)

    def ready() -> str:
        run = _run(run_directory, profile, preset, {} if convention is None else {"convention": convention})
        if convention not in (None, run.preset.convention):
            raise UsageError(
                f"--convention {convention}: {run.path.name} was made for '{run.preset.convention}'",
                rule="the convention is a parameter of the run",
                fix=f"eagle3lab train --convention {convention}, without --run, makes a new one",
            )
        _before(run, ("fetch", "corpus", "capture") if source == "stored" else ("fetch", "corpus"), note)
        return str(run.path)

    run = Run.open(world.lead(ready))
    with run.working() if world.leader else contextlib.nullcontext():
        done = train_drafter(
            run,
            progress=lambda row: note(progress_text(row)),
            max_seconds=None if max_minutes is None else 60 * max_minutes,
            source=source,
            world=world,
            watching=watching,
            note=note if world.leader else lambda _: None,
        )
    world.leave()
    if not world.leader:
        return None
    last = done.held_out[-1] if done.held_out else {}
    lines = [
        f"drafter: {done.folder}",
        "held-out replay (teacher-forced, chains as they are served): "
        f"accept length {last.get('simulated_accept_length', 'unknown')}",
        *(["stopped by --max-minutes before the last step; the same with --run goes on"] if done.truncated else []),
        f"run: {run.path}",
    ]
    facts = {"run": str(run.path), "drafter": str(done.folder), "held_out": last, "truncated": done.truncated}
    return StepOutcome(lines, facts)


def _run(directory: str | None, profile: str, preset: str, parameters: dict[str, Any] | None = None) -> Run:
    return Run.create(profile, preset, parameters) if directory is None else Run.open(directory)


def _before(run: Run, steps: tuple[str, ...], note: Callable[[str], None]) -> None:
    does = {"fetch": lambda: fetch_for(run, note=note), "corpus": lambda: prepare_corpus(run, note=note),
            "capture": lambda: capture_states(run, note=note)}  # fmt: skip
    for step in steps:
        if run.step_state(step) != "ok":
            does[step]()
