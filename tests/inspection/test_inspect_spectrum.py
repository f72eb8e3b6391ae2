"""Lanczos against all singular values: bounds hold, outliers are counted, edges are those of random matrices."""

from __future__ import annotations

import numpy as np
import pytest
from fc_builders import low_rank, save_fc, start_std, uniform

from eagle3lab.inspection import inspect_checkpoint
from eagle3lab.inspection.layout import find_fc
from eagle3lab.inspection.spectrum import edges, exact_spectrum, spectrum
from eagle3lab.inspection.tensorfile import open_checkpoint

SMALL, KIMI_QUARTER = (384, 1152), (1792, 5376)


def both(tmp_path, weights: np.ndarray):
    layout = find_fc(open_checkpoint(save_fc(tmp_path, weights)))
    how = (layout.column_tiles, layout.shape, layout.widths, layout.points)
    return layout, spectrum(*how), exact_spectrum(*how)


def check_bounds(fast, exact) -> None:
    for quick, full in zip(fast, exact, strict=True):
        assert quick.point == full.point and quick.std == pytest.approx(full.std, rel=1e-6)
        assert quick.largest <= full.largest * (1 + 1e-6) <= quick.largest_upper * (1 + 1e-6)
        assert quick.largest_upper / quick.largest < 1.01
        assert quick.smallest >= full.smallest * (1 - 1e-5)
        assert quick.stable_rank[0] <= full.stable_rank[0] * (1 + 1e-6) <= quick.stable_rank[1] * (1 + 2e-6)
        assert (
            abs(quick.effective_rank - full.effective_rank) < 4 * quick.effective_rank_se + 0.02 * full.effective_rank
        )
        assert len(quick.outliers) <= len(full.outliers)
        if quick.outliers_complete:
            assert len(quick.outliers) == len(full.outliers)
            np.testing.assert_allclose(quick.outliers, full.outliers, atol=quick.residual + 1e-6)


def test_exact_is_numpy_svd(tmp_path) -> None:
    layout, _, exact = both(tmp_path, uniform(SMALL, 0))
    w = layout.region(slice(0, 384), slice(0, 1152)).astype(float)
    np.testing.assert_allclose(np.sort(exact[0].nodes), np.sort(np.linalg.svd(w, compute_uv=False)), rtol=1e-8)
    np.testing.assert_allclose(exact[2].largest, np.linalg.norm(w[:, 384:768], 2), rtol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("rank", "outliers"), [(0, 0), (4, 4), (128, 0)])
def test_fast_against_exact(tmp_path, rank: int, outliers: int, seed: int) -> None:
    w = uniform(SMALL, seed)
    if rank:
        w = w + low_rank(SMALL, rank, 0.227 * start_std(SMALL), seed + 9)
    _, fast, exact = both(tmp_path, w)
    check_bounds(fast, exact)
    assert len(exact[0].outliers) == outliers and len(fast[0].outliers) == outliers
    if rank == 4:  # an energy that hides in many directions shows as four values in few
        assert fast[0].largest > 1.3 * fast[0].edges.high


@pytest.mark.slow
def test_fast_against_exact_at_a_quarter_of_kimi(tmp_path) -> None:
    w = uniform(KIMI_QUARTER, 0) + low_rank(KIMI_QUARTER, 8, 0.227 * start_std(KIMI_QUARTER), 3)
    _, fast, exact = both(tmp_path, w)
    check_bounds(fast, exact)
    assert len(fast[0].outliers) == 8


def test_edges_at_kimi_size() -> None:
    found = edges((7168, 21504), 0.0039371299)
    assert (found.low, found.high) == (pytest.approx(0.2440, abs=1e-4), pytest.approx(0.9107, abs=1e-4))
    assert found.detection_limit == pytest.approx(0.439, abs=1e-3)
    assert edges((7168, 21504), 0.004037).high == pytest.approx(0.9338, abs=1e-4)


def test_a_degenerate_matrix_ends_early(tmp_path) -> None:
    w = np.outer(np.arange(1, 65), np.arange(1, 193)).astype(np.float32)
    _, fast, exact = both(tmp_path, w)
    assert fast[0].largest == pytest.approx(exact[0].largest, rel=1e-5)
    assert fast[0].stable_rank[1] == pytest.approx(1.0, rel=1e-4) and fast[0].effective_rank == pytest.approx(
        1, rel=0.05
    )


@pytest.mark.parametrize("pair", [(0, 1), (3, 200), (17, 90), (41, 42), (100, 255), (7, 128)])
def test_a_sparse_largest_vector_is_found(tmp_path, pair: tuple[int, int]) -> None:
    """The bound is one for starts that are uniform on the sphere; signs alone are orthogonal to it half of the time."""
    w = np.zeros((256, 768), np.float32)
    w[pair[0]], w[pair[1]] = np.arange(1, 769), -np.arange(1, 769)
    _, fast, exact = both(tmp_path, w)
    assert fast[0].largest == pytest.approx(exact[0].largest, rel=1e-5)


@pytest.mark.parametrize("kind", ["fast", "exact"])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_zeros_and_two_equal_rows(tmp_path, kind: str, value: float) -> None:
    path = save_fc(tmp_path / "c", np.full((2, 6), value, np.float32))
    spectra = inspect_checkpoint(path, spectrum=kind).spectra
    assert [round(s.largest, 6) for s in spectra if s.point == "all"] == ([] if value == 0 else [round(12**0.5 / 2, 6)])
