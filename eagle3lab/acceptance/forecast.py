"""Which chain or tree is fastest at a batch size, from accept length and measured costs of single forwards.

A round drafts and verifies: seconds = extend(b, e) + (k - 1) * draft(b, w) + verify(b, n + 1), for batch b, e new
slots a round (the accept length, rounded up), w drafted tokens a pass, n nodes. It yields b * accept_length tokens;
plain decoding yields b tokens in verify(b, 1). Rows of a batch do not wait for each other, so a row's tokens a round
are its accept length whatever the batch. Costs are interpolated between measured sizes, never beyond them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3lab.core.errors import AcceptanceError


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one forward, by (batch, tokens a row)."""

    name: str
    seconds: Mapping[tuple[int, int], float]

    def at(self, batch: int, tokens: int) -> float:
        """Interpolated linearly in both sizes; `AcceptanceError` beyond what was measured."""
        batches = sorted({b for b, _ in self.seconds})
        low, high = self._around(batches, batch, "batch")
        left, right = (self._tokens(b, tokens) for b in (low, high))
        return left if low == high else left + (right - left) * (batch - low) / (high - low)

    def _tokens(self, batch: int, tokens: int) -> float:
        sizes = sorted(t for b, t in self.seconds if b == batch)
        low, high = self._around(sizes, tokens, "tokens a row")
        left, right = self.seconds[batch, low], self.seconds[batch, high]
        return left if low == high else left + (right - left) * (tokens - low) / (high - low)

    def _around(self, known: Sequence[int], wanted: int, what: str) -> tuple[int, int]:
        if not known or not known[0] <= wanted <= known[-1]:
            raise AcceptanceError(
                f"{self.name} cost at {what} {wanted} is not measured (known: {', '.join(map(str, known)) or 'none'})",
                rule="a forecast interpolates and does not extrapolate",
                fix="measure more sizes: python benchmarks/bench_decode.py --help",
            )
        place = bisect_left(known, wanted)
        return (wanted, wanted) if known[place] == wanted else (known[place - 1], known[place])


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs. verify: target forward with head. draft: drafter pass with head; its width is tokens a row."""

    verify: CostTable
    draft: CostTable


@dataclass(frozen=True, slots=True)
class Option:
    """One way to draft.

    Attributes:
        name: what it is. steps: depth k. width: tokens a row in a drafting pass. nodes: tokens sent to the target.
        accept_length: 1 + accepted / verify steps, of this very chain or tree.
    """

    name: str
    steps: int
    width: int
    nodes: int
    accept_length: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """An option at a batch size: seconds a round, and speed against plain decoding at the same batch."""

    option: Option
    batch: int
    draft_seconds: float
    verify_seconds: float
    speedup: float


def chain_options(joint: Sequence[float]) -> list[Option]:
    """Chains of 1..K drafts from joint rates measured with K: the first j positions do not depend on later ones.

    A shorter chain starts its next round sooner, at places that the longer one had passed, so its rates differ a
    little from these; replay the chosen k to see its own.
    """
    return [Option(f"chain {k}", k, 1, k, 1 + sum(joint[:k])) for k in range(1, len(joint) + 1)]


def forecast(option: Option, batch: int, costs: Costs) -> Forecast:
    """Speed of one option; `AcceptanceError` where a cost is not measured."""
    extend = costs.draft.at(batch, min(math.ceil(option.accept_length), option.steps + 1))
    deeper = (option.steps - 1) * costs.draft.at(batch, option.width) if option.steps > 1 else 0.0
    verify = costs.verify.at(batch, option.nodes + 1)
    plain = costs.verify.at(batch, 1)
    drafted = extend + deeper
    return Forecast(option, batch, drafted, verify, option.accept_length * plain / (drafted + verify))


def best(options: Sequence[Option], batch: int, costs: Costs) -> Forecast | None:
    """The fastest option at a batch size; None when no option beats plain decoding."""
    found = max((forecast(option, batch, costs) for option in options), key=lambda f: f.speedup, default=None)
    return found if found is not None and found.speedup > 1 else None
