"""One log in the spellings that terminals, containers and pretty-printers leave: the same facts are read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.doctor.serverlog import read_log

SETTINGS = "server_args=ServerArgs(model_path='T', {}speculative_algorithm{}='{}EAGLE{}', speculative_num_steps=3)\n"
DECODE = "Decode batch, #running-req: 1, accept len: {}1.00{}, accept rate: {}0.00{}\n"
WORDS = ("--model-path", "T", "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3")
METRICS = (
    "SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: {} tokens, "
    "Per-position acceptance rate: {}, Avg Draft acceptance rate: 30.0%\n"
)


@pytest.mark.parametrize("escape", ["\x1b[", "\x9b", "^[[", "\\x1b[", "\\u001b[", "\\033[", "#033["])
def test_colours_hide_nothing(escape: str) -> None:
    on, off = f"{escape}1;33m", f"{escape}0m"
    log = read_log((SETTINGS + DECODE).format(*[on, off] * 4))
    assert (log.engine, log.algorithm, log.launch) == ("sglang", "EAGLE", WORDS)
    assert [(one.accept_length, one.accept_rate, one.line) for one in log.gauges] == [(1.0, 0.0, 2)]


def test_colours_of_vllm() -> None:
    line = "\x1b[32m" + METRICS.format("\x1b[1m1.60\x1b[0m", 60, 300, "0.400, \x1b[2m0.150\x1b[0m, 0.050")
    counts = read_log(line).counts
    assert counts is not None and (counts.verify_steps, counts.accepted) == (100, 60)


def test_brackets_that_are_no_escape_stay() -> None:
    log = read_log("server_args=ServerArgs(model_path='[1m]', speculative_algorithm='EAGLE3')\n")
    assert log.launch[:2] == ("--model-path", "[1m]")


@pytest.mark.parametrize(
    "text",
    [
        "server_args=ServerArgs(\n    model_path='T',\n    speculative_algorithm='EAGLE',\n"
        "    chat_template='{% (( ',\n    speculative_num_steps=3,\n)\nready\n",
        "server_args={'model_path': 'T', 'speculative_algo\nrithm': 'EAGLE', 'speculative_num_st\neps': 3}\nready\n",
        "INFO server_args={\n  'model_path': 'T',\n  'speculative_algorithm':\n    'EAGLE',\n"
        "  'speculative_num_steps': 3}\n",
    ],
)
def test_settings_over_several_lines(text: str) -> None:
    log = read_log(text)
    assert (log.engine, log.algorithm, log.launch) == ("sglang", "EAGLE", WORDS)


@pytest.mark.parametrize(
    "text",
    [
        "non-default args: {'model': 'T',\n 'speculative_config': {\n  'method': 'eagle',\n  'model': 'D'}}\n",
        "config: model='T', speculative_config=SpeculativeConfig(\n  method='eagle',\n  model='D'), x=1\n",
    ],
)
def test_settings_of_vllm_over_several_lines(text: str) -> None:
    log = read_log(text)
    assert (log.engine, log.algorithm) == ("vllm", "eagle")


def test_a_print_that_never_ends_takes_no_other_line() -> None:
    log = read_log("server_args=ServerArgs(model_path='T',\nspeculative_algorithm='NEXTN' is what others use\n")
    assert log.launch == ("--model-path", "T")
    begun = time.monotonic()
    read_log("speculative_config={\n" * 30_000)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("mean", "accepted", "rates", "said"),
    [
        ("1.90", 90, "0.200, 0.300, 0.400", "0.2 to 0.3 at position 2"),
        ("2.20", 120, "1.200, 0.000, 0.000", "1.2 at position 1"),
        ("2.50", 60, "0.400, 0.150, 0.050", "rates make 1.6"),
    ],
)
def test_rates_that_cannot_be_joint(tmp_path: Path, mean: str, accepted: int, rates: str, said: str) -> None:
    (tmp_path / "v.log").write_text(METRICS.format(mean, accepted, 300, rates))
    found = [f for f in visit(Inputs(log=str(tmp_path / "v.log"))).findings if f.severity != "info"]
    assert [(f.severity, f.code) for f in found] == [("error", "log-acceptance")]
    assert said in found[0].message


def test_equal_rates_are_joint(tmp_path: Path) -> None:
    (tmp_path / "v.log").write_text(METRICS.format("1.90", 90, 300, "0.300, 0.300, 0.300"))
    assert not [f for f in visit(Inputs(log=str(tmp_path / "v.log"))).findings if f.severity != "info"]
