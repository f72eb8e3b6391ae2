"""`eagle3lab train`: the drafter of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3lab.capture.store import Store
from eagle3lab.core.files import read_json, write_json
from eagle3lab.drafter.checkpoint import save_drafter
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.init import build_drafter
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import Preset
from eagle3lab.steps.capture import states_folder
from eagle3lab.steps.corpus import corpus_for
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.training.conventions import Convention
from eagle3lab.training.trainer import Trainer, TrainSettings

TRAINING = "training.json"
"""The curve of a run's training, in its directory."""


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """The training of a run.

    Attributes:
        history: rows by step: loss, loss_by_step, accuracy_by_step, learning_rate, gradient_norm, tokens_per_second.
        held_out: rows by step: chains, accepted, simulated_accept_length (teacher-forced replay of validation samples).
        folder: the checkpoint; parameters: trained numbers by part.
    """

    history: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    folder: Path
    parameters: dict[str, int]
    seconds: float
    truncated: bool


def draft_config(profile: Profile, target: Target, draft_vocab_size: int) -> DraftConfig:
    """A drafter as wide as its target: one block of the target's own shape."""
    config = target.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return DraftConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        points=profile.model.points,
        target_blocks=target.blocks,
        target_family=profile.model.family,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=config.max_position_embeddings,
    )


def train_settings(preset: Preset, seed: int, convention: Convention = "served") -> TrainSettings:
    """Settings of a preset."""
    return TrainSettings(
        steps=preset.train_steps,
        batch_tokens=preset.batch_tokens,
        ttt_steps=preset.ttt_steps,
        learning_rate=preset.learning_rate,
        seed=seed,
        convention=convention,
        checkpoint_every=max(50, preset.train_steps // 10),
        evaluate_every=max(1, preset.train_steps // 5),
    )


def train_drafter(
    run: Run,
    *,
    progress: Callable[[dict[str, Any]], None] | None = None,
    max_seconds: float | None = None,
    convention: Convention = "served",
) -> TrainSummary:
    """Train the drafter of a run from its captured states.

    An interrupted training goes on from its last checkpoint; a finished one is not done again, its summary is read.
    """
    if run.step_state("train") == "ok":
        return finished_training(run)
    with run.recording("train"):
        profile = load_profile(run.manifest.profile)
        store = Store(states_folder(run), points=profile.model.points)
        target = load_target(fetched_folder(profile), dtype=profile.model.dtype)
        corpus = corpus_for(run, target.tokenizer)
        vocabulary = corpus.vocabulary(target.vocab_size, run.preset.draft_vocab_size)
        config = draft_config(profile, target, run.preset.draft_vocab_size)
        drafter, recipe = build_drafter(config, target, torch.from_numpy(vocabulary.kept), seed=run.manifest.seed)
        settings = train_settings(run.preset, run.manifest.seed, convention)
        trainer = Trainer(drafter, target, store, list(corpus.train), list(corpus.held_back), settings, run.drafter)
        trainer.resume()
        started = time.monotonic()
        result = trainer.run(max_seconds=max_seconds, progress=progress)
        seconds = time.monotonic() - started
        record = {
            "init": recipe,
            "settings": asdict(settings),
            "steps_done": result.steps_done,
            "truncated": result.truncated,
            "target_weight_sha256": store.manifest.target_weight_sha256,
            "states_points": store.manifest.points,
            "coverage": vocabulary.coverage,
        }
        save_drafter(drafter, run.drafter, record=record)
        (run.drafter / "resume.pt").unlink(missing_ok=True)
        counts = {name: sum(p.numel() for p in part.parameters()) for name, part in drafter.named_children()}
        write_json(run.path / TRAINING, {**asdict(result), "parameters": counts, "seconds": round(seconds, 3)})
        if result.truncated:
            run.set_truncated(True)
        last = result.held_out[-1] if result.held_out else {}
        run.merge_metrics(
            {
                "training": {
                    "steps": result.steps_done,
                    "held_out": last,
                    "accuracy_by_step": result.history[-1]["accuracy_by_step"],
                }
            },
            timing={"training_seconds": seconds},
        )
    return finished_training(run)


def finished_training(run: Run) -> TrainSummary:
    """What the training of a run left behind."""
    run.require("train")
    stored = read_json(run.path / TRAINING)
    return TrainSummary(
        stored["history"],
        stored["held_out"],
        run.drafter,
        stored["parameters"],
        stored["seconds"],
        stored["truncated"],
    )
