"""Launch lines: the words that are built, and the words that are refused."""

from __future__ import annotations

import json
import sys

import pytest

from eagle3lab.core.errors import ServerError, UsageError
from eagle3lab.targets.launch import (
    OPTIONS_FILE,
    base_arguments,
    capture_arguments,
    check_arguments,
    drafter_arguments,
    expected_report,
)
from eagle3lab.targets.plan import GIB, fit
from eagle3lab.targets.profiles import load_profile
from eagle3lab.targets.shapes import target_shape

KIMI = load_profile("kimi-k2.5")
SHAPE = target_shape(KIMI.config)


def words(**change) -> list[str]:
    settings = {"model_path": "M", "ranks": 8, "port": 30000, "room": None, "context": None, **change}
    return base_arguments(KIMI, **settings)


def after(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_kimi_line_with_memory() -> None:
    line = words(room=fit(SHAPE, 8, 96 * GIB))
    assert float(after(line, "--mem-fraction-static")) == pytest.approx(1 - 16 / 96, abs=1e-3)
    assert int(after(line, "--context-length")) == 138_278 // 1024 * 1024
    assert after(line, "--host") == "127.0.0.1" and "--trust-remote-code" in line
    assert after(line, "--reasoning-parser") == "kimi_k2"
    check_arguments(line)


def test_tight_fit_turns_graphs_off() -> None:
    line = words(room=fit(SHAPE, 8, 80 * GIB))
    assert after(line, "--chunked-prefill-size") == "2048" and after(line, "--cuda-graph-backend-decode") == "disabled"
    assert "--chunked-prefill-size" not in words(room=fit(SHAPE, 8, 141 * GIB))


def test_without_memory_sglang_decides() -> None:
    assert "--mem-fraction-static" not in words() and "--context-length" not in words()


def test_drafter_words() -> None:
    line = drafter_arguments("D", steps=3)
    assert (after(line, "--speculative-num-steps"), after(line, "--speculative-num-draft-tokens")) == ("3", "4")
    check_arguments([*words(), *line])


def test_capture_words() -> None:
    line = [
        *words(),
        *capture_arguments([2, 30, 58], {"folder": "F"}, logits_processor="language_model.logits_processor"),
    ]
    check_arguments(line)
    assert line[line.index("--return-aux-hidden-state-layer-ids") + 1 :][:3] == ["2", "30", "58"]
    [hook] = json.loads(after(line, "--forward-hooks"))
    assert hook["target_modules"] == ["language_model.logits_processor"] and hook["config"] == {"folder": "F"}
    assert "--disable-radix-cache" in line and "--speculative-draft-model-path" not in line
    promised = expected_report(line)
    assert promised["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert "speculative_algorithm" not in promised  # it resets itself to none, so none of it can be asked for


def test_expected_report_takes_the_last_and_completes_prefixes() -> None:
    line = [
        *words(),
        *drafter_arguments("D", steps=3),
        "--speculative-algorithm=EAGLE",
        "--tp",
        "4",
        "--context-length",
        "128k",
    ]
    promised = expected_report(line)
    assert promised["speculative_algorithm"] == "EAGLE" and promised["tp_size"] == 4
    assert promised["speculative_draft_model_path"] == "D" and "context_length" not in promised
    assert expected_report(["--context-length", "4096"]) == {"context_length": 4096}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--speculative-algoritm", "EAGLE3"], "--speculative-algorithm"),
        (["--tp-size", "eight"], "'eight'"),
        (["--tp-size"], "0 values"),
        (["--disable-radix-cache", "yes"], "takes no value"),
        (["--dtype", "bfloat61"], "bfloat16"),
        (["--return-aux-hidden-state-layer-ids", "2", "x"], "'x'"),
        (["--speculative"], "ambiguous"),
        (["stray"], "--dtype"),
    ],
)
def test_arguments_that_sglang_would_refuse(extra: list[str], named: str) -> None:
    line = ["--dtype", "float32", *extra] if extra == ["stray"] else [*words(), *extra]
    with pytest.raises(UsageError, match=named):
        check_arguments(line)


def test_a_first_word_that_is_no_option() -> None:
    with pytest.raises(UsageError, match="stray"):
        check_arguments(["stray"])


def test_stored_options_carry_their_source() -> None:
    stored = json.loads(OPTIONS_FILE.read_text())
    assert "sglang-0.5.23" in stored["source"]["package"] and len(stored["source"]["sha256"]) == 64
    assert len(stored["options"]) == 531  # equal to the options of the release's own parser, names and arities


SERVER_ARGS = """
import argparse
def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", type=int)
    return parser.parse_args(argv)
"""


@pytest.fixture
def fake_sglang(tmp_path, monkeypatch):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("__version__ = '9.9'\n")
    (tmp_path / "sglang" / "srt" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(SERVER_ARGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_installed_sglang_has_the_last_word(fake_sglang) -> None:
    assert check_arguments(["--tp-size", "8"], python=sys.executable) == "sglang 9.9's own parser"
    with pytest.raises(ServerError, match="--dtype"):
        check_arguments(["--dtype", "auto"], python=sys.executable)  # known to the stored list, not to this parser


def test_without_sglang_the_stored_list_says_so() -> None:
    assert "not installed" in check_arguments(["--tp-size", "8"], python=sys.executable)
