"""`eagle3lab run`, `runs` and `report` from the command line: one line for an error, exit codes, what prune spares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.runs.directory import Run


@pytest.fixture
def call(capfd):
    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    ("words", "in_error"),
    [
        (("run", "--profile", "smolm2"), "unknown profile 'smolm2'; did you mean 'smollm2'?"),
        (("run", "--profile", "/nowhere/x.toml"), "/nowhere/x.toml"),
        (("run", "--preset", "quik"), "did you mean 'quick'?"),
        (("run", "-p", "train_step=5"), "did you mean 'train_steps'?"),
        (("run", "-p", "train_steps=five"), "train_steps is 'five' (str)"),
        (("run", "-p", "seed=-1"), "seed is -1"),
        (("run", "-p", "draft=/nowhere"), "draft is /nowhere"),
        (("run", "--regenerate", "--preset", "quik"), "did you mean 'quick'?"),
        (("run", "-p", "preset=quick"), "--preset quick"),
        (("run", "--max-minutes", "0"), "--max-minutes 0"),
        (("run", "--max-minutes", "nan"), "--max-minutes nan"),
        (("train", "--max-minutes", "-1"), "--max-minutes -1"),
        (("run", "--resume", "/nowhere"), "no run directory '/nowhere'"),
        (("report", "nothing"), "no run directory 'nothing'"),
        (("runs", "prune", "--keep", "-1"), "--keep -1"),
    ],
)
def test_bad_words_run_nothing(call, words: tuple[str, ...], in_error: str, runs_here: Path) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "") and in_error in err and len(err.splitlines()) == 1 and "Traceback" not in err
    assert not runs_here.exists() or not list(runs_here.iterdir())


def test_a_run_keeps_its_parameters(call, run: Run) -> None:
    code, _, err = call("run", "--resume", str(run.path), "-p", "seed=4")
    assert code == 2 and "keeps the parameters" in err


def test_an_unwritten_manifest_is_told_in_one_line(call, run: Run) -> None:
    (run.path / "manifest.json").write_text('{"schema": "eagle3lab-run/1"')
    code, _, err = call("run", "--resume", str(run.path))
    assert code == 2 and "is not JSON" in err and len(err.splitlines()) == 1


def test_list_and_prune(call, run: Run, runs_here: Path) -> None:
    others = [Run.create("smollm2", "quick", seed=seed) for seed in (1, 2)]
    run.merge_metrics({"accept_length": 1.5})
    code, out, _ = call("runs", "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)["runs"]}
    assert code == 0 and rows[run.path.name]["accept_length"] == 1.5
    assert rows[others[0].path.name]["accept_length"] is None
    assert "unknown" in call("runs", "list")[1]
    with run.recording("train"):
        _, out, _ = call("runs", "prune", "--keep", "1", "--yes", "--json")
    # The newest is kept, the one that is worked on is spared, the third goes.
    assert len(json.loads(out)["removed"]) == 1 and run.path.is_dir()
    code, out, _ = call("runs", "prune", "--keep", "0")
    assert "would remove 2 runs" in out and len(list(runs_here.glob("*/manifest.json"))) == 2


def test_prune_removes_a_link_and_not_what_it_points_to(call, run: Run, tmp_path: Path, runs_here: Path) -> None:
    elsewhere = tmp_path / "precious"
    run.path.rename(elsewhere)
    (runs_here / run.path.name).symlink_to(elsewhere)
    code, _, _ = call("runs", "prune", "--keep", "0", "--yes")
    assert code == 0 and (elsewhere / "manifest.json").is_file()


def test_report_command(call, run: Run) -> None:
    code, out, _ = call("report", run.path.name, "--json")
    assert code == 0 and Path(json.loads(out)["report"]).is_file()
