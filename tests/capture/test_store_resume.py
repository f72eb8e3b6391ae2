"""A capture that is killed, damaged or asked for again becomes the same folder, or is refused."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from eagle3lab.capture.manifest import MANIFEST
from eagle3lab.capture.shards import shard_name
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.core import files
from eagle3lab.core.errors import DiskError, StoreError
from tests.capture.capturing import capture_until, contents, manifest, run_capture, start

FULL = os.environ.get("EAGLE3LAB_FULL") == "1"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted capture."""
    folder = tmp_path_factory.mktemp("reference") / "states"
    run_capture(folder)
    return folder


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    """A finished capture to be damaged."""
    folder = tmp_path / "states"
    folder.mkdir()
    for name, data in contents(reference).items():
        (folder / name).write_bytes(data)
    return folder


def test_reference_has_several_shards_and_nothing_else(reference: Path) -> None:
    names = [shard_name(index) for index in range(manifest().planned_shards)]
    assert len(names) >= 4
    assert list(contents(reference)) == sorted([MANIFEST, *names])


@pytest.mark.parametrize("stage", ["inside", "before rename", "before manifest", "after manifest"])
def test_killed_at_a_stage_then_resumed_is_byte_identical(stage: str, reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    process = start(capture_until, folder, stage)
    process.join()
    assert process.exitcode == -9
    assert contents(folder) != contents(reference)
    run_capture(folder)
    assert contents(folder) == contents(reference)


def test_a_writer_without_the_rename_would_be_caught(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    process = start(capture_until, folder, "naive")
    process.join()
    torn = folder / shard_name(2)
    assert process.exitcode == -9
    assert 0 < torn.stat().st_size < (reference / shard_name(2)).stat().st_size
    # It looks finished to a program that trusts names; this store asks its manifest, and makes the shard again.
    run_capture(folder)
    assert contents(folder) == contents(reference)


def killed_at_random(folder: Path, duration: float, draw: random.Random) -> bool:
    process = start(run_capture, folder)
    time.sleep(draw.uniform(0, duration))
    process.kill()
    process.join()
    return process.exitcode == -9


@pytest.mark.slow
@pytest.mark.parametrize("kills", [50] if FULL else [6])
def test_killed_at_random_moments_then_resumed_is_byte_identical(kills: int, reference: Path, tmp_path: Path) -> None:
    draw, hits, partial = random.Random(7), 0, 0
    started = time.monotonic()
    start(run_capture, tmp_path / "timed").join()
    duration = time.monotonic() - started
    for attempt in range(10 * kills):
        folder = tmp_path / f"states-{attempt}"
        if not killed_at_random(folder, duration, draw):
            continue
        hits += 1
        partial += folder.exists() and contents(folder) != contents(reference)
        run_capture(folder)
        assert contents(folder) == contents(reference), f"kill {hits}"
        if hits == kills:
            break
    assert hits == kills
    assert partial > 0, "no kill fell into the capture itself"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_sha256", "e" * 64),
        ("template_sha256", "e" * 64),
        ("target_weight_sha256", "e" * 64),
        ("corpus_sha256", "e" * 64),
        ("points", [2, 4, 6]),
        ("last", "pre_norm"),
        ("hidden_size", 64),
        ("planned_shards", 3),
        ("engine_arguments", {"compute": "float32"}),
    ],
)
def test_resume_with_other_inputs_is_refused(field: str, value: object, copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(StoreError, match=field):
        StoreWriter(copy, manifest(**{field: value}))
    assert contents(copy) == before


def test_refused_points_name_the_off_by_one(copy: Path) -> None:
    with pytest.raises(StoreError, match="off-by-one"):
        StoreWriter(copy, manifest(points=[3, 5, 6]))


def truncate(folder: Path) -> list[int]:
    path = folder / shard_name(1)
    os.truncate(path, path.stat().st_size - 4)
    return [1]


def flip_a_bit(folder: Path) -> list[int]:
    path = folder / shard_name(3)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    return [3]


def swap(folder: Path) -> list[int]:
    first, second = folder / shard_name(0), folder / shard_name(2)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    return [0, 2]


def remove(folder: Path) -> list[int]:
    (folder / shard_name(2)).unlink()
    return [2]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, swap, remove])
def test_a_damaged_shard_is_named_and_only_it_is_redone(damage, copy: Path, reference: Path) -> None:
    bad = [shard_name(index) for index in damage(copy)]
    stamps = {path.name: path.stat().st_mtime_ns for path in copy.glob("states-*")}
    with pytest.raises(StoreError, match=bad[0] if damage is not swap else "holds the bytes of states-00002"):
        Store(copy, verify=True)
    notes = run_capture(copy)
    assert [note.split(" ")[0].rsplit("/")[-1] for note in notes] == bad
    assert contents(copy) == contents(reference)
    for name, stamp in stamps.items():
        assert (name in bad) or (copy / name).stat().st_mtime_ns == stamp, f"{name} was good and was rewritten"


@pytest.mark.parametrize("damage", [truncate, swap, remove])
def test_a_reader_without_hashing_still_sees_gross_damage(damage, copy: Path) -> None:
    damage(copy)
    with pytest.raises(StoreError, match="only"):
        Store(copy)


def test_an_unfinished_capture_is_not_read(copy: Path) -> None:
    found = StoreWriter(copy, manifest(), note=lambda _: None)
    found.manifest.shards.pop()
    found.manifest.write(copy)
    with pytest.raises(StoreError, match=r"of \d+ shards"):
        Store(copy)


def test_capture_stops_at_the_disk_floor_and_goes_on_later(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"

    def shrinking(_: Path) -> int:
        room = 10**9 if len(list(folder.glob("states-*"))) < 2 else 1000
        return files.DISK_FLOOR_BYTES + room

    with monkeypatch.context() as patched:
        patched.setattr(files, "free_bytes", shrinking)
        with pytest.raises(DiskError, match=r"states-00002.* MB are free"):
            run_capture(folder)
    assert sorted(contents(folder)) == [MANIFEST, shard_name(0), shard_name(1)]
    run_capture(folder)
    assert contents(folder) == contents(reference)
