"""Parameters that a later cell sets again or that are derived, executed copies, cells of a test that may fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .pairs_runs import notebook, ran, tagged

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
        (["from config import lr\nprint(lr)"], 2),
        (["import config as lr"], 2),
        (["with open('x') as lr:\n    pass"], 2),
        (["if True:\n    lr = 2"], 2),
        (["if x:\n    lr = 2\nelse:\n    lr = 3"], 2),
        (["try:\n    lr = 2\nexcept OSError:\n    pass"], 2),
        (["try:\n    from config import lr\nexcept ImportError:\n    lr = 2"], 2),
        (["del lr\nlr = 2"], 2),
        (["print(lr := 2)"], 2),
        (["%time lr = 2"], 2),
        (["def lr():\n    pass"], 2),
        (["for i in range(3):\n    lr = i"], 2),
        (["def step():\n    return lr", "lr = 1e-3\nstep()"], 3),
        (["class Run:\n    def step(self): return lr", "lr = 1e-3\nRun().step()"], 3),
        (["rate = lambda: lr", "lr = 1e-3"], 3),
        (["from fastai.vision.all import *", "if quick:\n    lr = 2", "lr = 3"], 4),
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
        ["def step():\n    return lr", "step()", "lr = 1e-3"],
        ["def rate(): return lr\ndef step(): return rate()", "%timeit step()", "lr = 1e-3"],
        ["@register\ndef step():\n    return lr", "lr = 1e-3"],
        ["class Run:\n    def step(self): return lr", "Run().step()", "lr = 1e-3"],
        ["rate = lambda: lr", "rate()", "lr = 1e-3"],
        ["with open(lr) as file:\n    pass", "lr = 1e-3"],
        ["try:\n    lr = float(lr)\nexcept ValueError:\n    lr = 1"],
        ["print(train(lr))", "lr = 1e-3"],
        ["lr, other = 5e-5, 2"],
        ["train(lr)\ndel lr"],
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


@pytest.mark.parametrize(
    "cells",
    [
        ["if quick:\n    lr = 2", "train(lr)"],
        ["from config import *\ntrain(lr)"],
        ["%run settings.py", "train(lr)"],
        ["try:\n    from config import lr\nexcept ImportError:\n    pass", "train(lr)"],
        ["def short():\n    global lr\n    lr = 2", "short()", "train(lr)"],
        ["for x in y:\n    lr = 2"],
        ["if a and (lr := 3):\n    pass"],
    ],
)
def test_nothing_is_claimed_where_it_is_open(cells: list[str]) -> None:
    report = visit_facts({**notebook(tagged("lr = 1e-4"), *cells), "parameters": {"lr": 5e-5}})
    [found] = [f for f in report.findings if f.code == "notebook-parameters"]
    assert found.severity == "info" and "may set lr again" in found.message


@pytest.mark.parametrize(
    "cell",
    [
        "k = 1\nif True:\n    v = k * 2",
        "k = 1\nif k > 1:\n    v = 3\nelse:\n    v = 4",
        "k = 1\ntry:\n    v = k\nexcept OSError:\n    v = 2",
        "k = 1\nfor i in range(k):\n    v = i",
        "k = 1\nv = 1\nv += k",
        "k = 1\nprint(v := k)",
        "k = 1\ndef f(): return k\nv = f()",
        "k = 1\ndef g(): return k\ndef f(): return g()\nv = f()",
        "k = 1\nm = lambda a: a + k\nv = m(2)",
        "k = 1\nv = lambda a, b=k: a + b",
        "k = 1\nv = sorted(rows, key=lambda row: row * k)",
    ],
)
def test_a_value_that_is_derived(cell: str) -> None:
    [(severity, message)] = serious("notebook-parameters", tagged(cell), "print(v)", parameters={"k": 5})
    assert severity == "warning" and message.startswith("v is computed from k")


@pytest.mark.parametrize(
    "cell",
    [
        "k = 1\nm = lambda a: a + k",
        "k = 1\nm = {'plus': lambda a: a + k}",
        "k = 1\ndef f(): return k",
        "k = 1\ndef f(k): return k\nv = f(2)",
        "k = 1\nv = [k for k in range(3)]",
        "k = 1\nv = k\nv = 3",
        "k = 1\nk = k + 1",
        "if True:\n    k = 1\nv = 2",
    ],
)
def test_a_value_that_is_not_derived(cell: str) -> None:
    assert not serious("notebook-parameters", tagged(cell), "print(k)", parameters={"k": 5})
    assert not serious("notebook-parameters", tagged(cell), "print(k)")


INJECTED = {"source": "# Parameters\nlr = 5e-05", "tags": ["injected-parameters"]}


def executed(*cells: str | dict[str, Any], **given: Any) -> list[tuple[str, str]]:
    noted = {"parameters": given, "version": "2.7.0"}
    report = visit_facts(notebook(*cells, papermill=noted))
    return [(f.severity, f.message) for f in report.findings if f.code == "notebook-parameters"]


def test_an_executed_copy_whose_parameter_was_ignored() -> None:
    [(severity, message)] = executed(INJECTED, "lr = 1e-4; steps = 3", "print(lr * steps)", lr=5e-5)
    assert severity == "error" and message.startswith("no cell is tagged parameters: lr is injected")
    injected = {"source": "learning_rate = 5e-05", "tags": ["injected-parameters"]}
    [(severity, message)] = executed(tagged("lr = 1e-4"), injected, "print(lr)", learning_rate=5e-5)
    assert severity == "error" and "did you mean lr" in message


def test_an_executed_copy_whose_parameter_took_effect() -> None:
    assert not executed(tagged("lr = 1e-4"), INJECTED, "print(lr)", lr=5e-5)
    assert not executed("lr = 1e-4")
    [(severity, _)] = executed(INJECTED, "train(lr)", lr=5e-5)
    assert severity == "warning"
    facts = notebook(INJECTED, "lr = 1", papermill={"parameters": {"lr": 5e-5}})
    assert not visit_facts({**facts, "parameters": {}}).findings


ERROR, TEXT = {"output_type": "error", "ename": "E", "evalue": "no"}, {"output_type": "stream", "text": "x"}


@pytest.mark.parametrize(
    ("cells", "severity", "words"),
    [
        ([ran("1", None, ERROR), ran("2", None)], "error", "cell 1 of 2 failed with E: no"),
        ([{"source": "1", "outputs": [ERROR]}], "error", "cell 1 of 1 failed with E: no"),
        ([ran("1", 3), ran("2", 1), ran("3", 2)], "warning", "out of order: 3, 1, 2"),
    ],
)
def test_what_an_executed_copy_tells(cells: list[dict[str, Any]], severity: str, words: str) -> None:
    [(told, message)] = serious("notebook-ran", *cells)
    assert told == severity and words in message


@pytest.mark.parametrize(
    "cells",
    [
        [ran("1", 1), ran("2", 5), ran("3", 9)],
        [ran("1", 1), {**ran("2", 1), "tags": ["skip-execution"]}, ran("3", 2)],
        [{**ran("1", None, ERROR), "tags": ["raises-exception"]}],
        [ran("1", None, TEXT), ran("2", None)],
    ],
)
def test_an_executed_copy_that_is_fine(cells: list[dict[str, Any]]) -> None:
    assert not serious("notebook-ran", *cells)
    report = visit_facts(notebook(*cells, papermill={"version": "2.7.0"}))
    assert not [f for f in report.findings if f.code == "notebook-ran"]


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
