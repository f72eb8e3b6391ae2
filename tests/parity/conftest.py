"""Fixtures of the parity tests: one bench a session, one subprocess a peer and batch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.model import load_target
from eagle3lab.targets.profiles import load_profile
from tests.parity.batches import Bench, hand_over, make_bench

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).parent / "peers"
TIME_LIMIT = 1200
"""Seconds for one peer and batch: about 30 on a quiet machine, imports included."""


def peer_python(peer: str) -> Path:
    """Interpreter of a peer's environment, .venvs/PEER (VENVS moves it); it need not exist."""
    return ROOT / os.environ.get("VENVS", ".venvs") / peer / "bin" / "python"


def run_peer(peer: str, script: str, folder: Path) -> None:
    """Run `peers/PEER_SCRIPT.py` on a folder in the peer's own environment; skip the test where it is not installed."""
    python = peer_python(peer)
    if not python.exists():
        pytest.skip(f"{peer} is not installed: scripts/install_peers.sh {peer}")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [str(python), str(PEERS / f"{peer}_{script}.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert finished.returncode == 0, f"{peer} failed:\n{finished.stderr[-3000:]}"


@pytest.fixture(scope="session")
def bench() -> Bench:
    """Real states need the real target; it is fetched by `make fetch` and never by a test."""
    if not any(peer_python(peer).exists() for peer in ("specforge", "speculators")):
        pytest.skip("neither SpecForge nor speculators is installed: scripts/install_peers.sh (make test-engines does)")
    profile = load_profile("smollm2")
    folder = fetched_folder(profile)
    if not folder.is_dir():
        pytest.skip("the embedded target is not fetched: make fetch")
    torch.manual_seed(0)
    return make_bench(load_target(folder, dtype="float32"), profile)


@pytest.fixture(scope="session")
def answers(bench: Bench, tmp_path_factory: pytest.TempPathFactory):
    """answers(peer, batch) -> folder with the peer's loss and gradients for every K; each is computed once."""
    done: dict[tuple[str, str], Path] = {}

    def get(peer: str, batch: str) -> Path:
        if (peer, batch) not in done:
            folder = tmp_path_factory.mktemp(f"{peer}-{batch}")
            hand_over(bench, bench.batches[batch], folder)
            run_peer(peer, "step", folder)
            done[peer, batch] = folder
        return done[peer, batch]

    return get
