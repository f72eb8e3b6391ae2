"""Which chain or tree is fastest at a batch size, from acceptance by position and measured costs of single forwards.

A round of n nodes drafts, verifies and extends the drafter's cache, for batch b and w drafted tokens a pass:

    seconds = extend(b, e) + (k - 1) * draft(b, w) + verify(b, n + 1)

It yields b * accept_length tokens; plain decoding yields b tokens in plain(b). The extension is as wide as the row that
kept most: with S_j the share of steps that keep at least j, some row of b keeps j or more with chance 1 - (1 - S_j)^b.
A forecast is for a full batch (a complete reply's row is given to the next prompt), and for the loop's forwards alone.
Costs are interpolated between measured sizes, never beyond them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3lab.acceptance.replay import Walk, walk
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
    """Measured costs, sizes in tokens a row.

    Fields:
        verify: target forward with head and with the drafter's states taken. plain: the same without those states.
        draft: drafter pass with the head over all its tokens.
        extend: fc and drafter pass, and the head over the last token of each row: that drafts the first token.
    """

    verify: CostTable
    plain: CostTable
    draft: CostTable
    extend: CostTable


@dataclass(frozen=True, slots=True)
class Option:
    """One way to draft.

    Attributes:
        name: what it is. steps: depth k. width: tokens a row in a drafting pass. nodes: tokens sent to the target.
        joint: S_1 ... S_k, share of verify steps that keep at least 1, ... k drafts of this very chain or tree.
    """

    name: str
    steps: int
    width: int
    nodes: int
    joint: tuple[float, ...]

    @property
    def accept_length(self) -> float:
        """Tokens a verify step yields, bonus in."""
        return 1 + sum(self.joint)


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
    little from these; where there is a replay, `walked_chains` has them exactly.
    """
    return [Option(f"chain {k}", k, 1, k, tuple(joint[:k])) for k in range(1, len(joint) + 1)]


def walked_chains(walks: Sequence[Walk], deepest: int) -> list[Option]:
    """Chains of 1..K drafts from one replay with K = `deepest` of samples with one reply each.

    The first k drafts of a chain are those of a chain of k, so its accepted lengths are the longer one's, cut at k, and
    its decode path is walked over them.
    """
    options = []
    for k in range(1, deepest + 1):
        ends = torch.zeros(2, dtype=torch.int64)  # the two places of a reply that cannot be judged
        accepted = [n for one in walks for n in walk(torch.cat([one.prefix.clamp(max=k), ends])).accepted]
        options.append(Option(f"chain {k}", k, 1, k, joint_of(accepted, k)))
    return options


def joint_of(accepted: Sequence[int], depth: int) -> tuple[float, ...]:
    """Share of verify steps that accepted at least 1, ... `depth` drafts; zeros without a step."""
    return tuple(sum(n >= j for n in accepted) / max(1, len(accepted)) for j in range(1, depth + 1))


def forecast(option: Option, batch: int, costs: Costs) -> Forecast:
    """Speed of one option; `AcceptanceError` where a cost is not measured."""
    some = [1.0, *(1 - (1 - share) ** batch for share in option.joint), 0.0]  # chance that some row keeps j or more
    extend = sum(
        (some[kept] - some[kept + 1]) * costs.extend.at(batch, kept + 1)
        for kept in range(option.steps + 1)
        if some[kept] > some[kept + 1]
    )
    deeper = (option.steps - 1) * costs.draft.at(batch, option.width) if option.steps > 1 else 0.0
    verify = costs.verify.at(batch, option.nodes + 1)
    drafted = extend + deeper
    speedup = option.accept_length * costs.plain.at(batch, 1) / (drafted + verify)
    return Forecast(option, batch, drafted, verify, speedup)


def best(options: Sequence[Option], batch: int, costs: Costs) -> Forecast | None:
    """The fastest option at a batch size; None when no option beats plain decoding."""
    found = max((forecast(option, batch, costs) for option in options), key=lambda f: f.speedup, default=None)
    return found if found is not None and found.speedup > 1 else None
