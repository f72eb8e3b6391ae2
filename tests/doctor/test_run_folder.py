"""`--run`: a folder that is none is refused, and a file of a run that cannot be used is named, never passed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.readers import rundir
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.runs import schemas

from .states_files import whole, write

COUNTS = {"counts": {"verify_steps": 40, "proposed": 120, "accepted": 30}, "k": 3, "accept_length": 1.75}
STATUS = {"notebooks": {}, "steps": {"train": {"status": "ok"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, value in (
        ("manifest", {"schema": "eagle3lab-run/1"}),
        ("status", STATUS),
        ("metrics", {"sets": {"own": COUNTS}}),
        ("training", {}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "model.safetensors").touch()  # without a config.json beside it nothing looks inside
    return tmp_path


def told(folder: Path) -> tuple[Report, dict[str, str]]:
    report = visit(Inputs(run=str(folder)))
    return report, {f.message: f.severity for f in report.findings}


def test_the_schema_is_that_of_runs() -> None:
    assert (rundir.RUN_SCHEMA, rundir.STATUS_SCHEMA) == (schemas.RUN_SCHEMA, schemas.STATUS_SCHEMA)


def test_a_whole_run(folder: Path) -> None:
    report, messages = told(folder)
    assert "error" not in messages.values() and report.checks_run
    assert not any("metrics.json" in message for message in messages)


@pytest.mark.parametrize("manifest", [None, {"schema_version": "eagle3lab-states/1"}], ids=["empty", "states"])
def test_another_folder_is_refused(tmp_path: Path, manifest: dict | None) -> None:
    """Captured states have a manifest.json too."""
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"is no run directory; it holds manifest\.json and status\.json"):
        told(tmp_path)


def test_a_file_that_leads_outside_is_told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("elsewhere") / "metrics.json"
    (folder / "metrics.json").replace(outside)
    (folder / "metrics.json").symlink_to(outside)
    assert any("is no file inside the run" in message for message in told(folder)[1])


@pytest.mark.parametrize("name", ["manifest.json", "status.json", "metrics.json", "training.json"])
@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[1]", "holds a JSON list"), ("", "is not JSON")])
def test_a_broken_file_is_an_error(folder: Path, name: str, text: str, why: str) -> None:
    (folder / name).write_text(text)
    _, messages = told(folder)
    assert [severity for message, severity in messages.items() if f"{folder / name}: {why}" in message] == ["error"]


def test_a_report_without_counts_is_told(folder: Path) -> None:
    (folder / "metrics.json").write_text(json.dumps({"sets": {"own": {"accept_length": 1.9}}}))
    assert any("neither `counts` nor `sets`" in message for message in told(folder)[1])


WHOLE = {"step": 400, "weights": True, "optimizer": True, "scheduler": {"last_step": 400}, "rng": True, "sampler": True}


@pytest.mark.parametrize(
    ("run", "severity", "words"),
    [
        (WHOLE, "info", "step 400 can be resumed exactly"),
        (WHOLE | {"optimizer": None}, "error", "cannot be resumed exactly: optimizer missing"),
        (WHOLE | {"scheduler": {"last_step": 0}}, "error", "the scheduler stands at step 0, the run at 400"),
    ],
)
def test_the_newest_checkpoint_of_an_unfinished_training(folder: Path, run: dict, severity: str, words: str) -> None:
    for step, held in ((200, WHOLE | {"step": 200, "scheduler": {"last_step": 200}}), (400, run)):
        checkpoint = folder / "drafter" / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"run": held}))
    [said] = [message for message, kind in told(folder)[1].items() if kind == severity and "resumed exactly" in message]
    assert words in said


def test_a_truncated_run_is_told(folder: Path) -> None:
    (folder / "status.json").write_text(json.dumps({**STATUS, "truncated": True}))
    [severity] = [severity for message, severity in told(folder)[1].items() if "the run is truncated" in message]
    assert severity == "warning"
    (folder / "status.json").write_text(json.dumps({**STATUS, "truncated": False}))
    assert not any("truncated" in message for message in told(folder)[1])


@pytest.mark.parametrize(("reset_at", "newest"), [(None, 400), (400, 400), (200, 400)])
def test_the_learning_rate_goes_on_across_a_resume(folder: Path, reset_at: int | None, newest: int) -> None:
    """The history tells the rate of every row, and the checkpoints where a training was resumed."""
    rates = {step: 1e-3 * (1 - step / 700) for step in range(50, 650, 50)}
    if reset_at is not None:
        rates |= {step: 1e-3 * (1 - (step - reset_at) / 700) * 3 for step in rates if step > reset_at}
    history = [{"step": step, "loss": 9 - step / 100, "learning_rate": rate} for step, rate in rates.items()]
    (folder / "training.json").write_text(json.dumps({"history": history}))
    for step in (200, newest):
        checkpoint = folder / "drafter" / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        held = WHOLE | {"step": step, "scheduler": {"last_step": step}}
        (checkpoint / "state.json").write_text(json.dumps({"run": held}))
    said = [message for message, severity in told(folder)[1].items() if severity == "error"]
    assert len(said) == (reset_at is not None)
    if reset_at is not None:
        assert f"learning rate jumps at step {reset_at + 50}" in said[0]


def errors(folder: Path) -> list[str]:
    return [message for message, severity in told(folder)[1].items() if severity == "error"]


@pytest.mark.parametrize(
    "name", ["metrics.json", "training.json", "manifest.json", "drafter/model.safetensors", "drafter"]
)
def test_what_a_finished_step_wrote_is_missed(folder: Path, name: str) -> None:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert any(
        f"{name}: is not there, though the step that writes it ended ok" in message for message in errors(folder)
    )
    (folder / "manifest.json").write_text(json.dumps({"schema": "eagle3lab-run/1"}))
    (folder / "status.json").write_text(json.dumps({"notebooks": {}, "steps": {"train": {"status": "running"}}}))
    assert not errors(folder)


@pytest.mark.parametrize("name", ["manifest.json", "status.json"])
def test_a_file_of_another_release(folder: Path, name: str) -> None:
    value = json.loads((folder / name).read_text()) | {"schema": "eagle3lab-of-later/2"}
    (folder / name).write_text(json.dumps(value))
    assert [message for message in errors(folder) if f"{name}: its schema is 'eagle3lab-of-later/2'" in message]


@pytest.mark.parametrize(("preset", "wrong"), [("quick", False), ("long", True), (None, False)])
def test_numbers_of_another_preset(folder: Path, preset: str | None, wrong: bool) -> None:
    (folder / "manifest.json").write_text(json.dumps({"schema": "eagle3lab-run/1", "preset": "quick"}))
    (folder / "metrics.json").write_text(json.dumps({"sets": {"own": COUNTS}, "preset": preset}))
    assert any("its numbers are of preset 'long', the run is of 'quick'" in one for one in errors(folder)) is wrong


def test_the_points_of_a_drafters_record(tmp_path: Path) -> None:
    """A list that was written off by one is found without the states: the drafter tells what it was trained on."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir(), draft.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 8}))
    record = {"states_points": [2, 15, 27]}
    for ids, states, wrong in (([1, 14, 26], None, 0), ([2, 15, 27], None, 1), ([2, 15, 27], [3, 16, 28], 0)):
        config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, "hidden_size": 8}
        (draft / "config.json").write_text(json.dumps(config))
        (draft / "eagle3lab_training.json").write_text(json.dumps(record))
        given = write(tmp_path / str(ids[0] + wrong), whole(), points=states, hidden_size=8) if states else ""
        report = visit(Inputs(draft=str(draft), target=str(target), states=str(given), engine="sglang"))
        found = [f.message for f in report.findings if f.code == "points-differ" and f.severity == "error"]
        assert len(found) == wrong, found
