"""Every number that people watch, for both flags: how it is made and what it reads when nothing is accepted."""

from __future__ import annotations

from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.steps.case_decode import ALGORITHMS, Case

METRIC_HEAD = ("number", "how it is made", *(f"as {flag}" for flag in ALGORITHMS), "what zero looks like")


def metric_rows(case: Case) -> list[tuple[object, ...]]:
    """Every number that people watch, for both flags, from the counts of `decode_both`."""
    parts = [_metrics(case, flag) for flag in ALGORITHMS]
    return [(name, how, *(part[name] for part in parts), zero) for name, how, zero in _METRICS]


_METRICS = (
    ("accepted / drafted", "counts", "0 of many: the only number that cannot be mistaken"),
    ("accept length", "1 + accepted / verify steps", "1.00, never 0: the bonus token is counted"),
    ("accepted per step", "accepted / verify steps", "0.00: the same without the bonus"),
    ("accept rate", "accepted / drafted", "0 %"),
    ("joint by position", "steps that kept this draft and all before", "0 at every position"),
    ("conditional by position", "of the steps that came that far", "0, then unknown: nothing came that far"),
    ("SGLang spec_accept_length", "completion tokens / verify steps, by request", "n / (n - 1), above 1: the token of "
     "the prefill is counted"),
    ("SGLang histogram", "steps with 0, 1, ... drafts kept", "everything in the first entry"),
    ("vLLM counters", "drafts, drafted, accepted, by position", "drafts grow, accepted stays 0"),
    ("vLLM mean acceptance length", "1 + accepted / drafts", "1.00"),
    ("text equals plain greedy", "replies compared token for token", "all of them: right text proves nothing"),
    ("calls of fc", "counted here", "0 under the wrong flag; more with any other fault"),
    ("seconds against plain decoding", "measured here, one batch", "above 1: all the cost of drafting, no gain"),
)  # fmt: skip


def _metrics(case: Case, flag: str) -> dict[str, str]:
    served = case.served[flag]
    counts = served.counts
    meta = [as_sglang(one) for one in counts.per_prompt]
    lengths = sorted(one["spec_accept_length"] for one in meta if "spec_accept_length" in one)
    told = as_vllm(counts)
    return {
        "accepted / drafted": f"{counts.accepted} of {counts.proposed}",
        "accept length": _two(counts.accept_length),
        "accepted per step": _two(counts.accepted_per_step),
        "accept rate": _percent(counts.accept_rate),
        "joint by position": ", ".join(_percent(one) for one in counts.joint or ()) or "unknown",
        "conditional by position": ", ".join(_percent(one) for one in counts.conditional or ()) or "unknown",
        "SGLang spec_accept_length": f"{lengths[0]:.4f} to {lengths[-1]:.4f}" if lengths else "absent",
        "SGLang histogram": str(list(counts.histogram or ())),
        "vLLM counters": ", ".join(str(told[name]) for name in told),
        "vLLM mean acceptance length": _two(counts.accept_length),
        "text equals plain greedy": f"{case.lossless(flag)} of {len(case.plain)}",
        "calls of fc": str(len(served.fc_inputs)),
        "seconds against plain decoding": f"x {served.seconds / case.seconds:.1f}" if case.seconds else "unknown",
    }


def as_sglang(counts: AcceptanceCounts) -> dict[str, Any]:
    """`meta_info` that SGLang 0.5.23 would send for these counts of one prompt; {} before the first verify step."""
    if not counts.verify_steps:
        return {}
    return {
        "completion_tokens": counts.generated_tokens,
        "spec_verify_ct": counts.verify_steps,
        "spec_num_correct_drafts": counts.accepted,
        "spec_num_proposed_drafts": counts.proposed,
        "spec_accept_rate": counts.accept_rate,
        "spec_accept_length": (counts.generated_tokens or 0) / counts.verify_steps,
        "spec_correct_drafts_histogram": list(counts.histogram or ()),
    }


def as_vllm(counts: AcceptanceCounts) -> dict[str, Any]:
    """Counters that vLLM would show in /metrics for these counts."""
    return {
        "vllm:spec_decode_num_drafts": counts.verify_steps,
        "vllm:spec_decode_num_draft_tokens": counts.proposed,
        "vllm:spec_decode_num_accepted_tokens": counts.accepted,
        "vllm:spec_decode_num_accepted_tokens_per_pos": list(counts.at_least or ()),
    }


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
