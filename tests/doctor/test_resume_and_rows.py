"""Learning rates around a resume in both ways to count steps, and states whose rows do not answer to their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import visit_facts

RUN = {"step": 100, "weights": True, "optimizer": True, "scheduler": {"last_step": 100}, "rng": True, "sampler": True}


def serious(values: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(f.severity, f.code, f.message) for f in visit_facts(values).findings if f.severity != "info"]


def rates(first: int, *values: float) -> dict[str, Any]:
    return {"run": RUN, "log_lr": [[first + i, value] for i, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("values", "at"),
    [
        (rates(98, 9.2e-5, 9.1e-5, 0.0, 1e-6), 100),
        (rates(98, 9.2e-5, 9.1e-5, 1e-3, 9.99e-4), 100),
        (rates(99, 9.1e-5, 0.0, 1e-6), 100),
        (rates(98, 9.2e-5, 9.1e-5, 0.0), 100),
        (rates(99, 9.1e-5, 9.0e-5, 0.0), 101),
    ],
)
def test_a_jump_is_seen_in_both_ways_to_count(values: dict[str, Any], at: int) -> None:
    [(severity, code, message)] = serious(values)
    assert (severity, code) == ("error", "resume-learning-rate") and f"jumps at step {at}" in message


@pytest.mark.parametrize(
    "values",
    [
        rates(98, 9.2e-5, 9.1e-5, 9.0e-5, 8.9e-5),
        rates(97, 3e-6, 2e-6, 1e-6, 0.0),  # a linear schedule that ends where the run was saved
        {"run": RUN, "log_lr": [[90, 1e-5], [100, 0.0]]},
        rates(97, 9.8e-5, 9.9e-5, 1e-4, 1e-4, 9.99e-5),  # a warm-up that ends there
        {"run": RUN, "log_lr": [[0, 1e-3], [50, 1e-4], [100, 9e-5], [150, 8e-5]]},
    ],
)
def test_a_schedule_that_goes_on_is_quiet(values: dict[str, Any]) -> None:
    assert not serious(values)


@pytest.mark.parametrize("shards", [[0.02, 0.03, 0.01], [0.09, 0.0], [0.0, 0.0, 0.0], [0.02]])
def test_no_shard_agrees(shards: list[float]) -> None:
    [(severity, code, message)] = serious({"next_token_agreement_by_shard": shards})
    assert (severity, code) == ("warning", "states-agreement") and message.startswith("no shard agrees")


def test_one_shard_of_three_does_not() -> None:
    [(severity, _, message)] = serious({"next_token_agreement_by_shard": [0.3, 0.31, 0.03]})
    assert severity == "error" and message.startswith("shard 2 does not belong")


@pytest.mark.parametrize("rows", [[2, 3, 4], [2, 3], [2, 3, 4, 5, 6, 7], []])
def test_rows_are_counted(rows: list[int]) -> None:
    [(severity, code, message)] = serious({"tokens": [[1, 2, 3, 4, 5]], "state_rows_argmax": [rows]})
    assert (severity, code) == ("error", "states-swapped")
    assert message == f"sample 0 has {len(rows)} rows of states for 5 tokens"


@pytest.mark.parametrize("rows", [[2, 3, 4, 5], [2, 3, 4, 5, 6]])
def test_the_last_row_may_be_left_out(rows: list[int]) -> None:
    assert not serious({"tokens": [[1, 2, 3, 4, 5]], "state_rows_argmax": [rows]})


def test_swapped_samples_of_two_lengths_are_said_once() -> None:
    values = {"tokens": [[1, 2, 3, 4, 5], [6, 7, 8]], "state_rows_argmax": [[7, 8, 9], [2, 3, 4, 5, 6]]}
    assert [message for _, _, message in serious(values)] == [
        "samples 0 and 1 are swapped: each holds the states of the other"
    ]
