"""The source notebooks: structure, language, no stored outputs, runnable from any folder."""

from __future__ import annotations

import ast
import json
import re

import nbformat
import pytest

from eagle3lab.core.paths import notebooks_folder
from eagle3lab.runs.parameters import NOTEBOOKS, STANDALONE, check_notebook

ALL = sorted(notebooks_folder().glob("*.ipynb"))
ALLOWED_IMPORTS = ("eagle3lab.steps",)


@pytest.fixture(params=[path.stem for path in ALL])
def name(request) -> str:
    return request.param


@pytest.fixture
def notebook(name: str) -> dict:
    return json.loads((notebooks_folder() / f"{name}.ipynb").read_text())


def text(cell: dict) -> str:
    return "".join(cell["source"])


def test_every_notebook_of_the_lab_is_there() -> None:
    assert set(NOTEBOOKS | STANDALONE) <= {path.stem for path in ALL}


def test_valid_and_stable_ids(notebook: dict) -> None:
    nbformat.validate(nbformat.from_dict(notebook))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    # Names given by hand: a tool that renumbers cells would turn every diff into noise.
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z][a-z0-9-]*", one) for one in ids)


def test_parameters_follow_the_model(name: str) -> None:
    if name in NOTEBOOKS | STANDALONE:
        check_notebook(notebooks_folder() / f"{name}.ipynb")


def test_opens_with_what_it_shows_and_what_it_costs(name: str, notebook: dict) -> None:
    first = notebook["cells"][0]
    assert first["cell_type"] == "markdown" and text(first).startswith(f"# {name[:2]} · ")
    lines = [line for line in text(first).splitlines() if line.strip()]
    assert lines[1].startswith("This notebook shows ") and lines[1].endswith(".") and lines[1].count(". ") == 0
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["smollm2", "kimi-thin", "kimi-k2.5"]


def test_ends_with_a_result_computed_from_the_run(notebook: dict) -> None:
    last = notebook["cells"][-1]
    assert last["cell_type"] == "code" and text(last).startswith("say(")
    assert sum(".publish(" in text(cell) for cell in notebook["cells"]) >= 1, "at least one figure"


def test_prose_holds_no_results(notebook: dict) -> None:
    """Numbers of a run belong to the run: after the title cell, prose has none with a decimal point or a percent."""
    for cell in notebook["cells"][1:]:
        if cell["cell_type"] == "markdown":
            found = re.findall(r"\d+\.\d+|\d+ ?%", text(cell))
            assert not found, (cell["id"], found)


def test_no_logic_no_paths_no_magic(notebook: dict) -> None:
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(text(cell))  # a magic is no Python
        for node in ast.walk(tree):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.Try | ast.If)
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").startswith(ALLOWED_IMPORTS), node.module
            assert not isinstance(node, ast.Import)
        assert "/home" not in text(cell) and "../" not in text(cell)
