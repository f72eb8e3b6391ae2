"""Bootstrap intervals over prompts: the prompt is what varies, tokens of one reply are not independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eagle3lab.core.errors import AcceptanceError

if TYPE_CHECKING:
    from eagle3lab.acceptance.counts import AcceptanceCounts

DRAWS = 10_000
"""Resamples: the ends of a 95 % interval then move by about 1 % of its width between seeds."""
LEVEL = 0.95
_CELLS = 4_000_000


def ratio_interval(
    pairs: Sequence[tuple[float, float]], *, seed: int = 0, draws: int = DRAWS
) -> tuple[float, float] | None:
    """95 % percentile interval of sum(numerator) / sum(denominator) over resampled prompts.

    Args:
        pairs: (numerator, denominator) of each prompt; prompts with denominator 0 carry nothing and are left out.

    Returns:
        (low, high), or None with fewer than two prompts that carry something: one prompt shows no spread.
    """
    values = np.array([pair for pair in pairs if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    if len(values) < 2:
        return None
    drawn = np.concatenate([weights @ values for weights in _resamples(len(values), seed, draws)])
    return _ends(drawn[:, 0] / drawn[:, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Accept length of two drafters on the same prompts.

    Fields:
        a, b: accept length (bonus in) over the common prompts. difference: b - a.
        interval: 95 % bootstrap interval of the difference, the same prompts drawn for both; None with one prompt.
        prompts: common prompts. only_a, only_b: names that the other side has not.
    """

    a: float
    b: float
    difference: float
    interval: tuple[float, float] | None
    prompts: int
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def differs(self) -> bool | None:
        """Whether the interval leaves out 0; None when there is no interval."""
        return None if self.interval is None else not self.interval[0] <= 0.0 <= self.interval[1]


def compare(a: AcceptanceCounts, b: AcceptanceCounts, *, seed: int = 0, draws: int = DRAWS) -> Comparison:
    """Compare two drafters, paired by prompt name.

    Raises:
        AcceptanceError: a prompt name is missing or stands twice, or no prompt is common to both.
    """
    left, right = _by_name(a, "a"), _by_name(b, "b")
    common = [name for name in left if name in right and left[name].verify_steps and right[name].verify_steps]
    if not common:
        raise AcceptanceError(
            f"no prompt is common to both ({len(left)} and {len(right)} prompts)",
            rule="a paired comparison needs the same prompts",
            fix="measure both drafters on one prompt file",
        )
    rows = np.array(
        [(*_pair(left[name]), *_pair(right[name])) for name in common], dtype=np.float64
    )  # [prompts, 4]: accepted a, steps a, accepted b, steps b
    sums = rows.sum(axis=0)
    interval = None
    if len(common) > 1:
        drawn = np.concatenate([weights @ rows for weights in _resamples(len(rows), seed, draws)])
        interval = _ends(drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1])
    return Comparison(
        a=1 + sums[0] / sums[1],
        b=1 + sums[2] / sums[3],
        difference=sums[2] / sums[3] - sums[0] / sums[1],
        interval=interval,
        prompts=len(common),
        only_a=tuple(name for name in left if name not in right),
        only_b=tuple(name for name in right if name not in left),
    )


def _by_name(counts: AcceptanceCounts, side: str) -> dict[str, AcceptanceCounts]:
    found: dict[str, AcceptanceCounts] = {}
    for one in counts.per_prompt:
        if not one.prompt or one.prompt in found:
            what = f"prompt {one.prompt!r} of {side} stands twice" if one.prompt else f"a prompt of {side} has no name"
            raise AcceptanceError(what, rule="prompts are paired by name", fix="measure with named prompts")
        found[one.prompt] = one
    return found


def _pair(counts: AcceptanceCounts) -> tuple[int, int]:
    return counts.accepted, counts.verify_steps


def _resamples(count: int, seed: int, draws: int) -> Iterator[np.ndarray]:
    """How often each of `count` prompts is drawn, [rows, count] a chunk, `draws` rows in all."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CELLS // count)
    for start in range(0, draws, rows):
        yield generator.multinomial(count, np.full(count, 1 / count), size=min(rows, draws - start)).astype(np.float64)


def _ends(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
