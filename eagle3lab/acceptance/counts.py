"""One definition of acceptance: counts, and everything else derived from them.

A verify step checks one chain (or tree) of drafted tokens. It accepts a prefix of them and always yields one token
more, the target's own (the bonus), so

    accept length     = 1 + accepted / verify_steps         bonus in: tokens a verify step yields
    accepted per step = accepted / verify_steps             bonus out
    accept rate       = accepted / proposed                 its denominator is drafted tokens (of a tree: nodes)
    joint S_j         = steps with at least j accepted / verify_steps
    conditional c_j   = S_j / S_{j-1}, None where nothing reached position j

None means unknown and is printed as such, never as 0. Where counts come from: `sources.py`; intervals: `intervals.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

from eagle3lab.acceptance.intervals import DRAWS, ratio_interval
from eagle3lab.core.errors import AcceptanceError


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """What was counted, over all prompts or over one.

    Fields:
        verify_steps: forward passes of the target that checked drafts.
        accepted: drafted tokens that were kept, bonus tokens out.
        proposed: drafted tokens that were checked; None where the source does not tell.
        histogram: `histogram[j]` verify steps accepted exactly j tokens; None where the source does not tell.
        generated_tokens: tokens of the replies as the source counts them (SGLang: with the prefill token).
        prompt: name of the prompt when this is one prompt's count; paired comparisons match by it.
        per_prompt: the same for each prompt; () when only totals are known.

    Raises:
        AcceptanceError: the counts contradict each other.
    """

    verify_steps: int
    accepted: int
    proposed: int | None = None
    histogram: tuple[int, ...] | None = None
    generated_tokens: int | None = None
    prompt: str = ""
    per_prompt: tuple[AcceptanceCounts, ...] = ()

    def __post_init__(self) -> None:
        named = {"verify_steps": self.verify_steps, "accepted": self.accepted}
        optional = {"proposed": self.proposed, "generated_tokens": self.generated_tokens}
        named |= {name: value for name, value in optional.items() if value is not None}
        named |= {f"histogram[{j}]": value for j, value in enumerate(self.histogram or ())}
        for name, value in named.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise _impossible(self, f"{name} is {value!r}", "counts are whole numbers of 0 or more")
        if self.verify_steps == 0 and self.accepted > 0:
            raise _impossible(self, f"{self.accepted} accepted in 0 verify steps", "a draft is accepted in a step")
        if self.proposed is not None and self.accepted > self.proposed:
            raise _impossible(self, f"accepted {self.accepted} of {self.proposed} proposed", "accepted <= proposed")
        if self.histogram is not None:
            steps = sum(self.histogram)
            kept = sum(j * count for j, count in enumerate(self.histogram))
            if (steps, kept) != (self.verify_steps, self.accepted):
                raise _impossible(
                    self,
                    f"the histogram sums to {steps} steps and {kept} accepted, the totals say {self.verify_steps} "
                    f"and {self.accepted}",
                    "histogram[j] = verify steps with exactly j accepted",
                )

    def since(self, before: AcceptanceCounts, prompt: str = "") -> AcceptanceCounts:
        """What was counted between two readings of the same counters; a bucket that a histogram had not is 0.

        Raises:
            AcceptanceError: the counters went back (a restart), or the readings do not fit together.
        """
        histogram = None
        if self.histogram is not None and before.histogram is not None:
            pairs = zip_longest(self.histogram, before.histogram, fillvalue=0)
            histogram = tuple(now - then for now, then in pairs)
        known = self.proposed is not None and before.proposed is not None
        proposed = (self.proposed or 0) - (before.proposed or 0) if known else None
        steps, accepted = self.verify_steps - before.verify_steps, self.accepted - before.accepted
        if min(steps, accepted, proposed or 0, *(histogram or ())) < 0:
            raise AcceptanceError("counters went back", rule="they only rise until the server is restarted")
        return AcceptanceCounts(
            verify_steps=steps, accepted=accepted, proposed=proposed, histogram=histogram, prompt=prompt
        )

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / verify_steps (bonus in); None before the first verify step."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def accepted_per_step(self) -> float | None:
        """accepted / verify_steps (bonus out); None before the first verify step."""
        return self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def accept_rate(self) -> float | None:
        """accepted / proposed; None when nothing was proposed or the source does not tell."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def depth(self) -> int | None:
        """Positions a step can reach, as far as the histogram tells; sources pad it to the draft's steps."""
        return None if self.histogram is None else max(len(self.histogram) - 1, 0)

    @property
    def at_least(self) -> tuple[int, ...] | None:
        """Verify steps that accepted at least 1, 2, ... tokens (length `depth`); None without a histogram."""
        return None if self.histogram is None else tuple(accumulate(reversed(self.histogram[1:])))[::-1]

    @property
    def joint(self) -> tuple[float, ...] | None:
        """S_1, S_2, ...: share of verify steps that reached the position; it can never rise."""
        if self.at_least is None or not self.verify_steps:
            return None
        return tuple(count / self.verify_steps for count in self.at_least)

    @property
    def conditional(self) -> tuple[float | None, ...] | None:
        """c_1, c_2, ...: of the steps that reached the position before, the share that reached this one."""
        if self.at_least is None or not self.verify_steps:
            return None
        before = (self.verify_steps, *self.at_least)
        return tuple(now / base if base else None for base, now in zip(before, self.at_least, strict=False))

    def accept_length_interval(self, *, seed: int = 0, draws: int = DRAWS) -> tuple[float, float] | None:
        """95 % bootstrap interval over prompts of the accept length; None with fewer than two prompts."""
        pairs = [(one.accepted, one.verify_steps) for one in self.per_prompt]
        interval = ratio_interval(pairs, seed=seed, draws=draws)
        return None if interval is None else (1 + interval[0], 1 + interval[1])

    def accept_rate_interval(self, *, seed: int = 0, draws: int = DRAWS) -> tuple[float, float] | None:
        """95 % bootstrap interval over prompts of the accept rate; None when a prompt's proposals are unknown."""
        pairs = [(one.accepted, one.proposed) for one in self.per_prompt if one.proposed is not None]
        return ratio_interval(pairs, seed=seed, draws=draws) if len(pairs) == len(self.per_prompt) else None

    def to_json(self, *, seed: int = 0) -> dict[str, Any]:
        """The keys of `accept --json`; unknown is null."""
        interval = self.accept_length_interval(seed=seed)
        return {
            "accept_length": self.accept_length,
            "accept_length_interval": None if interval is None else list(interval),
            "accepted_per_step": self.accepted_per_step,
            "accept_rate": self.accept_rate,
            "joint": None if self.joint is None else list(self.joint),
            "conditional": None if self.conditional is None else list(self.conditional),
            "counts": self._counts(),
            "per_prompt": [{"prompt": one.prompt, **one._counts()} for one in self.per_prompt],
        }

    def _counts(self) -> dict[str, Any]:
        return {
            "verify_steps": self.verify_steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "histogram": None if self.histogram is None else list(self.histogram),
            "generated_tokens": self.generated_tokens,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AcceptanceCounts:
        """Counts from what `to_json` wrote, other keys ignored; `AcceptanceError` when they are not there."""
        prompts = value.get("per_prompt")
        rows = prompts if isinstance(prompts, list) else []
        each = tuple(cls._from_counts(row) for row in rows if isinstance(row, Mapping))
        return cls._from_counts(value.get("counts"), per_prompt=each)

    @classmethod
    def _from_counts(cls, counts: Any, per_prompt: tuple[AcceptanceCounts, ...] = ()) -> AcceptanceCounts:
        if not isinstance(counts, Mapping) or "verify_steps" not in counts or "accepted" not in counts:
            raise AcceptanceError(
                f"counts are {str(counts)[:80]}", rule="counts hold verify_steps and accepted", fix="measure again"
            )
        histogram = counts.get("histogram")
        return cls(
            verify_steps=counts["verify_steps"],
            accepted=counts["accepted"],
            proposed=counts.get("proposed"),
            histogram=tuple(histogram) if isinstance(histogram, list) else None,
            generated_tokens=counts.get("generated_tokens"),
            prompt=str(counts.get("prompt", "")),
            per_prompt=per_prompt,
        )


def total(prompts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
    """Sum over prompts. proposed, histogram and tokens are known only when every prompt knows them."""
    each = tuple(prompts)
    histograms = [one.histogram for one in each]
    return AcceptanceCounts(
        verify_steps=sum(one.verify_steps for one in each),
        accepted=sum(one.accepted for one in each),
        proposed=_sum([one.proposed for one in each]),
        histogram=_sum_histograms(histograms),
        generated_tokens=_sum([one.generated_tokens for one in each]),
        per_prompt=each,
    )


def accepted_prefix(correct: Sequence[Any]) -> int:
    """Drafted tokens that a verify step keeps: those before the first wrong one. [1, 0, 1, 0] keeps 1, not 2."""
    kept = 0
    for right in correct:
        if not right:
            break
        kept += 1
    return kept


def from_lengths(
    accepted: Sequence[int], *, k: int, prompt: str = "", generated: int | None = None
) -> AcceptanceCounts:
    """Counts of a chain of `k` drafts a step from the number accepted in each verify step."""
    histogram = [0] * (k + 1)
    for count in accepted:
        if not 0 <= count <= k:
            raise AcceptanceError(f"{count} accepted of {k} drafted", rule="0 to k drafts are accepted a step")
        histogram[count] += 1
    return AcceptanceCounts(
        verify_steps=len(accepted),
        accepted=sum(accepted),
        proposed=k * len(accepted),
        histogram=tuple(histogram),
        generated_tokens=generated,
        prompt=prompt,
    )


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _sum_histograms(histograms: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [one for one in histograms if one is not None]
    if len(known) != len(histograms):
        return None
    longest = max((len(one) for one in known), default=0)
    return tuple(sum(one[j] for one in known if j < len(one)) for j in range(longest))


def _impossible(counts: AcceptanceCounts, what: str, rule: str) -> AcceptanceError:
    where = f"prompt {counts.prompt!r}: " if counts.prompt else ""
    return AcceptanceError(f"{where}impossible counts: {what}", rule=rule, fix="measure again, or correct the counts")
