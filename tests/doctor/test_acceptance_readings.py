"""Acceptance as servers, logs and people write it: what is said of a faulty reading, and not of a healthy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3lab.acceptance.definitions import is_result
from eagle3lab.acceptance.sources import from_sglang_meta_info, least_from_sglang_meta_info
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts

FULL = "SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: {} tokens"
MEAN = "SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s"
RATES = ", Per-position acceptance rate: {}"
OLD = "SpecDecoding metrics: Draft acceptance rate: {}%, Accepted: {} tokens, Drafted: {} tokens"
PAGE = 'sglang:spec_accept_length{{model_name="m"}} {}\nsglang:spec_num_steps{{model_name="m"}} 3.0\n'


def found(values: dict[str, Any], code: str) -> list[Finding]:
    return [one for one in visit_facts(values).findings if one.code == code]


def one(values: dict[str, Any], code: str) -> tuple[str, str]:
    [finding] = found(values, code)
    return finding.severity, finding.message


# -- SGLang answers without accepted drafts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "severity", "part"),
    [
        ({"completion_tokens": 64, "spec_verify_ct": 63}, "error", "no draft accepted in 63 verify steps"),
        (
            {"completion_tokens": 64, "spec_verify_ct": 63, "spec_accept_length": 1.0159, "spec_accept_rate": 0.0},
            "error",
            "1.0159 is 64/63",
        ),
        (
            {"completion_tokens": 64, "spec_verify_ct": 63, "spec_accept_length": 1.0667, "spec_accept_rate": 0.0},
            "error",
            "no draft accepted in 63",
        ),
        ({"spec_verify_ct": 63, "spec_accept_rate": 0.0}, "error", "no draft accepted in 63"),
        ({"completion_tokens": 5, "spec_verify_ct": 4}, "warning", "too few steps"),
        ({"completion_tokens": 64, "spec_verify_ct": 25}, "info", "accept length at least 2.52"),
        ({"completion_tokens": 64, "spec_verify_ct": 25, "spec_accept_rate": 0.0}, "info", "at least 2.52"),
        ({"spec_verify_ct": 4, "spec_correct_drafts_histogram": [1, 1, 2]}, "info", "at least 2.25"),
        ({"spec_verify_ct": 63}, "info", "unknown"),
        ({"spec_verify_ct": 63, "spec_accept_rate": 0.4}, "info", "unknown"),
        ({"completion_tokens": 1, "spec_verify_ct": 0}, "info", "unknown"),
    ],
)
def test_tokens_and_steps_tell_the_least(meta: dict[str, Any], severity: str, part: str) -> None:
    said = one({"meta_info": meta}, "accept-answer")
    assert said[0] == severity and part in said[1]
    many = found({"answers": [meta, meta]}, "accept-answers")
    assert severity == "warning" or [finding.severity for finding in many] == [severity]


def test_a_measurement_takes_no_bound() -> None:
    meta = {"completion_tokens": 64, "spec_verify_ct": 25}
    assert from_sglang_meta_info(meta) is None
    least = least_from_sglang_meta_info(meta)
    assert least is not None and least.accepted == 38
    assert least_from_sglang_meta_info({**meta, "spec_num_correct_drafts": 40}) is None


# -- vLLM log lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "severity", "part"),
    [
        (FULL.format("1.00", 0, 600), "error", "no draft was ever right"),
        (FULL.format("1.00", 0, 301) + RATES.format("0.000, 0.000, 0.000"), "error", "in 101 verify steps (0 of 301)"),
        (FULL.format("nan", 0, 600), "error", "no draft was ever right"),
        (FULL.format("1.00", 3, 3000), "warning", "barely"),
        (OLD.format("0.0", 0, 600), "error", "no draft was ever right"),
        (MEAN.format("1.00"), "error", "exactly 1.00"),
        (MEAN.format("0.95"), "error", "the least is 1.00"),
        (MEAN.format("2.95"), "info", "accept length 2.95 to 2.95 in 1 log lines, each a mean over its log interval"),
        (FULL.format("2.60", 160, 301) + RATES.format("0.800, 0.500, 0.300"), "info", "accept length 2.6 "),
        (FULL.format("2.60", 160, 300), "info", "accept length 2.6 "),
        (OLD.format("50.0", 150, 300), "info", "no acceptance line"),
        (OLD.format("50.0", 150, 300) + "\n" + OLD.format("0.0", 0, 60), "info", "no acceptance line"),
        (OLD.format("0.0", 0, 3), "info", "no acceptance line"),
        (FULL.format("nan", 0, 0), "info", "no acceptance line"),
        (FULL.format("1.00", 0, 60) + "\n" + FULL.format("2.60", 160, 300), "info", "accept length 2.6 "),
    ],
)
def test_vllm_lines(log: str, severity: str, part: str) -> None:
    said = one({"log": log}, "log-acceptance")
    assert said[0] == severity and part in said[1]


# -- SGLang's gauge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "severities", "part"),
    [
        (PAGE.format("0.0"), {"info"}, "no counter or gauge above 0"),
        (PAGE.format("2.5"), {"info"}, "accept length 2.5 (bonus in); a gauge"),
        (PAGE.format("2.5"), {"info"}, "1.00 to 4.00"),
        (PAGE.format("2.5") + PAGE.format("0.0"), {"info"}, "1.00 to 4.00"),
        (PAGE.format("1.0"), {"error", "info"}, "exactly 1.00"),
        (PAGE.format("0.62"), {"error", "info"}, "below 1.00"),
        (
            PAGE.format("0.0") + "vllm:spec_decode_num_drafts_total 40\nvllm:spec_decode_num_accepted_tokens_total 0\n",
            {"error", "info"},
            "no draft accepted in 40",
        ),
    ],
)
def test_a_gauge_of_0_is_no_reading(page: str, severities: set[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.txt").write_text(page)
    report = visit(Inputs(acceptance=str(tmp_path / "metrics.txt")))
    said = [finding for finding in report.findings if finding.code.startswith("accept")]
    assert {finding.severity for finding in report.findings} <= severities
    assert part in str(report) and ("error" in severities) == any(one.severity == "error" for one in said)


# -- lists, counters, settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meaning", "length"),
    [
        *[(name, 2.8) for name in ("joint", "joint (survival)", "Joint rates", "survival_rate", "cumulative")],
        ("per-position acceptance rate (vLLM)", 2.8),
        *[(name, 2.33) for name in ("conditional", "conditional, from vLLM", "n-alpha (EAGLE)", "c_j", "cond. rates")],
        *[(name, 2.8) for name in ("unconditional joint rate", "unconditional, as vLLM prints it")],
        *[(name, None) for name in ("marginal", "unconditional", "not marginal", "joint?", "unknown, maybe joint")],
        *[(name, None) for name in ("not joint", "non-conditional", "joint or conditional", "entropy", "drafter's")],
    ],
)
def test_a_meaning_in_words(meaning: str, length: float | None) -> None:
    [finding] = found({"per_depth": [0.7, 0.6, 0.5], "meaning": meaning}, "accept-per-position")
    assert finding.severity == ("warning" if length is None else "info")
    assert length is None or finding.evidence["accept_length"] == pytest.approx(length)


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ({"drafts": 4816, "accepted": 12208, "accept_length": 2.535}, "error"),
        ({"drafts": 4816, "accepted": 12208, "accept_length": 2.5}, "error"),
        ({"verify_steps": 100, "correct_drafts": 250, "accept_length": 2.5}, "error"),
        ({"verify_steps": 100, "correct_drafts": 250, "accept_length": 1.8}, "warning"),
        ({"drafts": 4816, "accepted": 12208, "accept_length": 3.535}, None),
        ({"drafts": 4816, "accepted": 12208, "accept_length": 3.5}, None),
        ({"drafts": 4816, "accepted": 12208, "accept_length": 3.7}, None),
        ({"verify_steps": 100, "correct_drafts": 250, "accept_length": 3.51}, None),
        ({"verify_steps": 1, "correct_drafts": 2, "accept_length": 2.0}, None),
        ({"verify_steps": 100, "correct_drafts": 250, "accept_length": {"a": 2.5}}, None),
        ({"drafts": 0, "accepted": 0, "accept_length": 2.5}, None),
    ],
)
def test_a_stated_length_against_its_counters(values: dict[str, Any], severity: str | None) -> None:
    said = [finding for finding in found(values, "accept-ceiling") if finding.severity != "info"]
    assert [finding.severity for finding in said] == ([severity] if severity else [])
    assert severity != "error" or "leaves out the bonus token" in said[0].message


@pytest.mark.parametrize(("drafted", "severity"), [(500, "error"), (0, "error"), (1000, "info"), (3000, "info")])
def test_a_draft_has_a_token(drafted: int, severity: str) -> None:
    accepted = min(200, drafted)
    assert one({"drafts": 1000, "drafted": drafted, "accepted": accepted}, "accept-counters")[0] == severity


RESULTS = (
    *("tok_s", "tok/s", "tokens per second", "tokensPerSecond", "toks", "tau", "speed", "TPS", "output_throughput"),
    *("acceptance_length", "accept_len", "acc_len", "mean accepted tokens", "spec_accept_length", "acceptance rate"),
    *("speed-up", "speedup_ratio", "latency_ms", "ttft", "wall_time", "wall_seconds", "seconds", "peak_memory_gb"),
    *("draft_model", "draft_model_path", "speculative_draft_model_path", "draft_path", "drafter_path", "draftRevision"),
    *("draft_checkpoint", "draft_sha256", "checkpoint", "run", "run_id", "run-name", "id", "date", "timestamp"),
    *("commit", "epoch", "training_step", "train_loss", "notes", "comment", "num_drafts", "spec_verify_ct"),
    *("verify_ct", "verify_calls", "std", "stderr", "ci", "ci95", "total_tokens", "output_tokens", "loss", "accuracy"),
    *("completion_length", "per_position_rates", "rate_per_node", "top1_accuracy", "accept_length_std"),
    *("checkpoint_step", "drafted_tokens", "memory_used", "runtime"),
)
SETTINGS = (
    *("temperature", "top_k", "top_p", "thinking", "dataset", "max_new_tokens", "draft_tokens", "steps", "topk"),
    *("concurrency", "target", "SGLANG_SIMULATE_ACC_LEN", "accept_threshold", "synthetic_acceptance_length"),
    *("draft_temperature", "draft_dtype", "num_draft_tokens", "num_speculative_tokens", "speculative_algorithm"),
    *("target_checkpoint", "model_path", "engine_version", "dataset_id", "request_rate", "num_prompts", "seed"),
    *("max_output_tokens", "max_completion_tokens", "prompt_tokens", "total_input_tokens", "gpu_memory_utilization"),
)


@pytest.mark.parametrize("key", RESULTS)
def test_a_result_is_no_setting(key: str) -> None:
    assert is_result(key)
    assert one({"a": {key: 2.1, "temperature": 0}, "b": {key: 2.4, "temperature": 0}}, "accept-comparable")[0] == "info"


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_compared(key: str) -> None:
    assert one({"a": {key: 1, "tau": 2.1}, "b": {key: 2, "tau": 2.4}}, "accept-comparable")[0] == "warning"


UNKNOWN = (
    *("unknown", "?", "none", "n/a", "not given", "not stated", "untagged", "unlabelled", "unspecified", "ambiguous"),
    *(
        "missing",
        "acceptance rate",
        "per position",
        "per-position acceptance rates",
        "not known",
        "no idea",
        "-",
        "TBD",
    ),
)


@pytest.mark.parametrize("meaning", [None, "", *UNKNOWN])
def test_a_word_for_unknown_leaves_both_readings(meaning: str | None) -> None:
    [finding] = found({"per_depth": [0.7, 0.5, 0.2], "meaning": meaning}, "accept-per-position")
    assert finding.severity == "warning" and "2.4 if joint, 2.12 if conditional" in finding.message
    evidence = finding.evidence
    assert (evidence["if_joint"], evidence["chosen"]) == (pytest.approx(2.4), None)
    assert evidence["if_conditional"] == pytest.approx(2.12)


@pytest.mark.parametrize("meaning", ["marginal", "unconditional", "Marginal rates", "per-position marginals"])
def test_a_marginal_list_may_rise(meaning: str) -> None:
    said = one({"per_depth": [0.5, 0.6, 0.4], "meaning": meaning}, "accept-per-position")
    assert said[0] == "warning" and "no accept length follows" in said[1]


def test_two_drafts_under_equal_settings() -> None:
    a = {"accept_length": 2.5, "temperature": 0, "steps": 3, "draft_model": "A"}
    b = {**a, "accept_length": 2.7, "draft_model": "B"}
    assert one({"a": a, "b": b}, "accept-comparable") == ("info", "settings are equal")
    severity, message = one({"a": a, "b": {**b, "steps": 5}}, "accept-comparable")
    assert severity == "warning" and "steps 3 / 5" in message and "draft_model" not in message


@pytest.mark.parametrize(
    ("values", "top"),
    [
        ({"topk": 4, "draft_tokens": 8, "accept_length": 9.4}, 8.0),
        ({"topk": 8, "draft_tokens": 16, "accept_length": 16.2}, 16.0),
        ({"steps": 5, "topk": 8, "draft_tokens": 4, "accept_length": 4.4}, 4.0),
        ({"steps": 5, "topk": 8, "draft_tokens": 32, "accept_length": 6.1}, 6.0),
        ({"draft_tokens": 8, "accept_length": 9.4}, 9.0),
        ({"topk": 4, "draft_tokens": 8, "accept_length": 3.4}, None),
        ({"steps": 5, "topk": 8, "draft_tokens": 32, "accept_length": 4.1}, None),
        ({"steps": 3, "draft_tokens": 3, "accept_length": 3.4}, None),  # another engine's count, without the root
    ],
)
def test_no_more_than_a_tree_has_nodes(values: dict[str, Any], top: float | None) -> None:
    said = [finding for finding in found(values, "accept-ceiling") if finding.severity == "error"]
    assert [finding.evidence["ceiling"] for finding in said] == ([top] if top else [])


def test_a_tree_keeps_fewer_drafts_than_it_has_nodes() -> None:
    tree = {"topk": 4, "draft_tokens": 8, "verify_steps": 10}
    assert [f.severity for f in found({**tree, "correct_drafts": 71}, "accept-tree")] == ["error"]
    assert [f.severity for f in found({**tree, "correct_drafts": 25}, "accept-tree")] == ["info"]


COUNTS = {"verify_steps": 100, "proposed": 300, "accepted": 100, "histogram": [40, 30, 20, 10]}


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"accept_rate": 0.9}, "accept rate 0.9 does not follow from its counts: 0.3333"),
        ({"accept_rate": 0.333, "accepted_per_step": 2.0}, "accepted per step 2 does not follow"),
        ({"joint": [0.6, 0.7, 0.1]}, "joint rates [0.6, 0.7, 0.1] do not follow from the counts at position 2"),
        ({"joint": [0.6, 0.3, 0.1, 0.1]}, "at position 4"),
        ({"joint": ["a", 0.3, 0.1]}, "at position 1"),
        ({"conditional": [0.6, 0.3, 0.1]}, "conditional rates"),
        ({"counts": {**COUNTS, "histogram": None}, "joint": [0.6, 0.7, 0.1]}, "joint acceptance cannot rise"),
        ({"counts": {**COUNTS, "histogram": None}, "joint": [0.6, 0.5, 0.4]}, "add up to 1.5"),
        ({"accept_rate": 0.333, "joint": [0.6, 0.3, 0.1], "conditional": [0.6, 0.5, 0.333]}, None),
        ({"joint": [0.6, 0.3, 0.1, 0.0], "conditional": [0.6, 0.5, 0.333, None]}, None),
        ({"counts": {**COUNTS, "histogram": None}, "joint": [0.6, 0.3, 0.1]}, None),
        ({"counts": {**COUNTS, "proposed": None}, "accept_rate": None}, None),
    ],
)
def test_a_report_against_its_counts(stated: dict[str, Any], words: str | None) -> None:
    said = [f for f in found({"acceptance": {"counts": COUNTS, **stated}}, "accept-report") if f.severity != "info"]
    assert [(f.severity, words in f.message) for f in said] == ([("error", True)] if words else [])
