"""The reader: random access, epochs, workers and ranks, bounded memory, and the checks at its boundary."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab import cli
from eagle3lab.capture.epochs import epoch_batches
from eagle3lab.capture.manifest import MANIFEST, Shard, read_manifest
from eagle3lab.capture.shards import Sample, bytes_per_token, check_sample, header_bytes, shard_name, write_shard
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.core.errors import StoreError, UsageError
from tests.capture.capturing import conversations, manifest, run_capture
from tests.tiny import HIDDEN, POINTS, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "states"
    run_capture(path)
    return path


def test_every_sample_is_the_target_run_on_its_own_tokens(folder: Path) -> None:
    store, samples, target = Store(folder, points=POINTS, verify=True), conversations(), tiny_target()
    assert len(store) == len(samples)
    assert store.sample_ids == list(range(len(samples)))
    worst, shifted = 0.0, 0.0
    for index in (5, 0, 23, 11):  # in any order
        found = store[index]
        assert found.input_ids.tolist() == samples[index].input_ids
        assert found.loss_mask.tolist() == samples[index].loss_mask
        last, states = target.states(found.input_ids[None], points=POINTS)
        wanted = torch.cat(states, -1)[0]
        scale = wanted.abs().max()
        worst = max(worst, float((found.aux.float() - wanted).abs().max() / scale))
        worst = max(worst, float((found.last.float() - last[0]).abs().max() / last.abs().max()))
        off = torch.cat(target.states(found.input_ids[None], points=[point + 1 for point in POINTS])[1], -1)[0]
        shifted = max(shifted, float((found.aux.float() - off).abs().max() / scale))
    assert worst < 2**-8  # bf16 keeps 8 bits
    assert shifted > 20 * worst, "states of the next blocks would pass as well"


def test_points_of_another_drafter_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(StoreError, match="off-by-one"):
        Store(folder, points=[1, 3, 4])


def test_a_sample_is_a_view_and_its_pickle_is_not_the_shard(folder: Path) -> None:
    store = Store(folder)
    sample = store[3]
    assert sample.aux.untyped_storage().nbytes() > 2 * sample.aux.nbytes
    data = pickle.dumps(sample)
    assert len(data) < 1.5 * (sample.aux.nbytes + sample.last.nbytes) + 4000
    assert torch.equal(pickle.loads(data).aux, sample.aux)
    assert torch.equal(pickle.loads(pickle.dumps(store))[3].aux, sample.aux)


def identity(index: int) -> int:
    return index


class Numbered(torch.utils.data.Dataset):
    """A store behind torch's loader."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Sample:
        return self.store[index]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_read_the_same(folder: Path, method: str) -> None:
    store = Store(folder)
    loader = torch.utils.data.DataLoader(
        Numbered(store), batch_size=None, num_workers=2, multiprocessing_context=method, sampler=range(0, len(store), 3)
    )
    found = list(loader)
    assert [sample.sample_id for sample in found] == list(range(0, len(store), 3))
    for sample in found:
        assert torch.equal(sample.aux, store[sample.sample_id].aux)


LENGTHS = [5 + (index * 7919) % 500 for index in range(2000)]


