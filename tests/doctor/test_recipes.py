"""Contents of states in other words: what is understood, what is not and is said, and what is no fault."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from eagle3lab.doctor.recipes import contents
from eagle3lab.doctor.row_copies import copied_rows, unclear_copies

from .conftest import serious, visit_facts

SHAPE, POINTS, H = (4, 24), (2, 30, 58), 8
EVERY = range(24)
FACTS = {"dtype": "F16", "shape": [4, 24], "points": [2, 30, 58], "H": 8}


def built(recipe: str) -> np.ndarray:
    found = contents(recipe, SHAPE, points=POINTS, block=H, dtype="F16")
    values = None if found is None else found[0]
    assert values is not None, recipe
    return values


def cells(*places: tuple[Any, Any]) -> np.ndarray:
    wanted = np.zeros(SHAPE, dtype=bool)
    for rows, columns in places:
        wanted[np.ix_(np.atleast_1d(rows), np.atleast_1d(columns))] = True
    return wanted


ROW_2 = [(2, EVERY)]


@pytest.mark.parametrize(
    ("recipe", "places"),
    [
        *[
            (f"ones; {part}", ROW_2)
            for part in (
                *("row 2 filled with NaN", "row 2 entirely NaN", "whole row 2 NaN", "row 2 holds nothing but NaN"),
                *("row 2: NaN", "row 2 -> NaN", "row 2 := NaN", "row 2 consists of NaN only", "NaN in row 2"),
                *("row 2 has only NaNs", "the third row is NaN", "all-NaN row 2", "row 2 is not-a-number"),
                *("row 2 was overwritten with NaN", "[2] = NaN", "aux[2, :] = nan", "token 2 all NaN", "row #2 NaN"),
                *("row 2 NaN in all three points", "row 2 (NaN)", "row 2 is NaN, as in issue reports"),
            )
        ],
        *[
            (f"{base} row 2 all NaN", ROW_2)
            for base in (
                *("all ones;", "ones with", "ones but", "ones where", "ones, and", "ones\n", "everything is one;"),
                *("normal(0, 1), seed 0;", "normal(0, 1) with seed 3;", "standard normal;", "gaussian;", "random;"),
                *("constant 1;", "0.5 everywhere;", "half;", "all values are 1;", "every row is 1;", "filled with 1;"),
                *("np.ones((4, 24));", "torch.randn(4, 24);", "normal(mean=0, std=1);", "uniform(-1, 1);", "rand;"),
                *("normal with mean 0 and std 1;", "random normal values;", "np.random.normal(0, 1, (4, 24));"),
            )
        ],
        ("ones, except row 2, which is all NaN", ROW_2),
        ("ones except row 2 is NaN", ROW_2),
        ("row 2 all NaN; the rest ones", ROW_2),
        ("row 2 NaN, all other rows 1", ROW_2),
        ("ones; row 2 NaN in point 30 only", [(2, range(8, 16))]),
        ("ones; NaN in row 2, points 2 and 58", [(2, [*range(8), *range(16, 24)])]),
        ("ones; [2, 3] NaN", [(2, 3)]),
        ("ones; one NaN at [2, 3]", [(2, 3)]),
        ("ones; a single NaN at row 2, column 3", [(2, 3)]),
        ("ones; two NaNs in row 2", [(2, [0, 1])]),
        ("ones; NaN at (2, 3)", [(2, 3)]),
        ("ones; NaN at [2, 3] and at [0, 9]", [(2, 3), (0, 9)]),
        ("ones; row 1, column 3 and row 2, column 5 are NaN", [(1, 3), (2, 5)]),
        ("ones; rows 1 and 3, columns 0 to 1 all NaN", [([1, 3], [0, 1])]),
        ("ones; every second row NaN", [([1, 3], EVERY)]),
        ("ones; the second and third rows are NaN", [([1, 2], EVERY)]),
        ("ones; row 1 zero in point 2, NaN in point 30", [(1, range(8, 16))]),
        ("ones; [2][3] = np.nan", [(2, 3)]),
        ("ones; rows [2, 3] = float('nan')", [([2, 3], EVERY)]),
        ("ones. Row 2 is all NaN, the rest is finite.", ROW_2),
        ("ones - row 2 all NaN, nothing else", ROW_2),
        ("uniform in [0, 1]; all of row 2 is NaN", ROW_2),
        ("ones; odd rows are NaN", [([1, 3], EVERY)]),
        ("ones; rows from 2 on are NaN", [([2, 3], EVERY)]),
        ("ones; every row after row 1 is NaN", [([2, 3], EVERY)]),
        ("ones; rows 1:3 NaN", [([1, 2], EVERY)]),
        ("ones; rows 1 through 2 NaN", [([1, 2], EVERY)]),
        ("ones; [-1, :] = nan", [(3, EVERY)]),
        ("ones; [::2, 0] = nan", [([0, 2], 0)]),
        ("ones; row 2 all NaN, row 3 all zero", ROW_2),
        ("ones; NaN in row 2, zero in row 3", ROW_2),
        ("ones; row 3 all zero and row 2 all NaN", ROW_2),
        ("ones; NaN in row 2, point 30 and inf in row 3", [(2, range(8, 16))]),
    ],
)
def test_nan_in_other_words(recipe: str, places: Any) -> None:
    np.testing.assert_array_equal(np.isnan(built(recipe)), cells(*places))
    assert any(severity == "error" and "NaN in" in said for severity, said in serious(FACTS | {"recipe": recipe}))


@pytest.mark.parametrize(
    ("recipe", "value", "places"),
    [
        ("ones; inf at [0, 3]", np.inf, [(0, 3)]),
        ("ones; an inf at row 0, column 3", np.inf, [(0, 3)]),
        ("ones; minus infinity in row 0, column 3", -np.inf, [(0, 3)]),
        ("ones; column 3 of row 0 is infinite", np.inf, [(0, 3)]),
        ("ones; [0, 3] and [2, 9] = inf", np.inf, [(0, 3), (2, 9)]),
        ("ones; [0, 3], [2, 9] = +inf", np.inf, [(0, 3), (2, 9)]),
        ("ones; every second row all zero", 0, [([1, 3], EVERY)]),
        ("ones; row 2 all NaN, row 3 all zero", 0, [(3, EVERY)]),
        ("ones; row 1 is zeroed", 0, [(1, EVERY)]),
        ("ones; rows 2 to 3 are padding (zero)", 0, [([2, 3], EVERY)]),
        ("ones; rows 2-3 zeroed out", 0, [([2, 3], EVERY)]),
        ("ones; [1, 0:5] = 65504", 65504, [(1, range(5))]),
        ("ones; [1, 0-4] = 65504", 65504, [(1, range(5))]),
        ("ones; [1, 0..4] = max", 65504, [(1, range(5))]),
        ("ones; five values of row 1 at 65504", 65504, [(1, range(5))]),
        ("ones; row 1, 5 values at 65504", 65504, [(1, range(5))]),
        ("ones; the first five values of row 1 saturate at 65504", 65504, [(1, range(5))]),
        ("ones; row 1 is empty (all zeros)", 0, [(1, EVERY)]),
        ("ones; row 1, columns 0 to 4 clipped at the fp16 maximum", 65504, [(1, range(5))]),
        ("ones; [0, 5] = 3000, a massive activation", 3000, [(0, 5)]),
    ],
)
def test_other_values_in_other_words(recipe: str, value: float, places: Any) -> None:
    np.testing.assert_array_equal(built(recipe) == np.float32(value), cells(*places))


@pytest.mark.parametrize(
    "recipe",
    [
        *("ones; row 9 all NaN", "ones; rows 1 to 9 NaN", "ones; [9, 3] = inf", "ones; [1, 0:50] = 65504"),
        *(
            "ones; row 2 is strange",
            "ones; row 2 NaN or zero",
            "ones; row 2 is not NaN",
            "ones; no NaN",
            "ones; [0, 3]",
        ),
        *(
            "ones; row 2 all NaN, except point 30",
            "ones; row 2 all NaN, later overwritten by zero",
            "ones except row 2",
        ),
        *("ones; all rows but the last NaN", "ones; all rows but row 2 NaN", "ones; row 2 NaN, but not in point 30"),
        *(
            "first 3 rows NaN",
            "ones; [0, 3] in point 58 = inf",
            "ones; row 3 is almost a copy of row 2",
            "uniform(2, 1)",
        ),
        *(
            "ones; five values at 65504",
            "ones; rows 2 to 3 are padding",
            "ones; row 2 has zero mean",
            "ones; no NaN",
            "",
        ),
    ],
)
def test_what_is_not_understood_is_said(recipe: str) -> None:
    assert contents(recipe, SHAPE, points=POINTS, block=H) is None
    if recipe:
        assert not serious(FACTS | {"recipe": recipe})
        said = [f.message for f in visit_facts(FACTS | {"recipe": recipe}).findings]
        assert any("not understood" in one for one in said)


@pytest.mark.parametrize(
    "recipe",
    [
        *("ones", "standard normal", "0.5 everywhere", "ones; [0, 5] = 3000 (a massive one)"),
        *("ones; rows 2 and 3 equal 5", "ones; five values of row 1 and row 2 at 30", "ones; row 1 and row 2 = 3"),
    ],
)
def test_healthy_states(recipe: str) -> None:
    assert not serious(FACTS | {"recipe": recipe})


@pytest.mark.parametrize(
    ("recipe", "group"),
    [
        *[
            (recipe, [2, 3, 4])
            for recipe in (
                *("rows 3 and 4 repeat row 2", "rows 3 and 4 are the same as row 2", "rows 3 and 4 hold row 2 again"),
                *("rows 2, 3 and 4 are one and the same row", "rows 3 and 4 match row 2 bit for bit"),
                *("rows 3 and 4 were copied from row 2", "rows 3 and 4 duplicated from row 2"),
                *("row 2 is repeated in rows 3 and 4", "rows 3 and 4 are duplicates of the row before"),
                *("rows 3 and 4 do not differ from row 2", "rows 3 and 4 contain row 2's values", "rows 3, 4 <- row 2"),
                *("rows 3 and 4 repeat row 2 for different tokens", "rows 2..4 share the same bits"),
                *("rows 3 and 4 are bit-equal copies of row 2 although their tokens differ", "rows 3, 4 = row 2"),
            )
        ],
        ("the last row is a bit-equal copy of the one before it", [4, 5]),
        ("row 5 is the previous row once more", [4, 5]),
        ("each row after row 2 repeats it", [2, 3, 4, 5]),
        ("all rows are identical", [0, 1, 2, 3, 4, 5]),
        ("row[3] = row[2]", [2, 3]),
        ("from row 3 on every row is the same", [3, 4, 5]),
        ("all rows are built in the same way", None),
        ("the values of row 3 and row 4 lie near 1", None),
        ("rows 3 and 4 have the same argmax as row 2", None),
        ("rows 3 and 4 are close to row 2, but not the same", None),
        ("rows 3 and 4 are row 2 plus 0.01", None),
        ("no two rows are the same", None),
        ("rows 2 and 3 equal zero", None),
        ("row 4 carries the same token as row 2", None),
        ("every row is different from the others", None),
    ],
)
def test_copies_in_other_words(recipe: str, group: list[int] | None) -> None:
    assert copied_rows(recipe, 6) == ([group] if group else [])
    facts = {"tokens": [[1, 2, 3, 4, 5, 6]], "state_rows_argmax": [[2, 3, 4, 4, 4, 4]], "recipe": recipe}
    errors = [f for f in visit_facts(facts).findings if f.severity == "error"]
    assert [f.evidence.get("rows") for f in errors] == ([group] if group else [])


def test_copies_that_name_no_rows_are_said() -> None:
    assert unclear_copies("a row is repeated", 6) == ["a row is repeated"]
    facts = {"tokens": [[1, 2, 3]], "state_rows_argmax": [[2, 3, 4]], "recipe": "a row is repeated"}
    assert any("does not say which rows" in f.message for f in visit_facts(facts).findings)


def test_copies_among_contents() -> None:
    recipe = "normal(0, 1); rows 2 and 3 are bit-equal copies of row 1"
    values = built(recipe)
    assert (values[1] == values[2]).all() and (values[1] == values[3]).all() and (values[0] != values[1]).any()
    assert serious(FACTS | {"recipe": recipe}) == [("error", "rows 1 to 3 are bit-equal for different tokens")]


def test_any_text_ends_soon() -> None:
    """Words of the grammar in any order: no error, and no time that grows with the text."""
    grammar = "ones row rows 2 3 [1, 0:5] = nan inf , ; and every second all ( ) normal(0, 1) seed the same as copy"
    words = grammar.split()
    draw = random.Random(0)
    start = time.process_time()
    for length in [3, 8, 20, 60] * 20 + [400] * 5:
        text = " ".join(draw.choice(words) for _ in range(length))
        contents(text, SHAPE, points=POINTS, block=H)
        copied_rows(text, 4)
    for text in (
        "ones; row " + "1, " * 600,
        "all " * 500,
        "ones; [" + "1" * 1000,
        "(" * 900,
        "for their " * 190,
        "-" * 1999,
    ):
        contents(text, SHAPE, points=POINTS, block=H)
        copied_rows(text, 4)
    assert time.process_time() - start < 10
