"""The same acceptance is judged the same, whatever source it comes from."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import serious

LINE = (
    "SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: 300 tokens, "
    "Per-position acceptance rate: {}, 0.000, 0.000, Avg Draft acceptance rate: 1.0%\n"
)


def sources(accepted: int) -> dict[str, dict[str, Any]]:
    """100 verify steps of 3 drafts, of which the first was accepted so often."""
    meta = {"completion_tokens": 101 + accepted, "spec_verify_ct": 100, "spec_num_correct_drafts": accepted}
    meta |= {"spec_num_proposed_drafts": 300}
    counts = {"verify_steps": 100, "accepted": accepted, "proposed": 300, "histogram": [100 - accepted, accepted]}
    length = 1 + accepted / 100
    return {
        "vllm": {"log": LINE.format(f"{length:.2f}", accepted, f"{length - 1:.3f}")},
        "sglang": {"log": f"Decode batch, accept len: {length:.2f}, accept rate: {accepted / 300:.2f}\n"},
        "answer": {"meta_info": meta},
        "answers": {"answers": [meta]},
        "counters": {"drafts": 100, "drafted": 300, "accepted": accepted},
        "tree": {"verify_steps": 100, "correct_drafts": accepted, "steps": 3, "topk": 1, "draft_tokens": 4},
        "length": {"accept_length": length},
        "length of steps": {"accept_length": length, "steps": 3},
        "report": {"acceptance": {"accept_length": length, "counts": counts}},
    }


@pytest.mark.parametrize("source", sources(3))
def test_next_to_none_is_a_warning(source: str) -> None:
    [(severity, message)] = serious(sources(3)[source])
    assert severity == "warning" and "barely above 1.00" in message


@pytest.mark.parametrize("source", sources(60))
def test_a_drafter_that_works_is_none(source: str) -> None:
    assert not serious(sources(60)[source])


@pytest.mark.parametrize("source", sources(0))
def test_nothing_is_an_error(source: str) -> None:
    assert [severity for severity, _ in serious(sources(0)[source])] == ["error"]


def test_few_steps_prove_little() -> None:
    assert not serious({"drafts": 19, "drafted": 57, "accepted": 1})
    assert serious({"drafts": 20, "drafted": 60, "accepted": 1})