def epoch(number: int, ranks: int = 1) -> list[list[list[int]]]:
    return [
        epoch_batches(LENGTHS, batch_tokens=4096, seed=1, epoch=number, rank=rank, ranks=ranks) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_share_an_epoch_without_overlap(ranks: int) -> None:
    dealt = [list(itertools.chain(*batches)) for batches in epoch(0, ranks)]
    assert sorted(itertools.chain(*dealt)) == list(range(len(LENGTHS)))
    counts = [len(batches) for batches in epoch(0, ranks)]
    assert max(counts) - min(counts) <= 1


def test_batches_are_bounded_and_of_similar_length() -> None:
    (batches,) = epoch(0)
    padded = sum(max(LENGTHS[i] for i in batch) * len(batch) for batch in batches)
    assert all(max(LENGTHS[i] for i in batch) * len(batch) <= 4096 for batch in batches)
    assert padded < 1.1 * sum(LENGTHS)
    order = [i for batch in batches for i in batch]
    unsorted = [order[start : start + 16] for start in range(0, len(order), 16)]
    shuffled = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    naive = [shuffled[start : start + 16] for start in range(0, len(shuffled), 16)]
    assert sum(max(LENGTHS[i] for i in batch) * len(batch) for batch in naive) > 1.5 * sum(LENGTHS), len(unsorted)


def test_epochs_differ_and_repeat() -> None:
    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    firsts = [sum(LENGTHS[i] for i in batch) / len(batch) for batch in epoch(0)[0]]
    assert firsts != sorted(firsts), "an epoch must not run from short to long"
    with pytest.raises(UsageError, match="rank 3 of 3"):
        epoch_batches(LENGTHS, batch_tokens=4096, seed=1, epoch=0, rank=3, ranks=3)


def sample(tokens: int = 4, **changes: object) -> Sample:
    values = {
        "sample_id": 7,
        "input_ids": torch.arange(tokens),
        "loss_mask": torch.ones(tokens, dtype=torch.bool),
        "aux": torch.ones(tokens, len(POINTS) * HIDDEN),
        "last": torch.ones(tokens, HIDDEN),
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def spoilt(value: float) -> torch.Tensor:
    states = torch.ones(4, HIDDEN)
    states[2, 5] = value
    return states


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(aux=torch.ones(3, 96)), r"sample 7: aux is \[3, 96\], needed \[4, 96\]; rows == tokens"),
        (sample(aux=torch.ones(4, 64)), r"needed \[4, 96\]; 3 points x 32 = 96"),
        (sample(last=torch.ones(5, HIDDEN)), r"last is \[5, 32\]"),
        (sample(loss_mask=torch.ones(2, dtype=torch.bool)), r"loss_mask is \[2\]"),
        (sample(last=spoilt(torch.nan)), "last is not finite at token 2"),
        (sample(last=spoilt(-torch.inf)), "last is not finite at token 2"),
    ],
)
def test_what_the_engine_hands_over_is_checked(bad: Sample, message: str) -> None:
    check_sample(sample(), points=len(POINTS), hidden_size=HIDDEN)
    with pytest.raises(StoreError, match=message):
        check_sample(bad, points=len(POINTS), hidden_size=HIDDEN)


def test_large_finite_values_pass() -> None:
    huge = torch.full((4, HIDDEN), 3e38)  # their sum overflows, none of them does
    check_sample(sample(last=huge), points=len(POINTS), hidden_size=HIDDEN)


def test_kimi_bytes_per_token() -> None:
    assert bytes_per_token(3, 7168) - 9 == 57_344


