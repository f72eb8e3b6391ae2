"""Notebook files of other formats, tags on the wrong cell, and counts of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.run import Inputs, visit

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def code(source: str, *tags: str, count: int | None = None) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {"tags": [*tags]},
        "outputs": [],
        "execution_count": count,
    }


def text(source: str, *tags: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": source, "metadata": {"tags": [*tags]}}


def told(place: Path, value: Any) -> list[tuple[str, str, str]]:
    path = place / "a.ipynb"
    path.write_text(json.dumps(value))
    found = visit(Inputs(notebooks=str(path))).findings
    return [(f.severity, f.message, f.fix) for f in found if f.severity != "info"]


def notebook(*cells: Any, metadata: dict[str, Any] = KERNEL) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


LR = code("lr = 1e-4", "parameters")
FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "nbformat 3": (
        {"worksheets": [{"cells": []}], "metadata": {}, "nbformat": 3},
        "error",
        "is of nbformat 3, which has worksheets",
        "jupyter nbconvert --to notebook --inplace",
    ),
    "a number for a cell": (
        notebook(LR, 1),
        "error",
        "cell 2 is a int, a JSON object is needed",
        "write a.ipynb again",
    ),
    "the tag on a text": (
        notebook(text("# Parameters", "parameters"), code("lr = 1e-4")),
        "warning",
        "the tag parameters stands on text cell 1",
        "tag the code cell",
    ),
    "no Python": (
        notebook(code("lr = = 1e-4", "parameters"), code("print(lr)")),
        "error",
        "cell 1, tagged parameters, is no Python: invalid syntax (line 1)",
        "correct the cell",
    ),
    "never closed": (
        notebook(code("steps = (3,\nlr = 1", "parameters")),
        "error",
        "cell 1, tagged parameters, is no Python",
        "correct the cell",
    ),
    "injected and overwritten": (
        notebook(code("# Parameters\nlr = 0.5", "injected-parameters", count=1), code("lr = 1e-4", count=2)),
        "error",
        "lr is injected at the top and then overwritten",
        "tag the cell with the assignments",
    ),
    "counts of two runs": (
        notebook(code("a = 1", count=1), code("a", count=1)),
        "warning",
        "cells with one execution count are of several runs: 1, 1",
        "run all cells",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(tmp_path: Path, name: str) -> None:
    value, severity, message, fix = FAULTS[name]
    found = told(tmp_path, value)
    assert any(one == severity and message in said and fix in what for one, said, what in found), found


@pytest.mark.parametrize(
    "value",
    [
        notebook(LR, code("print(lr)")),
        notebook(text("# lr", "hide"), LR),
        notebook(code("%load_ext autoreload\nlr = 1", "parameters")),
        notebook(code("files = !ls\nlr = 1", "parameters")),
        notebook(code("lr <- 1", "parameters"), metadata={"kernelspec": {**KERNEL["kernelspec"], "language": "R"}}),
        notebook(
            {**LR, "execution_count": 1}, code("# Parameters\nlr = 0.5", "injected-parameters", count=2),
            code("print(lr)", count=3),
        ),
        notebook(code("a = 1", count=4), code("# a remark", count=5), code(""), code("a", count=9)),
    ],
    ids=["plain", "another tag", "magic", "shell", "R", "injected", "gaps"],
)  # fmt: skip
def test_a_healthy_notebook(tmp_path: Path, value: Any) -> None:
    assert told(tmp_path, value) == []
