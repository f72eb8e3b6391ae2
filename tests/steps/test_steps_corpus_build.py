"""`corpus build` refuses amounts that mean nothing before the target is loaded, each with one line and exit 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.core.errors import UsageError
from eagle3lab.targets.model import load_target


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--own", "-1", "--own -1; 0 or more"),
        ("--temperature", "nan", "--temperature nan; 0 or more"),
        ("--temperature", "-0.5", "--temperature -0.5; 0 or more"),
        ("--temperature", "inf", "--temperature inf; 0 or more"),
        ("--max-new-tokens", "0", "--max-new-tokens 0; 1 or more"),
        ("--seed", "-2", "--seed -2; 0 or more"),
        ("--prompts", "/nowhere.jsonl", "/nowhere.jsonl cannot be read"),
    ],
)
def test_amounts_that_mean_nothing(
    flag: str, value: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3lab.steps.corpus_build.fetched_folder", lambda profile: Path("/nowhere"))
    monkeypatch.setattr("eagle3lab.steps.corpus_build.weight_hash", lambda folder: "0" * 64)
    monkeypatch.setattr("eagle3lab.steps.corpus_build.load_target", lambda *a, **k: pytest.fail("the target is loaded"))
    assert cli.run(["corpus", "build", flag, value]) == 2
    assert told in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("dtype", ["fp8", "float64", "nn"])
def test_a_type_that_no_target_is_loaded_in(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"'{dtype}' is no type to compute in"):
        load_target(Path("/nowhere"), dtype=dtype)
