"""`eagle3lab fetch`: bring the target of a profile onto this machine, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.files import read_json
from eagle3lab.runs.directory import Run
from eagle3lab.targets.adopt import adopt
from eagle3lab.targets.fetch import TARGET_MANIFEST, fetch, fetched_folder, weight_hash
from eagle3lab.targets.profiles import Profile, load_profile


@dataclass(frozen=True, slots=True)
class TargetSummary:
    """Where the target is and what it is."""

    folder: Path
    id: str
    weight_sha256: str
    bytes: int
    manifest: dict[str, Any]


def fetch_target(profile: str, source: str | None = None, *, note: Callable[[str], None] = print) -> Path:
    """Folder of the target of `profile`, fetched when absent; or made of `source` (`eagle3lab.targets.adopt`)."""
    loaded = load_profile(profile)
    return fetch(loaded, note=note) if source is None else adopt(loaded, source, note=note)


def fetch_for(run: Run, *, note: Callable[[str], None] = print) -> TargetSummary:
    """Fetch the target of a run and note its hash in the run's manifest."""
    with run.recording("fetch"):
        profile = load_profile(run.manifest.profile)
        folder = fetch(profile, note=note)
        summary = describe(profile, folder)
        run.require_inputs(target=summary.weight_sha256)
        run.add_inputs(target=summary.weight_sha256)
        return summary


def describe(profile: Profile, folder: Path | None = None) -> TargetSummary:
    """What is known of a fetched target."""
    folder = folder or fetched_folder(profile)
    manifest = folder / TARGET_MANIFEST
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    facts = read_json(manifest) if manifest.is_file() else {}
    return TargetSummary(folder, facts.get("id", profile.model.id), weight_hash(folder), size, facts)
