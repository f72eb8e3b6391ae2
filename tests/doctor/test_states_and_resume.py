"""States given by a recipe, samples under other tokens, values in 8 bits, and what a resume may change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle3lab.doctor.recipes import contents
from eagle3lab.doctor.row_copies import copied_rows

from .conftest import serious

SHAPE, POINTS, H = (5, 12), (2, 18, 33), 4
WHOLE = {"step": 100, "weights": True, "optimizer": True, "scheduler": {"last_step": 100}, "rng": True, "sampler": True}


@pytest.mark.parametrize(
    ("recipe", "rows", "columns"),
    [
        ("ones; row 2 all NaN", [2], range(12)),
        ("ones; column 5 = nan", range(5), [5]),
        ("ones; columns 3..5 all NaN", range(5), [3, 4, 5]),
        ("ones; all rows NaN", range(5), range(12)),
        ("ones; every row is NaN", range(5), range(12)),
        ("ones; block 1 of row 2 all NaN", [2], [4, 5, 6, 7]),
        ("ones; point 18 of row 2 is NaN", [2], [4, 5, 6, 7]),
        ("ones; row 2 NaN in the last point", [2], [8, 9, 10, 11]),
        ("ones; the last two rows are NaN", [3, 4], range(12)),
        ("ones; rows 1 and 3, columns 0 to 1 all NaN", [1, 3], [0, 1]),
        ("ones; the last row is NaN in every point", [4], range(12)),
        ("ones, row 3 all NaN", [3], range(12)),
        ("randn; row 2 all NaN", [2], range(12)),
        ("uniform(0, 1); row 2 all NaN", [2], range(12)),
        ("normal(0, 1), row 2 all NaN", [2], range(12)),
    ],
)
def test_recipes(recipe: str, rows: Any, columns: Any) -> None:
    found = contents(recipe, SHAPE, points=POINTS, block=H)
    values = None if found is None else found[0]
    assert values is not None
    wanted = np.zeros(SHAPE, dtype=bool)
    wanted[np.ix_(list(rows), list(columns))] = True
    np.testing.assert_array_equal(np.isnan(values), wanted)


@pytest.mark.parametrize(
    "recipe",
    [
        "ones; row 9 all NaN",
        "ones; point 7 is NaN",
        "ones; points 18 and 7 are NaN",
        "ones; row 2 is strange",
        "ones; 3",
        "ones; row 2 NaN or zero",
        "something",
        "uniform(1, 0)",
    ],
)
def test_recipes_that_say_nothing(recipe: str) -> None:
    assert contents(recipe, SHAPE, points=POINTS, block=H) is None


@pytest.mark.parametrize(
    ("recipe", "group"),
    [
        ("rows 3 and 4 are bit-equal copies of row 2", [2, 3, 4]),
        ("rows 3..4 are bit-equal copies of row 2", [2, 3, 4]),
        ("row 4 is a copy of row 3", [3, 4]),
        ("rows 2, 3 and 4 are bit-equal", [2, 3, 4]),
        ("rows 2 to 4 are identical", [2, 3, 4]),
        ("the last two rows are bit-equal copies of row 2", [2, 3, 4]),
        ("ones; row 4 equals row 3 bit for bit", [3, 4]),
        ("row t of a sample is 3 x one-hot(argmax) plus 0.01 x t in every column", None),
        ("no two rows are equal", None),
        ("row 4 does not equal row 3", None),
        ("row 4 is a copy", None),
    ],
)
def test_copies(recipe: str, group: list[int] | None) -> None:
    assert copied_rows(recipe, 5) == ([group] if group else [])


def test_swaps_at_ordinary_agreement() -> None:
    """A real target agrees with a third of its text: the swapped samples fit each other no better."""
    given = {"tokens": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], "recipe": ""}
    [(severity, said)] = serious(given | {"state_rows_argmax": [[8, 9, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0]]})
    assert severity == "error" and "samples 0 and 1 are swapped" in said
    assert not serious(given | {"state_rows_argmax": [[2, 3, 0, 0, 0, 0], [8, 9, 0, 0, 0, 0]]})
    chance = serious(given | {"state_rows_argmax": [[8, 0, 0, 0, 0, 0], [8, 9, 10, 0, 0, 0]]})
    assert "swapped" not in str(chance) and "holds the states" not in str(chance)


@pytest.mark.parametrize(("argmax", "place"), [([1, 2, 3, 4, 5], "at t,"), ([3, 4, 5, 0, 0], "at t + 2,")])
def test_displaced_rows(argmax: list[int], place: str) -> None:
    [(severity, said)] = serious({"tokens": [[1, 2, 3, 4, 5]], "state_rows_argmax": [argmax], "recipe": ""})
    assert severity == "error" and place in said


def test_repeated_tokens_are_not_displaced() -> None:
    assert not serious({"tokens": [[5, 5, 5, 5, 5]], "state_rows_argmax": [[5, 5, 5, 5, 5]], "recipe": ""})


@pytest.mark.parametrize(
    ("value", "dtype", "becomes"),
    [
        (70000.0, "F8_E5M2", "inf"),
        (-70000.0, "float8_e5m2", "-inf"),
        (60000.0, "F8_E5M2", None),  # rounded down to 57344
        (50000.0, "F8_E5M2", None),
        (500.0, "F8_E4M3", "448"),
        (460.0, "F8_E4M3", None),
        (70000.0, "F16", "inf"),
        (70000.0, "BF16", None),
    ],
)
def test_a_value_in_a_small_type(value: float, dtype: str, becomes: str | None) -> None:
    said = serious({"value": value, "dtype_after": dtype})
    assert (becomes is None) == (said == []), said
    if becomes:
        assert said[0][0] == "error" and f"becomes {becomes}," in said[0][1]


@pytest.mark.parametrize(
    ("key", "saved", "now", "severity"),
    [
        *[
            (key, "a", "b", None)
            for key in ("output_dir", "resume_from", "checkpoint", "run_name", "wandb_id", "log_dir")
        ],
        *[(key, 1, 2, None) for key in ("num_workers", "log_every", "save_every", "eval_every", "data_workers")],
        *[(key, "a", "b", "error") for key in ("dataset", "data_path", "train_data", "corpus_path", "dataset_name")],
        *[(key, [2, 15], [3, 16], "error") for key in ("layer_ids", "aux_layers", "capture_layers", "resid_pre")],
        ("shuffle", True, False, "error"),
        *[(key, 8, 4, "warning") for key in ("num_gpus", "dp_size", "per_device_batch_size", "data_parallel_size")],
        *[(key, 8, 4, "warning") for key in ("learning_rate", "train_steps", "model_name", "target_checkpoint")],
        ("world_size", 8, "8", None),
    ],
)
def test_settings_of_a_resume(key: str, saved: Any, now: Any, severity: str | None) -> None:
    said = serious({"run": WHOLE | {key: saved}, "resume_with": {key: now}})
    assert [one for one, _ in said] == ([severity] if severity else []), said


@pytest.mark.parametrize(
    ("rows", "at"),
    [
        ([[98, 2e-6], [99, 1e-6], [100, 0.0], [101, 1e-4]], 101),  # back at its peak after the schedule's end
        ([[99, 9.1e-5], [100, 9e-5], [0, 0.0], [1, 1e-6]], 0),  # the counter starts again
        ([[98, 2e-6], [99, 1e-6], [100, 0.0], [101, 0.0]], None),
        ([[99, 9.1e-5], [100, 9e-5], [99, 9.1e-5], [100, 9e-5], [101, 8.9e-5]], None),  # goes on from an older step
    ],
)
def test_learning_rates_at_the_ends(rows: list[list[float]], at: int | None) -> None:
    said = [message for severity, message in serious({"run": WHOLE, "log_lr": rows}) if severity == "error"]
    assert len(said) == (at is not None)
    if at is not None:
        assert f"step {at}" in said[0]


def test_rows_of_a_log_in_other_forms() -> None:
    rates = {99: 9.1e-5, 100: 9e-5, 101: 0.0}
    for key in ("lr", "learning_rate"):
        [(severity, said)] = serious({"run": WHOLE, "log_lr": [{"step": s, key: rate} for s, rate in rates.items()]})
        assert severity == "error" and "jumps at step 101" in said
    assert not serious({"run": WHOLE, "log_lr": [{"step": 99, "lr": 9.1e-5}, [100, 9e-5], [101, None]]})


@pytest.mark.parametrize(
    ("row", "words"),
    [("9e-05", "'9e-05'"), ([100, "9e-05"], "'9e-05'"), (["a", 1e-5], "'a'"), (3, "3"), ([1], "[1]"), ({"a": 1}, "a")],
)
def test_rows_that_are_no_numbers_are_told(row: Any, words: str) -> None:
    [(severity, said)] = serious({"run": WHOLE, "log_lr": [[99, 9.1e-5], row, [101, 8.9e-5]]})
    assert severity == "error" and "log_lr holds" in said and words in said


def losses(*values: float) -> dict[str, Any]:
    return {"curve": [{"step": step, "loss": value} for step, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("facts", "severity", "words"),
    [
        (losses(*[0.0] * 12), "error", "the loss is 0 at every step (12 log rows): most likely 0 supervised tokens"),
        (losses(0.0, 0.0), "error", "0 supervised tokens"),
        (losses(9.0, 0.0, 8.5, 0.0, 8.1), "warning", "0 in 2 of 5 log rows, first at step 1"),
        ({"losses_straight": [0.0, 0.0], "losses_resumed": [0.0, 0.0]}, "error", "0 supervised tokens"),
        ({"loss_over_all_positions": 0, "loss_over_masked_positions": 0.0}, "error", "0 supervised tokens"),
        (losses(9.0, 4.0, 1.0, 0.001, 0.0, 0.0), None, ""),  # learned by heart
        (losses(*[9 - step / 4 for step in range(12)]), None, ""),
        ({"losses_straight": [2.0, 0.0], "losses_resumed": [2.0, 0.0]}, None, ""),
    ],
)
def test_a_loss_of_0_has_no_token_behind_it(facts: dict[str, Any], severity: str | None, words: str) -> None:
    said = serious(facts)
    assert [one for one, _ in said] == ([severity] if severity else []) and words in str(said)


@pytest.mark.parametrize(
    ("state", "good"),
    [
        *[(state, True) for state in ("complete", "good (verified)", "OK", "done, hash matches", "verified")],
        *[(state, False) for state in ("incomplete", "not complete", "hash", "good, tokenizer changed", "unknown")],
    ],
)
def test_states_of_a_shard(state: str, good: bool) -> None:
    assert (serious({"shards": [{"i": 0, "state": state}]}) == []) is good


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"step": 400, "gradient_accumulation": 4}, None),
        ({"step": 400}, "scheduler stands at step 100"),
        ({"optimizer": {"step": 0}}, "optimizer stands at step 0"),
        ({"optimizer": {"step": 100}}, None),
    ],
)
def test_what_stands_at_which_step(change: dict[str, Any], word: str | None) -> None:
    said = serious({"run": WHOLE | change})
    assert (word is None) == (not said) and (word or "") in str(said)


def test_vllms_capture_line_and_its_old_options() -> None:
    config = '{"method":"extract_hidden_states","num_speculative_tokens":1,"draft_model_config":{"hf_config":{}}}'
    good = serious({"launch_args": ["serve", "T", "--speculative-config", config]}, "vllm")
    assert "draft_model_config" not in str(good)
    old = serious({"launch_args": ["serve", "T", "--speculative-model", "D", "--num-speculative-tokens", "3"]}, "vllm")
    assert [severity for severity, said in old if "no option of vLLM any more" in said] == ["error", "error"]


def rows_that_agree(*hits: int, rows: int = 24) -> dict[str, Any]:
    """Samples whose first so many rows give their next token; the samples share no token."""
    tokens = [[100 * n + place for place in range(rows + 1)] for n in range(len(hits))]
    seen = [
        [t[place + 1] if place < right else 99 for place in range(rows)] for t, right in zip(tokens, hits, strict=True)
    ]
    return {"tokens": tokens, "state_rows_argmax": seen}


@pytest.mark.parametrize(
    ("hits", "wrong"),
    [
        ((20, 19, 1, 22), True),  # far below what the others agree
        ((6, 3, 1, 2, 3, 2), False),  # a target that made none of the text: few rows agree, by accident
        ((6, 3, 1, 2), False),
        ((12, 12, 0, 12), True),
    ],
)
def test_few_rows_that_agree_by_accident_are_no_outliers(hits: tuple[int, ...], wrong: bool) -> None:
    assert any("belong to" in told for _, told in serious(rows_that_agree(*hits))) is wrong
