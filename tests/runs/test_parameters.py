"""Parameters: strict models, words of the command line, and the parameters cells read without running them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from toys import notebook

from eagle3lab.core.errors import UsageError
from eagle3lab.core.paths import notebooks_folder
from eagle3lab.runs.parameters import (
    NOTEBOOKS,
    STANDALONE,
    check_notebook,
    declared_parameters,
    parse_assignments,
    validate,
)


def test_frozen_notebook_parameters() -> None:
    common = ["profile", "preset", "run", "seed"]
    assert {name: list(model.model_fields) for name, model in NOTEBOOKS.items()} == {
        "00_preflight": common,
        "01_load_target": common,
        "02_capture_hidden_states": common,
        "03_train_drafter": common,
        "04_inspect_fc": [*common, "draft"],
        "05_measure_acceptance": [*common, "draft"],
    }
    assert list(STANDALONE["06_zero_acceptance"].model_fields) == common
    assert list(STANDALONE["07_compare_runs"].model_fields) == [*common, "runs"]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("03_train_drafter", {"sed": 1}, "unknown parameter 'sed' for 03_train_drafter; did you mean 'seed'?"),
        ("03_train_drafter", {"seed": "1"}, "parameter seed of 03_train_drafter is '1' (str)"),
        ("03_train_drafter", {"seed": True}, "is True (bool)"),
        ("03_train_drafter", {"seed": -1}, "is -1 (int)"),
        ("03_train_drafter", {"draft": "x"}, "unknown parameter 'draft'"),
        ("03_train_drafter", {"preset": "quik"}, "unknown preset 'quik'; did you mean 'quick'?"),
        ("03_train", {}, "did you mean '03_train_drafter'?"),
    ],
)
def test_bad_values_name_the_nearest(name: str, values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        validate(name, values)


def test_words_of_the_command_line_get_the_declared_types() -> None:
    words = ["seed=7", "learning_rate=1e-3", "train_samples=none", "humaneval=true", "draft=12"]
    assert parse_assignments(words) == {
        "seed": 7,
        "learning_rate": 0.001,
        "train_samples": None,
        "humaneval": True,
        "draft": "12",
    }


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("seed", "it is NAME=VALUE"),
        ("sead=1", "did you mean 'seed'?"),
        ("preset=quick", "--preset"),
        ("seed=one", "'one' (str); seed is int"),
        ("seed=1.5", "(float); seed is int"),
        ("train_steps=__import__('os')", "train_steps is int"),
        ("train_samples=[1]", "train_samples is int or None"),
        ("train_steps=" + "(" * 5000, "train_steps is int"),
    ],
)
def test_bad_words(word: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_assignments([word])
    with pytest.raises(UsageError, match="given twice"):
        parse_assignments(["seed=1", "seed=2"])


@pytest.mark.parametrize("name", [*NOTEBOOKS, *STANDALONE])
def test_source_notebooks_follow_their_models(name: str) -> None:
    check_notebook(notebooks_folder() / f"{name}.ipynb")


def broken(value: dict, change: str) -> dict:
    """A good notebook with one thing wrong."""
    cells, metadata = value["cells"], value["metadata"]
    if change == "no tag":
        cells[0]["metadata"] = {}
    elif change == "two tags":
        cells[1]["metadata"] = {"tags": ["parameters"]}
    elif change == "derived":
        cells[0]["source"] += "\nsteps: int = seed * 2  # s"
    elif change == "untyped":
        cells[0]["source"] += "\nsteps = 2  # s"
    elif change == "no comment":
        cells[0]["source"] += "\nsteps: int = 2"
    elif change == "extra":
        cells[0]["source"] += "\nsteps: int = 2  # s"
    elif change == "other default":
        cells[0]["source"] = cells[0]["source"].replace("seed: int = 0", "seed: int = 1")
    elif change == "kernel":
        metadata["kernelspec"]["name"] = "my-env"
    elif change == "no kernel":
        del metadata["kernelspec"]
    elif change == "allow errors":
        metadata["execution"] = {"allow_errors": True}
    elif change == "timeout":
        metadata["execution"] = {"timeout": 9999}
    elif change == "skipped":
        cells[1]["metadata"] = {"tags": ["skip-execution"]}
    elif change == "outputs":
        cells[1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    return value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no tag", "0 cells tagged"),
        ("two tags", "2 cells tagged"),
        ("derived", "parameter steps is computed (seed * 2)"),
        ("untyped", "'steps = 2  # s' in the parameters cell"),
        ("no comment", "parameter steps has no comment"),
        ("extra", "declares parameter 'steps'"),
        ("other default", "seed: int = 1"),
        ("kernel", "kernel 'my-env'"),
        ("no kernel", "kernel None"),
        ("allow errors", "execution.allow_errors"),
        ("timeout", "execution.timeout"),
        ("skipped", "skip-execution"),
        ("outputs", "holds outputs"),
    ],
)
def test_a_broken_notebook_is_refused(tmp_path: Path, change: str, words: str) -> None:
    path = tmp_path / "03_train_drafter.ipynb"
    path.write_text(json.dumps(notebook("x = 1")))
    check_notebook(path)
    path.write_text(json.dumps(broken(notebook("x = 1"), change)))
    with pytest.raises(UsageError, match=re.escape(words)):
        check_notebook(path)


def test_papermill_reads_the_same_declaration(tmp_path: Path) -> None:
    from papermill import inspect_notebook

    path = tmp_path / "05_measure_acceptance.ipynb"
    path.write_text(json.dumps(notebook("x = 1", draft=True)))
    ours = {one.name: (one.kind, repr(one.default).replace("'", '"'), one.help) for one in declared_parameters(path)}
    theirs = inspect_notebook(str(path))
    assert ours == {n: (p["inferred_type_name"], p["default"], p["help"]) for n, p in theirs.items()}
