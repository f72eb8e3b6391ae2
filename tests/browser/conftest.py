"""What the browser tests need: Chromium, Playwright, a finished quick run. Absent ones skip with their reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter import Lab, serve

from eagle3lab.core.paths import cache_folder, notebooks_folder, repository
from eagle3lab.runs.directory import Run

SCREENSHOTS = repository() / "build/screenshots"
RUN_SECONDS = 1200


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the installed browser. Playwright's own download is never used."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on the PATH: apt-get install chromium, or CHROMIUM=/path/to/chrome")
    return path


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """A headless browser."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e .[browser]")
    with api.sync_playwright() as playwright:
        words = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=chromium, args=words)
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new page that reaches nothing but loopback: a remote asset is an error."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(30_000)
    opened = context.new_page()
    yield opened
    context.close()


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished quick run, alone in a runs folder: the notebooks write into it."""
    runs = tmp_path_factory.mktemp("lab") / "runs"
    for run in Run.all():
        quick = run.manifest.profile == "smollm2" and run.manifest.preset == "quick" and not run.manifest.overrides
        if quick and run.step_state("accept") == "ok" and (run.path / "report.html").is_file():
            shutil.copytree(run.path, runs / run.path.name)
            return runs / run.path.name
    if not any(cache_folder().glob("target*/*")):
        pytest.skip("no target in the cache: make fetch")
    words = [sys.executable, "-m", "eagle3lab", "run", "--preset", "quick"]
    subprocess.run(words, check=True, timeout=RUN_SECONDS, env={**os.environ, "EAGLE3LAB_RUNS": str(runs)})
    (made,) = (path for path in runs.iterdir() if path.is_dir())
    return made


@pytest.fixture(scope="session")
def lab(quick_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab over copies of the notebooks, with `quick_run` as the only run there is."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    shutil.copytree(notebooks_folder(), folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    environment = {"EAGLE3LAB_RUNS": str(quick_run.parent), "EAGLE3LAB_CACHE": str(cache_folder())}
    with serve(folder, home, environment) as running:
        yield running
