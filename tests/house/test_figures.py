"""Committed figures: each with its data, in words, traceable to the run that made it, and small."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from eagle3lab.core.errors import RunError
from eagle3lab.core.paths import repository
from eagle3lab.plots.resources import bars
from eagle3lab.runs.directory import Run
from eagle3lab.runs.schemas import Manifest

FIGURES = repository() / "figures"
MOST_BYTES = 5_000_000


def load_script():
    spec = importlib.util.spec_from_file_location("export_figures", repository() / "scripts/export_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def faults(folder: Path) -> list[str]:
    """What is wrong with a folder of exported figures."""
    found: list[str] = []
    names = sorted(path.stem for path in folder.glob("*.png"))
    text = (folder / "README.md").read_text()
    for name in names:
        missing = [kind for kind in script.KINDS if not (folder / f"{name}{kind}").is_file()]
        found += [f"{name} has no {kind}" for kind in missing]
        if f"]({name}.png)" not in text:
            found.append(f"README.md does not show {name}")
        if not missing and len((folder / f"{name}.csv").read_text().splitlines()) < 2:
            found.append(f"{name}.csv has no row")
    manifest = Manifest.model_validate(json.loads((folder / "manifest.json").read_text()))
    metrics = json.loads((folder / "metrics.json").read_text())
    if not names or metrics["preset"] != manifest.preset or manifest.parameters_sha256[:6] not in text:
        found.append("figures, manifest and metrics are not of one run")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    found += [f"{name} has {size} bytes" for name, size in sizes.items() if size > script.LARGEST]
    if sum(sizes.values()) > MOST_BYTES:
        found.append(f"{sum(sizes.values())} bytes together")
    return found


def test_the_committed_figures() -> None:
    assert faults(FIGURES) == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path / "runs"))
    made = Run.create("smollm2", "default")
    with made.recording("accept"):
        made.merge_metrics({"preset": "default"})
    bars([{"kind": "a", "samples": 3}], name="kind", value="samples", title="T", unit="x").publish(made.figures, "02_k")
    return made


def test_export_leaves_a_whole_folder_and_removes_the_old(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "old.png").write_bytes(b"x")
    assert script.export(run, folder) == ["02_k"]
    assert faults(folder) == [] and not (folder / "old.png").exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "02_k.csv").unlink(), "02_k has no .csv"),
        (lambda folder: (folder / "02_k.png").write_bytes(bytes(1_000_001)), "02_k.png has 1000001 bytes"),
        (lambda folder: (folder / "metrics.json").write_text('{"preset": "quick"}'), "not of one run"),
        (lambda folder: (folder / "README.md").write_text("nothing"), "does not show 02_k"),
    ],
)
def test_damage_is_found(run: Run, tmp_path: Path, damage, told: str) -> None:
    script.export(run, tmp_path / "figures")
    damage(tmp_path / "figures")
    assert told in "; ".join(faults(tmp_path / "figures"))


def test_a_large_or_half_figure_is_refused(run: Run, tmp_path: Path) -> None:
    (run.figures / "02_k.pdf").unlink()
    with pytest.raises(RunError, match=r"lacks 02_k\.pdf"):
        script.export(run, tmp_path / "figures")
    (run.figures / "02_k.pdf").write_bytes(bytes(1_000_001))
    with pytest.raises(RunError, match=r"02_k\.pdf over"):
        script.export(run, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
