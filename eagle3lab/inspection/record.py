"""What a checkpoint says about its own start: the record of our trainer, used as a prior and never as proof."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eagle3lab.core.errors import CheckpointError

RECORD = "eagle3lab_training.json"
SNAPSHOTS = "fc_snapshots"


@dataclass(frozen=True)
class InitRecord:
    """family, seed, sha256 of the initial fc (float32 bytes, row-major), as recorded; None where absent."""

    family: str | None
    seed: int | None
    sha256: str | None


def read_init_record(folder: Path) -> InitRecord | None:
    """The recorded start of the drafter in `folder`, or None when nothing is recorded.

    Raises:
        CheckpointError: the record is there and is not JSON.
    """
    path = folder / RECORD
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})", fix="remove it, or train again") from error
    for key in ("init", "fc"):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        return None
    family, seed, sha256 = (value.get(key) for key in ("family", "seed", "sha256"))
    return InitRecord(
        family if isinstance(family, str) else None,
        seed if type(seed) is int else None,
        sha256 if isinstance(sha256, str) else None,
    )


def snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of the fc snapshots that training wrote, by step."""
    found = []
    for file in (folder / SNAPSHOTS).glob("step-*.safetensors"):
        step = file.stem.removeprefix("step-")
        if step.isdigit():
            found.append((int(step), file))
    return sorted(found)
