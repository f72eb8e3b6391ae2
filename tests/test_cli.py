"""The command line: one line for an error, exit codes, nothing heavy imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eagle3lab import cli
from eagle3lab.core.errors import ServerError


@pytest.fixture
def call(capfd):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from eagle3lab import cli; rc = cli.run(['--help']);"
        "print(rc, sorted({'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "0 []"


def test_points_json(call) -> None:
    code, out, err = call("points", "--blocks", "61", "--ids", "2,30,58", "--engine", "sglang", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["resid_pre"] == [2, 30, 58] and answer["ambiguous"] is False
    assert any("Kimi/DeepSeek" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("words", "in_error"),
    [
        (("points", "--blocks", "61", "--ids", "2,x", "--engine", "sglang"), "'2,x'"),
        (("points", "--blocks", "61", "--engine", "sglang"), "--ids A,B,C"),
        (("points", "--ids", "1,2,3", "--engine", "sglang"), "--blocks N"),
        (("points", "--blocks", "61", "--ids", "none", "--engine", "sgland"), "did you mean 'sglang'"),
        (("points", "--blocks", "61", "--resid-pre", "2,30,99", "--engine", "vllm"), "[99] out of range"),
        (("points", "--blocks", "61", "--resid-pre", "none", "--engine", "vllm"), "--resid-pre"),
        (("points", "--blocks", "4", "--ids", "none", "--engine", "vllm"), "[2, 2, 1]"),
        (("points", "--ids", "none", "--engine", "vllm", "--target", "/nowhere"), "/nowhere"),
        (("pointz",), "points"),
        (("points", "--blocs", "61"), "--blocks"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(call, words: tuple[str, ...], in_error: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and in_error in err and "Traceback" not in err


def test_refused_list_exits_1(call) -> None:
    code, out, _ = call("points", "--blocks", "61", "--ids", "2,30,61", "--engine", "sglang", "--family", "kimi_k25")
    assert code == 1 and "captured 2 of 3" in out


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ServerError("port\n30000 is taken", fix="--port 30001"), 2)]
)
def test_what_a_step_raises(call, monkeypatch, error: BaseException, code: int) -> None:
    from eagle3lab.steps import points as step

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(step, "points", fail)
    got, _, err = call("points", "--blocks", "61", "--ids", "none", "--engine", "vllm")
    assert got == code and len(err.splitlines()) == 1


def test_a_reader_that_left_is_no_traceback() -> None:
    script = f"{sys.executable} -m eagle3lab points --blocks 61 --ids none --engine vllm | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["accept", "replay", "--states", ".", "--draft", "."], "torch"),
        (["fetch", "--profile", "smollm2"], "gguf"),
        (["run", "--preset", "quick"], "papermill"),
    ],
)
def test_a_package_of_an_extra_is_named(words: list[str], package: str, tmp_path) -> None:
    """The base installation has none of them: one line says what to install, before anything is downloaded."""
    code = f"import sys; sys.modules[{package!r}] = None; from eagle3lab import cli; sys.exit(cli.run({words!r}))"
    places = {**os.environ, "EAGLE3LAB_CACHE": str(tmp_path), "EAGLE3LAB_RUNS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=places)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"eagle3lab: this command needs {package}, which is not installed; ")
    assert "Traceback" not in done.stderr and "downloading" not in done.stdout
