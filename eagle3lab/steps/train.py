"""`eagle3lab train`: the drafter of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eagle3lab.capture.store import Store
from eagle3lab.core.files import read_json, write_json
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.build import Corpus
from eagle3lab.drafter.checkpoint import save_drafter
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.init import build_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs.directory import Run
from eagle3lab.runs.presets import Preset
from eagle3lab.steps.capture import planned_states, states_folder
from eagle3lab.steps.corpus import corpus_for
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.training import checkpoints
from eagle3lab.training.batches import States
from eagle3lab.training.distributed import World, join, whole
from eagle3lab.training.sources import FollowedStates, OnlineStates
from eagle3lab.training.trainer import FULL_HEAD_SHARE, Trainer, TrainSettings, Watching

TRAINING = "training.json"
"""The curve of a run's training, in its directory."""
BEST = "best"
"""Beside the drafter: the one that was best on held-out samples, when that is not the last."""
Source = Literal["stored", "followed", "online"]


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
    """A drafter as wide as its target: one block of the target's own shape, or of the profile's where that differs."""
    config = target.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    given = (profile.plan or {}).get("drafter", {})
    return DraftConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        points=profile.model.points,
        target_blocks=target.blocks,
        target_family=profile.model.family,
        intermediate_size=given.get("intermediate_size", config.intermediate_size),
        num_attention_heads=given.get("attention_heads", config.num_attention_heads),
        num_key_value_heads=given.get("kv_heads", config.num_key_value_heads),
        head_dim=given.get("head_dim", config.head_dim),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=config.max_position_embeddings,
    )


def start_of(target: Target) -> dict[str, Any]:
    """How a drafter of this target starts: keywords of `build_drafter`.

    A Llama-class target lends its last block, as by default. Another block (latent attention,
    experts) does not fit a Llama-class drafter: block and fc start fresh, as the public trainers for Kimi do.
    """
    last = target.layers[-1]
    if hasattr(last.self_attn, "k_proj") and hasattr(last.mlp, "gate_proj"):
        return {}
    return {"fc": "kaiming-uniform", "block": "fresh"}


