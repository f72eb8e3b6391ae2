"""Runs side by side: which are taken, what a pair says, and notebook 07 with none, one, two and many runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3lab.acceptance.counts import from_lengths, total
from eagle3lab.core.errors import RunError, UsageError
from eagle3lab.core.paths import notebooks_folder
from eagle3lab.runs import provenance
from eagle3lab.runs.comparison import choose_runs, measured, on_front, seed_spread
from eagle3lab.runs.directory import Run
from eagle3lab.steps import compare

PROMPTS = 24


@pytest.fixture(autouse=True)
def no_git(monkeypatch) -> None:
    """Asking git takes longer than all the rest of making a run."""
    monkeypatch.setattr(provenance, "git_state", lambda: {"commit": "unknown", "dirty": "unknown"})


def drafts(rate: float, noise: int = 0, prompts: int = PROMPTS) -> dict:
    """Metrics of one set: prompts that differ much, and a drafter that keeps a draft with a chance near `rate`."""
    rng = np.random.default_rng(5)
    each = []
    for number in range(prompts):
        chance = np.clip(rate + rng.uniform(-0.3, 0.3), 0.01, 0.99)
        own = np.random.default_rng([number, noise])
        kept = np.minimum(own.geometric(1 - chance, size=60) - 1, 3)
        each.append(from_lengths(kept.tolist(), k=3, prompt=f"p{number}"))
    return total(each).to_json() | {"k": 3, "temperature": 0, "max_new_tokens": 48, "prompts": prompts}


def make(rate: float, *, seconds: float | None = 60.0, seed: int = 0, noise: int = 0, prompts: int = PROMPTS, **values):
    """A run as notebook 05 leaves it. `values`: overrides, and max_new_tokens or target of the measurement."""
    target, tokens = values.pop("target", "t"), values.pop("max_new_tokens_measured", 48)
    run = Run.create("smollm2", "quick", values, seed)
    own = drafts(rate, noise, prompts) | {"max_new_tokens": tokens}
    run.merge_metrics(
        {
            "headline": "own",
            "accept_length": own["accept_length"],
            "sets": {"own": own, "fresh": drafts(rate, noise + 9)},
        },
        timing={} if seconds is None else {"training_seconds": seconds},
    )
    run.add_inputs(target=target, held_out_own="o", held_out_fresh="f")
    with run.recording("accept"):
        pass
    return run


def look(*runs: Run, **options) -> compare.ComparedRuns:
    return compare.compare_runs(runs=",".join(str(run.path) for run in runs), note=lambda _: None, **options)


def test_a_difference_is_paired_by_prompt() -> None:
    """One drafter is a little better on every prompt: the paired interval shows it, two separate ones overlap."""
    a, b = make(0.40), make(0.46, train_steps=50)
    (pair, _) = look(a, b).pairs
    assert pair.verdict == "longer" and pair.label == "train_steps 50" and pair.comparison.prompts == PROMPTS
    low, high = pair.comparison.interval
    ends = [run.metrics()["sets"]["own"]["accept_length_interval"] for run in (a, b)]
    assert 0 < low < high and ends[0][1] > ends[1][0], "unpaired intervals cannot tell them apart"
    assert [one.verdict for one in look(b, a).pairs] == ["shorter", "shorter"]


def test_equal_drafters_cannot_be_told_apart() -> None:
    found = look(make(0.4, noise=1), make(0.4, noise=2, seed=1), make(0.4, noise=3, seed=2))
    assert {pair.verdict for pair in found.pairs if pair.set == "own"} == {"cannot be told apart"}
    assert "0 of 2 drafters have a longer accept length, 0 a shorter one, and 2 cannot" in compare.words(found)


@pytest.mark.parametrize(
    ("values", "words"),
    [({"max_new_tokens_measured": 128}, "max_new_tokens is 48 and 128"), ({"target": "other"}, "another target")],
)
def test_other_measurements_are_not_set_against_each_other(values: dict, words: str) -> None:
    found = look(make(0.3), make(0.6, seed=1, **values))
    assert found.pairs[0].comparison is None and words in found.pairs[0].verdict
    assert "nothing can be said" in compare.words(found) and words in compare.words(found)
    assert len(compare.cost_rows(found)) == 1, "nor in the figure of cost"


def test_no_common_prompt_and_one_common_prompt() -> None:
    one, other = make(0.4), make(0.4, seed=1, prompts=1)
    assert look(one, other).pairs[0].verdict == "no interval: one common prompt"
    metrics = other.metrics()
    metrics["sets"]["own"]["per_prompt"] = []
    (other.path / "metrics.json").write_text(json.dumps(metrics))
    assert "no prompt is common" in look(one, other).pairs[0].verdict


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], []),
        ([(1, 1)], [True]),
        ([(1, 1), (2, 3), (3, 2)], [True, True, False]),
        ([(1, 2), (1, 1), (2, 2)], [True, False, False]),
        ([(1, 1), (1, 1)], [True, True]),
    ],
)
def test_who_is_on_the_front(points: list, front: list[bool]) -> None:
    assert on_front(points) == front


def test_the_front_against_every_pair() -> None:
    points = [tuple(point) for point in np.random.default_rng(0).integers(0, 12, (60, 2)).tolist()]
    for (x, y), good in zip(points, on_front(points), strict=True):
        better = [(a, b) for a, b in points if a <= x and b >= y and (a < x or b > y)]
        assert good is not bool(better)


def test_seeds_alone() -> None:
    first = [make(0.3, seed=0), make(0.5, seed=1), make(0.9, seed=0, train_steps=5)]
    found, _ = measured(first)
    lengths = [one.sets["own"]["accept_length"] for one in found]
    assert seed_spread(found, "own") == (pytest.approx(lengths[1] - lengths[0]), 2)
    # Without a second seed of the same parameters there is none, however far they lie apart.
    assert seed_spread(found[1:], "own") is None


def test_labels_say_what_differs_and_only_that() -> None:
    runs = [make(0.3, learning_rate=1e-3), make(0.3, learning_rate=2e-3), make(0.3, learning_rate=2e-3, seed=4)]
    assert [one.label for one in measured(runs)[0]] == [
        "seed 0, learning_rate 0.001",
        "seed 0, learning_rate 0.002",
        "seed 4, learning_rate 0.002",
    ]
    twice = [make(0.3), make(0.3)]
    assert [one.label for one in measured(twice)[0]] == [
        f"preset quick, seed 0 ({run.path.name[:16]})" for run in twice
    ]


def test_batch_takes_runs_of_these_parameters_and_this_code_only(monkeypatch) -> None:
    good = make(0.3)
    make(0.3, seed=1)
    make(0.3, train_steps=5)
    Run.create("smollm2", "quick")  # nothing measured yet
    asked = {"profile": "smollm2", "preset": "quick", "seed": 0, "note": lambda _: None}
    assert [run.path for run in choose_runs("", batch=True, **asked)] == [good.path]
    assert len(choose_runs("", batch=False, **asked)) == 3
    monkeypatch.setattr(provenance, "code_hash", lambda: "other code")
    assert choose_runs("", batch=True, **asked) == []


def test_named_runs_must_be_there_and_measured(runs_here: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        compare.compare_runs(runs="nothing")
    empty = Run.create("smollm2", "quick")
    with pytest.raises(RunError, match="step 'accept'"):
        look(empty)
    with pytest.raises(RunError, match="step 'accept'"):
        look(make(0.3), run=str(empty.path))
    with pytest.raises(UsageError, match="parameter runs"):
        compare.compare_runs(runs=3)  # type: ignore[arg-type]


def test_a_sweep_is_its_good_jobs(runs_here: Path) -> None:
    good, bad = make(0.3), make(0.3, seed=1)
    rows = [{"run": str(good.path), "state": "ok", "accept_length": 1.3}]
    rows += [{"run": str(bad.path), "state": "error", "accept_length": 1.3}, {"run": None, "state": "dead"}]
    rows += [{"run": str(bad.path), "state": "ok", "accept_length": None}]
    folder = runs_here / "sweep-x-123456"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"jobs": rows}))
    for name in ("sweep-x-123456", str(folder), str(folder / "sweep.json")):
        assert [one.run.path for one in compare.compare_runs(runs=name, note=lambda _: None).runs] == [good.path]


def test_the_baseline_can_be_named_and_else_is_one_that_most_compare_with() -> None:
    odd, a, b = make(0.3, max_new_tokens_measured=128), make(0.3, seed=1), make(0.3, seed=2)
    assert look(odd, a, b).runs[0].run.path == a.path
    assert look(odd, a, run=str(b.path)).runs[0].run.path == b.path
    assert look(odd, a, run=str(odd.path)).runs[0].run.path == odd.path


def test_a_random_target_is_left_out() -> None:
    run = make(0.3)
    run.merge_metrics({"meaningless": "random target: acceptance has no meaning"})
    found = look(run)
    assert found.runs == [] and "Left out" in compare.words(found) and "no meaning" in compare.words(found)


def test_a_checkpoint_from_elsewhere_has_no_training_time() -> None:
    other = make(0.5, seed=1)
    other.merge_metrics({"drafter": "/somewhere/mine"})
    found = look(make(0.3), other)
    assert [row["run"] for row in compare.cost_rows(found)] == ["seed 0"]
    assert "checkpoint mine" in found.runs[1].label and "Fewer than two" in compare.words(found)


def notebook_07(tmp_path: Path, runs: str) -> tuple[str, dict]:
    """Notebook 07 run by papermill itself from another folder; its Markdown outputs, and the notebook."""
    out = tmp_path / "out.ipynb"
    words = ["-m", "papermill", str(notebooks_folder() / "07_compare_runs.ipynb"), str(out), "-p", "runs", runs]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    value = json.loads(out.read_text())
    outputs = [output.get("data", {}) for cell in value["cells"] for output in cell.get("outputs", [])]
    return "\n".join("".join(data.get("text/markdown", "")) for data in outputs), value


@pytest.mark.parametrize("count", [0, 1, 2, 24])
def test_the_notebook_is_right_with_none_one_two_and_many_runs(tmp_path: Path, runs_here: Path, count: int) -> None:
    runs = [
        make(0.3 + 0.005 * n, seconds=20.0 + n, seed=n % 4, noise=n, learning_rate=1e-3 * (1 + n // 4))
        for n in range(count)
    ]
    text, value = notebook_07(tmp_path, ",".join(run.path.name for run in runs))
    result = text[text.index("**Result.**") :]
    figures = sorted(path.name for path in runs_here.glob("compare-*/*.png"))
    shown = sum("image/png" in output.get("data", {}) for cell in value["cells"] for output in cell.get("outputs", []))
    if count == 0:
        assert "no finished run to compare" in result and figures == []
    elif count == 1:
        length = runs[0].metrics()["accept_length"]
        assert "There is one run" in result and f"{length:.2f}" in result and figures == ["07_cost.png"]
    else:
        assert figures == ["07_cost.png", "07_differences.png"] and len(figures) == shown
        assert f"of {count - 1} drafters have a longer accept length" in result
        assert len(re.findall(r"^\| own \|", text, re.M)) == count - 1
        assert ("would stand out by chance" in result) is (count == 24)
    assert "nan" not in text.lower() and "None" not in text
