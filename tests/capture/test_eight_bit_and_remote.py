"""Copies of a capture: in 8 bits with the error that it costs, and at a URL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from eagle3lab.acceptance.counts import from_lengths, total
from eagle3lab.capture.eight_bit import shrink
from eagle3lab.capture.manifest import MANIFEST
from eagle3lab.capture.remote import pull, push
from eagle3lab.capture.shards import from_int8, shard_name, to_int8
from eagle3lab.capture.store import Store
from eagle3lab.core.errors import StoreError
from eagle3lab.steps import shrink as steps_shrink
from eagle3lab.steps.accept_outcome import AcceptOutcome
from tests.capture.capturing import contents, run_capture
from tests.tiny import HIDDEN, POINTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copies") / "states"
    run_capture(path)
    return path


def test_rounding_is_at_most_half_a_level_of_each_block() -> None:
    torch.manual_seed(0)
    states = torch.randn(7, 3 * 16) * torch.tensor([0.01, 1.0, 100.0]).repeat_interleave(16)
    back = from_int8(*to_int8(states, 3), torch.float32)
    largest = states.unflatten(-1, (3, 16)).abs().amax(-1, keepdim=True)
    error = (back - states).unflatten(-1, (3, 16)).abs()
    assert (error <= 0.5001 * largest / 127).all()
    one_scale = from_int8(*to_int8(states, 1), torch.float32)
    assert (one_scale[:, :16] == 0).all(), "one scale for all points would erase the smallest block"
    zero = torch.zeros(2, 48)
    assert torch.equal(from_int8(*to_int8(zero, 3), torch.float32), zero)


def test_half_the_bytes_and_the_error_that_is_printed(folder: Path, tmp_path: Path) -> None:
    done = shrink(folder, tmp_path / "small")
    store, small = Store(folder), Store(tmp_path / "small", points=POINTS, verify=True)
    states = sum(length * 2 * (len(POINTS) + 1) * HIDDEN for length in store.lengths)
    assert done.bytes_before - done.bytes_after > 0.3 * states
    assert list(done.error) == [*POINTS, -1]
    for place, point in enumerate(POINTS):
        part = slice(place * HIDDEN, (place + 1) * HIDDEN)
        wrong = whole = 0.0
        for index in range(len(store)):
            exact, back = store[index].aux[:, part].float(), small[index].aux[:, part].float()
            wrong += float((back - exact).square().sum())
            whole += float(exact.square().sum())
        assert done.error[point] == pytest.approx((wrong / whole) ** 0.5, rel=1e-3)
        assert 1e-4 < done.error[point] < 0.02
    assert small[3].aux.dtype == torch.bfloat16
    assert small[3].input_ids.equal(store[3].input_ids)
    again = shrink(folder, tmp_path / "small")
    assert again.error == done.error
    with pytest.raises(StoreError, match="int8 already"):
        shrink(tmp_path / "small", tmp_path / "smaller")


def test_the_acceptance_cost_is_measured_by_replay_on_both(folder: Path, tmp_path: Path, monkeypatch) -> None:
    seen = []

    def replayed(states: Path, draft: Path, *, steps: int, **_: object) -> AcceptOutcome:
        """Wrong in one chain more of every sample where the states are rounded."""
        seen.append(Store(states).manifest.storage)
        lost = seen[-1] == "int8"
        each = [from_lengths([3, 2, 1, 0 if lost else 1], k=steps, prompt=str(i)) for i in range(4)]
        return AcceptOutcome(total(each).to_json(), "replay")

    monkeypatch.setattr(steps_shrink, "replay", replayed)
    lines = steps_shrink.shrink_states(folder, tmp_path / "small", draft=Path("drafter"))
    assert seen == ["plain", "int8"]
    assert "accept length 2.7500 -> 2.5000, difference -0.2500" in lines[-1] and "over 4 samples" in lines[-1]
    assert "not measured" in steps_shrink.shrink_states(folder, tmp_path / "other")[-1]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'far'}"


def test_there_and_back_again(folder: Path, tmp_path: Path, url: str) -> None:
    quiet = {"note": lambda _: None}
    shards = len(Store(folder).manifest.shards)
    assert push(folder, url, **quiet) == shards
    assert push(folder, url, **quiet) == 0
    assert pull(url, tmp_path / "here", **quiet) == shards
    assert contents(tmp_path / "here") == contents(folder)
    (tmp_path / "here" / shard_name(1)).write_bytes(b"torn")
    assert pull(url, tmp_path / "here", **quiet) == 1
    assert contents(tmp_path / "here") == contents(folder)


def test_an_interrupted_push_is_no_capture_yet(folder: Path, tmp_path: Path, url: str) -> None:
    push(folder, url, note=lambda _: None)
    (tmp_path / "far" / MANIFEST).unlink()
    with pytest.raises(StoreError, match="no manifest"):
        pull(url, tmp_path / "here")
    assert push(folder, url, note=lambda _: None) == len(Store(folder).manifest.shards)
    pull(url, tmp_path / "here", note=lambda _: None)


def test_damage_on_the_way_is_named_and_nothing_is_kept(folder: Path, tmp_path: Path, url: str) -> None:
    push(folder, url, note=lambda _: None)
    far = tmp_path / "far" / shard_name(2)
    data = bytearray(far.read_bytes())
    data[-9] ^= 4
    far.write_bytes(data)
    with pytest.raises(StoreError, match=r"states-00002\.safetensors arrived damaged"):
        pull(url, tmp_path / "here", note=lambda _: None)
    assert not (tmp_path / "here" / shard_name(2)).exists()
    assert not (tmp_path / "here" / MANIFEST).exists()
    far.unlink()
    with pytest.raises(StoreError, match=r"states-00002\.safetensors is not at"):
        pull(url, tmp_path / "here", note=lambda _: None)


def test_other_captures_are_not_overwritten(folder: Path, tmp_path: Path, url: str) -> None:
    push(folder, url, note=lambda _: None)
    other = tmp_path / "other"
    run_capture(other, seed=1)
    with pytest.raises(StoreError, match="another capture lies at"):
        push(other, url)
    with pytest.raises(StoreError, match="another capture lies in"):
        pull(url, other)
    os.truncate(other / shard_name(0), 100)
    with pytest.raises(StoreError, match="another sha256"):
        push(other, url + "-2")
    with pytest.raises(StoreError, match="cannot be opened"):
        push(folder, "nonsense://x")


def test_what_the_other_end_raises_is_one_line(folder: Path, tmp_path: Path, url: str) -> None:
    for place in ("", str(tmp_path / "file" / "x")):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(StoreError):
            push(folder, place, note=lambda _: None)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / MANIFEST).write_text("{}")
    with pytest.raises(StoreError, match="the same command goes on"):
        pull(url, tmp_path / "here", note=lambda _: None)
