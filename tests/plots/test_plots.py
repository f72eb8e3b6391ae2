"""Figures: the plotted data is right, words say what the picture says, files do not depend on the clock."""

from __future__ import annotations

import csv
import io
import itertools
import json

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.plots import acceptance, resources, states, style, tokens, training, weights
from eagle3lab.plots.publish import Plot, publish, render, to_csv

HISTORY = [
    {"step": 10, "loss_by_step": [8.0, 8.5], "accuracy_by_step": [0.1, 0.05]},
    {"step": 20, "loss_by_step": [5.0, 6.0], "accuracy_by_step": [0.4, 0.2]},
]
HELD_OUT = [{"step": 0, "simulated_accept_length": 1.02}, {"step": 20, "simulated_accept_length": 1.51}]


def lines_of(axis) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]


def test_training_curves_draw_the_rows_they_were_given() -> None:
    plot = training.training_curves(HISTORY, HELD_OUT)
    loss, accuracy, replay = plot.figure.axes
    assert lines_of(loss) == [([10, 20], [8.0, 5.0]), ([10, 20], [8.5, 6.0])]
    assert lines_of(accuracy)[1] == ([10, 20], [0.05, 0.2])
    assert lines_of(replay)[0] == ([0, 20], [1.02, 1.51])
    assert "10.0% to 40.0%" in plot.alt and "1.02 to 1.51" in plot.alt
    assert plot.rows[1] == {"step": 20, "loss_1": 5.0, "loss_2": 6.0, "accuracy_1": 0.4, "accuracy_2": 0.2}
    assert len(training.training_curves(HISTORY).figure.axes) == 2
    with pytest.raises(UsageError):
        training.training_curves([])


def test_many_rows_are_drawn_as_running_means_over_the_rows_themselves() -> None:
    rows = [
        {"step": n, "loss_by_step": [float(n % 2)], "accuracy_by_step": [None if n % 2 else 0.5]} for n in range(56)
    ]
    loss, accuracy = training.training_curves(rows).figure.axes
    (_, means), (_, raw) = lines_of(loss)
    assert means[:4] == [0.0, 0.5, 0.5, 0.5] and raw[:3] == [0.0, 1.0, 0.0]
    assert lines_of(accuracy)[0][1] == [0.5] * 56, "an unknown one is left out, not taken for 0"


def position(name: str, place: int, joint: float, conditional: float) -> dict:
    values = {"joint": joint, "conditional": conditional}
    ends = {
        f"{key}_{end}": value + sign * 0.1 for key, value in values.items() for end, sign in (("low", -1), ("high", 1))
    }
    return {"set": name, "position": place, **values, **ends}


