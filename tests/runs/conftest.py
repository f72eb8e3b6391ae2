"""Toy notebooks and a runs folder of their own for every test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from toys import notebook

from eagle3lab.runs.directory import Run


@pytest.fixture(autouse=True)
def runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/` inside the test's folder."""
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def toys(tmp_path: Path) -> Callable[..., Path]:
    """Write toy notebooks: `toys(name=("cell", ...))` with digits first as `n00_preflight`."""

    def write(**cells: tuple[str, ...]) -> Path:
        folder = tmp_path / "toys"
        folder.mkdir(exist_ok=True)
        for name, sources in cells.items():
            stem = name.removeprefix("n")
            value = notebook(*sources, draft=stem[:2] in {"04", "05"})
            (folder / f"{stem}.ipynb").write_text(json.dumps(value))
        return folder

    return write


@pytest.fixture
def run() -> Run:
    """A new run of the quick preset."""
    return Run.create("smollm2", "quick", seed=3)