def test_written_bytes_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(5),
        "b": torch.randn(3, 7).bfloat16(),
        "c": torch.tensor([True, False]),
        "d": torch.zeros(0, 4),
    }
    digest = write_shard(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert write_shard(tmp_path / "y.safetensors", tensors) == digest
    tensors["a"] += 1
    assert write_shard(tmp_path / "y.safetensors", tensors) != digest


def sparse_folder(folder: Path, shards: int, tokens: int, samples: int) -> int:
    """Shards of Kimi's size whose states are holes: real headers, offsets and ids, no bytes on disk behind them."""
    points, hidden = 3, 7168
    layout = {
        "offsets": (torch.int64, (samples + 1,)),
        "sample_id": (torch.int64, (samples,)),
        "input_ids": (torch.int64, (tokens,)),
        "aux": (torch.bfloat16, (tokens, points * hidden)),
        "last": (torch.bfloat16, (tokens, hidden)),
        "loss_mask": (torch.bool, (tokens,)),
    }
    header = header_bytes(layout)
    size = len(header) + sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in layout.values())
    entries = []
    for index in range(shards):
        with (folder / shard_name(index)).open("wb") as handle:
            handle.write(header)
            for values in (torch.arange(samples + 1) * (tokens // samples), torch.arange(samples) + index * samples):
                handle.write(values.numpy().tobytes())
            handle.truncate(size)
        entries.append(Shard(name=shard_name(index), sha256="0" * 64, samples=samples, tokens=tokens))
    found = manifest(
        points=[2, 30, 58], points_checkpoint=[2, 30, 58], blocks=61, hidden_size=hidden, planned_shards=shards
    )
    found.shards = entries
    found.write(folder)
    return size * shards


READ_MANY = """
import json, resource, sys, time
from pathlib import Path
from eagle3lab.capture.store import Store

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

import torch
before = anonymous()
started = time.monotonic()
store = Store(Path(sys.argv[1]))
opened = time.monotonic() - started
seconds = []
for place in torch.randint(0, len(store), (400,), generator=torch.Generator().manual_seed(0)).tolist():
    started = time.monotonic()
    sample = store[place]
    seconds.append(time.monotonic() - started)
    assert sample.aux.shape == (store.length(place), 21504) and sample.sample_id == place
    sample.aux[0, :8].sum(), sample.last[-1, :8].sum()
found = {"samples": len(store), "opened": opened, "median": sorted(seconds)[200], "grown": anonymous() - before}
print(json.dumps(found))
"""


def read_many(folder: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", READ_MANY, str(folder)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_memory_and_access_time_do_not_grow_with_the_folder(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder in (small, large):
        folder.mkdir()
    assert sparse_folder(small, 1, 32_768, 64) < 2e9
    assert sparse_folder(large, 108, 32_768, 64) > 200e9
    little, much = read_many(small), read_many(large)
    assert much["samples"] == 108 * little["samples"]
    # A loader that read the shard of each sample would hold at least one of them: 1.9 GB.
    assert much["grown"] < 64e6
    assert much["median"] < 20 * little["median"] + 0.005
    assert much["opened"] < 10


def test_no_more_tensors_than_six_a_shard(folder: Path) -> None:
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert len(file.keys()) == 6


def test_a_manifest_with_an_unknown_key_or_none_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"no {MANIFEST}"):
        read_manifest(tmp_path)
    facts = json.loads((folder / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(facts | {"pointz": [1]}))
    with pytest.raises(StoreError, match="pointz"):
        read_manifest(tmp_path)


def test_writing_outside_the_manifest_promise_is_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "states", manifest(planned_shards=1))
    with pytest.raises(StoreError, match="rows == tokens"):
        writer.write(0, [replace(sample(), aux=torch.ones(3, 96))])
    assert writer.pending() == [0]
    started = time.monotonic()
    writer.write(0, [sample()])
    assert writer.pending() == []
    assert time.monotonic() - started < 5
    assert len(Store(tmp_path / "states")) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(aux=t["aux"][:, :-1]), r"aux is BF16 \[\d+, 95\]"),
        (lambda t: t.update(last=t["last"][:-1]), "last is BF16"),
        (lambda t: t.update(aux=t["aux"].float()), "aux is F32"),
        (lambda t: t.update(loss_mask=t["loss_mask"].long()), "loss_mask is I64"),
        (lambda t: t.update(input_ids=t["input_ids"].float()), "input_ids is F32"),
        (lambda t: t.update(offsets=t["offsets"][:0]), r"offsets is I64 \[0\]"),
        (lambda t: t["offsets"].__setitem__(0, -1), "from 0, ascending"),
    ],
)
def test_a_shard_that_is_not_what_the_manifest_promises(folder: Path, tmp_path: Path, change, words: str) -> None:
    shutil.copytree(folder, tmp_path / "states")
    path = tmp_path / "states" / shard_name(0)
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(StoreError, match=words):
        Store(tmp_path / "states")


@pytest.mark.parametrize("change", [{"hidden_size": 0}, {"blocks": -1}])
def test_a_manifest_of_no_model_is_refused(folder: Path, tmp_path: Path, change: dict) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(json.loads((folder / MANIFEST).read_text()) | change))
    with pytest.raises(StoreError, match=next(iter(change))):
        read_manifest(tmp_path)


@pytest.mark.parametrize("command", [["convert", "--to", "specforge"], ["states", "shrink"]])
def test_copies_are_made_of_the_bytes_that_were_captured(folder: Path, tmp_path: Path, command, capfd) -> None:
    shutil.copytree(folder, tmp_path / "states")
    path = tmp_path / "states" / shard_name(1)
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    assert cli.run([*command, str(tmp_path / "states"), str(tmp_path / "copy")]) == 2
    assert f"{shard_name(1)} has sha256" in capfd.readouterr().err
