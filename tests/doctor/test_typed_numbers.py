"""Numbers that a person or a log gives and that cannot be: told, never read as absent or as equal."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import diagnose


def told(code: str, **facts: Any) -> list[Finding]:
    return [finding for finding in diagnose(Facts(facts)).findings if finding.code == code]


def rows(count: int = 12, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 9 - step / 4, **more} for step in range(count)]


@pytest.mark.parametrize(
    ("code", "facts", "words"),
    [
        ("run-curve", {"curve": rows(loss="9.0")}, "the loss at step 0 is '9.0', needed: a number"),
        ("run-curve", {"curve": rows(gradient_norm=-1)}, "gradient_norm is -1 at step 0"),
        ("run-curve", {"curve": rows(accuracy_by_step=[0.4, 1.4])}, "accuracy_by_step is 1.4 at step 0"),
        (
            "run-curve",
            {"curve": rows(), "held_out": [{"step": 9, "simulated_accept_length": 0.4}]},
            "simulated_accept_length is 0.4 at step 9",
        ),
        ("resume-losses", {"losses_straight": ["a", 2], "losses_resumed": ["b", 2]}, "losses_straight holds 'a'"),
        ("accept-counters", {"drafts": 8, "accepted": 0.5, "drafted": 24}, "accepted is 0.5"),
        ("states-batch-1", {"cosine_to_batch_1": [0.999, 1.2]}, "row 1: 1.2 is no cosine"),
        ("draft-tokens", {"steps": 2.5, "topk": 1, "draft_tokens": 4}, "steps is 2.5"),
        (
            "accept-answer",
            {"meta_info": {"spec_verify_ct": 15, "spec_num_correct_drafts": 50}, "draft_tokens": 4},
            "50 drafts accepted in 15 verify steps",
        ),
    ],
)
def test_impossible_values_are_errors(code: str, facts: dict[str, Any], words: str) -> None:
    assert [words in one.message for one in told(code, **facts) if one.severity == "error"] == [True]


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("run-curve", {"curve": [{"step": 1, "train/loss": 9.0}]}),
        ("run-curve", {"curve": []}),
        ("run-status", {"status": {}}),
        ("resume-losses", {"losses_straight": [1.0], "losses_resumed": []}),
    ],
)
def test_what_could_not_be_checked_is_said(code: str, facts: dict[str, Any]) -> None:
    (finding,) = told(code, **facts)
    assert finding.severity == "info" and "could not check" in finding.message


def test_right_values_are_left_alone() -> None:
    held = [{"step": 9, "simulated_accept_length": 1.0}]
    found = told("run-curve", curve=rows(gradient_norm=0.5, accuracy_by_step=[1.0, 0.0]), held_out=held)
    assert [one for one in found if one.severity == "error"] == []
    assert [one.severity for one in told("states-batch-1", cosine_to_batch_1=[1.0004, 0.999])] == ["info"]
    assert told("resume-losses", losses_straight=[1, 2], losses_resumed=[1, 2.0])[0].evidence["equal"] is True
