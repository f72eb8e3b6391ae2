"""Launch options that no engine takes, and the right ones that look odd."""

from __future__ import annotations

import pytest

from eagle3lab.doctor.checks.context import served_context
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.readers.launch import read
from eagle3lab.doctor.run import choose_engines, diagnose

SGLANG = (
    "python3 -m sglang.launch_server --model-path T --speculative-algorithm EAGLE3 --speculative-draft-model-path D"
)
VLLM = "vllm serve T --speculative-config"


def launched(line: str) -> Facts:
    facts = Facts()
    read(line, facts)
    choose_engines(facts, "")
    return facts


def told(line: str) -> list[Finding]:
    return [f for f in diagnose(launched(line)).findings if f.code == "launch-options" and f.severity != "info"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (SGLANG.replace("algorithm", "algorthm"), "did you mean --speculative-algorithm?"),
        (SGLANG.replace("speculative-algorithm", "speculative_algorithm"), "dashes, no underscores"),
        (f"{SGLANG} --mem-fracton-static 0.8", "did you mean --mem-fraction-static?"),
        (f"{SGLANG} --speculative-num-steps three", "'three'"),
        (f"{SGLANG} --speculative-num-steps 2.5", "'2.5'"),
        (f"{SGLANG} --speculative-eagle-topk 0", "'0', needed: a whole number of 1 or more"),
        (f"{SGLANG} --tp", "has no value"),
        (f"{SGLANG} --context-length 128K", "'128K'"),
        (f"{SGLANG} --mem-fraction-static 90", "'90'"),
        (f"{SGLANG} --port 3o000", "'3o000'"),
        (f"{SGLANG} --dtype bf16", "did you mean 'bfloat16'?"),
        (f"{SGLANG} --speculative-draft-path D", "did you mean --speculative-draft-model-path?"),
        (f"""{VLLM} '{{"method": "EAGLE3", "model": "D"}}'""", "did you mean 'eagle3'?"),
        (f"""{VLLM} '{{"method": "eagle3", "num_speculative_tokens": 0}}'""", "num_speculative_tokens is 0"),
        (f"""{VLLM} '{{"method": "eagle3", "num_speculative_token": 3}}'""", "did you mean num_speculative_tokens?"),
        ("vllm serve T --speculative-config.num_speculative_tokens three", "'three'"),
        (f"""{VLLM.replace("config", "confg")} '{{}}'""", "did you mean --speculative-config?"),
        ("vllm serve T --max-model-len 128x", "'128x'"),
        (f"{SGLANG} --schedule-policy", "has no value"),
        (f"{SGLANG} --disable-radix-cache true", "takes no value, given: 'true'"),
        (f"{SGLANG} --trust-remote-code=true", "takes no value, given: 'true'"),
        (f"{SGLANG} --host 0.0.0.0 30000", "'30000' is left over"),
        (SGLANG.replace("--speculative-algorithm", "\u2014speculative-algorithm"), "U+2014 EM DASH"),
        (SGLANG.replace("--speculative-algorithm", "\u2013-speculative-algorithm"), "U+2013 EN DASH"),
        (SGLANG.replace("--speculative-algorithm", "-speculative-algorithm"), "one hyphen"),
        (SGLANG.replace(" EAGLE3", "\u00a0EAGLE3"), "U+00A0 NO-BREAK SPACE"),
        (SGLANG.replace(" D", " D\u200b"), "U+200B ZERO WIDTH SPACE"),
        (SGLANG.replace("--speculative-algorithm EAGLE3", "'--speculative-algorithm EAGLE3'"), "is one word"),
        (SGLANG.replace(" --speculative-algorithm", " \\ --speculative-algorithm"), "begins with a blank"),
        ("vllm serve T --speculative-config", "has no value"),
        ("vllm serve T -sc", "has no value"),
        ("vllm serve T '--tensor-parallel-size 8'", "is one word"),
    ],
)
def test_what_the_parser_would_refuse(line: str, named: str) -> None:
    [finding] = told(line)
    assert named in finding.message


@pytest.mark.parametrize(
    "line",
    [
        f"{SGLANG} --context-length 128k --chunked-prefill-size -1 --tp $TP --disable-radix-cach",
        f"docker run --gpus all --device x --shm-size 32g --ipc=host lmsysorg/sglang:latest {SGLANG} --tp=8",
        f"torchrun --nnodes 1:4 -m {SGLANG.removeprefix('python3 -m ')} --nnodes 2",
        f"{SGLANG} --cuda-graph-bs 1 2 4 --served-model-name 'caf\u00e9 \u4e2d' --disable-radix-cache $MORE",
        f"{SGLANG} --enable-return-aux-hidden-states --return-aux-hidden-state-layer-ids 2 30 58",
        f"{SGLANG} --enable-spec-capture --spec-capture-method eagle3 --speculative-num-steps 3",
        "python my_launcher.py --speculative-algorthm EAGLE3 --model-path T",
        f"""{VLLM} '{{"method": "deepseek_mtp", "num_speculative_tokens": 1}}' --max-model-len auto""",
        "vllm serve T -tp 8 --speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3",
        f"""{VLLM} '{{"method": "$M", "num_speculative_tokens": "3"}}' --ec-transfer-config x""",
    ],
)
def test_right_lines_that_look_odd(line: str) -> None:
    assert told(line) == []


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (f"{SGLANG} --context-length 128k", 128_000),
        (f"{SGLANG} --context-length 128Ki", 131_072),
        (f"{SGLANG} --context-length 4096", 4096),
        ("vllm serve T --max-model-len 25.6k", 25_600),
        ("vllm serve T --max-model-len 128K", 131_072),
        ("vllm serve T --max-model-len auto", None),
    ],
)
def test_the_served_context_is_read_as_the_engine_reads_it(line: str, tokens: int | None) -> None:
    assert served_context(launched(line))[0] == tokens


@pytest.mark.parametrize("numbers", [{"steps": 3, "topk": 0, "draft_tokens": 4}, {"steps": 0, "draft_tokens": 1}])
def test_typed_numbers_below_one(numbers: dict[str, int]) -> None:
    found = diagnose(Facts(dict(numbers))).findings
    assert [f.severity for f in found if f.code == "draft-tokens"] == ["error"]
