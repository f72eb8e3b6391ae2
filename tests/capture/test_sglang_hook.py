"""The hook inside the engine: rows find their place, what is wrong is told to the client, memory is bounded."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3lab.capture import sglang_hook
from eagle3lab.capture.plan import HOOK_FILE, Plan, fault_path, receipt_path, write_plan
from eagle3lab.capture.sglang_hook import CaptureHook, create
from eagle3lab.capture.shards import shard_name
from eagle3lab.core import files
from eagle3lab.core.hashes import sha256_file
from tests.capture.fake_sglang import Engine

HIDDEN, POINTS, VOCAB = 16, 3, 50
TABLE = torch.randn(POINTS + 1, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
MIX = torch.randn(64, 1, generator=torch.Generator().manual_seed(4))


def states(ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """States that depend on token and position, so that a row in a wrong place shows."""
    made = [TABLE[point][ids] + MIX[: len(ids)] for point in range(POINTS + 1)]
    return made[:-1], made[-1]


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


class Scene:
    """An exchange folder, a plan in it, and a hook."""

    def __init__(self, folder: Path, shards: list[list[tuple[int, list[int]]]], **options: object) -> None:
        self.exchange, self.folder = folder / "exchange", folder / "states"
        self.folder.mkdir()
        self.ids = {sample: torch.tensor(ids) for members in shards for sample, ids in members}
        flat = [(sample, ids, [True] * len(ids)) for members in shards for sample, ids in members]
        owners = [index for index, members in enumerate(shards) for _ in members]
        self.hook: CaptureHook = create({"exchange": str(self.exchange), **options})  # type: ignore[assignment]
        self.plan: Plan = write_plan(
            self.exchange, self.folder, flat, owners, points=POINTS, hidden_size=HIDDEN, dtype="bfloat16"
        )
        self.engine = Engine(self.hook, states)

    def requests(self, *samples: int) -> list[tuple[str, Tensor]]:
        return [(self.plan.rid(sample), self.ids[sample]) for sample in samples]

    def shard(self, index: int = 0, seconds: float = 20) -> dict[str, Tensor]:
        path, deadline = receipt_path(self.exchange, self.plan.id, index), time.monotonic() + seconds
        while not path.exists():
            assert not self.fault(), self.fault()
            assert time.monotonic() < deadline, "no receipt"
            time.sleep(0.005)
        assert json.loads(path.read_text())["sha256"] == sha256_file(self.folder / shard_name(index))
        return load_file(self.folder / shard_name(index))

    def fault(self) -> str:
        path = fault_path(self.exchange, self.plan.id)
        return json.loads(path.read_text())["error"] if path.exists() else ""

    def expected(self, *samples: int) -> dict[str, Tensor]:
        made = [states(self.ids[sample]) for sample in samples]
        lengths = torch.tensor([0, *(len(self.ids[sample]) for sample in samples)])
        return {
            "offsets": lengths.cumsum(0),
            "sample_id": torch.tensor(samples),
            "input_ids": torch.cat([self.ids[sample] for sample in samples]),
            "aux": torch.cat([torch.cat(aux, -1) for aux, _ in made]).bfloat16(),
            "last": torch.cat([last for _, last in made]).bfloat16(),
            "loss_mask": torch.ones(int(lengths.sum()), dtype=torch.bool),
        }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def one_shard(tmp_path: Path, lengths: tuple[int, ...] = (6, 12, 1, 7), **options: object) -> Scene:
    return Scene(tmp_path, [list(enumerate(prompts(lengths)))], **options)


@pytest.mark.parametrize("chunk", [8, 3, 100])
@pytest.mark.parametrize("shape", ["list", "packed, no first argument", "padded"])
def test_rows_of_unequal_prompts_find_their_place(tmp_path: Path, chunk: int, shape: str) -> None:
    scene = one_shard(tmp_path)
    scene.engine.packed = scene.engine.kimi = shape.startswith("packed")
    scene.engine.padding = 5 if shape == "padded" else 0
    scene.engine.run(scene.requests(2, 0, 3, 1), chunk)  # the engine's order is its own
    assert max(len(rows) for rows in scene.engine.sent) > 1, "no pass held two requests"
    assert same(scene.shard(), scene.expected(0, 1, 2, 3))


def test_misplaced_rows_would_be_seen(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    scene.engine.run(scene.requests(0, 1, 2, 3), 8)
    found = scene.shard()
    wrong = scene.expected(0, 1, 2, 3)
    wrong["aux"] = wrong["aux"].roll(1, 0)
    assert not same(found, wrong)
    wrong = scene.expected(0, 1, 2, 3)
    wrong["aux"] = wrong["aux"].roll(HIDDEN, 1)  # points in another order
    assert not same(found, wrong)


def test_decode_passes_strangers_and_short_calls_are_ignored(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    assert scene.engine.decode([scene.plan.rid(0)], HIDDEN) is None
    scene.engine.pass_over([("warm-up", torch.arange(5), 0, 5), (scene.plan.rid(0), scene.ids[0], 0, 6)])
    assert scene.hook(None, (torch.zeros(3),), None) is None
    scene.engine.run(scene.requests(1, 2, 3), 9)
    assert same(scene.shard(), scene.expected(0, 1, 2, 3))


def test_a_request_that_starts_again_is_taken_again(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    rid = scene.plan.rid(1)
    scene.engine.pass_over([(rid, scene.ids[1], 0, 8)])
    scene.engine.run(scene.requests(1, 0, 0, 2), 5)
    assert not receipt_path(scene.exchange, scene.plan.id, 0).exists()
    scene.engine.run(scene.requests(3), 5)
    assert same(scene.shard(), scene.expected(0, 1, 2, 3))


def test_a_cached_prefix_is_refused(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    assert scene.engine.pass_over([(scene.plan.rid(1), scene.ids[1], 8, 12)]) is None
    assert "rows from 8 on came after 0 rows" in scene.fault()
    assert "--disable-radix-cache" in scene.fault()


def test_only_the_last_chunk_is_refused(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    scene.engine.pass_over([(scene.plan.rid(1), scene.ids[1], 0, 5)])
    scene.engine.pass_over([(scene.plan.rid(1), scene.ids[1], 8, 12)])
    assert "rows from 8 on came after 5 rows" in scene.fault()


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    swapped = scene.ids[1].clone()
    swapped[3] = (swapped[3] + 1) % VOCAB
    scene.engine.run([(scene.plan.rid(1), swapped)], 8)
    assert "other tokens than planned" in scene.fault()


def test_wrong_width_names_the_formula(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    scene.engine.states = lambda ids: (states(ids)[0][:2], states(ids)[1])
    scene.engine.run(scene.requests(0), 8)
    assert "aux is 32 wide" in scene.fault()
    assert "3 points x 16 = 48" in scene.fault()


def test_not_finite_is_named(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)

    def broken(ids: Tensor) -> tuple[list[Tensor], Tensor]:
        aux, last = states(ids)
        aux[1][4, 7] = torch.inf
        return aux, last

    scene.engine.states = broken
    scene.engine.run(scene.requests(0), 8)
    assert "sample 0: aux is not finite at token 4" in scene.fault()


def test_no_aux_states_names_the_flags(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    states_0 = states(scene.ids[0])[1]
    from tests.capture.fake_sglang import ForwardBatch

    batch = ForwardBatch([scene.plan.rid(0)], scene.ids[0], [6], [0])
    assert scene.hook(None, (scene.ids[0], states_0, None, batch, None), None) is None
    assert "--enable-return-aux-hidden-states" in scene.fault()


def test_a_plan_that_is_not_there_and_a_full_disk_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = one_shard(tmp_path)
    scene.engine.run([("e3.0123456789ab.0", scene.ids[0])], 8)
    assert "no capture plan" in json.loads(fault_path(scene.exchange, "0123456789ab").read_text())["error"]
    monkeypatch.setattr(files, "free_bytes", lambda _: files.DISK_FLOOR_BYTES + 10)
    scene.engine.run(scene.requests(0, 1, 2, 3), 8)
    deadline = time.monotonic() + 20
    while not scene.fault() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "must stay free" in scene.fault()
    assert not list(scene.folder.iterdir())


def test_after_a_fault_the_next_plan_works(tmp_path: Path) -> None:
    scene = one_shard(tmp_path)
    scene.engine.pass_over([(scene.plan.rid(1), scene.ids[1], 8, 12)])
    first = scene.plan
    flat = [(sample, ids.tolist(), [True] * len(ids)) for sample, ids in scene.ids.items()]
    scene.plan = write_plan(
        scene.exchange, scene.folder, flat, [0] * len(flat), points=POINTS, hidden_size=HIDDEN, dtype="bfloat16"
    )
    assert scene.plan.id != first.id
    scene.engine.run(scene.requests(0, 1, 2, 3), 8)
    assert same(scene.shard(), scene.expected(0, 1, 2, 3))


def test_only_rank_0_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_hook, "_first_rank", lambda: False)
    scene = one_shard(tmp_path)
    scene.engine.run(scene.requests(0, 1, 2, 3), 8)
    assert not (scene.exchange / HOOK_FILE).exists()
    assert not scene.hook._open
    monkeypatch.setattr(sglang_hook, "_first_rank", lambda: True)
    scene.engine.run(scene.requests(0), 8)
    assert scene.hook._open


def four_shards(tmp_path: Path, **options: object) -> Scene:
    texts = prompts((10, 10, 10, 10))
    return Scene(tmp_path, [[(index, text)] for index, text in enumerate(texts)], **options)


def test_a_slow_disk_holds_the_engine_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = four_shards(tmp_path)
    one = scene.plan.shard_bytes(0)
    scene.hook.max_bytes = 2 * one
    release, peak = threading.Semaphore(0), 0
    write = sglang_hook.write_shard

    def slow(path: Path, tensors: dict[str, Tensor]) -> str:
        release.acquire()
        return write(path, tensors)

    monkeypatch.setattr(sglang_hook, "write_shard", slow)
    passed: list[int] = []

    def run() -> None:
        for sample in range(4):
            scene.engine.run(scene.requests(sample), 100)
            passed.append(sample)

    thread = threading.Thread(target=run)
    thread.start()
    for finished in range(5):
        time.sleep(0.1)
        peak = max(peak, scene.hook._bytes)
        assert len(passed) == min(4, 2 + finished), "a pass did not wait for the disk, or waited for nothing"
        release.release()
    thread.join(20)
    assert peak == 2 * one
    for index in range(4):
        assert same(scene.shard(index), scene.expected(index))
    assert scene.hook._bytes == 0


def test_too_many_open_shards_are_a_fault_and_not_a_deadlock(tmp_path: Path) -> None:
    scene = four_shards(tmp_path)
    scene.hook.max_bytes = 2 * scene.plan.shard_bytes(0)
    started = time.monotonic()
    for sample in range(3):
        scene.engine.pass_over([(scene.plan.rid(sample), scene.ids[sample], 0, 4)])
    assert time.monotonic() - started < 5
    assert "2 unfinished shards" in scene.fault()


def test_a_disk_that_stands_still_is_a_fault_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = four_shards(tmp_path, patience=0.2)
    scene.hook.max_bytes = scene.plan.shard_bytes(0)
    still = threading.Event()
    monkeypatch.setattr(sglang_hook, "write_shard", lambda *_: still.wait(30) and "")
    scene.engine.run(scene.requests(0, 1), 100)
    assert "the disk frees one in 0 s" in scene.fault()
    still.set()


def test_it_imports_with_torch_and_safetensors_alone() -> None:
    program = (
        "import sys\n"
        "import torch, safetensors.torch\n"
        "before = set(sys.modules)\n"
        "import eagle3lab.capture.sglang_hook\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['eagle3lab']"
