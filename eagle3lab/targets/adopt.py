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
from eagle3lab.targets.config import read_config, text_config
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
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def adopt(profile: Profile, source: str, *, note: Callable[[str], None] = print) -> Path:
    """Make `source` the target of `profile`; returns the folder that stands for it.

    Args:
        source: a folder in transformers layout, or the name of a model in the hub's cache.
        note: receives one line per thing done.

    Raises:
        FetchError: no such folder, weights or tokenizer missing, other sizes than the profile's, a profile of random
            weights, or another target in its place.
        ProfileError: a config.json that cannot be read.
    """
    if profile.random_weights:
        raise FetchError(
            f"profile '{profile.name}' is of random weights",
            rule="what a run of it does and says is made for a target that means nothing",
            fix="a profile of your own with another source kind: --profile FILE.toml",
        )
    folder, target = _source_folder(source), fetched_folder(profile)
    _require_fit(profile, folder)

    def stale() -> bool:
        held = adopted_from(target)
        if held != str(folder):
            raise FetchError(
                f"{target} holds the target from {held or 'the source of the profile'}",
                rule="a profile has one target; nothing is overwritten",
                fix=f"rm -r {target}",
            )
        return damaged(target, note) is not None

    return build_folder(target, lambda temporary: _link(profile, folder, temporary, note), stale=stale, note=note)


def _source_folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if not folder.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        folder = _from_hub_cache(source)
    if not (folder / "config.json").is_file():
        raise FetchError(f"no config.json in {folder}", rule="--source names a folder in transformers layout")
    return folder.resolve()


def _from_hub_cache(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:  # not installed, not there, not a name
        raise FetchError(
            f"{name} is no folder, and not in the hub's cache",
            rule="the network is not asked",
            fix=f"hf download {name}",
        ) from error


def _require_fit(profile: Profile, source: Path) -> None:
    """Refuse a model of other sizes, one without all of its weights, and one without a tokenizer."""
    text = text_config(read_config(source))
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
    names = {path.name for path in weight_files(source)}
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names |= {str(name) for name in dict(read_json(index).get("weight_map", {})).values()}
    missing = sorted(name for name in names if not (source / name).is_file())
    if missing:
        raise FetchError(f"{source / missing[0]} is not there", rule="all weight files of a target are whole")
    if not any((source / name).is_file() for name in TOKENIZERS):
        raise FetchError(f"no tokenizer in {source}", rule=f"one of {', '.join(TOKENIZERS)}")


def _name_of(source: Path) -> str:
    """`owner/model` of a folder in the hub's cache (models--owner--model/snapshots/...), else the folder's name."""
    cached = re.fullmatch(r"models--(.+)", source.parent.parent.name) if source.parent.name == "snapshots" else None
    return cached[1].replace("--", "/", 1) if cached else source.name


def _link(profile: Profile, source: Path, folder: Path, note: Callable[[str], None]) -> None:
    for path in weight_files(source):
        (folder / path.name).symlink_to(path)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in NOT_COPIED and path.name != TARGET_MANIFEST:
            shutil.copyfile(path, folder / path.name)
    note(f"hashing the weights of {source}")
    own = {"id": _name_of(source), "source": {"kind": "folder"}, "adopted_from": str(source)}
    write_target_manifest(folder, profile, own)
