"""Fits, margins and refusals with the number that decides."""

from __future__ import annotations

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.targets.plan import (
    GIB,
    DrafterShape,
    fit,
    parse_memory,
    reserve_bytes,
    state_bytes_per_token,
    training_memory,
)
from eagle3lab.targets.profiles import load_profile
from eagle3lab.targets.shapes import target_shape

KIMI = target_shape(load_profile("kimi-k2.5").config)
DRAFTER = DrafterShape(7168, 3, 7168, 18432, 64, 64, 128, 32000, 163840)


@pytest.mark.parametrize(
    ("gib", "verdict"), [(64, "refused"), (80, "tight"), (96, "fits"), (141, "fits"), (192, "fits")]
)
def test_kimi_over_8_gpus(gib: int, verdict: str) -> None:
    got = fit(KIMI, 8, gib * GIB)
    assert got.verdict == verdict
    assert got.weights / GIB == pytest.approx(69.2, rel=0.01)
    # Nothing is spent twice: weights, what ranks hold whole, reserve and KV pool are the GPU.
    assert got.weights + got.replicated_extra + got.reserve + got.kv_pool == pytest.approx(gib * GIB)
    assert 0 < got.mem_fraction < 1 and got.gpu_memory * (1 - got.mem_fraction) >= got.reserve


def test_context_left_on_96_gib() -> None:
    got = fit(KIMI, 8, 96 * GIB)
    assert got.kv_tokens == int(got.kv_pool // 70_272) and 100_000 < got.kv_tokens < 262_144
    assert got.context(KIMI.context) == got.kv_tokens
    assert fit(KIMI, 8, 192 * GIB).context(KIMI.context) == 262_144


def test_refusal_carries_the_number() -> None:
    got = fit(KIMI, 8, 64 * GIB)
    assert "71.0" in got.reason and "64 GiB" in got.reason and "12.0 GiB lack" in got.reason


def test_tight_says_how_and_what_lacks() -> None:
    got = fit(KIMI, 8, 80 * GIB)
    assert got.margin < 0 and "7.0 GiB" in got.reason and "--chunked-prefill-size 2048" in got.reason
    assert (got.prefill_chunk, got.graphs) == (2048, False)


def test_other_refusals() -> None:
    assert "do not divide over 7 GPUs" in fit(KIMI, 7, 192 * GIB).reason
    assert "262144 positions" in fit(KIMI, 8, 192 * GIB, context=300_000).reason
    assert fit(KIMI, 8, 96 * GIB, context=262_144).verdict != "fits"  # 138 thousand tokens of KV with the usual reserve
    assert fit(KIMI, 8, 72 * GIB).verdict == "refused"  # weights alone would fit


def test_a_served_drafter_costs_context() -> None:
    alone, beside = fit(KIMI, 8, 96 * GIB), fit(KIMI, 8, 96 * GIB, drafter=DRAFTER)
    assert beside.kv_tokens < alone.kv_tokens
    assert beside.kv_bytes_per_token == 70_272 + 2 * 2 * 128 * 8


def test_reserve_follows_sglangs_rule() -> None:
    # 512 + 1.5 x 8192 + 8 / 8 x 1024 + 512 x 2 + 1.5 x 1024 MiB
    assert reserve_bytes(141 * GIB, 8, 8192, graphs=True, mla=True) == 16384 * 1024**2
    assert reserve_bytes(80 * GIB, 1, 2048, graphs=True, mla=False) == 10 * GIB  # floor above 60 GiB
    assert reserve_bytes(80 * GIB, 8, 2048, graphs=False, mla=True) == 4608 * 1024**2


def test_state_bytes() -> None:
    assert state_bytes_per_token(7168, 3) == 57_344
    assert state_bytes_per_token(7168, 3, last=False) == 43_008 == 21_504 * 2


def test_training_memory_counts_the_drafter() -> None:
    # fc 154,140,672 + q, k, v 3 x 8192 x 14336 + o 7168 x 8192 + MLP 3 x 7168 x 18432 + 4 norms + head 32000 x 7168
    fc, qkv, o = 7168 * 21504, 3 * 8192 * 14336, 7168 * 8192
    assert DRAFTER.trained_parameters == fc + qkv + o + 3 * 7168 * 18432 + 4 * 7168 + 32000 * 7168
    small = training_memory(DRAFTER, tokens=1024, ttt_steps=3)
    large = training_memory(DRAFTER, tokens=4096, ttt_steps=7)
    assert small.optimiser_and_weights == large.optimiser_and_weights == 16 * DRAFTER.trained_parameters
    assert large.activations > 4 * small.activations


@pytest.mark.parametrize(
    ("text", "want"),
    [("96GiB", 96 * GIB), ("96", 96 * GIB), ("80 GB", 80 * 10**9), ("1.5TiB", 1536 * GIB), ("512MiB", GIB // 2)],
)
def test_parse_memory(text: str, want: int) -> None:
    assert parse_memory(text) == want


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "0", "96 apples", "96GiB8"])
def test_parse_memory_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="96GiB"):
        parse_memory(text)
