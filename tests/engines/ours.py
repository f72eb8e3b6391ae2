"""Our own decoding of the same prompts, with how close every choice was to a tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.sampling import Greedy
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step.

    Attributes:
        drafts: proposed tokens. accepted: those of them in the text.
        agreed: those that the target agreed with, past the end of the reply included (SGLang counts these).
        gap: the smallest top-2 gap among the choices behind this step.
    """

    drafts: list[int]
    accepted: int
    agreed: int
    gap: float


@dataclass(slots=True)
class Reply:
    """One prompt. `first_gap`: top-2 gap of the first token, which prefill chooses."""

    tokens: list[int]
    steps: list[Step]
    first_gap: float


@dataclass(slots=True)
class _Gaps(Greedy):
    """Greedy choices that note their top-2 gaps. One row at a time."""

    first: list[float] = field(default_factory=list)
    drafter: list[float] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)

    temperature = 0.0

    def choose(self, logits: Tensor) -> Tensor:
        if logits.dim() == 2:
            self.first.append(float(_gap(logits)[0]))
        return Greedy.choose(self, logits)

    def draft(self, logits: Tensor) -> tuple[Tensor, None]:
        self.drafter.append(float(_gap(logits)[0]))
        return Greedy.draft(self, logits)

    def verify(self, logits: Tensor, drafts: Tensor, kept: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        agreed, bonus = Greedy.verify(self, logits, drafts, kept, q)
        used = _gap(logits)[0, : int(agreed[0]) + 1]  # what follows the first refused draft decides nothing
        self.steps.append((int(agreed[0]), min(*self.drafter, *used.tolist())))
        self.drafter.clear()
        return agreed, bonus


def _gap(logits: Tensor) -> Tensor:
    top = logits.float().topk(2, -1).values
    return top[..., 0] - top[..., 1]


def decode(
    target: Target, drafter: Eagle3Drafter, prompts: Sequence[list[int]], *, k: int, max_new_tokens: int
) -> list[Reply]:
    """Speculative decoding prompt by prompt, as `accept decode` does, with gaps."""
    replies = []
    for prompt in prompts:
        gaps = _Gaps()
        reply = ChainDecoder(target, drafter, k, gaps).run([prompt], max_new_tokens=max_new_tokens, batch=1)[0]
        steps = [Step(d, a, *seen) for d, a, seen in zip(reply.drafts, reply.accepted, gaps.steps, strict=True)]
        replies.append(Reply(reply.tokens, steps, gaps.first[0]))
    return replies


def rope_base(drafter: Eagle3Drafter, theta: float) -> Eagle3Drafter:
    """The same drafter with another rotary base: a fault that only attention shows. For wrong versions."""
    d = drafter.config.head_dim
    wrong = _copy(drafter)
    wrong.inverse_frequency.copy_(1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    return wrong


def other_points(drafter: Eagle3Drafter, shift: int) -> Eagle3Drafter:
    """The same drafter reading every point `shift` blocks later. For wrong versions."""
    wrong = _copy(drafter)
    wrong.config = drafter.config.model_copy(update={"points": [p + shift for p in drafter.config.points]})
    return wrong


def _copy(drafter: Eagle3Drafter) -> Eagle3Drafter:
    wrong = Eagle3Drafter(drafter.config, drafter.embedding, drafter.d2t)
    wrong.load_state_dict(drafter.state_dict())
    return wrong.eval().requires_grad_(False)