def train_settings(preset: Preset, seed: int, chain: int, compute: str) -> TrainSettings:
    """Settings of a preset; chain: drafts of a chain in the held-out replay; compute: type of the forwards."""
    return TrainSettings(
        steps=preset.train_steps,
        batch_tokens=preset.batch_tokens,
        ttt_steps=preset.ttt_steps,
        chain=chain,
        learning_rate=preset.learning_rate,
        head_rows=preset.head_rows,
        full_head_share=FULL_HEAD_SHARE if preset.train_lm_head else 0.0,  # a head that stays has nothing to set right
        train_lm_head=preset.train_lm_head,
        feature_weight=preset.feature_weight,
        seed=seed,
        convention=preset.convention,
        precision="fp32" if compute == "float32" else "bf16",
        log_every=min(50, max(10, preset.train_steps // 100)),  # a row is judged over the whole head, three steps' work
        checkpoint_every=max(50, preset.train_steps // 8),
        evaluate_every=max(1, preset.train_steps // 4),
    )


def train_drafter(
    run: Run,
    *,
    progress: Callable[[dict[str, Any]], None] | None = None,
    max_seconds: float | None = None,
    source: Source = "stored",
    world: World | None = None,
    watching: Watching | None = None,
    note: Callable[[str], None] = print,
) -> TrainSummary:
    """Train the drafter of a run.

    An interrupted training, or one that `max_seconds` ended, goes on from its last checkpoint; a finished one is not
    done again, its summary is read.

    Args:
        source: `stored` states, those that another process is still capturing (`followed`), or none at all: `online`
            the target makes them in this very job, on every rank what that rank trains on.
        world: the ranks that train together; rank 0 writes.
    """
    world = world or join()
    if world.lead(lambda: run.step_state("train") == "ok" and not _reopen(run)):
        return finished_training(run)
    with run.recording("train") if world.leader else contextlib.nullcontext():
        profile = load_profile(run.manifest.profile)
        compute = compute_type(run.preset.precision, profile.model.dtype, world.device.type)
        target = load_target(fetched_folder(profile), dtype=compute)
        corpus = corpus_for(run, target.tokenizer)
        run.require_inputs(target=weight_hash(fetched_folder(profile)), corpus=corpus.sha256)
        states, first_epoch = _states(run, source, profile, target, corpus, note)
        vocabulary = corpus.vocabulary(target.vocab_size, run.preset.draft_vocab_size)
        config = draft_config(profile, target, run.preset.draft_vocab_size)
        kept = torch.from_numpy(vocabulary.kept)
        drafter, recipe = build_drafter(config, target, kept, seed=run.manifest.seed, **start_of(target))
        if source != "online":  # the states are there: what is left to read is the head
            target.release_blocks()
        settings = train_settings(run.preset, run.manifest.seed, profile.draft_tokens, compute)
        if profile.random_weights:
            # No step of it is better than another, and a checkpoint of 2.5 GB takes longer than its few steps.
            settings = replace(settings, checkpoint_every=0)
        trainer = Trainer(
            drafter, target, states, corpus.train, corpus.held_back, settings, run.drafter,
            world=world, watching=watching, first_epoch=first_epoch, note=note,
        )  # fmt: skip
        trainer.resume()
        result = trainer.run(max_seconds=max_seconds, progress=progress)
        record = {
            "init": recipe,
            "settings": asdict(settings),
            "steps_done": result.steps_done,
            "truncated": result.truncated,
            "target_weight_sha256": states.manifest.target_weight_sha256,
            "states_points": states.manifest.points,
            "coverage": vocabulary.coverage,
        }
        drafter = whole(trainer.drafter, trainer.plain)
        if world.leader:
            _write(run, drafter, trainer, record)
    world.meet()
    return finished_training(run)


def _reopen(run: Run) -> bool:
    """Forget a training that `max_seconds` ended, with what was measured with its drafter; False for a finished one."""
    truncated = finished_training(run).truncated
    if truncated:
        run.forget("train")
    return truncated


def _states(
    run: Run, source: Source, profile: Profile, target: Target, corpus: Corpus, note: Callable[[str], None]
) -> tuple[States, list[list[int]] | None]:
    """Where samples come from, and the order of the first epoch where that matters (see `BatchPlan`)."""
    if source == "stored":
        return Store(states_folder(run), points=profile.model.points), None
    manifest, folder, shards = planned_states(run, profile, corpus, target.tokenizer)
    if source == "online":
        return OnlineStates(target, corpus.samples, manifest), None
    trained = set(corpus.train)
    groups = [[member for member in shard if member in trained] for shard in shards]
    return FollowedStates(folder, corpus.samples, manifest, shards, note=note), [one for one in groups if one]


def _write(run: Run, drafter: Eagle3Drafter, trainer: Trainer, record: dict[str, Any]) -> None:
    """The drafter, the best one where that was an earlier one, the curve, and the run's metrics."""
    result = trainer.result
    save_drafter(drafter, run.drafter, record=record)
    trained = [part for part in drafter.named_children() if trainer.settings.train_lm_head or part[0] != "lm_head"]
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in trained}
    write_json(run.path / TRAINING, {**asdict(result), "parameters": counts, "seconds": round(result.seconds, 3)})
    best = result.best["step"] if result.best else result.steps_done
    if best < result.steps_done and checkpoints.load_weights(run.drafter, best, drafter):
        save_drafter(drafter, run.drafter / BEST, record={**record, "steps_done": best})
    else:
        shutil.rmtree(run.drafter / BEST, ignore_errors=True)  # of an earlier end
    if not result.truncated:
        checkpoints.remove(run.drafter)
    run.set_truncated(result.truncated)
    last = result.held_out[-1] if result.held_out else {}
    run.merge_metrics(
        {
            "training": {
                "steps": result.steps_done,
                "precision": trainer.settings.precision,
                "held_out": last,
                "accuracy_by_step": result.history[-1]["accuracy_by_step"],
            }
        },
        timing={"training_seconds": result.seconds},
    )


def progress_text(row: dict[str, Any]) -> str:
    """One line of a terminal for a row of the curve."""
    accuracy = ", ".join("unknown" if value is None else f"{value:.3f}" for value in row["accuracy_by_step"])
    minutes, seconds = divmod(round(row["seconds_left"]), 60)
    return (
        f"step {row['step']}: loss {row['loss']:.3f}, accuracy by step {accuracy}, "
        f"{row['tokens_per_second']:.0f} tokens/s, {row['model_flop_utilisation']:.0%} of the matrix rate, "
        f"{minutes} min {seconds:02d} s left"
    )


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
