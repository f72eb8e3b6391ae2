"""Which drafted tokens are kept, greedy and at a temperature, so that the text's distribution stays the target's.

p is the target's distribution over V tokens, q the drafter's over its Vd kept tokens (0 elsewhere), both at the same
temperature.

`Greedy`: a draft is kept while it is the target's argmax.
`Rejection`: drafts are drawn from q; draft x is kept with probability min(1, p(x) / q(x)); at the first refusal the
    token comes from max(0, p - q), renormalised; after k kept drafts from p. A draft is kept with probability
    sum(min(p, q)), the most that any exact rule reaches with drafts drawn from q (Leviathan et al., arXiv 2211.17192;
    Chen et al., arXiv 2302.01318). With a reduced vocabulary nothing changes: q is 0 on tokens that it leaves out.
`TargetOnly`: drafts are the drafter's most likely tokens; the target draws its own token and a draft is kept when it
    is that token. Also exact, kept with probability p(draft); the only rule here for trees, whose nodes are the top-k
    and not draws (SGLang and EAGLE's own code verify this way).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eagle3lab.core.errors import UsageError


class Rule(Protocol):
    """How tokens are chosen, drafted and judged. Rows R, drafted tokens k.

    by_place: a draft is kept when it is the token that `choose` gives, so places can be judged one by one.
    """

    temperature: float
    by_place: bool

    def choose(self, logits: Tensor) -> Tensor:
        """The target's own token: logits [..., V] -> int64 [...]."""
        ...

    def draft(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """A drafted token: logits [R, Vd] -> draft ids int64 [R], and q [R, Vd] where the rule needs it."""
        ...

    def verify(self, logits: Tensor, drafts: Tensor, kept: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """Judge a chain.

        Args:
            logits: [R, k+1, V], the target's after the current token and after every draft.
            drafts: int64 [R, k] target ids; kept: int64 [Vd] target id of every draft id.
            q: [R, k, Vd] that each draft was drawn from, or None.

        Returns:
            kept drafts a row int64 [R], and the token after them (bonus) int64 [R].
        """
        ...


class Greedy:
    """Temperature 0."""

    temperature = 0.0
    by_place = True

    def choose(self, logits: Tensor) -> Tensor:
        """argmax over the last axis."""
        return logits.argmax(-1)

    def draft(self, logits: Tensor) -> tuple[Tensor, None]:
        """The drafter's argmax."""
        return logits.argmax(-1), None

    def verify(self, logits: Tensor, drafts: Tensor, kept: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keep drafts while they are the target's choice; the bonus is its choice after them. See `Rule`."""
        choice = self.choose(logits)
        agreed = (choice[:, :-1] == drafts).long().cumprod(1).sum(1)
        return agreed, choice.gather(1, agreed[:, None])[:, 0]


class TargetOnly(Greedy):
    """The target draws every token; a most likely draft is kept when it is the token drawn.

    Args:
        temperature: above 0. seed: same prompts, batch and seed give the same text on the same machine.
    """

    def __init__(self, temperature: float, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if temperature <= 0:
            raise UsageError(f"temperature is {temperature}", rule="sampling needs a temperature above 0; 0 is greedy")
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def choose(self, logits: Tensor) -> Tensor:
        """One draw from softmax(logits / temperature)."""
        return self._draw((logits / self.temperature).softmax(-1))

    def _draw(self, weights: Tensor) -> Tensor:
        """One index of the last axis, with probability proportional to `weights` [..., n] >= 0."""
        return torch.multinomial(weights.flatten(0, -2), 1, generator=self.generator).view(weights.shape[:-1])


class Rejection(TargetOnly):
    """Drafts drawn from q, kept by rejection sampling. Arguments as `TargetOnly`."""

    by_place = False

    def draft(self, logits: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # q is always there
        """One draw from the drafter's q at the rule's temperature."""
        q = (logits.float() / self.temperature).softmax(-1)
        return self._draw(q), q

    def verify(self, logits: Tensor, drafts: Tensor, kept: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Rule` and the module docstring."""
        if q is None:
            raise UsageError("drafts without q", rule="rejection sampling judges drafts that were drawn from a known q")
        rows, k = drafts.shape
        p = (logits / self.temperature).softmax(-1)
        spread = torch.zeros_like(p[:, :k])
        spread[..., kept] = q
        places = drafts[..., None]
        chance = p[:, :k].gather(-1, places)[..., 0] / spread.gather(-1, places)[..., 0]
        coin = torch.rand(rows, k, generator=self.generator, device=p.device)
        agreed = (coin < chance).long().cumprod(1).sum(1)
        row = torch.arange(rows, device=p.device)
        own = p[row, agreed]
        rest = (own - spread[row, agreed.clamp(max=k - 1)]).clamp_min(0)
        # All drafts kept: nothing is subtracted. p == q up to rounding: a refusal has probability 0 and no residual.
        plain = (agreed == k) | (rest.sum(-1) <= 0)
        return agreed, self._draw(torch.where(plain[:, None], own, rest))


def rule_for(temperature: float, *, sampled_drafts: bool = True, seed: int = 0) -> Rule:
    """Greedy at temperature 0, else rejection sampling, or the target-only rule for drafts that are not draws."""
    if temperature < 0:
        raise UsageError(f"temperature is {temperature}", rule="0 (greedy) or more")
    if temperature == 0:
        return Greedy()
    return Rejection(temperature, seed) if sampled_drafts else TargetOnly(temperature, seed)


def overlap(p: Tensor, q: Tensor, kept: Tensor) -> Tensor:
    """sum(min(p, q)): probability that a draft from q is kept. p [..., V], q [..., Vd], kept int64 [Vd] -> [...]."""
    return torch.minimum(p[..., kept], q).sum(-1)
