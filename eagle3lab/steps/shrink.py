"""`eagle3lab states shrink`: states in 8 bits, with the error of the states and, given a drafter, what it costs."""

from __future__ import annotations

from pathlib import Path

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.intervals import Comparison, compare
from eagle3lab.capture.eight_bit import shrink
from eagle3lab.steps.accept_replay import replay


def shrink_states(
    source: Path,
    destination: Path,
    *,
    draft: Path | None = None,
    profile: str = "smollm2",
    target: Path | None = None,
    steps: int = 3,
    samples: str | None = None,
) -> list[str]:
    """Write `source` into `destination` in 8 bits.

    Args:
        draft: drafter that is replayed on both folders. target, profile, steps, samples: as for `accept replay`.

    Returns:
        lines for a person: sizes, error by point, cost in accept length.
    """
    done = shrink(source, destination)
    errors = ", ".join(f"{'last' if point < 0 else point}: {100 * share:.2f} %" for point, share in done.error.items())
    lines = [
        f"{done.samples} samples, {done.bytes_before / 1e6:.0f} MB -> {done.bytes_after / 1e6:.0f} MB",
        f"error (rms over rms of the states): {errors}",
    ]
    if draft is None:
        return [*lines, "acceptance cost: not measured; next: the same command with --draft DRAFTER"]
    exact, rounded = (
        replay(folder, draft, profile=profile, target=target, steps=steps, samples=samples)
        for folder in (source, destination)
    )
    cost = compare(AcceptanceCounts.from_json(exact.metrics), AcceptanceCounts.from_json(rounded.metrics))
    return [*lines, cost_line(cost, steps)]


def cost_line(cost: Comparison, steps: int) -> str:
    """The difference with its interval, paired by sample."""
    ends = (
        "no interval" if cost.interval is None else f"95 % interval {cost.interval[0]:+.4f} to {cost.interval[1]:+.4f}"
    )
    return (
        f"acceptance cost: accept length {cost.a:.4f} -> {cost.b:.4f}, difference {cost.difference:+.4f} ({ends}, "
        f"paired over {cost.prompts} samples, replay with k = {steps})"
    )
