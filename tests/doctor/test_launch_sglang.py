"""Launch lines that SGLang 0.5.23 refuses when it resolves its arguments, and their neighbours that it takes."""

from __future__ import annotations

import pytest

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.readers.launch import read
from eagle3lab.doctor.run import choose_engines, diagnose

CODES = ("launch-draft-tokens", "capture-flags", "launch-draft-path", "capture-points")
SERVER = "python3 -m sglang.launch_server --model-path T"
DRAFT = f"{SERVER} --speculative-algorithm EAGLE3 --speculative-draft-model-path D"
CAPTURE = f"{SERVER} --disable-radix-cache --chunked-prefill-size -1 --enable-return-aux-hidden-states"
IDS = "--return-aux-hidden-state-layer-ids 2 15 27"
STEPS, TOPK, TOKENS = "--speculative-num-steps 3", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens 4"


def told(line: str, **more: object) -> list[Finding]:
    facts = Facts()
    read(line, facts)
    for name, value in {"target": {"blocks": 30, "hidden_size": 576, "family": "llama"}, **more}.items():
        facts.put(name, value, "test")
    choose_engines(facts, "")
    return [f for f in diagnose(facts).findings if f.code in CODES]


def errors(line: str, **more: object) -> list[str]:
    return [f"{f.code}: {f.message}" for f in told(line, **more) if f.severity != "info"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{DRAFT} {TOPK} {TOKENS}", "--speculative-eagle-topk without --speculative-num-steps"),
        (f"{DRAFT} {TOPK}", "--speculative-eagle-topk without --speculative-num-steps"),
        (f"{DRAFT} {TOKENS}", "--speculative-num-draft-tokens without --speculative-num-steps"),
        (f"{DRAFT} {STEPS} {TOKENS}", "--speculative-num-steps without --speculative-eagle-topk"),
        (CAPTURE, "capture-flags: --enable-return-aux-hidden-states with no --speculative-algorithm"),
        (f"{CAPTURE} --speculative-algorithm EAGLE", "with --speculative-algorithm EAGLE"),
        (f"{CAPTURE} --speculative-algorithm nextn {IDS}", "with --speculative-algorithm nextn"),
        (f"{CAPTURE} --speculative-algorithm DFLASH", "with DFLASH needs --return-aux-hidden-state-layer-ids"),
        (f"{SERVER} {IDS}", "without --enable-return-aux-hidden-states"),
        (f"{DRAFT} {IDS}", "without --enable-return-aux-hidden-states"),
        (f"{CAPTURE} --speculative-algorithm EAGLE3 --pp-size 2", "one pipeline stage, --pp is 2"),
        (f"{CAPTURE} --speculative-algorithm EAGLE3 {IDS} --pp-size 2", "one pipeline stage, --pp is 2"),
    ],
)
def test_refused(line: str, said: str) -> None:
    [message] = errors(line)
    assert said in message


def test_nothing_is_captured_by_a_line_that_does_not_start() -> None:
    said = " ".join(f.message for f in told(f"{SERVER} {IDS}") + told(CAPTURE))
    assert "captures resid_pre" not in said and "speculation is off" not in said


def test_steps_alone_are_told() -> None:
    assert any("None > 1" in f.message for f in told(f"{DRAFT} {STEPS}"))
    assert not any("None > 1" in f.message for f in told(f"{DRAFT} {STEPS} {TOPK}"))


@pytest.mark.parametrize(
    "line",
    [
        DRAFT,
        f"{DRAFT} {STEPS} {TOPK}",
        f"{DRAFT} {STEPS} {TOPK} {TOKENS}",
        f"{DRAFT} --speculative-adaptive {TOPK}",
        f"{DRAFT} {TOPK} --config serve.yaml",
        f"{DRAFT} {TOPK} --disable-cuda-graph $EXTRA_ARGS",
        f"{DRAFT.replace(' T ', ' IQuest-Q1 ')} {STEPS}",
        f"{SERVER} --speculative-algorithm NGRAM {TOKENS}",
        f"{CAPTURE} --speculative-algorithm eagle3",
        f"{CAPTURE} --speculative-algorithm DFLASH {IDS}",
        f"{CAPTURE} --speculative-algorithm $ALG --pp-size 1",
        f"{CAPTURE} --config serve.yaml",
        f"{SERVER} {IDS} --config serve.yaml",
        f"{SERVER} --enable-return-hidden-states --pp-size 2",
    ],
)
def test_taken(line: str) -> None:
    assert errors(line) == []


def test_a_running_server_has_resolved_its_flags() -> None:
    server = {"engine": "sglang", "algorithm": None}
    assert errors(CAPTURE, server=server) == errors(f"{DRAFT} {TOPK}", server=server) == []
