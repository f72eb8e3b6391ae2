"""Presets compute in the target's own type only where this processor is faster in it."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.core import precision
from eagle3lab.core.errors import UsageError
from eagle3lab.core.precision import compute_type
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import find_preset
from eagle3lab.steps.preflight import preflight
from eagle3lab.steps.train import train_settings


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch):
    """Make 16-bit products `times` slower than those in float32."""

    def make(times: float) -> None:
        precision.slowdown.cache_clear()
        monkeypatch.setattr(precision, "_seconds", lambda dtype: 1e-3 * (1 if dtype == "float32" else times))

    yield make
    precision.slowdown.cache_clear()


@pytest.mark.parametrize(
    ("times", "found"), [(0.5, "bfloat16"), (1.2, "bfloat16"), (1.9, "float32"), (300.0, "float32")]
)
def test_auto_follows_the_processor(times: float, found: str, slow) -> None:
    slow(times)
    assert compute_type("auto", "bfloat16") == found
    assert compute_type("auto", "bfloat16", "cuda") == "bfloat16"
    assert compute_type("bf16", "bfloat16") == "bfloat16", "asked for, it is done"
    assert compute_type("fp32", "bfloat16") == compute_type("auto", "float32") == "float32"


def test_the_choice_agrees_with_a_clock() -> None:
    """On this very machine: `auto` takes the faster type, unless the two are about as fast."""
    precision.slowdown.cache_clear()
    a = {dtype: torch.ones(512, 512, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}

    def seconds(dtype: torch.dtype) -> float:
        import time

        best = float("inf")
        for _ in range(2):
            started = time.perf_counter()
            torch.mm(a[dtype], a[dtype])
            best = min(best, time.perf_counter() - started)
        return best

    ratio = seconds(torch.bfloat16) / seconds(torch.float32)
    if not 0.8 < ratio / precision.SLOWER < 1.25:
        assert (compute_type("auto", "bfloat16") == "float32") == (ratio > precision.SLOWER)


def test_a_run_says_what_it_computes_in_and_trains_in_it(slow, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path))
    slow(300.0)
    run = Run.create("smollm2", "quick")
    said = preflight(run).facts["capture and training compute in"]
    assert said == "float32: a matrix product in bfloat16 takes 300 times as long as in float32 on this processor"
    assert train_settings(find_preset("quick"), 0, 3, "float32").precision == "fp32"
    assert train_settings(find_preset("quick"), 0, 3, "bfloat16").precision == "bf16"
    slow(1.94)
    said = preflight(run).facts["capture and training compute in"]
    assert said == "float32: a matrix product in bfloat16 takes 1.9 times as long as in float32 on this processor"
    slow(0.5)
    assert preflight(run).facts["capture and training compute in"] == "bfloat16"
    asked = Run.create("smollm2", "quick", {"precision": "fp32"})
    assert preflight(asked).facts["capture and training compute in"] == "float32"
    with pytest.raises(UsageError, match=r"precision is 'fp16'; did you mean"):
        Run.create("smollm2", "quick", {"precision": "fp16"})
