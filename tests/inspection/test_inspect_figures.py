"""Figures of an inspection carry the numbers that were measured, and the widget's logic is a function."""

from __future__ import annotations

import numpy as np
import pytest
from fc_builders import low_rank, normal, save_fc, start_std, uniform, write_safetensors

pytest.importorskip("matplotlib")

from eagle3lab.core.errors import CheckpointError, UsageError
from eagle3lab.inspection import Inspection, inspect_checkpoint
from eagle3lab.inspection.formats import bfloat16_bits
from eagle3lab.plots.fc import marchenko_pastur, weight_histogram
from eagle3lab.plots.publish import to_csv
from eagle3lab.steps import fc_figures
from eagle3lab.widgets.fc import ALL, Browser, Choice, after_tensor, fc_widget, static_twin

SHAPE = (96, 288)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Inspection:
    folder = tmp_path_factory.mktemp("figures")
    start = uniform(SHAPE, 0)
    moved = start + low_rank(SHAPE, 3, 0.3 * start_std(SHAPE), 1)
    moved[7] = 0
    save_fc(folder / "start", start)
    return inspect_checkpoint(save_fc(folder / "now", moved), against=folder / "start", spectrum="exact")


def test_norm_map_shows_every_row_and_marks_dead_ones(found: Inspection) -> None:
    plot = fc_figures.norm_maps(found)
    rows = [r for r in plot.rows if r["kind"] == "row" and r["series"] == "point mid"]
    w = found.layout.region(slice(0, 96), slice(96, 192))
    np.testing.assert_allclose([r["median"] for r in rows], np.sqrt((w.astype(float) ** 2).mean(axis=1)), rtol=1e-5)
    assert sum(r["count"] for r in plot.rows if r["kind"] == "column") == 288
    assert "1 rows and 0 columns are marked" in plot.alt


def test_many_rows_become_a_band_that_keeps_extremes() -> None:
    from eagle3lab.plots.fc import norm_maps

    values = np.full(3000, 1.0)
    values[1234] = 9.0
    plot = norm_maps([values.tolist()], values.tolist(), points=["x"])
    rows = [r for r in plot.rows if r["kind"] == "row"]
    assert len(rows) <= 600 and max(r["high"] for r in rows) == 9.0 and sum(r["count"] for r in rows) == 3000


def test_spectrum_figure_has_all_values_and_the_law(found: Inspection) -> None:
    plot = fc_figures.spectrum(found.spectra)
    values = [r["singular_value"] for r in plot.rows if r["point"] == "all"]
    np.testing.assert_allclose(values, np.sort(found.spectra[0].nodes))
    assert f"all: {len(found.spectra[0].outliers)} above the edge" in plot.alt


def test_marchenko_pastur_is_the_law_of_a_random_matrix() -> None:
    rng = np.random.default_rng(0)
    measured = np.sort(np.linalg.svd(rng.standard_normal((300, 900)) * 0.5, compute_uv=False))
    x, share = marchenko_pastur((300, 900), 0.5)
    gap = np.abs(np.interp(measured, x, share) - (np.arange(300) + 0.5) / 300).max()
    assert gap < 0.02
    wrong_x, wrong = marchenko_pastur((300, 900), 0.55)
    assert np.abs(np.interp(measured, wrong_x, wrong) - (np.arange(300) + 0.5) / 300).max() > 0.1


def test_energy_and_difference_figures(found: Inspection) -> None:
    energy = fc_figures.energy(found)
    assert sum(r["share"] for r in energy.rows) == pytest.approx(1)
    assert all(r["share_low"] < r["share"] < r["share_high"] for r in energy.rows)
    difference = fc_figures.difference(found, "the start")
    blocks = [r["relative"] for r in difference.rows if r["kind"] == "block"]
    np.testing.assert_allclose(blocks, [b.relative for b in found.delta.blocks[1:]])
    assert max(r["relative"] for r in difference.rows if r["kind"] == "row") == pytest.approx(1.0)  # row 7 is gone
    for plot in (energy, difference):
        assert len(to_csv(plot.rows).splitlines()) == len(plot.rows) + 1


