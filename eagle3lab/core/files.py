"""Files that appear whole or not at all, and folders built under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import DiskError, RunError

DISK_FLOOR_BYTES = 256 * 1024**2
"""Free bytes that every writer leaves on the disk: below it other programs on the machine start to fail."""


def atomic_write(path: Path, writer: Callable[[Path], object]) -> None:
    """Call `writer(temporary)` and rename the result to `path` after fsync, so a reader sees all of it or nothing.

    The temporary name ends in the process id; a leftover of a killed process is never taken for the file.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    atomic_write(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, atomically. NaN and infinity are refused (not JSON)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a broken or missing file is a `RunError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"no file {path}", rule="the step that writes it has not finished") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON ({error})", fix=f"delete {path} and run the step again") from error


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents; `DiskError` where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"no folder {folder} can be made ({error.strerror})", rule="a place to write to is a folder"
        ) from error


def require_place(path: Path) -> None:
    """Refuse (`DiskError`) a file that cannot be written where it is wanted: asked before the work, not after it."""
    if path.is_dir():
        raise DiskError(f"{path} is a folder", rule="a file is written there")
    make_folder(path.parent)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DiskError(f"{path} may not be written", rule="asked before the work, so that none is lost")


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system that holds `folder` (or its nearest existing parent)."""
    probe = folder.absolute()
    while not probe.exists():
        probe = probe.parent
    return shutil.disk_usage(probe).free


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse with `DiskError` when `needed` bytes plus the floor are not free where `folder` lies."""
    free = free_bytes(folder)
    if free < needed + DISK_FLOOR_BYTES:
        raise DiskError(
            f"{what} needs {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free at {folder}",
            rule=f"{DISK_FLOOR_BYTES / 1e6:.0f} MB must stay free",
            fix="free some space, or set EAGLE3LAB_CACHE to a folder on a larger disk",
        )


@contextlib.contextmanager
def folder_lock(folder: Path, *, note: Callable[[str], None] = print) -> Iterator[None]:
    """Hold an exclusive lock beside `folder` while it is built; a second process waits and says so.

    The lock is the kernel's (`flock`), so it vanishes with its process: a dead builder never blocks the next one.
    """
    make_folder(folder.parent)
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        handle = lock.open("a+")
    except OSError as error:
        raise DiskError(f"{lock} cannot be opened ({error.strerror})", rule="what is built is locked there") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process that builds {folder}")
            started = time.monotonic()
            fcntl.flock(handle, fcntl.LOCK_EX)
            note(f"waited {time.monotonic() - started:.0f} s for {folder}")
        yield


def build_folder(
    folder: Path,
    builder: Callable[[Path], None],
    *,
    stale: Callable[[], bool] | None = None,
    note: Callable[[str], None] = print,
) -> Path:
    """Return `folder`, building it first when it is absent: whole or not at all, once, under a lock.

    `builder(temporary)` fills a temporary sibling that is renamed to `folder` at the end. Leftovers of a killed
    builder are removed before the next try.

    Args:
        stale: asked, under the lock, of a folder that is there: true = the new one takes its place once it is whole.
    """
    if folder.exists() and stale is None:
        return folder
    with folder_lock(folder, note=note):
        if folder.exists() and not (stale is not None and stale()):
            return folder
        for leftover in folder.parent.glob(f".{folder.name}.*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        temporary.mkdir(parents=True)
        try:
            builder(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
            fsync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
