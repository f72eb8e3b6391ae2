"""The two changes in a throw-away SGLang: made once, made again without harm, refused on files of another release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.sglang_cpu.patch import CHANGES
from tests.engines.runner import ROOT


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts" / "sglang_cpu" / "patch.py")],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_changes(tmp_path: Path) -> None:
    assert run(tmp_path).stdout.startswith("FAILED: sglang, it is not installed")
    files = {tmp_path / "sglang" / name: change for name, change in CHANGES.items()}
    for path, (before, _) in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"above\n{before}below\n")
    (tmp_path / "sglang" / "__init__.py").touch()
    for _ in range(2):
        assert run(tmp_path).returncode == 0
        assert all(path.read_text() == f"above\n{after}below\n" for path, (_, after) in files.items())
    next(iter(files)).write_text("another release\n")
    failed = run(tmp_path)
    assert failed.returncode == 1 and "does not hold the lines" in failed.stdout
