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
    | {"alpha", "al", "acc", "seconds", "num_spec_steps", "checkpoint_step", "global_step"}
    | {"timing", "name", "label", "drafter", "draft", "note", "source"}
)
"""Keys of a published number that are results or names; `is_result` knows more by their words."""

_MEASURED = frozenset(
    {"speed", "speedup", "throughput", "latency", "elapsed", "duration", "walltime", "runtime"}
    | {"tau", "τ", "mat", "tps", "toks", "qps", "rps", "ttft", "tpot", "itl"}
)
_ACCEPTANCE = frozenset({"accept", "accepts", "accepted", "acceptance", "acc"})
_OF_ACCEPTANCE = frozenset({"len", "length", "lengths", "rate", "rates", "ratio", "tokens", "mean", "avg", "interval"})
_TOKENS = frozenset({"tok", "toks", "token", "tokens"})
_SECONDS = frozenset({"s", "sec", "second", "seconds"})
_ASKED = frozenset({"simulate", "synthetic", "threshold", "max", "min", "limit"})
"""Words of a setting that is named after a result: SGLANG_SIMULATE_ACC_LEN, synthetic_acceptance_rate."""

_RESULT_WORDS = frozenset(
    {"std", "stdev", "stddev", "stderr", "sem", "ci", "ci95", "loss", "losses", "accuracy", "perplexity", "ppl"}
    | {"drafts", "drafted", "joint", "conditional", "marginal", "survival", "histogram"}
)
"""Words that only a result has in its name."""
_RESULT_PAIRS = (
    ({"peak", "used"}, {"memory", "mem", "vram"}),
    ({"verify", "verified", "verification"}, {"ct", "count", "calls", "steps", "num", "total"}),
    ({"total", "output", "completion", "generated", "produced"}, _TOKENS),
    ({"completion", "response", "generated"}, {"length", "len", "lengths"}),
    ({"rate", "rates"}, {"node", "nodes", "depth", "depths", "position", "positions", "pos", "per"}),
    ({"wall", "elapsed", "total"}, _SECONDS | {"time"}),
)
"""Pairs of words, one of each set, that only a result has in its name."""
_GIVEN = frozenset({"prompt", "input", "context", "request"})
"""Words of what is sent: total_input_tokens, request_rate."""

_TRAINING = frozenset({"train", "trained", "training", "finetune", "finetuned", "finetuning"})
_DRAFT = frozenset({"draft", "drafter", "drafters", "speculator", "speculative", "spec", "eagle", "eagle3"})
_OF_DRAFT = frozenset(
    {"model", "path", "checkpoint", "ckpt", "revision", "sha", "sha256", "hash", "name", "id", "repo", "dir"}
    | {"folder", "weights", "version", "commit", "url", "file", "label", "vocab", "size", "params", "parameters"}
)
_NAMES = frozenset(
    {"name", "label", "title", "tag", "tags", "id", "uuid", "run", "runs", "date", "time", "datetime", "timestamp"}
    | {"created", "at", "started", "finished", "commit", "git", "sha", "epoch", "epochs", "checkpoint", "ckpt"}
    | {"note", "notes", "comment", "comments", "remark", "remarks", "description", "author", "source", "url"}
    | {"log", "report", "file", "seconds", "minutes", "hours"}
)
"""Words of names, dates and remarks: a key of nothing else says which number this is, not how it was measured."""


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
    """Largest accept length: draft depth + 1 (bonus in), and no more than a tree has nodes, its root included.

    Args:
        steps: draft steps, the depth of chain or tree. topk: branches; above 1 the draft is a tree.
        draft_tokens: SGLang's count, which has the root in it. Without topk it may be another engine's, without the
            root, so one more is possible and nothing is taken off the steps.
    """
    nodes = draft_tokens if draft_tokens is not None and draft_tokens > 0 else None
    if steps is not None:
        tree = topk is not None and topk > 1
        return float(min(steps + 1, nodes)) if tree and nodes is not None else float(steps + 1)
    if nodes is None:
        return None
    return float(nodes if topk is not None else nodes + 1)


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
    """Whether a key of a published number is a result or a name, in the spellings in use; every other is a setting.

    What names or made the draft is no setting either: two drafts under equal settings are what is compared.
    """
    written = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    words = [word for word in re.split(r"[\W_]+", written) if word]
    if "_".join(words) in RESULT_KEYS:
        return True
    have = set(words)
    return _names_a_draft(have) or (not have & _ASKED and _is_measured(have))


def _names_a_draft(have: set[str]) -> bool:
    """Words that say which draft, run or measurement this is: draft_model_path, run_id, training_step."""
    of_draft = bool(have & _DRAFT) and bool(have & _OF_DRAFT) and have <= _DRAFT | _OF_DRAFT
    return bool(have) and (of_draft or have <= _NAMES or bool(have & _TRAINING))


def _is_measured(have: set[str]) -> bool:
    """Words of a result: speed, lengths and rates of acceptance, counts, spread, losses, memory."""
    speed = bool(have & _TOKENS) and bool(have & _SECONDS)
    pair = any(have & one and have & other for one, other in _RESULT_PAIRS) and not have & _GIVEN
    accepted = bool(have & _ACCEPTANCE and have & _OF_ACCEPTANCE)
    return speed or pair or accepted or bool(have & (_MEASURED | _RESULT_WORDS))


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Settings whose values differ, or that only one side names; results and names are left out."""
    settings = [key for key in {**a, **b} if not is_result(str(key))]
    missing = object()
    return [key for key in settings if a.get(key, missing) != b.get(key, missing)]
