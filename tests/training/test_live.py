"""The figure of a running training: redrawn in place, and readable in a notebook that was executed by a program."""

from __future__ import annotations

import base64

import nbclient
import nbformat
import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.plots.instruments import training_instruments


def row(step: int) -> dict:
    return {
        "step": step,
        "loss": 10.0 / step,
        "accuracy_by_step": [0.1, 0.05],
        "simulated_accept_length": 1 + step / 100,
        "gradient_norm": 3.0,
        "fc_std_ratio_by_point": [1.0 + step, 1.0, 1.01],
        "tokens_per_second": 500.0,
    }


CODE = f"""
from types import SimpleNamespace
from eagle3lab.steps import live
live.REDRAW_SECONDS, live.DRAWING_SHARE = 0, 1e9
run = SimpleNamespace(manifest=SimpleNamespace(profile="smollm2"), preset=SimpleNamespace(train_steps=30))
with live.training_live(run) as progress:
    for made in {[row(10), row(20), row(30)]}:
        progress(made)
"""


def test_an_executed_notebook_keeps_the_last_drawing():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 1, "redrawn in place, not one under the other"
    assert "after 30 steps" in images[0]["data"]["text/plain"] and "31.00 at point 2" in images[0]["data"]["text/plain"]
    assert images[0]["metadata"]["image/png"]["alt"] in images[0]["data"]["text/plain"]
    assert base64.b64decode(images[0]["data"]["image/png"])[:4] == b"\x89PNG"
    assert any("loss 0.33" in output.get("text", "") for output in outputs), "the bar as text"


def test_outside_a_notebook_there_is_only_the_bar(capsys):
    from types import SimpleNamespace

    from eagle3lab.steps.live import training_live

    run = SimpleNamespace(manifest=SimpleNamespace(profile="smollm2"), preset=SimpleNamespace(train_steps=10))
    with training_live(run) as progress:
        progress(row(10))
    shown = capsys.readouterr()
    assert shown.out == "" and "loss 1.00" in shown.err


def test_drawing_takes_a_small_part_of_the_time(monkeypatch):
    """A drawing of 1 s every 10 s would cost the training a tenth."""
    from types import SimpleNamespace

    from eagle3lab.steps import live

    now, drawn = 0.0, []

    def draw(history, points):
        nonlocal now
        now += 1.0
        drawn.append(now)

    monkeypatch.setattr(live, "training_instruments", draw)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now))
    run = SimpleNamespace(manifest=SimpleNamespace(profile="smollm2"), preset=SimpleNamespace(train_steps=400))
    with live.training_live(run) as progress:
        for step in range(1, 401):
            now += 1.0
            progress(row(step))
        while_training = len(drawn)
    assert 0.8 * live.DRAWING_SHARE < while_training / drawn[-1] < 1.2 * live.DRAWING_SHARE
    assert len(drawn) == while_training + 1 and drawn[-1] == now, "the last drawing shows the end"


def test_instruments_need_a_row():
    with pytest.raises(UsageError, match="0 logged steps"):
        training_instruments([], [2, 15, 27])
    plot = training_instruments([row(10), row(20)], [2, 15, 27])
    assert list(plot.rows[0]) == ["step", "loss", "simulated_accept_length", "gradient_norm", "fc_2", "fc_15", "fc_27"]
