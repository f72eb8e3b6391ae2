"""Target, drafter and prompts: made once a session, used by both engines."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import eagle3lab
from eagle3lab.core.files import build_folder
from eagle3lab.core.hashes import sha256_json
from eagle3lab.core.paths import cache_folder, data_folder
from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs.directory import Run
from eagle3lab.steps.capture import capture_states
from eagle3lab.steps.corpus import prepare_corpus
from eagle3lab.steps.train import train_drafter
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile

K = 3
PROMPTS = int(os.environ.get("EAGLE3LAB_ENGINE_PROMPTS", "20"))
"""Held-out prompts for vLLM. Fewer while developing on a busy machine; the count is part of the printed result."""
MAX_NEW_TOKENS = 64
SMALL = {
    **{"train_samples": 160, "train_steps": 400, "batch_tokens": 256},
    **{"learning_rate": 3e-3, "head_rows": 1536, "draft_vocab_size": 8192, "ttt_steps": 2},
}
"""Amounts of the drafter that the tests train from nothing: a few minutes on one core, and some drafts right."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every engine is given."""

    target: Target
    target_folder: Path
    drafter: Eagle3Drafter
    drafter_folder: Path
    prompts: list[list[int]]
    names: list[str]


CODE = ("corpus", "capture", "drafter", "training")
"""Folders of the package that decide what a trained drafter is."""


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The embedded target as a checkpoint."""
    folder = fetched_folder(load_profile("smollm2"))
    if not folder.is_dir():
        pytest.skip("the embedded target is not fetched: make fetch")
    return folder


@pytest.fixture(scope="session")
def drafter_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE3LAB_ENGINE_DRAFTER, else one trained here; kept in data/cache under a hash of all that decides it."""
    if given := os.environ.get("EAGLE3LAB_ENGINE_DRAFTER"):
        return Path(given).absolute()
    package = Path(eagle3lab.__file__).parent
    files = [path for name in CODE for path in (package / name).rglob("*.py")]
    files += [path for path in (data_folder() / "replies").rglob("*") if path.is_file()]
    contents = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    key = sha256_json({"amounts": SMALL, "target": weight_hash(target_folder), "files": contents})[:16]

    def train(folder: Path) -> None:
        run = Run.create("smollm2", "quick", dict(SMALL), seed=0, folder=tmp_path_factory.mktemp("runs"))
        prepare_corpus(run)
        capture_states(run)
        train_drafter(run)
        shutil.copytree(run.drafter, folder, dirs_exist_ok=True)

    return build_folder(cache_folder() / "engines" / key, train)


@pytest.fixture(scope="session")
def bench(target_folder: Path, drafter_folder: Path) -> Bench:
    """Target, drafter and prompts."""
    target = load_target(target_folder, dtype="float32")
    drafter = load_drafter(drafter_folder, target.embedding.weight)
    chosen = held_out("fresh")[:PROMPTS]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": p.prompt}]) for p in chosen]
    return Bench(target, target_folder, drafter, drafter_folder, prompts, [p.id for p in chosen])
