"""The plan of a served capture: which tokens belong to which sample and shard, shared by client and engine as files.

The exchange folder holds `plan-<id>.safetensors` (written by the client), `receipt-<id>-<shard>.json` for each shard
that the engine wrote, `fault-<id>.json` when it could not, and `hook.json`, the engine's sign of life. A request is
called `e3.<plan id>.<sample>`, so rows find their place whatever the order in which the engine runs them.

Like the hook, this file needs nothing but torch and safetensors.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import write_bytes, write_json
from eagle3lab.core.hashes import sha256_bytes

HOOK_FILE = "hook.json"
_RID = re.compile(r"e3\.([0-9a-f]{12})\.(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies: its shard, and its rows `start` to `stop` there."""

    shard: int
    start: int
    stop: int


class Plan:
    """What is to be captured.

    Attributes:
        id: 12 hex digits, from everything below.
        folder: where shards go. points: P. hidden_size: H. dtype: of the stored states.
        members: shard -> its samples, in order. place: sample -> `Place`.
    """

    def __init__(self, id: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.id = id
        self.folder = Path(facts["folder"])
        self.points, self.hidden_size = int(facts["points"]), int(facts["hidden_size"])
        self.dtype: torch.dtype = getattr(torch, facts["dtype"])
        self._ids, self._mask = tensors["input_ids"], tensors["loss_mask"]
        offsets = tensors["offsets"].tolist()
        self.members: dict[int, list[int]] = {}
        self.place: dict[int, Place] = {}
        self._flat: dict[int, tuple[int, int]] = {}
        ends: dict[int, int] = {}
        for index, (sample, shard) in enumerate(
            zip(tensors["sample_id"].tolist(), tensors["shard"].tolist(), strict=True)
        ):
            self._flat[sample] = (offsets[index], offsets[index + 1])
            start = ends.get(shard, 0)
            ends[shard] = start + offsets[index + 1] - offsets[index]
            self.members.setdefault(shard, []).append(sample)
            self.place[sample] = Place(shard, start, ends[shard])
        self.shard_tokens = ends

    @property
    def width(self) -> int:
        """P * H."""
        return self.points * self.hidden_size

    def input_ids(self, sample: int) -> Tensor:
        """int64 [T] of a sample."""
        return self._ids[slice(*self._flat[sample])]

    def loss_mask(self, sample: int) -> Tensor:
        """bool [T] of a sample."""
        return self._mask[slice(*self._flat[sample])]

    def rid(self, sample: int) -> str:
        """Request id of a sample."""
        return f"e3.{self.id}.{sample}"

    def shard_bytes(self, shard: int) -> int:
        """Bytes of a shard's states."""
        return self.shard_tokens[shard] * (self.width + self.hidden_size) * self.dtype.itemsize


def parse_rid(rid: str) -> tuple[str, int] | None:
    """(plan id, sample) of a request of ours; None for anybody else's."""
    match = _RID.fullmatch(rid)
    return (match[1], int(match[2])) if match else None


def write_plan(
    exchange: Path,
    folder: Path,
    samples: Sequence[tuple[int, Sequence[int], Sequence[bool]]],
    shards: Sequence[int],
    *,
    points: int,
    hidden_size: int,
    dtype: str,
) -> Plan:
    """Write a plan and return it.

    Args:
        samples: (sample id, token ids, loss mask). shards: shard of each, in the same order.
    """
    offsets = [0]
    for _, ids, _ in samples:
        offsets.append(offsets[-1] + len(ids))
    tensors = {
        "input_ids": torch.tensor([token for _, ids, _ in samples for token in ids], dtype=torch.int64),
        "loss_mask": torch.tensor([flag for _, _, mask in samples for flag in mask], dtype=torch.bool),
        "offsets": torch.tensor(offsets, dtype=torch.int64),
        "sample_id": torch.tensor([sample for sample, _, _ in samples], dtype=torch.int64),
        "shard": torch.tensor(list(shards), dtype=torch.int64),
    }
    facts = {"folder": str(folder.absolute()), "points": points, "hidden_size": hidden_size, "dtype": dtype}
    facts["attempt"] = secrets.token_hex(8)  # a second attempt at the same shards must not meet the first one's fault
    data = save(tensors, metadata={"plan": json.dumps(facts)})
    id = sha256_bytes(data)[:12]
    write_bytes(plan_path(exchange, id), data)
    return Plan(id, facts, tensors)


def read_plan(exchange: Path, id: str) -> Plan:
    """Read the plan `id`. `StoreError` when the client has not written it."""
    path = plan_path(exchange, id)
    if not path.is_file():
        raise StoreError(f"no capture plan {path}", rule="client and engine share one exchange folder")
    with safe_open(path, framework="pt") as file:
        facts = json.loads((file.metadata() or {})["plan"])
        return Plan(id, facts, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def plan_path(exchange: Path, id: str) -> Path:
    """File of a plan."""
    return exchange / f"plan-{id}.safetensors"


def receipt_path(exchange: Path, id: str, shard: int) -> Path:
    """File that says shard `shard` is written."""
    return exchange / f"receipt-{id}-{shard:05d}.json"


def fault_path(exchange: Path, id: str) -> Path:
    """File that says the engine gave up on a plan."""
    return exchange / f"fault-{id}.json"


def write_receipt(exchange: Path, id: str, shard: int, *, sha256: str, samples: int, tokens: int) -> None:
    """Say that a shard is on disk, whole."""
    write_json(receipt_path(exchange, id, shard), {"sha256": sha256, "samples": samples, "tokens": tokens})
