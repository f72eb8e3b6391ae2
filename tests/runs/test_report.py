"""The report and the summary: one file, nothing remote, nothing from data unescaped, unknown is not 0."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eagle3lab.core.errors import RunError
from eagle3lab.doctor.findings import Report, error, info
from eagle3lab.plots.resources import bars
from eagle3lab.runs import report as module
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import PRESETS
from eagle3lab.runs.report import write_report
from eagle3lab.runs.summary import summary_lines
from eagle3lab.steps.report import report

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'

METRICS = {
    "preset": "quick",
    "headline": "own",
    "sets": {
        "own": {
            "accept_length": 1.6239,
            "accept_length_interval": [1.51, 1.74],
            "accept_rate": 0.2079,
            "joint": [0.41, 0.15, 0.06],
            "conditional": [0.41, 0.366, None],
            "counts": {"verify_steps": 234, "proposed": 702, "accepted": 146},
            "lossless": True,
            "prompts": 6,
            "k": 3,
            "max_new_tokens": 48,
            "repeats": {"share_of_steps": 0.12, "accept_length_without": 1.58},
            "lookup": {"accept_length": 1.2},
            "coverage": 0.95,
            "controls": {"fc_zeroed": {"accept_length": 1.02}, EVIL: {"accept_length": None}},
        },
        "fresh": {"accept_length": None, "counts": {}},
    },
}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def full(run: Run) -> Run:
    run.merge_metrics(METRICS)
    rows = [{"kind": EVIL, "samples": 3}]
    bars(rows, name="kind", value="samples", title=EVIL, unit="x").publish(run.figures, "02_kinds")
    return run


def page(run: Run, doctor: Report | None = None) -> tuple[str, Page]:
    text = write_report(run, doctor).read_text()
    return text, Page(text)


def test_accept_length_comes_first_then_the_doctor_figures_and_the_rest(full: Run) -> None:
    _, html = page(full, Report.of([error("d2t", "absolute ids")], 9))
    order = ["1.62 tokens per verify step", "What the doctor found", "Figures", "Parameters", "Environment"]
    places = [html.words.index(word) for word in [*order, "How to reproduce"]]
    assert places == sorted(places)
    assert "1.51 to 1.74" in html.words and "146 of 702" in html.words and "absolute ids" in html.words
    assert full.manifest.command in html.words and full.manifest.git["commit"] in html.words


def test_nothing_remote_no_script_and_everything_escaped(full: Run) -> None:
    text, html = page(full, Report.of([error(EVIL, EVIL, fix=EVIL)], 1))
    assert not [tag for tag, _ in html.tags if tag in {"script", "link", "iframe", "object"}]
    assert not [attrs for _, attrs in html.tags if any(name.startswith("on") for name in attrs)]
    sources = [attrs["src"] for tag, attrs in html.tags if tag == "img"]
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|url\(", text)
    assert EVIL in html.words, "the text is shown, as text"


def test_every_image_has_words_and_every_table_headers(full: Run) -> None:
    _, html = page(full)
    assert all(attrs.get("alt") for tag, attrs in html.tags if tag == "img")
    assert ("html", {"lang": "en"}) in html.tags
    assert sum(tag == "table" for tag, _ in html.tags) <= sum(tag == "th" for tag, _ in html.tags)


def test_unknown_is_unknown(full: Run) -> None:
    _, html = page(full)
    fresh = html.words[html.words.index("fresh") :]
    assert fresh.startswith("freshunknownno interval") and "0.00" not in fresh[: fresh.index("What the doctor found")]


def test_contrast_of_text_in_both_schemes(full: Run) -> None:
    text, _ = page(full)
    for scheme in re.findall(r":root \{([^}]*)\}", text):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", scheme))
        for name in ("text", "soft", "strong", "bad", "warn"):
            for ground in ("page", "box"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


def contrast(a: str, b: str) -> float:
    """WCAG 2.1 contrast ratio (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_it_stays_small_and_says_what_it_left_out(full: Run, monkeypatch) -> None:
    for number in range(6):
        (full.figures / f"05_{number}.png").write_bytes(b"\x89PNG" + bytes(900_000))
        (full.figures / f"05_{number}.json").write_text('{"title": "t", "alt": "a"}')
    text, html = page(full)
    assert len(text.encode()) < 5_000_000 and "Not embedded" in html.words and "05_5.png" in html.words
    monkeypatch.setattr(module, "FIGURE_BYTES", 10**9)
    assert len(page(full)[0].encode()) > 5_000_000, "without the limit it would be too large"


def test_an_empty_run_has_a_report_too(run: Run) -> None:
    _, html = page(run)
    assert "Acceptance was not measured" in html.words and "Not examined" in html.words
    assert report(run).bytes > 0


def test_a_failed_write_leaves_the_old_report(full: Run, monkeypatch) -> None:
    path: Path = write_report(full, None)
    before = path.read_text()
    monkeypatch.setattr(module, "measured_sets", lambda metrics: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(full, None)
    assert path.read_text() == before


def test_summary_says_which_number_it_is(full: Run) -> None:
    text = "\n".join(summary_lines(full))
    assert "own: accept length 1.62 [1.51, 1.74] (6 prompts x 48 new tokens, k = 3, greedy; 146 of 702" in text
    assert "fresh: accept length unknown [no interval]" in text and "speed: not measured" in text
    assert "12.0% of steps start inside a repeated 4-gram, accept length without them 1.58" in text


def test_figures_of_acceptance_come_first(full: Run) -> None:
    rows = [{"kind": "a", "samples": 3}]
    bars(rows, name="kind", value="samples", title="Lengths of all", unit="x").publish(full.figures, "05_lengths")
    _, html = page(full)
    assert html.words.index("Data: figures/05_lengths.csv") < html.words.index("Data: figures/02_kinds.csv")


def test_nothing_to_do_is_not_told_to_do_something(full: Run) -> None:
    _, html = page(full, Report.of([info("d2t", "maps 12 ids", fix="rebuild"), error("fc", "dead", fix="train it")], 2))
    assert "train it" in html.words and "rebuild" not in html.words and "maps 12 ids" in html.words


def test_amounts_are_those_of_the_run_not_of_todays_presets(full: Run, monkeypatch) -> None:
    steps = full.preset.train_steps
    changed = {"quick": dataclasses.replace(PRESETS["quick"], train_steps=steps + 7)}
    monkeypatch.setattr("eagle3lab.runs.presets.PRESETS", changed)
    assert Run.open(full.path).preset.train_steps == steps
    assert "did not record its amounts" not in page(full)[1].words
    assert Run.create("smollm2", "quick", seed=4).preset.train_steps == steps + 7


def test_uncommitted_changes_are_said_beside_the_commands(full: Run) -> None:
    _, html = page(full)
    told = "uncommitted changes:" in html.words
    assert told == (full.manifest.git["dirty"] is True)


@pytest.mark.parametrize(
    ("metrics", "where"),
    [
        ({"sets": [1]}, "sets: Input should be a valid dictionary"),
        ({"sets": {"own": None}}, "sets.own: "),
        ({"accept_length": "1.5"}, "accept_length: Input should be a valid number"),
        ({"accept_length": float("nan")}, "accept_length: Input should be a finite number"),
        ({"sets": {"own": {"accept_length_interval": [1.5]}}}, "sets.own.accept_length_interval: "),
        ({"sets": {"own": {"counts": {"verify_steps": 1.5}}}}, "sets.own.counts.verify_steps: "),
        ({"timing": {"speed": {"batch": 1}}}, "timing.speed.plain_tokens_per_second: Field required"),
        ([], "the file: "),
    ],
)
def test_metrics_that_the_lab_cannot_have_written(run: Run, metrics: object, where: str) -> None:
    (run.path / "metrics.json").write_text(json.dumps(metrics))
    for read in (run.metrics, lambda: write_report(run, None), lambda: summary_lines(run)):
        with pytest.raises(RunError, match=re.escape(f"metrics.json: {where}")):
            read()


def test_metrics_with_more_keys_are_read(run: Run) -> None:
    more = METRICS | {"later": {"x": 1}, "sets": {"own": METRICS["sets"]["own"] | {"later": [None, "x"]}}}
    (run.path / "metrics.json").write_text(json.dumps(more))
    assert run.metrics()["later"] == {"x": 1}
    write_report(run, None)


@pytest.mark.parametrize("words", ["{}", "[]", '{"title": "x"}'])
def test_a_figure_without_words(run: Run, words: str) -> None:
    run.figures.mkdir(exist_ok=True)
    (run.figures / "05_x.png").write_bytes(b"")
    (run.figures / "05_x.json").write_text(words)
    with pytest.raises(RunError, match="has no title or no alt"):
        write_report(run, None)