def test_no_comparison_no_figure(tmp_path) -> None:
    assert fc_figures.difference(inspect_checkpoint(save_fc(tmp_path, uniform(SHAPE, 0))), "x") is None


@pytest.fixture
def browser(tmp_path) -> Browser:
    tensors = {
        "midlayer.up_proj.weight": bfloat16_bits(normal((50, 96), 0.02, 1)),
        "fc.weight": bfloat16_bits(uniform(SHAPE, 0)),
        "norm.weight": bfloat16_bits(np.ones(96, np.float32)),
    }
    write_safetensors(tmp_path / "a" / "m.safetensors", tensors)
    return Browser(tmp_path / "a", other=save_fc(tmp_path / "b", uniform(SHAPE, 1) * 2))


def test_browser_offers_matrices_and_blocks(browser: Browser) -> None:
    assert browser.tensors == ["fc.weight", "midlayer.up_proj.weight"]
    assert browser.blocks("fc.weight") == [ALL, "low", "mid", "high"]
    kept = after_tensor(browser, Choice("fc.weight", "mid", log=True), "midlayer.up_proj.weight")
    assert kept == Choice("midlayer.up_proj.weight", ALL, log=True)


@pytest.mark.parametrize("block", [ALL, "low", "high"])
def test_histogram_is_the_density_of_the_chosen_block(browser: Browser, block: str) -> None:
    plot = browser.plot(Choice("fc.weight", block, log=False, compare=True))
    width = plot.rows[0]["high"] - plot.rows[0]["low"]
    assert sum(r["this checkpoint"] for r in plot.rows) * width == pytest.approx(1)
    assert sum(r["the other"] for r in plot.rows) * width == pytest.approx(1, abs=0.01)
    w = uniform(SHAPE, 0)
    w = w if block == ALL else w[:, :96] if block == "low" else w[:, 192:]
    middle = next(r for r in plot.rows if r["low"] == 0)
    assert middle["this checkpoint"] * width == pytest.approx(((w >= 0) & (w < middle["high"])).mean(), abs=0.005)


def test_browser_refuses_what_is_not_there(browser: Browser) -> None:
    with pytest.raises(UsageError, match=r"fc\.weight"):
        browser.plot(Choice("fc.wieght"))
    with pytest.raises(UsageError, match="high"):
        browser.plot(Choice("fc.weight", "hihg"))
    with pytest.raises(CheckpointError, match="no tensor midlayer"):
        browser.plot(Choice("midlayer.up_proj.weight", compare=True))
    with pytest.raises(UsageError):
        weight_histogram([0, 1, 2], [{"label": "x", "density": [1.0]}], title="t", log=False)


def test_widget_draws_every_choice_and_shows_errors(browser: Browser) -> None:
    pytest.importorskip("ipywidgets")
    shown = []
    box = fc_widget(browser, show=shown.append)
    controls, block, place = box.children
    tensor, log, compare = controls.children
    log.value = True
    block.value = "mid"
    assert "point mid" in shown[-1].alt and shown[-1].png[:4] == b"\x89PNG"
    tensor.value = "midlayer.up_proj.weight"
    assert block.options == (ALL,) and "up_proj" in shown[-1].alt
    count = len(shown)
    compare.value = True  # the other checkpoint has no such tensor
    assert len(shown) == count
    tensor.value = "fc.weight"
    assert len(shown) > count and not any(o.get("output_type") == "error" for o in place.outputs)


def test_static_twin_is_the_same_figure(browser: Browser) -> None:
    twin = static_twin(browser)
    data, metadata = twin._repr_mimebundle_()
    assert twin.alt == browser.plot(browser.first).alt == metadata["image/png"]["alt"] and data["text/plain"]