def test_accept_by_position_shows_values_and_intervals() -> None:
    rows = [position("own", 1, 0.4, 0.4), position("own", 2, 0.2, 0.5), position("fresh", 1, 0.3, 0.3)]
    plot = acceptance.accept_by_position(rows)
    joint, conditional = plot.figure.axes
    assert [y for _, y in lines_of(joint)] == [[0.4, 0.2], [0.3]]
    assert [y for _, y in lines_of(conditional)] == [[0.4, 0.5], [0.3]]
    low, high = joint.collections[0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((0.3, 0.5))
    assert "own: joint 40.0%, 20.0%" in plot.alt
    unknown = rows[0] | {"joint": None}
    assert lines_of(acceptance.accept_by_position([unknown]).figure.axes[0])[0][1] == []


def test_accept_lengths_leave_unknown_out_and_say_numbers() -> None:
    rows = [
        {"name": "own", "accept_length": 1.6, "low": 1.5, "high": 1.7, "group": "drafter"},
        {"name": "look-up", "accept_length": 1.2, "low": None, "high": None, "group": "baseline"},
        {"name": "zeroed", "accept_length": None, "low": None, "high": None, "group": "control"},
    ]
    plot = acceptance.accept_lengths(rows)
    assert [row["name"] for row in plot.rows] == ["own", "look-up"]
    assert plot.alt == "Accept lengths. own 1.60 (1.50 to 1.70); look-up 1.20."


def test_states_and_weights() -> None:
    plot = states.residual_by_depth([1.0, 10.0, 20.0], [1, 2])
    assert "10 at 1, 20 at 2" in plot.alt and [row["capture_point"] for row in plot.rows] == [False, True, True]
    with pytest.raises(UsageError):
        states.residual_by_depth([1.0], [3])
    points = [{"point": 2, "p05": 1.0, "median": 2.0, "p95": 4.0}]
    bars = states.capture_norms(points, [5, 7, 9]).figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [2.0]
    block = {"point": "2", "edges": [-1.0, 0.0, 1.0], "density": [0.4, 0.6], "std": 0.5}
    plot = weights.weight_distribution([block | {"initial": None, "family": None, "initial_std": None}])
    assert [row["density"] for row in plot.rows] == [0.4, 0.6] and plot.rows[0]["initial_density"] is None


def test_unknown_memory_is_said_to_be_unknown() -> None:
    rows = [{"resource": "memory", "needed_gb": 6.0, "there_gb": None}]
    assert resources.needed_and_there(rows).alt == "memory: 6.0 GB needed, unknown there."


def test_files_depend_on_the_data_alone(tmp_path) -> None:
    for folder in ("a", "b"):
        training.training_curves(HISTORY, HELD_OUT).publish(tmp_path / folder, "03_training")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["03_training.csv", "03_training.json", "03_training.pdf", "03_training.png"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    rows = list(csv.DictReader((tmp_path / "a" / "03_training.csv").open()))
    assert [row["accuracy_1"] for row in rows] == ["0.1", "0.4"]
    assert json.loads((tmp_path / "a" / "03_training.json").read_text())["alt"]
    changed = [HISTORY[0], HISTORY[1] | {"accuracy_by_step": [0.9, 0.2]}]
    other = training.training_curves(changed, HELD_OUT)
    assert render(other.figure, "png", dpi=300) != (tmp_path / "a" / "03_training.png").read_bytes()


def test_a_notebook_shows_png_and_words(tmp_path) -> None:
    data, metadata = training.training_curves(HISTORY).publish(tmp_path, "x")._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"} and metadata["image/png"]["alt"] in data["text/plain"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_a_figure_name_is_a_file_name(tmp_path, name: str) -> None:
    with pytest.raises(UsageError, match="figure name"):
        training.training_curves(HISTORY).publish(tmp_path, name)
    with pytest.raises(UsageError, match="0 data rows"):
        publish(Plot(training.training_curves(HISTORY).figure, [], "t", "a"), tmp_path, "x")


def test_csv_quotes_what_needs_it() -> None:
    rows = [{"name": 'a, "b"\nc', "value": None}]
    assert list(csv.DictReader(io.StringIO(to_csv(rows)))) == [{"name": 'a, "b"\nc', "value": ""}]


def test_lines_differ_without_colour() -> None:
    signs = {(style.line_style(i)["marker"], style.line_style(i)["linestyle"]) for i in range(8)}
    assert len(signs) == 8


def grey(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_first_colours_differ_in_grey() -> None:
    shades = sorted(grey(colour) for colour in style.PALETTE[:3])
    assert min(b - a for a, b in itertools.pairwise(shades)) > 12
    assert all(grey(colour) < 215 for colour in style.PALETTE), "visible on white"


def test_token_html_escapes_and_marks_by_more_than_colour() -> None:
    reply = tokens.ColouredReply("<b>hi</b>", [("<script>", 0), ("x & y", 1), ("z", 2)])
    html = tokens.coloured_html([reply])
    assert "<script>" not in html and "&lt;script&gt;" in html and "x &amp; y" in html and "&lt;b&gt;hi" in html
    assert "67% of 3 tokens were drafted" in html and "double" in html and 'title="draft position 2"' in html
    assert tokens.coloured_text(reply) == "<script>[x & yz]"
    assert "empty reply" in tokens.coloured_html([tokens.ColouredReply("p", [])])


def test_nothing_global_is_changed() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    training.training_curves(HISTORY)
    assert dict(matplotlib.rcParams) == before
