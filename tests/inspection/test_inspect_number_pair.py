"""`inspect --shape --mean --std`: the arithmetic behind the words, checked against independent formulas."""

from __future__ import annotations

import math

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.inspection.words import answer_number_pair, native_mean, parse_shape

KIMI = (7168, 21504)


def test_the_question_of_the_field_is_answered() -> None:
    answer = answer_number_pair(KIMI, "0.0", "0.004037")
    text = answer.as_text()
    assert answer.nearest == "kaiming-uniform"
    first = next(f for f in answer.families if f["name"] == "kaiming-uniform")
    assert first["ratio"] == pytest.approx(0.004037 * math.sqrt(3 * 21504), rel=1e-12)
    assert first["standard_errors"] == pytest.approx(704, abs=1)
    assert answer.update_ratio == pytest.approx(0.2267, abs=2e-4)
    for words in ("1.0743 / 1 / 1", "1.0378 / 1.0378 / 1", "0.00680542", "5.21%", "-1.086", "0.975", "11.1", "48.9"):
        assert words in text, words
    assert "trained well" not in text and "DEAD" not in text


@pytest.mark.parametrize(
    ("std", "word"),
    [
        ("0.0039371", "untouched draw of that family would print"),
        ("0.02", "normal-0.02"),
        ("0", "DEAD"),
        ("nan", "DEAD"),
        ("0.0031", "below the initial one"),
        ("0.5", "no listed initial family"),
    ],
)
def test_other_values_get_other_answers(std: str, word: str) -> None:
    assert word in answer_number_pair(KIMI, "0.0", std).as_text()


@pytest.mark.parametrize(
    ("std", "words"),
    [
        ("0.004037", "not an untouched kaiming-uniform: consistent with real training"),
        ("0.0039371", "the numbers of an untouched kaiming-uniform"),
        ("0.0039", "too few digits"),
        ("0.5", "of no initial family that is listed"),
        ("0", "fc is dead"),
        ("inf", "fc is dead"),
    ],
)
def test_the_second_line_is_the_answer(std: str, words: str) -> None:
    first, second, *_ = answer_number_pair(KIMI, "0.0", std).as_text().splitlines()
    assert second.startswith("In short: ") and words in second
    assert "moved" not in first


def test_a_mean_of_one_digit_speaks_against_nothing() -> None:
    assert "Printed with six digits it only" in answer_number_pair(KIMI, "0.0", "0.004037").as_text()
    assert "says nothing" in answer_number_pair((64, 192), "0.0", "0.5").as_text()
    assert "closer to zero than chance" in answer_number_pair((64, 192), "0.000000", "0.5").as_text()
    assert "too. It only speaks" in answer_number_pair(KIMI, "0.000000", "0.004037").as_text()


def test_digits_that_were_not_printed_decide_nothing() -> None:
    assert "decides nothing" in answer_number_pair(KIMI, "0.0", "0.0039").as_text()
    assert "not an untouched draw" in answer_number_pair(KIMI, "0.0", "0.003900").as_text()


def test_a_mean_away_from_zero_is_said() -> None:
    text = answer_number_pair(KIMI, "-0.000029", "0.003937").as_text()
    assert "standard errors (3.2e-07) from zero" in text and "drawn in bfloat16" in text
    assert "drawn in bfloat16 on a CPU has it there" not in answer_number_pair(KIMI, "0.000029", "0.003937").as_text()
    assert native_mean(KIMI) == pytest.approx(-2.9e-5, rel=0.01)  # drawn with torch at three seeds: -2.9e-05


@pytest.mark.parametrize("text", ["7168", "0x5", "7168*21504", "x", "-1x4"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shape(text)


@pytest.mark.parametrize("std", ["-1", "abc", "", "1e308", "3.41e38"])
def test_bad_numbers_are_refused(std: str) -> None:
    with pytest.raises(UsageError):
        answer_number_pair(KIMI, "0", std)


@pytest.mark.parametrize("std", ["0.0039371", "0.004"])
def test_a_mean_that_no_draw_has_is_no_untouched_draw(std: str) -> None:
    assert "not an untouched kaiming-uniform: its mean is not 0" in answer_number_pair(KIMI, "0.001", std).as_text()
