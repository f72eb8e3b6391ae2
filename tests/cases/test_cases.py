"""Every case through the command line, once as files and once as facts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab import cli

from .artefacts import build, build_facts
from .expectations import complaints


def visit(words: list[str], engine: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict, int, str]:
    """Run `eagle3lab doctor` in this process; (report, exit code, everything printed)."""
    chosen = [] if engine == "any" else ["--engine", engine]
    code = cli.run(["doctor", *words, *chosen, "--json"])
    out, err = capsys.readouterr()
    assert out, f"nothing printed; stderr: {err}"
    return json.loads(out), code, out + err


@pytest.mark.parametrize("how", ["files", "facts"])
def test_case(case: dict, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (build if how == "files" else build_facts)(case["input"], tmp_path)
    report, code, printed = visit(words, case["engine"], capsys)
    found = complaints(case, report, code, printed)
    shown = "\n".join(f"  {f['severity']} {f['code']}: {f['message']}" for f in report["findings"])
    assert not found, f"{case['id']} {case['title']}: " + "; ".join(found) + "\n" + shown
