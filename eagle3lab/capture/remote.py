"""Finished states to and from another place, shard by shard: any URL that fsspec knows (`s3://`, `gs://`, `sftp://`).

The manifest is written last, so a folder at the other end is complete or has none. What is there already with the right
bytes is not moved again; what arrives is hashed before it counts.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3lab.capture.manifest import MANIFEST, StatesManifest, read_manifest
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import atomic_write, require_space
from eagle3lab.core.hashes import sha256_file

BLOCK = 8 << 20


def push(folder: Path, url: str, *, note: Callable[[str], None] = print) -> int:
    """Copy a finished capture to `url`; returns the number of shards that were moved.

    Raises:
        StoreError: the capture is not finished, a shard is damaged, or another capture lies at `url`.
    """
    with _told(url):
        return _push(folder, url, note)


def pull(url: str, folder: Path, *, note: Callable[[str], None] = print) -> int:
    """Copy a capture from `url`; returns the number of shards that were moved.

    Raises:
        StoreError: no finished capture at `url`, another one in `folder`, or a shard that arrives damaged.
        DiskError: it does not fit.
    """
    with _told(url):
        return _pull(url, folder, note)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Whatever the file system at the other end raises, in one line. Each has errors of its own; most are OSErrors."""
    if not url.strip():
        raise StoreError("no URL is given", rule="a URL that fsspec knows, such as s3://bucket/states")
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StoreError(
            f"{url}: {type(error).__name__} {reason}",
            rule="states are read and written there",
            fix="the same command goes on where it stopped",
        ) from error


def _push(folder: Path, url: str, note: Callable[[str], None]) -> int:
    manifest = _finished(read_manifest(folder), folder)
    remote, root = _open(url)
    there = _remote_manifest(remote, root)
    if there is not None and there != manifest:
        raise StoreError(f"another capture lies at {url}", rule="nothing is overwritten", fix="give another URL")
    moved = 0
    remote.makedirs(root, exist_ok=True)
    for shard in manifest.shards:
        path, target = folder / shard.name, f"{root}/{shard.name}"
        if sha256_file(path) != shard.sha256:
            raise StoreError(f"{path} has another sha256 than its manifest", fix="eagle3lab capture again")
        if _size(remote, target) == path.stat().st_size and there is not None:
            continue
        partial = f"{target}.partial"
        with path.open("rb") as source, remote.open(partial, "wb") as out:
            shutil.copyfileobj(source, out, BLOCK)
        remote.mv(partial, target)
        moved += 1
        note(f"{shard.name} -> {url}")
    remote.pipe_file(f"{root}/{MANIFEST}", (folder / MANIFEST).read_bytes())
    return moved


def _pull(url: str, folder: Path, note: Callable[[str], None]) -> int:
    remote, root = _open(url)
    manifest = _remote_manifest(remote, root)
    if manifest is None:
        raise StoreError(
            f"no {MANIFEST} at {url}", rule="a finished capture has one", fix="eagle3lab states push first"
        )
    _finished(manifest, url)
    if (folder / MANIFEST).is_file() and read_manifest(folder) != manifest:
        raise StoreError(f"another capture lies in {folder}", rule="nothing is overwritten", fix="name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in manifest.shards if not _same(folder / s.name, s.sha256)]
    sizes = {shard.name: _size(remote, f"{root}/{shard.name}") for shard in missing}
    if lost := [name for name, size in sizes.items() if size is None]:
        raise StoreError(f"{lost[0]} is not at {url}", rule="the manifest names it", fix="eagle3lab states push again")
    require_space(folder, sum(size or 0 for size in sizes.values()), f"states from {url}")
    for shard in missing:

        def fetch(temporary: Path, name: str = shard.name, digest: str = shard.sha256) -> None:
            with remote.open(f"{root}/{name}", "rb") as source, temporary.open("wb") as out:
                shutil.copyfileobj(source, out, BLOCK)
            if sha256_file(temporary) != digest:
                raise StoreError(f"{name} arrived damaged from {url}", rule="its sha256 is in the manifest")

        atomic_write(folder / shard.name, fetch)
        note(f"{shard.name} <- {url}")
    manifest.write(folder)
    return len(missing)


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise StoreError(
            "fsspec is not installed", rule="it reads and writes URLs", fix="pip install fsspec"
        ) from error
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # an unknown scheme, or one whose package is missing
        raise StoreError(f"{url} cannot be opened ({error})", rule="a URL that fsspec knows") from error


def _remote_manifest(remote: Any, root: str) -> StatesManifest | None:
    path = f"{root}/{MANIFEST}"
    return StatesManifest.model_validate_json(remote.cat_file(path)) if remote.exists(path) else None


def _finished(manifest: StatesManifest, place: Path | str) -> StatesManifest:
    if len(manifest.shards) != manifest.planned_shards:
        raise StoreError(
            f"{place} has {len(manifest.shards)} of {manifest.planned_shards} shards",
            rule="finished captures are moved",
            fix="eagle3lab capture again: it resumes",
        )
    return manifest


def _size(remote: Any, path: str) -> int | None:
    return int(remote.size(path)) if remote.exists(path) else None


def _same(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_file(path) == digest
