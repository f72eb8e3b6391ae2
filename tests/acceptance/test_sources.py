"""Counts from what engines print: the real spellings, older ones, data-parallel ranks, and silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3lab.acceptance.sources import (
    Gauge,
    from_numbers,
    from_sglang_log,
    from_sglang_meta_info,
    from_vllm_log,
    from_vllm_metrics,
    gauges_from_sglang_log,
    histogram_from_positions,
    prefill_floor,
    refuse_simulated,
    weighted_mean,
)
from eagle3lab.core.errors import AcceptanceError

ZERO = {
    "completion_tokens": 16, "spec_verify_ct": 15, "spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 45,
    "spec_correct_drafts_histogram": [15], "spec_accept_length": 1.0667,
}  # fmt: skip

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 703.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2109.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 409.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 265.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 101.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 43.0
"""


def test_sglang_zero_acceptance_is_not_read_from_its_own_length():
    counts = from_sglang_meta_info(ZERO, steps=3)
    assert counts.accept_length == 1.0
    assert counts.joint == (0.0, 0.0, 0.0)
    assert prefill_floor(16) == pytest.approx(ZERO["spec_accept_length"], abs=5e-5)


def test_sglang_older_names():
    older = {
        "completion_tokens": 10, "spec_verify_ct": 4, "spec_accept_token_num": 5, "spec_draft_token_num": 12,
        "spec_accept_histogram": [1, 1, 2],
    }  # fmt: skip
    counts = from_sglang_meta_info(older)
    assert (counts.accepted, counts.proposed, counts.histogram) == (5, 12, (1, 1, 2))


@pytest.mark.parametrize("silent", [{}, {"completion_tokens": 64}, {"spec_verify_ct": 4}, {"spec_verify_ct": None}])
def test_absent_is_none_not_zero(silent):
    assert from_sglang_meta_info(silent) is None


def test_contradicting_counters_are_refused():
    with pytest.raises(AcceptanceError, match="histogram sums to 14"):
        from_sglang_meta_info({**ZERO, "spec_correct_drafts_histogram": [14]})


def test_vllm_prometheus_text():
    counts = from_vllm_metrics(PROMETHEUS)
    assert counts.accept_length == pytest.approx(1.582, abs=5e-4)
    assert counts.histogram == (438, 164, 58, 43)
    assert counts.joint == pytest.approx([265 / 703, 101 / 703, 43 / 703])


def test_vllm_engines_of_a_data_parallel_server_are_added():
    second = PROMETHEUS.replace('engine="0"', 'engine="1"')
    counts = from_vllm_metrics(PROMETHEUS + second)
    assert (counts.verify_steps, counts.accepted, counts.at_least) == (1406, 818, (530, 202, 86))


def test_vllm_mapping_and_objects_give_the_same():
    flat = {
        "vllm:spec_decode_num_drafts": 703, "vllm:spec_decode_num_draft_tokens": 2109,
        "vllm:spec_decode_num_accepted_tokens": 409, "vllm:spec_decode_num_accepted_tokens_per_pos": [265, 101, 43],
    }  # fmt: skip
    objects = [
        SimpleNamespace(name=name, **({"values": value} if isinstance(value, list) else {"value": value}))
        for name, value in flat.items()
    ]
    assert from_vllm_metrics(flat) == from_vllm_metrics(objects) == from_vllm_metrics(PROMETHEUS)


@pytest.mark.parametrize("silent", ["", "# nothing\n", PROMETHEUS.replace("703.0", "0.0"), "garbage { 1 } 2 3 4"])
def test_vllm_without_drafts_is_none(silent):
    assert from_vllm_metrics(silent) is None


def test_positions_that_rise_are_refused():
    with pytest.raises(AcceptanceError, match="position 2 was accepted 6 times"):
        histogram_from_positions(10, [5, 6])


def test_sglang_log_lines_with_and_without_noise():
    log = (
        "[2026-01-01 DP0 TP0] Decode batch, #running-req: 1, #token: 512, token usage: 0.01, accept len: 2.50, "
        "accept rate: 0.50, cuda graph: True\nnoise\nDecode batch, accept len: nan, accept rate: nan\n"
        "Decode batch, accept len: 1.50, accept rate: 0.17\n"
    )
    assert [(one.accept_length, one.accept_rate, one.line) for one in gauges_from_sglang_log(log)] == [
        (2.5, 0.5, 1),
        (1.5, 0.17, 4),
    ]
    assert from_sglang_log(log).accept_length == 2.0
    assert from_sglang_log("Decode batch, #running-req: 1") is None


def test_vllm_log_lines_add_up():
    line = (
        "SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s, Drafted throughput: "
        "3.00 tokens/s, Accepted: {} tokens, Drafted: {} tokens, Per-position acceptance rate: {}, "
        "Avg Draft acceptance rate: 20.0%"
    )
    log = "\n".join(
        [line.format("1.60", 60, 300, "0.400, 0.150, 0.050"), line.format("1.00", 0, 90, "0.000, 0.000, 0.000")]
    )
    counts = from_vllm_log(log)
    assert (counts.verify_steps, counts.accepted, counts.proposed) == (130, 60, 390)


def test_ranks_are_weighted_by_their_verify_steps():
    busy, idle = Gauge(accept_length=3.0, steps=900), Gauge(accept_length=1.0, steps=100)
    assert weighted_mean([busy, idle]) == pytest.approx(2.8)  # a plain mean says 2.0
    assert weighted_mean([busy, Gauge(accept_length=1.0)]) is None
    assert weighted_mean([]) is None


@pytest.mark.parametrize("value", ["3.5", "0.1", " 2 "])
def test_simulated_acceptance_is_refused(value):
    with pytest.raises(AcceptanceError, match="invents its acceptance"):
        refuse_simulated({"SGLANG_SIMULATE_ACC_LEN": value})


@pytest.mark.parametrize("value", ["", "0", "-1", "no"])
def test_simulation_that_is_off_is_not_refused(value):
    refuse_simulated({"SGLANG_SIMULATE_ACC_LEN": value, "SGLANG_SIMULATE_ACC_METHOD": "multinomial"})


def test_the_older_name_of_simulated_acceptance_counts_over_the_newer() -> None:
    with pytest.raises(AcceptanceError, match="SGL_SIMULATE_ACC_LEN=2"):
        refuse_simulated({"SGL_SIMULATE_ACC_LEN": "2", "SGLANG_SIMULATE_ACC_LEN": "-1"})
    refuse_simulated({"SGL_SIMULATE_ACC_LEN": "-1", "SGLANG_SIMULATE_ACC_LEN": "2"})


def test_three_typed_numbers():
    counts = from_numbers(verify_steps=4816, accepted=12208, proposed=33712)
    assert counts.accept_length == pytest.approx(3.535, abs=5e-4)
    assert counts.accept_rate == pytest.approx(0.3621, abs=5e-5)
