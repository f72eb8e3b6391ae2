"""Parameters that a later cell sets again, and cells of a test that may fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .pairs_runs import notebook, tagged

ROOT = Path(__file__).parents[2]


def serious(code: str, *cells: str | dict[str, Any], **facts: Any) -> list[tuple[str, str]]:
    report = visit_facts({**notebook(*cells), **facts})
    return [(f.severity, f.message) for f in report.findings if f.code == code and f.severity != "info"]


def parameters(*cells: str | dict[str, Any], **given: Any) -> list[tuple[str, str]]:
    return serious("notebook-parameters", tagged("lr = 1e-4\nsteps = 3"), *cells, parameters=given)


@pytest.mark.parametrize(
    ("cells", "cell"),
    [
        (["lr = 1e-3; print(lr)"], 2),
        (["import torch", "lr: float = 1e-3", "train(lr)"], 3),
        (["print(f'{lr:g}')\nlr", "lr = float('1e-3')"], 3),
        (["lr, other = 1e-3, 2"], 2),
        (["import yaml\nlr = yaml.safe_load('1e-3')"], 2),
        (["for lr in (1e-3, 1e-4):\n    train(lr)"], 2),
        ([{"source": "lr = 5e-5", "tags": ["injected-parameters"]}, "lr = 1e-3"], 3),
        (["%matplotlib inline\n!pip list\nlr = 1e-3"], 2),
        (["%load_ext autoreload\n%autoreload 2", "%%time\nlr = 1e-3"], 3),
    ],
)
def test_what_is_given_is_overwritten(cells: list[str | dict[str, Any]], cell: int) -> None:
    [(severity, message)] = parameters(*cells, lr=5e-5)
    assert severity == "error" and message.startswith(f"cell {cell} sets lr again") and "is overwritten" in message
    [(severity, message)] = parameters(*cells)
    assert severity == "warning" and "would be overwritten" in message
    assert not parameters(*cells, steps=5)


def test_the_line_told_is_the_one_under_a_cell_magic() -> None:
    [(_, message)] = parameters("%%time\nimport torch\nlr = 1e-3", lr=5e-5)
    assert "(lr = 1e-3)" in message


@pytest.mark.parametrize(
    "cells",
    [
        ["train(lr)", "lr = 1e-3"],
        ["rate = lr * 2", "lr = 1e-3"],
        ["lr = lr or 1e-3"],
        ["lr = float(lr)"],
        ["lr *= 2"],
        ["if not lr:\n    lr = 1e-3"],
        ["def step():\n    return lr", "lr = 1e-3"],
        ["settings = {name: globals()[name] for name in ('lr', 'steps')}", "lr = 1e-3"],
        ["%run setup.py", "lr = 1e-3"],
        ["!train --lr {lr}", "lr = 1e-3"],
        ["%time train(lr)", "lr = 1e-3"],
        ["%%bash\necho $lr", "lr = 1e-3"],
        ["lr = 5e-5"],
        [{"source": "lr = 1e-3", "tags": ["skip-execution"]}, "train(lr)"],
        [{"source": "lr = 5e-5", "tags": ["injected-parameters"]}, "train(lr)"],
        [{"source": "lr = 1e-3", "cell_type": "markdown"}, "train(lr)"],
        ["def train(lr=1e-3):\n    lr = 2 * lr", "losses = [lr for lr in (1, 2)]"],
    ],
)
def test_what_is_given_takes_effect(cells: list[str | dict[str, Any]]) -> None:
    assert not parameters(*cells, lr=5e-5)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_own_notebooks_set_no_parameter_again(path: Path) -> None:
    assert not [f for f in visit(Inputs(notebooks=str(path))).findings if "sets" in f.message]


RAISES = {"source": "1/0", "tags": ["raises-exception"]}


@pytest.mark.parametrize("runner", ["nbmake", "nbmake 1.5", ""])
def test_a_cell_of_a_test_that_may_fail(runner: str) -> None:
    [(severity, message)] = serious("notebook-limits", "x = 1", RAISES, used_as="test", runner=runner)
    assert severity == "error" and message.startswith("cell 2 is tagged raises-exception in a test notebook")


@pytest.mark.parametrize(
    ("cell", "facts"),
    [
        (RAISES, {"runner": "nbmake"}),  # no test: the mark of a demonstration
        (RAISES, {"used_as": "test", "runner": "papermill"}),  # papermill fails on it all the same
        ({"source": "1/1", "tags": ["hide-input"]}, {"used_as": "test", "runner": "nbmake"}),
        ({"source": " ", "tags": ["raises-exception"]}, {"used_as": "test", "runner": "nbmake"}),
    ],
)
def test_a_cell_that_fails_or_may_fail(cell: dict[str, Any], facts: dict[str, Any]) -> None:
    assert not serious("notebook-limits", "x = 1", cell, **facts)
