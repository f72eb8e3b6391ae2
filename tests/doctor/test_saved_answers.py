"""`--acceptance` over what servers and benchmarks save: counts are counted, gauges stay gauges, absent is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.acceptance.sources import from_vllm_metrics
from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.readers.paths import kind_of
from eagle3lab.doctor.run import Inputs, visit

BENCH = {"date": "20260101", "backend": "vllm", "request_throughput": 3.0}
ZERO = {
    **{"spec_decode_acceptance_rate": 0.0, "spec_decode_acceptance_length": 1.0, "spec_decode_num_drafts": 500},
    **{"spec_decode_draft_tokens": 1500, "spec_decode_accepted_tokens": 0},
    "spec_decode_per_position_acceptance_rates": [0.0, 0.0, 0.0],
}
WORKS = {
    **{**BENCH, **ZERO, "spec_decode_acceptance_rate": 40.0, "spec_decode_acceptance_length": 2.2},
    **{"spec_decode_accepted_tokens": 600, "spec_decode_per_position_acceptance_rates": [0.6, 0.4, 0.2]},
}
METRICS = {
    **{"vllm:spec_decode_num_drafts": 400, "vllm:spec_decode_num_draft_tokens": 1200},
    **{"vllm:spec_decode_num_accepted_tokens": 300, "vllm:spec_decode_num_accepted_tokens_per_pos": [200, 80, 20]},
}
OBJECTS = [{"name": key, "values" if isinstance(value, list) else "value": value} for key, value in METRICS.items()]
NOTHING = {
    **METRICS,
    "vllm:spec_decode_num_accepted_tokens": 0,
    "vllm:spec_decode_num_accepted_tokens_per_pos": [0] * 3,
}
INFO = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
META = {"completion_tokens": 16, "spec_verify_ct": 15, "spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 45}
GOOD_META = {"completion_tokens": 40, "spec_verify_ct": 20, "spec_num_correct_drafts": 19}
BLOCK = {
    **{"mean_acceptance_length": 1.0, "draft_acceptance_rate": 0.0, "acceptance_histogram": [40, 0, 0, 0]},
    **{"num_spec_steps": 40, "num_accepted_draft_tokens": 0, "num_draft_tokens": 120, "num_spec_tokens": 3},
}
GOOD_BLOCK = {
    **{**BLOCK, "mean_acceptance_length": 1.75, "draft_acceptance_rate": 0.25},
    **{"acceptance_histogram": [20, 10, 10, 0], "num_accepted_draft_tokens": 30},
}


def states(*lengths: Any) -> dict[str, Any]:
    return {**INFO, "internal_states": [{"avg_spec_accept_length": length} for length in lengths]}


def choice(meta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "message": {"content": "x"}, "meta_info": meta}


def vllm(block: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0}], "metrics": {"speculative_decoding": block}}


def stream(*events: Any) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def lines(*rows: Any) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


@pytest.mark.parametrize(
    ("content", "severity", "part"),
    [
        # vllm bench serve
        (ZERO, "error", "no draft accepted in 500 verify steps (0 of 1500)"),
        ({**BENCH, **ZERO}, "error", "no draft accepted in 500"),
        (WORKS, "info", "accept length 2.2 (bonus in), 600 of 1500"),
        ([WORKS, {**BENCH, **ZERO}], "error", "result 1: no draft accepted in 500"),
        (lines(WORKS, WORKS), "info", "result 1: accept length 2.2"),
        ({**WORKS, "spec_decode_acceptance_length": 3.2}, "error", "3.2 does not follow from its counts: 2.2"),
        ({**WORKS, "spec_decode_acceptance_rate": 80.0}, "error", "accept rate 0.8 does not follow"),
        ({**WORKS, "spec_decode_per_position_acceptance_rates": [0.4, 0.6, 0.2]}, "error", "joint acceptance cannot"),
        ({**BENCH, "completed": 8}, "info", "holds no accept length above 0"),
        # metrics as JSON
        (METRICS, "info", "accept length 1.75 (bonus in), 300 of 1200"),
        (OBJECTS, "info", "accept length 1.75"),
        ({"metrics": OBJECTS}, "info", "accept length 1.75"),
        (NOTHING, "error", "no draft accepted in 400"),
        ({**METRICS, "vllm:spec_decode_num_drafts": 0}, "info", "no counter or gauge above 0"),
        (
            {"sglang:spec_accept_length": 2.7, "sglang:spec_num_steps": 3},
            "info",
            "accept length 2.7 (bonus in); a gauge",
        ),
        # SGLang's /server_info
        (states(2.7), "info", "accept length 2.7 (bonus in); a gauge"),
        (states(1.0), "error", "exactly 1.00"),
        (states(4.4), "error", "4.40 is above 4.00"),
        (states(2.7, 1.03), "warning", "1.03 is barely above 1.00"),
        (states(0.0), "info", "holds no accept length above 0"),
        (states(None), "info", "holds no accept length above 0"),
        ({"decode": [states(2.7)], "prefill": [{}]}, "info", "accept length 2.7"),
        # answers of SGLang
        ({"id": "1", "choices": [choice({**META, "spec_accept_length": 1.0667})]}, "error", "1.0667 is 16/15"),
        ({"id": "1", "choices": [choice(GOOD_META), choice(GOOD_META)]}, "info", "38 of unknown drafts"),
        (
            {"id": "1", "choices": [{"index": 0}], "sglext": {"spec_tokens_details": META}},
            "error",
            "in 15 verify steps",
        ),
        ({"id": "1", "choices": [{"index": 0}], "usage": {"completion_tokens": 9}}, "info", "acceptance is unknown"),
        (stream({"meta_info": {**META, "spec_verify_ct": 2}}, {"meta_info": META}), "error", "in 15 verify steps"),
        (stream({"meta_info": {**META, "id": "a"}}, {"meta_info": {**GOOD_META, "id": "b"}}), "info", "19 of unknown"),
        (stream({"choices": [{"delta": {"content": "x"}}]}), "info", "acceptance is unknown"),
        # answers of vLLM
        (BLOCK, "error", "no draft accepted in 40 verify steps (0 of 120)"),
        (vllm(BLOCK), "error", "no draft accepted in 40"),
        (vllm(GOOD_BLOCK), "info", "accept length 1.75"),
        ([vllm(GOOD_BLOCK), vllm(GOOD_BLOCK), vllm(None)], "info", "1 of 3 answers because they hold no"),
        (vllm(None), "info", "acceptance is unknown"),
        (vllm({**BLOCK, "num_accepted_draft_tokens": 7}), "error", "the histogram sums to 40 steps"),
        ({**BLOCK, "acceptance_histogram": [0, 0, 0, 0], "num_spec_steps": 0}, "info", "no verify step was counted"),
        (stream({"id": "c", "choices": []}, {**vllm(BLOCK), "choices": []}), "error", "no draft accepted in 40"),
        # SGLang's benchmarks
        ({"backend": "sglang", "completed": 9, "accept_length": 2.7}, "info", "accept length 2.7 (bonus in); a gauge"),
        ({"backend": "sglang", "accept_length": 2.7, "server_info": states(2.7)}, "info", "1.00 to 4.00"),
        ({"backend": "sglang", "duration": 3.1, "accept_length": 1.0}, "error", "exactly 1.00"),
        ({"backend": "sglang", "duration": 3.1, "accept_length": None}, "info", "holds no accept length"),
        # lengths without a counter
        (
            {"meta_info": {"completion_tokens": 16, "spec_accept_length": 1.0667, "spec_accept_rate": 0.0}},
            "error",
            "16/15",
        ),
        ({"spec_accept_length": 1.0667, "spec_accept_rate": 0.0}, "error", "in 15 verify steps"),
        ({"completion_tokens": 64, "spec_accept_length": 2.56}, "info", "at least 2.52"),
        ({"completion_tokens": 64, "spec_accept_length": 2.6}, "info", "the server says accept length 2.6"),
        ({"meta_info": {"spec_accept_length": 1.04}}, "warning", "the server says accept length 1.04"),
        ({"meta_info": {"spec_accept_length": 0.0, "spec_accept_rate": 0.0}}, "info", "acceptance is unknown"),
        ({"completion_tokens": 64, "spec_verify_ct": 63, "spec_accept_rate": 0.02}, "warning", "at least 1 of unknown"),
        # what is none of these
        (
            "vllm:spec_decode_num_drafts_total 40\nvllm:spec_decode_num_accepted_tokens_total 0\n",
            "error",
            "in 40 verify",
        ),
        ({"accept_length": 2.7, "steps": 3}, "info", "accept length 2.7 (bonus in); possible"),
    ],
)
def test_a_saved_file(content: Any, severity: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(content if isinstance(content, str) else json.dumps(content))
    findings = visit(Inputs(acceptance=str(tmp_path / "saved.json"))).findings
    worst = next(one for one in ("error", "warning", "info") if any(f.severity == one for f in findings))
    assert worst == severity and any(part in f.message and f.severity == severity for f in findings), findings


@pytest.mark.parametrize("content", [{"accept_length": 2.7, "stpes": 3}, [{"x": 1}], [3], [], {}])
def test_what_is_no_acceptance_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(json.dumps(content))
    with pytest.raises(UsageError):
        visit(Inputs(acceptance=str(tmp_path / "saved.json")))


@pytest.mark.parametrize("content", [WORKS, METRICS, OBJECTS, states(2.7), vllm(BLOCK), BLOCK, [vllm(BLOCK)]])
def test_a_bare_path_is_known(content: Any, tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(json.dumps(content))
    assert kind_of(tmp_path / "saved.json") == "acceptance"


def test_metrics_as_json_are_the_page() -> None:
    assert from_vllm_metrics(OBJECTS) == from_vllm_metrics(METRICS)
