"""Take a model folder that lies on this machine already as a profile's target.

    eagle3lab fetch --profile smollm2 --source FOLDER

Its weights are linked, not copied, and its small files are copied; from then on every command and run of the profile
works on it, under the hash of these weights. Nothing of the source is changed, and the network is not asked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from eagle3lab.core.errors import FetchError
from eagle3lab.core.files import build_folder, read_json
from eagle3lab.targets.fetch import (
    TARGET_MANIFEST,
    adopted_from,
    damaged,
    fetched_folder,
    weight_files,
    write_target_manifest,
)
from eagle3lab.targets.profiles import Profile

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Weights are linked, and what only unpickling could read stays behind."""


def adopt(profile: Profile, source: str, *, note: Callable[[str], None] = print) -> Path:
    """Make `source` the target of `profile`; returns the folder that stands for it.

    Args:
        source: a folder in transformers layout, or the name of a model in the hub's cache.
        note: receives one line per thing done.

    Raises:
        FetchError: no such folder, no safetensors, other sizes than the profile's, or another target in its place.
    """
    folder, target = _source_folder(source), fetched_folder(profile)
    if target.exists():
        held = adopted_from(target)
        if held != str(folder):
            raise FetchError(
                f"{target} holds the target from {held or 'the source of the profile'}",
                rule="a profile has one target; nothing is overwritten",
                fix=f"rm -r {target}",
            )
        if damaged(target, note):
            shutil.rmtree(target)  # links and small files: the source itself is not touched
    return build_folder(target, lambda temporary: _link(profile, folder, temporary, note), note=note)


def _source_folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(source, local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise FetchError(
                f"{source} is no folder, and not in the hub's cache",
                rule="the network is not asked",
                fix=f"hf download {source}",
            ) from error
    if not (folder / "config.json").is_file():
        raise FetchError(f"no config.json in {folder}", rule="--source names a folder in transformers layout")
    return folder.resolve()


def _link(profile: Profile, source: Path, folder: Path, note: Callable[[str], None]) -> None:
    config = read_json(source / "config.json")
    text = config.get("text_config") or config
    expected = {
        "num_hidden_layers": profile.model.blocks,
        "hidden_size": profile.model.hidden_size,
        "vocab_size": profile.model.vocab_size,
    }
    other = [f"{name} {text.get(name)}" for name, value in expected.items() if text.get(name) != value]
    if other:
        raise FetchError(
            f"{source} has {', '.join(other)}",
            rule=f"profile '{profile.name}' is for {', '.join(f'{n} {v}' for n, v in expected.items())}",
            fix="a profile of your own: --profile FILE.toml",
        )
    for path in weight_files(source):
        (folder / path.name).symlink_to(path)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in NOT_COPIED and path.name != TARGET_MANIFEST:
            shutil.copyfile(path, folder / path.name)
    note(f"hashing the weights of {source}")
    write_target_manifest(folder, profile, {"adopted_from": str(source)})
