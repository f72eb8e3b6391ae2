"""An engine's verify steps against ours, up to the first choice that rounding could turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.engines.ours import Reply

TIE = 1e-4
"""Top-2 logits closer than this may be ordered either way by another order of summation in fp32."""
SHARE = 0.8
"""At least this share of all steps must lie before a tie: otherwise the comparison says nothing."""


@dataclass(slots=True)
class Comparison:
    """Steps compared, steps in all, ties (prompt, step, gap) and differences (one sentence each)."""

    compared: int = 0
    steps: int = 0
    ties: list[tuple[int, int, float]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Part of all our steps that was compared."""
        return self.compared / self.steps

    def lines(self) -> str:
        """The result for a person."""
        ties = "; ".join(f"prompt {p} step {s}: top-2 gap {gap:.1e}" for p, s, gap in self.ties) or "none"
        head = f"{self.compared} of {self.steps} steps compared, {len(self.differences)} differences; ties: {ties}"
        return "\n".join([head, *self.differences[:10]])


def before_tie(reply: Reply) -> tuple[int, float | None]:
    """Number of steps of a reply before its first tie, and the gap there (None: no tie)."""
    if reply.first_gap < TIE:
        return 0, reply.first_gap
    for place, step in enumerate(reply.steps):
        if step.gap < TIE:
            return place, step.gap
    return len(reply.steps), None


def in_text(out: list[int], room: int, stops: Sequence[int]) -> list[int]:
    """The tokens of a step that reach the text: none after the limit or after an end token."""
    new = out[:room]
    stop = next((i for i, token in enumerate(new) if token in stops), None)
    return new if stop is None else new[: stop + 1]


def compare_steps(
    ours: Sequence[Reply], theirs: Sequence[list[dict]], *, limit: int, stops: Sequence[int]
) -> Comparison:
    """Proposed tokens and accepted counts of every step before a tie must be equal.

    Args:
        theirs: per prompt, steps with `drafts` and `out` (accepted drafts and the bonus token).
    """
    result = Comparison()
    for number, (reply, steps) in enumerate(zip(ours, theirs, strict=True)):
        safe, gap = before_tie(reply)
        result.steps += len(reply.steps)
        result.compared += safe
        if gap is not None:
            result.ties.append((number, safe, gap))
        elif len(steps) != len(reply.steps):
            result.differences.append(f"prompt {number}: {len(steps)} steps, ours {len(reply.steps)}")
        made = 1
        for place, step in enumerate(reply.steps[:safe]):
            if place >= len(steps):
                result.differences.append(f"prompt {number}: only {len(steps)} steps, ours {len(reply.steps)}")
                break
            drafts, out = steps[place]["drafts"], steps[place]["out"]
            new = in_text(out, limit - made, stops)
            accepted = min(len(out) - 1, len(new))
            made += len(new)
            if (drafts, accepted) != (step.drafts, step.accepted):
                result.differences.append(
                    f"prompt {number} step {place}: proposed {drafts} accepted {accepted}, "
                    f"ours {step.drafts} accepted {step.accepted}"
                )
                break  # what follows another text says nothing more
    return result


def compare_texts(one: Sequence[list[int]], other: Sequence[list[int]], ours: Sequence[Reply]) -> list[str]:
    """Texts must be equal up to the first step that holds a tie of ours; one sentence per text that is not."""
    wrong = []
    for number, (a, b, reply) in enumerate(zip(one, other, ours, strict=True)):
        safe, gap = before_tie(reply)
        if gap is None:
            reach = len(reply.tokens)
        else:  # the first token, then accepted drafts and a bonus per step
            reach = 0 if reply.first_gap < TIE else 1 + sum(step.accepted + 1 for step in reply.steps[:safe])
        if a[:reach] != b[:reach] or (gap is None and len(a) != len(b)):
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            wrong.append(f"prompt {number} differs at token {place} of {reach}")
    return wrong
