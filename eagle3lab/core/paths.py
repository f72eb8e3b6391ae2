"""Where things live: the checkout's `data/`, `notebooks/`, `runs/`, or what the environment says instead."""

from __future__ import annotations

import os
from pathlib import Path


def repository() -> Path:
    """Root of the checkout that this package is imported from (the folder that holds `notebooks/`)."""
    return Path(__file__).resolve().parents[2]


def data_folder() -> Path:
    """`data/` of the checkout: committed prompts and responses."""
    return repository() / "data"


def cache_folder() -> Path:
    """Expensive inputs (target, corpus, states), git-ignored: `data/cache`, or `EAGLE3LAB_CACHE`."""
    return Path(os.environ.get("EAGLE3LAB_CACHE") or data_folder() / "cache")


def runs_folder() -> Path:
    """Run directories: `runs/` of the checkout, or `EAGLE3LAB_RUNS`."""
    return Path(os.environ.get("EAGLE3LAB_RUNS") or repository() / "runs")


def notebooks_folder() -> Path:
    """The source notebooks."""
    return repository() / "notebooks"
