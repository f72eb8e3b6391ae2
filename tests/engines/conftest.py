"""Target, drafter, prompts and our own decoding: made once a session, used by both engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs.directory import Run
from eagle3lab.steps.capture import capture_states
from eagle3lab.steps.corpus import prepare_corpus
from eagle3lab.steps.train import train_drafter
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile
from tests.engines.ours import Reply, decode

K = 3
PROMPTS = int(os.environ.get("EAGLE3LAB_ENGINE_PROMPTS", "20"))
"""Held-out prompts for vLLM. Fewer while developing on a busy machine; the count is part of the printed result."""
MAX_NEW_TOKENS = 64
SMALL = {"train_samples": 400, "train_steps": 100, "batch_tokens": 768, "draft_vocab_size": 8192}
"""Amounts of the drafter that the tests train from nothing: a few minutes on two quiet cores, and some drafts right."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every engine is given, and what we make of it."""

    target: Target
    target_folder: Path
    drafter: Eagle3Drafter
    drafter_folder: Path
    prompts: list[list[int]]
    names: list[str]
    ours: list[Reply]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The embedded target, a drafter (EAGLE3LAB_ENGINE_DRAFTER, or trained here), and our decoding of the prompts."""
    profile = load_profile("smollm2")
    folder = fetched_folder(profile)
    if not folder.is_dir():
        pytest.skip("the embedded target is not fetched: make fetch")
    given = os.environ.get("EAGLE3LAB_ENGINE_DRAFTER")
    if given:
        drafter_folder = Path(given)
    else:
        run = Run.create(
            "smollm2", "quick", dict(SMALL), seed=0, folder=tmp_path_factory.mktemp("runs"), slug="engines"
        )
        prepare_corpus(run)
        capture_states(run)
        train_drafter(run)
        drafter_folder = run.drafter
    target = load_target(folder, dtype="float32")
    drafter = load_drafter(drafter_folder, target.embedding.weight)
    chosen = held_out("fresh")[:PROMPTS]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": p.prompt}]) for p in chosen]
    ours = decode(target, drafter, prompts, k=K, max_new_tokens=MAX_NEW_TOKENS)
    return Bench(target, folder, drafter, drafter_folder, prompts, [p.id for p in chosen], ours)
