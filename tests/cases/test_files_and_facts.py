"""Where a real artefact exists for a fact, file and fact give the same findings (remarks at info level may differ)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .artefacts import build, build_facts
from .test_cases import visit


def test_file_and_fact_agree(case: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = build(case["input"], tmp_path)
    if "--facts" in words and len(words) == 2:
        pytest.skip("no part of this input has an artefact")
    heard = []
    for how in (words, build_facts(case["input"], tmp_path)):
        report, _, _ = visit(how, case["engine"], capsys)
        # a file's findings name the file, a fact's the fact: the verdicts are compared
        heard.append({(f["severity"], f["code"]) for f in report["findings"] if f["severity"] != "info"})
    assert heard[0] == heard[1]
