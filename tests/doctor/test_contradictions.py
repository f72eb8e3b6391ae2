"""Numbers of one measurement that contradict each other, each beside the same numbers in agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.acceptance.saved import settings_of
from eagle3lab.acceptance.sources import from_vllm_metrics
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.doctor.run import Inputs, visit

from .conftest import serious, visit_facts

STEPS = {"steps": 3, "topk": 1, "draft_tokens": 4}


def meta(histogram: list[int], tokens: int | None = None, **more: Any) -> dict[str, Any]:
    """An answer of SGLang with this histogram."""
    steps, right = sum(histogram), sum(j * count for j, count in enumerate(histogram))
    counted = {"spec_verify_ct": steps, "spec_num_correct_drafts": right, "spec_num_proposed_drafts": 3 * steps}
    made = 1 + steps + right if tokens is None else tokens
    return {"completion_tokens": made, **counted, "spec_correct_drafts_histogram": histogram, **more}


def report(**more: Any) -> dict[str, Any]:
    counts = {"verify_steps": 40, "accepted": 20, "proposed": 120, "histogram": [25, 10, 5, 0]}
    return {"counts": counts, "accept_length": 1.5, **more}


def prompts(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"prompt": str(n), "verify_steps": a, "accepted": b} for n, (a, b) in enumerate(pairs)]


def metrics(**more: Any) -> dict[str, Any]:
    return {"acceptance": {"headline": "own", "sets": {"own": report(), "fresh": report()}, **report(), **more}}


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "deeper than the draft": (
        {"meta_info": meta([1, 1, 1, 1, 1], spec_num_proposed_drafts=15), "steps": 3},
        {"meta_info": meta([1, 1, 1, 2, 0, 0]), "steps": 3},
        "error",
        "accepted 4 drafts in 5 verify steps of 3",
    ),
    "more than the draft steps": (
        {"meta_info": {"spec_verify_ct": 5, "spec_num_correct_drafts": 16}, "steps": 3},
        {"meta_info": {"spec_verify_ct": 5, "spec_num_correct_drafts": 15}, "steps": 3},
        "error",
        "16 drafts in 5 verify steps of 3",
    ),
    "one answer of several is too deep": (
        {"answers": [meta([2, 2]), meta([1, 0, 0, 0, 1])], "steps": 3},
        {"answers": [meta([2, 2]), meta([1, 0, 0, 1])], "steps": 3},
        "error",
        "1: a verify step that accepted 4",
    ),
    "tokens that no step made": (
        {"meta_info": meta([4, 2, 2, 2], 100, spec_accept_length=10.0)},
        {"meta_info": meta([4, 2, 2, 2], 22, spec_accept_length=2.2)},
        "warning",
        "100 tokens, 10 verify steps and 12 accepted drafts yield at most 23",
    ),
    "tokens that no step made, of many": (
        {"answers": [meta([4, 2]), meta([4, 2], 60)]},
        {"answers": [meta([4, 2]), meta([4, 2], 7)]},
        "warning",
        "1 of 2 answers: 60 tokens",
    ),
    "joint rates of 0": ({"joint_rates": [0.0, 0]}, {"joint_rates": [0.11, 0.01]}, "error", "every rate is 0"),
    "joint rates near 0": ({"joint_rates": [0.04]}, {"joint_rates": [0.3]}, "warning", "barely above 1.00"),
    "joint of 0 by name": (
        {"per_depth": [0, 0, 0], "meaning": "joint"},
        {"per_depth": [0.2, 0, 0], "meaning": "joint"},
        "error",
        "every rate is 0",
    ),
    "conditional of 0": (
        {"per_depth": [0.0, 0.5], "meaning": "conditional"},
        {"per_depth": [0.5, 0.0], "meaning": "conditional"},
        "error",
        "every rate is 0",
    ),
    "rates against counters": (
        {"per_depth": [0.7, 0.4, 0.3], "meaning": "joint", "drafts": 100, "accepted": 120},
        {"per_depth": [0.7, 0.3, 0.2], "meaning": "joint", "drafts": 100, "accepted": 120},
        "error",
        "make accept length 2.4, the counters 1 + 120/100 = 2.2",
    ),
    "joint rates against counters": (
        {"joint_rates": [0.7, 0.4], "verify_steps": 10, "correct_drafts": 9},
        {"joint_rates": [0.7, 0.2], "verify_steps": 10, "correct_drafts": 9},
        "error",
        "make accept length 2.1",
    ),
    "prompts do not add up": (
        {"acceptance": report(per_prompt=prompts((20, 10), (10, 10)))},
        {"acceptance": report(per_prompt=prompts((20, 10), (20, 10)))},
        "error",
        "2 prompts add up to 30 verify steps, the totals say 40",
    ),
    "headline of no set": (
        metrics(headline="humaneval"),
        metrics(headline="fresh"),
        "error",
        "the headline is 'humaneval', the report has the sets own, fresh",
    ),
    "headline of other numbers": (
        metrics(accept_length=2.5),
        metrics(accept_length=1.503),
        "error",
        "accept length is 2.5 at the top of the report and 1.5 in its set own",
    ),
    "a length in words": (
        {"acceptance": report(accept_length="1.5")},
        {"acceptance": report(accept_length=None)},
        "error",
        "'1.5', a number is needed",
    ),
}


def test_no_verify_step_yet_is_unknown() -> None:
    """SGLang leaves the counters out before the first step; a 0 that is written says the same."""
    report = visit_facts({"meta_info": {"completion_tokens": 12, "spec_verify_ct": 0}})
    assert [(f.severity, f.evidence.get("printed_as")) for f in report.findings if f.code == "accept-answer"] == [
        ("info", "unknown")
    ]


@pytest.mark.parametrize(("drafted", "right"), [(2109, True), (2000, True), (2110, False)])
def test_drafted_tokens_have_a_position_each(drafted: int, right: bool) -> None:
    counters = {"num_drafts": 703, "num_draft_tokens": drafted, "num_accepted_tokens": 409}
    page = {f"vllm:spec_decode_{name}": value for name, value in counters.items()}
    page["vllm:spec_decode_num_accepted_tokens_per_pos"] = [265, 101, 43]
    if right:
        counts = from_vllm_metrics(page)
        assert counts is not None and counts.proposed == drafted
    else:
        with pytest.raises(AcceptanceError, match="2110 tokens drafted in 703 drafts of 3 positions"):
            from_vllm_metrics(page)


def test_a_server_that_adapts_has_no_fixed_depth() -> None:
    info = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    assert dict(settings_of(info)) == {"steps": 3, "topk": 1}
    assert not dict(settings_of({**info, "speculative_adaptive": True}))


def test_a_run_is_read_with_its_headline(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": "eagle3lab-run/1"}))
    (tmp_path / "status.json").write_text(json.dumps({"steps": {"accept": {"status": "ok"}}}))
    for top, wrong in ((1.5, False), (2.5, True)):
        (tmp_path / "metrics.json").write_text(json.dumps(metrics(accept_length=top)["acceptance"]))
        told = [f for f in visit(Inputs(run=str(tmp_path))).findings if f.subject == "headline"]
        assert bool(told) is wrong


CURVE = [{"step": step, "loss": 9.0 - 0.1 * step, "gradient_norm": 1.0} for step in range(30)]
SAVED = {"step": 100, "weights": True, "optimizer": True, "scheduler": {"last_step": 100}, "rng": True, "sampler": True}
NAN = float("nan")


def curve(at: int, **values: Any) -> dict[str, Any]:
    return {"curve": [{**row, **values} if row["step"] == at else row for row in CURVE]}


def notebook(**values: Any) -> dict[str, Any]:
    return {"status": {"notebooks": {"03_train": {"status": "ok", "cells": 13, **values}}}}


def fc(last: float) -> dict[str, Any]:
    return {"fc_trajectory": [{"step": "0", "std": 0.01, "moved": 0.0}, {"step": "9", "std": last, "moved": 2.0}]}


AVERAGES = {"loss_over_all_positions": 4.8, "loss_over_masked_positions": 4.8, "masked_share": 1.0}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a step in words": ({"run": {**SAVED, "step": "100"}}, {"run": SAVED}, "error", "step is '100'"),
    "nan in both runs": (
        {"losses_straight": [3.0, NAN, NAN], "losses_resumed": [3.0, NAN, 1.0]},
        {"losses_straight": [3.0, None, 2.0], "losses_resumed": [3.0, None, 2.0]},
        "error",
        "the loss is not finite at step 2 of both runs",
    ),
    "a loss that is nan": ({**AVERAGES, "loss_over_all_positions": NAN}, AVERAGES, "error", "is not finite"),
    "a share of 2.5": ({**AVERAGES, "masked_share": 2.5}, AVERAGES, "error", "masked_share is 2.5"),
    "a negative loss": (curve(7, loss=-3.0), curve(7, loss=0.02), "warning", "the loss is -3 at step 7"),
    "a gradient of nan": (
        curve(7, gradient_norm=NAN),
        curve(1, gradient_norm=float("inf")),  # a loss scale that is too high at first
        "warning",
        "not finite in 1 of 30 log rows, first at step 7",
    ),
    "the last gradient": (curve(29, gradient_norm=NAN), curve(29, gradient_norm=None), "error", "first at step 29"),
    "a held-out nan": (
        {"curve": CURVE, "held_out": [{"step": 5, "simulated_accept_length": NAN}]},
        {"curve": CURVE, "held_out": [{"step": 5, "simulated_accept_length": None}]},
        "error",
        "simulated_accept_length is nan at step 5",
    ),
    "cells that did not run": (notebook(ran=3), notebook(ran=13), "error", "said to be ok, and 3 of its 13 cells ran"),
    "fc grows": (fc(0.5), fc(0.09), "warning", "fc grew 50 times"),
}


def good(*numbers: int) -> dict[str, Any]:
    return {"shards": [{"i": number, "state": "good"} for number in numbers], "conversations": 3}


STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a number twice": (good(0, 0, 1), good(0, 2, 1), "error", "2 good shards have the number 0"),
    "a share above 1": (
        {"next_token_agreement_by_shard": [0.8, 1.3]},
        {"next_token_agreement_by_shard": [0.8, 1.0]},
        "error",
        "agreement holds 1.3",
    ),
    "rows that are not given": (
        {"rows_compared": 5, "cosine_to_batch_1": [1.0, 1.0]},
        {"rows_compared": 2, "cosine_to_batch_1": [1.0, 1.0]},
        "warning",
        "5 rows are said to be compared, 2 cosines are given",
    ),
}
ALL = PAIRS | RUNS | STATES


@pytest.mark.parametrize("name", ALL)
def test_said_of_the_contradiction_alone(name: str) -> None:
    bad, right, severity, part = ALL[name]
    assert any(found == severity and part in message for found, message in serious(bad)), serious(bad)
    assert not serious(right)
