"""Exact moments from histograms, their standard errors, and number formats read without torch."""

from __future__ import annotations

import numpy as np
import pytest
from fc_builders import save_fc, uniform, write_safetensors

from eagle3lab.inspection import inspect_checkpoint
from eagle3lab.inspection.formats import bfloat16_bits, grid, to_float32, value_table
from eagle3lab.inspection.moments import PowerSums, histogram_moments, moments


def naive(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, std, skew and excess kurtosis in float64, the slow way."""
    x = values.astype(np.float64).ravel()
    z = (x - x.mean()) / x.std()
    return x.mean(), x.std(), (z**3).mean(), (z**4).mean() - 3


@pytest.mark.parametrize("fmt", ["BF16", "F16"])
def test_histogram_moments_equal_naive_float64(fmt: str) -> None:
    rng = np.random.default_rng(3)
    draw = rng.gamma(2.0, 0.01, size=50_000).astype(np.float32)  # skewed, so that every moment counts
    bits = bfloat16_bits(draw) if fmt == "BF16" else draw.astype(np.float16).view(np.uint16)
    found = histogram_moments(np.bincount(bits, minlength=65536), fmt)
    expected = naive(to_float32(bits, fmt))
    np.testing.assert_allclose((found.mean, found.std, found.skew, found.kurtosis), expected, rtol=1e-12)
    # The wrong version this must catch: a std that is itself a 16-bit number, as `tensor.std()` of such a tensor is.
    half = to_float32(bfloat16_bits(np.array([found.std])), "BF16")[0]
    assert half != pytest.approx(expected[1], rel=1e-6)


def test_power_sums_equal_the_histogram_and_survive_an_offset() -> None:
    rng = np.random.default_rng(4)
    draw = (rng.gamma(2.0, 0.01, size=40_000) + 5.0).astype(np.float32)
    sums, other = PowerSums(), PowerSums()
    sums.add(draw[:1000])
    other.add(draw[1000:])
    sums.merge(other)
    values, counts = np.unique(draw.astype(np.float64), return_counts=True)
    a, b = sums.moments(), moments(values, counts)
    np.testing.assert_allclose(
        (a.mean, a.std, a.skew, a.kurtosis, a.std_se, a.kurtosis_se),
        (b.mean, b.std, b.skew, b.kurtosis, b.std_se, b.kurtosis_se), rtol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("draw", ["uniform", "normal", "exponential"])
def test_standard_errors_match_the_spread_over_repeated_draws(draw: str) -> None:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(400):
        x = getattr(rng, draw)(size=1500)
        found.append(moments(*np.unique(x, return_counts=True)))
    for name in ("mean", "std", "kurtosis"):
        if (draw, name) == ("exponential", "kurtosis"):
            continue  # its eighth moment needs far more entries than this to be estimated
        spread = np.std([getattr(m, name) for m in found])
        printed = np.median([getattr(m, f"{name}_se") for m in found])
        # 400 draws know the spread to 3.5 %; the Gaussian rule std/sqrt(2n) would be 37 % off for the uniform.
        assert printed == pytest.approx(spread, rel=0.15), name


def test_reading_float8_tables_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    for fmt, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        expected = codes.view(dtype).to(torch.float64).numpy()
        np.testing.assert_array_equal(value_table(fmt), expected)


def test_rounding_to_bfloat16_agrees_with_torch_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.normal(size=4096), [0.0, -0.0, np.inf, -np.inf, 1e-40, 3.4e38, 1.00390625, 1.01171875]])
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(x), expected)
    assert np.isnan(to_float32(bfloat16_bits(np.array([np.nan], dtype=np.float32)), "BF16"))[0]


def test_bits_are_not_read_as_float16() -> None:
    bits = np.array([[0x3F80] * 3, [0x3F80, 0x7FC0, 0x8000]], dtype=np.uint16)  # 1, 1, 1 / 1, NaN, -0.0
    values = to_float32(bits, "BF16")
    np.testing.assert_array_equal(values[0], 1.0)
    assert np.isnan(values[1, 1]) and values[1, 2] == 0 and np.signbit(values[1, 2])
    assert to_float32(bits, "F16")[0, 0] == 1.875  # what the confusion would give


def test_grid_has_every_finite_value_once() -> None:
    g = grid("BF16")
    assert np.all(np.diff(g.values) > 0) and (g.values == 0).sum() == 1
    histogram = np.ones(65536, dtype=np.int64)
    counts = g.counts(histogram)
    assert counts[g.values == 0] == 2 and counts.sum() == 65536 - 2 * 128  # both zeros; no NaN, no infinity


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "F64", "transposed"])
def test_every_format_and_orientation_gives_the_same_moments(tmp_path, seed: int, kind: str) -> None:
    w = uniform((96, 288), seed)
    stored = to_float32(bfloat16_bits(w), "BF16")  # exact in every format but F16
    arrays = {
        "BF16": bfloat16_bits(w), "F16": stored.astype(np.float16), "F32": stored, "F64": stored.astype(np.float64),
        "transposed": bfloat16_bits(w.T),
    }  # fmt: skip
    name = {"BF16": "fc.weight", "F16": "model.fc.weight", "F32": "draft_model.fc.weight"}.get(kind, "module.fc.weight")
    write_safetensors(tmp_path / "model.safetensors", {name: arrays[kind]})
    found = inspect_checkpoint(tmp_path)
    expected = naive(stored) if kind != "F16" else naive(arrays["F16"].astype(np.float32))
    assert found.pooled.mean == pytest.approx(expected[0], rel=1e-9, abs=1e-15)
    assert found.pooled.std == pytest.approx(expected[1], rel=1e-10)
    for b, block in enumerate(found.blocks):
        part = stored[:, b * 96 : (b + 1) * 96]
        assert block.std == pytest.approx(part.astype(np.float64).std(), rel=1e-10 if kind != "F16" else 1e-5)
    # Blocks must be columns: rows of the matrix, or an untransposed reading, give other numbers.
    assert found.blocks[0].std != pytest.approx(stored[:32].astype(np.float64).std(), rel=1e-6)
    assert any("transposed" in note for note in found.layout.notes) is (kind == "transposed")


def test_the_mean_never_prints_as_zero(tmp_path) -> None:
    found = inspect_checkpoint(save_fc(tmp_path, uniform((96, 288), 7)))
    assert "mean=0.0" not in found.sentence and "±" in found.sentence
    assert "e-0" in found.sentence.split("std")[0]
