"""Excerpts of real server logs: SGLang 0.5.23 and vLLM 0.32.0 on a CPU, with the same target and drafter.

Paths are replaced and lines without meaning here are left out; of the settings line the keys that are read are kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.doctor.serverlog import read_log

LOGS = Path(__file__).with_name("logs")


def messages(name: str) -> dict[tuple[str, str], list[str]]:
    """(severity, code) -> messages of a visit to one log."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in visit(Inputs(log=str(LOGS / name))).findings:
        found.setdefault((one.severity, one.code), []).append(one.message)
    return found


def test_sglang_eagle3() -> None:
    said = messages("sglang-eagle3.log")
    assert {severity for severity, _ in said} == {"info"}
    assert said["info", "log-algorithm"] == ["algorithm in force: EAGLE3"]
    assert said["info", "log-acceptance"] == ["accept length 1 to 2 in 12 log lines, each one forward pass"]
    assert said["info", "probe-fc"] == ["fc input 1728 = 3 x 576, float32, SGLang's ids [2, 15, 27] (rank 0)"]
    assert said["info", "probe-weights"] == ["fc, lm_head, d2t equal the file (rank 0)"]


def test_sglang_eagle() -> None:
    said = messages("sglang-eagle.log")
    [fc] = said["error", "probe-fc"]
    assert fc.startswith("fc never called: it got 576 numbers a token, fc reads 1728; the target recorded no states")
    assert "exactly 1.00" in said["error", "log-acceptance"][0]


def test_sglang_renamed_keys() -> None:
    said = messages("sglang-renamed.log")
    assert [message.split()[1] for message in said["error", "probe-weights"]] == ["fc", "lm_head"]
    assert ("error", "log-weights") not in said, "SGLang drops them without a word: only the probe tells"


@pytest.mark.parametrize("name", ["eagle3", "eagle", "renamed"])
def test_sglang_settings(name: str) -> None:
    log = read_log((LOGS / f"sglang-{name}.log").read_text())
    assert (log.engine, log.algorithm) == ("sglang", "EAGLE" if name == "eagle" else "EAGLE3")
    assert log.interval == 1 and not log.hook_unmatched
    words = dict(zip(log.launch[::2], log.launch[1::2], strict=True))
    assert words["--speculative-num-draft-tokens"] == "4"
    assert words["--speculative-draft-model-path"] == "/models/drafter"


def test_vllm() -> None:
    log = read_log((LOGS / "vllm.log").read_text())
    assert (log.engine, log.algorithm, log.layer_ids) == ("vllm", "eagle3", (2, 15, 27))
    assert log.counts is not None
    assert (log.counts.verify_steps, log.counts.accepted, log.counts.proposed) == (22, 4, 66)
    said = messages("vllm.log")
    assert {severity for severity, _ in said} == {"info"}
    assert said["info", "log-algorithm"] == ["algorithm in force: eagle3, layer ids [2, 15, 27]"]


def test_counts_that_cannot_be_are_one_error_of_the_log(tmp_path: Path) -> None:
    line = "SpecDecoding metrics: Mean acceptance length: 5.00, Accepted: 400 tokens, Drafted: 300 tokens, "
    (tmp_path / "v.log").write_text(line + "Per-position acceptance rate: 0.5, Avg Draft acceptance rate: 133.0%\n")
    found = [f for f in visit(Inputs(log=str(tmp_path / "v.log"))).findings if f.severity != "info"]
    assert [(f.severity, f.code) for f in found] == [("error", "log-acceptance")]
    assert "accepted 400 of 300" in found[0].message


def test_a_log_of_another_program_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("hello\n")
    assert ["no line of SGLang or vLLM" in f.message for f in visit(Inputs(log=str(tmp_path / "x.log"))).findings] == [
        True
    ]


def test_an_empty_acceptance_file_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UsageError, match="holds nothing"):
        visit(Inputs(acceptance=str(tmp_path / "a.json")))
