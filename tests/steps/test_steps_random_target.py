"""Steps on a target with random weights: the whole chain at a small size, what it says, and the true Kimi widths."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from eagle3lab import cli
from eagle3lab.core.errors import ProfileError, UsageError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs import provenance
from eagle3lab.runs.directory import Run
from eagle3lab.runs.report import write_report
from eagle3lab.runs.summary import summary_lines
from eagle3lab.steps import words
from eagle3lab.steps.accept import MEANINGLESS, measure
from eagle3lab.steps.capture import capture_states
from eagle3lab.steps.corpus import corpus_for, prepare_corpus
from eagle3lab.steps.corpus_build import RANDOM_REPLIES, regenerate_if_needed
from eagle3lab.steps.fc import examine
from eagle3lab.steps.look import look_at_target
from eagle3lab.steps.train import draft_config, start_of, train_drafter
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import PROFILE_FOLDER, load_profile
from eagle3lab.targets.random_target import draw_target
from tests.tiny import tiny_target

SENTENCE = "random target: acceptance has no meaning"
SMALL = {"blocks = 61": "blocks = 7", "num_hidden_layers = 61": "num_hidden_layers = 7", "= 7168": "= 64",
         "points = [2, 30, 58]": "points = [2, 3, 4]", "train_steps = 20": "train_steps = 4"}  # fmt: skip


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """kimi-thin with 7 blocks of width 64: the same code in seconds."""
    text = (PROFILE_FOLDER / "kimi-thin.toml").read_text()
    for old, new in SMALL.items():
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("profile") / "small-kimi.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def run(profile: str, tmp_path_factory: pytest.TempPathFactory):
    """The chain, step by step, with a cache and a runs folder of its own."""
    place = tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3LAB_CACHE", str(place / "cache"))
        patch.setenv("EAGLE3LAB_RUNS", str(place / "runs"))
        made = Run.create(profile, "quick")
        made.look = look_at_target(made, max_new_tokens=8)
        made.corpus = prepare_corpus(made)
        made.states = capture_states(made)
        made.trained = train_drafter(made)
        made.fc = examine(made)
        made.accepted = measure(made)
        yield made


def test_the_chain_is_there(run) -> None:
    # A reply that is an end token alone is dropped, so fewer than were asked for may be there.
    assert run.corpus.samples == 24 and 0 < run.corpus.validation <= RANDOM_REPLIES - 24
    assert run.corpus.greedy is False and list(run.corpus.held_out) == ["fresh"]
    assert run.states.width == 3 * 64 and run.trained.history[-1]["step"] == 4
    assert "random text" in words.target(run.look)
    assert [row[0] for row in run.look.loaded] == [0]


def test_replies_are_sampled_so_that_they_differ(run) -> None:
    texts = {tuple(reply.tokens) for reply in corpus_for(run).replies}
    assert len(texts) > RANDOM_REPLIES / 2


def test_replies_are_made_once(run, monkeypatch) -> None:
    monkeypatch.setattr("eagle3lab.steps.corpus_build.build_replies", lambda *a, **k: pytest.fail("made again"))
    assert prepare_corpus(run).sha256 == run.corpus.sha256
    assert regenerate_if_needed(run.manifest.profile) is None


def test_fc_starts_as_for_kimi_and_moves(run) -> None:
    record = json.loads((run.drafter / "eagle3lab_training.json").read_text())
    assert (record["init"]["fc"]["family"], record["init"]["block"]) == ("kaiming-uniform", "fresh")
    first, last = run.fc.way[0], run.fc.way[-1]
    assert first["step"] == 0 and first["moved"] == 0 and first["cosine"] == pytest.approx(1)
    assert last["step"] == 4 and last["moved"] > 1e-3 and last["cosine"] < 1
    before = run.fc.densities[0]
    assert before["family"] == "start" and before["density"] != before["initial"]


def test_no_headline_anywhere(run) -> None:
    metrics = run.metrics()
    assert metrics["meaningless"] == MEANINGLESS == SENTENCE and "accept_length" not in metrics
    assert metrics["drafter"] == "drafter" and metrics["fc"]["drafter"] == "drafter"
    told = words.acceptance(run.accepted, run)
    assert SENTENCE in told and "accept length is" not in told and "3 of 3 prompts" in told
    assert not metrics["timing"]["speed"] and not (run.drafter / "best").exists()
    assert SENTENCE in summary_lines(run)[0] and not any("accept length" in line for line in summary_lines(run))
    page = write_report(run, None).read_text()
    assert SENTENCE in page and "tokens per verify step" not in page and "n-gram look-up" not in page


def test_a_real_target_keeps_its_headline(run) -> None:
    """The wrong version: the sentence where acceptance was measured on a trained target."""
    metrics = run.metrics()
    run.merge_metrics({"meaningless": None, "accept_length": 1.5})
    assert "accept length" in "\n".join(summary_lines(run)) and SENTENCE not in "\n".join(summary_lines(run))
    run.merge_metrics({"meaningless": metrics["meaningless"]})


def test_another_checkpoint_is_named_beside_its_numbers(run, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.symlink_to(run.drafter)  # the run's own by another name is still the run's own
    measure(run, draft=str(theirs))
    assert run.metrics()["drafter"] == "drafter"
    theirs.unlink()
    theirs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (theirs / name).write_bytes((run.drafter / name).read_bytes())
    measure(run, draft=str(theirs))
    assert run.metrics()["drafter"] == str(theirs)
    assert examine(run, draft=str(theirs)).way == [] and run.metrics()["fc"]["drafter"] == str(theirs)
    assert any(f"measured drafter: {theirs}" in line for line in summary_lines(run))
    assert str(theirs) in write_report(run, None).read_text()


def test_amounts_of_the_profile(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path))
    run = Run.create("kimi-thin", "long", {"train_steps": 3})
    assert (run.preset.train_steps, run.preset.draft_vocab_size, run.preset.humaneval) == (3, 256, False)
    assert Run.open(run.path).preset == run.preset
    assert Run.create("kimi-thin", "quick").preset.train_steps == 20
    assert Run.create("smollm2", "quick").preset.draft_vocab_size == 8192
    with pytest.raises(ProfileError, match="unknown profile"):
        Run.create("kimi-thn", "quick")


def test_wrong_amounts_of_a_profile_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path / "runs"))
    text = (PROFILE_FOLDER / "kimi-thin.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("train_steps = 20", "train_step = 20"))
    assert "train_step" in tomllib.loads(path.read_text())["amounts"]
    with pytest.raises(UsageError, match="did you mean 'train_steps'"):
        Run.create(str(path), "quick")


def test_the_drafter_is_wide_at_fc_and_thin_elsewhere() -> None:
    profile = load_profile("kimi-thin")
    target = draw_target(profile, moe_intermediate_size=8, intermediate_size=8)
    config = draft_config(profile, target, 256)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config, torch.empty(320, 7168))
    count = sum(parameter.numel() for parameter in drafter.parameters())
    assert list(drafter.fc.weight.shape) == [7168, 21_504]
    assert drafter.fc.weight.numel() < count <= 250e6
    assert start_of(target) == {"fc": "kaiming-uniform", "block": "fresh"} and start_of(tiny_target()) == {}


def test_kimi_k25_without_gpus_is_one_line_and_makes_nothing(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(provenance, "_gpus", lambda: [])
    assert cli.run(["run", "--profile", "kimi-k2.5"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "preflight" in err and "8 GPUs, and none is visible" in err
    assert not (tmp_path / "runs").exists()


def test_kimi_k25_with_gpus_is_not_refused_by_the_preflight(tmp_path: Path, monkeypatch) -> None:
    from eagle3lab.steps.preflight import refuse_without_gpus

    monkeypatch.setattr(provenance, "_gpus", lambda: ["a GPU"])
    refuse_without_gpus(load_profile("kimi-k2.5"))
    monkeypatch.setattr(provenance, "_gpus", lambda: [])
    refuse_without_gpus(load_profile("kimi-thin"))


def test_another_shape_or_seed_is_another_folder() -> None:
    profile = load_profile("kimi-thin")
    thinner = profile.model_copy(update={"config": {**(profile.config or {}), "intermediate_size": 128}})
    other = profile.model_copy(update={"source": profile.source.model_copy(update={"seed": 1})})
    folders = {fetched_folder(one) for one in (profile, thinner, other)}
    assert len(folders) == 3 and fetched_folder(load_profile("kimi-thin")) in folders
