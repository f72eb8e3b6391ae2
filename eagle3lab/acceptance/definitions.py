"""What lists of per-position numbers mean, and what a number can at most be.

Joint S_j: share of verify steps that accepted at least j drafts, so accept length = 1 + S_1 + S_2 + ...
Conditional c_j = S_j / S_{j-1}, so accept length = 1 + c_1 + c_1 c_2 + ...
A joint list cannot rise. A list without a name has two readings, and neither may be guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

RESULT_KEYS = frozenset(
    {"accept_length", "accept_length_interval", "accepted_per_step", "accept_rate", "joint", "conditional", "counts"}
    | {"per_prompt", "histogram", "verify_steps", "accepted", "proposed", "generated_tokens", "tokens_per_second"}
    | {"per_depth", "per_position", "drafts", "drafted", "correct_drafts", "completion_tokens", "acceptance"}
    | {"alpha", "al"}
    | {"timing", "name", "label", "drafter", "draft", "note", "source"}
)
"""Keys of a published number that are results or names; `is_result` knows more by their words."""

_MEASURED = frozenset(
    {"speed", "speedup", "throughput", "latency", "elapsed", "duration", "walltime"}
    | {"tau", "τ", "mat", "tps", "toks", "qps", "rps", "ttft", "tpot", "itl"}
)
_ACCEPTANCE = frozenset({"accept", "accepts", "accepted", "acceptance", "acc"})
_OF_ACCEPTANCE = frozenset({"len", "length", "lengths", "rate", "rates", "ratio", "tokens", "mean", "avg", "interval"})
_TOKENS = frozenset({"tok", "toks", "token", "tokens"})
_SECONDS = frozenset({"s", "sec", "second", "seconds"})
_ASKED = frozenset({"simulate", "synthetic", "threshold", "max", "min", "limit"})
"""Words of a setting that is named after a result: SGLANG_SIMULATE_ACC_LEN, synthetic_acceptance_rate."""


def length_from_joint(joint: Sequence[float]) -> float:
    """Accept length (bonus in) of joint rates."""
    return 1 + sum(joint)


def length_from_conditional(conditional: Sequence[float]) -> float:
    """Accept length (bonus in) of conditional rates: 1 + the sum of their running products."""
    return 1 + sum(accumulate(conditional, mul))


def conditional_from_joint(joint: Sequence[float]) -> list[float | None]:
    """c_j = S_j / S_{j-1} with S_0 = 1; None where nothing reached the position before."""
    return [now / before if before else None for before, now in pairwise([1.0, *joint])]


def joint_from_conditional(conditional: Sequence[float]) -> list[float]:
    """S_j: running products."""
    return list(accumulate(conditional, mul))


def first_rise(joint: Sequence[float]) -> int | None:
    """1-based position whose joint rate is above the one before it, None when the list never rises."""
    return next((j for j, (before, now) in enumerate(pairwise(joint), 2) if now > before), None)


def ceiling(steps: int | None, topk: int | None = None, draft_tokens: int | None = None) -> float | None:
    """Largest accept length: draft depth + 1 (bonus in). A chain's depth also follows from its draft tokens.

    Args:
        steps: draft steps, the depth of chain or tree. draft_tokens: SGLang's count, which has the root in it.
    """
    if steps is not None:
        return float(steps + 1)
    return float(draft_tokens) if draft_tokens is not None and topk == 1 else None


@dataclass(frozen=True, slots=True)
class TreeRates:
    """The two rates of tree drafting. depth: steps x verify steps; nodes: (draft tokens - 1) x verify steps."""

    depth: int
    nodes: int
    rate_per_depth: float | None
    rate_per_node: float | None


def tree_rates(*, verify_steps: int, accepted: int, steps: int, draft_tokens: int) -> TreeRates:
    """Accepted drafts over drafted depth and over drafted nodes; in a chain the two are one number."""
    depth, nodes = verify_steps * steps, verify_steps * (draft_tokens - 1)
    return TreeRates(depth, nodes, accepted / depth if depth else None, accepted / nodes if nodes else None)


def is_result(key: str) -> bool:
    """Whether a key of a published number is a result or a name, in the spellings in use; every other is a setting."""
    written = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    words = [word for word in re.split(r"[\W_]+", written) if word]
    if "_".join(words) in RESULT_KEYS:
        return True
    have = set(words)
    if have & _ASKED:
        return False
    speed = bool(have & _TOKENS) and bool(have & _SECONDS)
    up = {"speed", "up"} <= have or {"wall", "time"} <= have
    return speed or up or bool(have & _MEASURED) or bool(have & _ACCEPTANCE and have & _OF_ACCEPTANCE)


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Settings whose values differ, or that only one side names; results and names are left out."""
    settings = [key for key in {**a, **b} if not is_result(str(key))]
    missing = object()
    return [key for key in settings if a.get(key, missing) != b.get(key, missing)]
