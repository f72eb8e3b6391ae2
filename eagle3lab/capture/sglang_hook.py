"""The hook that runs inside SGLang: states of a forward pass, from the logits processor straight into shards.

    --forward-hooks '[{"name": "eagle3lab", "target_modules": ["*logits_processor"],
                       "hook_factory": "eagle3lab.capture.sglang_hook:create", "config": {"exchange": "FOLDER"}}]'

SGLang 0.5.23 registers it with `register_forward_hook`, so it sees positional arguments alone: the state after the
final norm [rows, H], the head, the ForwardBatch, and the aux states (a list of P tensors [rows, H], or one [rows, P*H]
in the DeepSeek files). Rows of a pass lie request after request. A request may come in several passes (chunked
prefill): `extend_prefix_lens_cpu` says where its rows begin.

It runs on every tensor-parallel rank and works on rank 0, where the residual stream is complete. It needs torch and
safetensors alone. It never raises: an exception here would end the engine. What goes wrong is written to the exchange
folder, where the client that sent the request finds it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.capture.plan import HOOK_FILE, Plan, fault_path, parse_rid, read_plan, write_receipt
from eagle3lab.capture.shards import check_finite, shard_name, write_shard
from eagle3lab.core.errors import Eagle3LabError, StoreError
from eagle3lab.core.files import write_json

MAX_BYTES = 8 << 30
"""Host memory for shards that are being filled or written."""
PATIENCE = 240.0
"""Seconds that a pass waits for the disk; SGLang's watchdog ends a scheduler that stands still for 300."""
STATES, BATCH, AUX = 1, 3, 4
"""Places of the positional arguments of a logits processor."""


def create(config: Mapping[str, Any]) -> Callable[..., None]:
    """Hook factory.

    Args:
        config: `exchange`, the folder shared with the client; optional `max_bytes` and `patience`.
    """
    return CaptureHook(
        Path(config["exchange"]),
        max_bytes=int(config.get("max_bytes", MAX_BYTES)),
        patience=float(config.get("patience", PATIENCE)),
    )


@dataclass
class OpenShard:
    """A shard in memory: `aux` [T, P*H], `last` [T, H], and how many rows of each sample are there."""

    aux: Tensor
    last: Tensor
    rows: dict[int, int] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)


class CaptureHook:
    """Collects rows, and hands full shards to a thread that writes them.

    Memory is bounded: at most `max_bytes` of shards exist at a time. When the disk is slower than the model, the pass
    that needs a new shard waits in here, and the engine waits with it.
    """

    def __init__(self, exchange: Path, *, max_bytes: int = MAX_BYTES, patience: float = PATIENCE) -> None:
        self.exchange, self.max_bytes, self.patience = exchange, max_bytes, patience
        self._plan_now: Plan | None = None
        self._failed: set[str] = set()
        self._open: dict[tuple[str, int], OpenShard] = {}
        self._written: set[tuple[str, int]] = set()
        self._queue: deque[tuple[Plan, int, OpenShard]] = deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._writer: threading.Thread | None = None
        if _first_rank():
            exchange.mkdir(parents=True, exist_ok=True)
            write_json(exchange / HOOK_FILE, {"pid": os.getpid(), "max_bytes": max_bytes})

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """See the module; returns None, so that the output stays what it is."""
        if len(args) <= BATCH or not _first_rank():
            return
        batch = args[BATCH]
        rids, rows, prefixes = (
            getattr(batch, name, None) for name in ("rids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
        )
        if not rids or rows is None or prefixes is None:
            return  # a decode pass (tokens that the engine made up itself) or a warm-up
        start = 0
        for rid, count, prefix in zip(rids, rows, prefixes, strict=False):
            ours = parse_rid(str(rid))
            if ours is not None and ours[0] not in self._failed:
                try:
                    self._take(*ours, args, slice(start, start + int(count)), int(prefix))
                except (Eagle3LabError, OSError, RuntimeError, KeyError, ValueError) as error:
                    self._fail(ours[0], error)
            start += int(count)

    def _take(self, id: str, sample: int, args: tuple[Any, ...], rows: slice, prefix: int) -> None:
        plan = self._plan(id)
        if sample not in plan.place:
            raise StoreError(f"sample {sample} is not in plan {id}")
        place = plan.place[sample]
        if (id, place.shard) in self._written:
            return  # sent again by a client that did not hear the answer
        length, count = place.stop - place.start, rows.stop - rows.start
        states: Tensor = args[STATES]
        aux: Any = args[AUX] if len(args) > AUX else None
        self._check(plan, sample, args[BATCH], states, aux, rows, prefix)
        shard = self._shard(plan, place.shard)
        have = 0 if prefix == 0 else shard.rows.get(sample, 0)  # prefix 0: the request was started again
        if prefix != have:
            raise StoreError(
                f"sample {sample}: rows from {prefix} on came after {have} rows",
                rule="every row is computed; cached prefixes have no rows",
                fix="start the server with --disable-radix-cache",
            )
        first = place.start + prefix
        shard.last[first : first + count].copy_(states[rows])
        parts = list(aux) if isinstance(aux, list | tuple) else [aux]
        column = 0
        for part in parts:  # ascending points
            shard.aux[first : first + count, column : column + part.shape[-1]].copy_(part[rows])
            column += part.shape[-1]
        shard.rows[sample] = prefix + count
        shard.complete.discard(sample)
        if prefix + count < length:
            return
        check_finite(sample, shard.aux[place.start : place.stop], shard.last[place.start : place.stop])
        shard.complete.add(sample)
        if len(shard.complete) == len(plan.members[place.shard]):
            self._hand_over(plan, place.shard)

    def _check(self, plan: Plan, sample: int, batch: Any, states: Tensor, aux: Any, rows: slice, prefix: int) -> None:
        """Tokens are the planned ones, rows are there, widths are P*H and H."""
        if aux is None:
            raise StoreError(
                f"sample {sample}: the engine handed over no aux states",
                rule="aux capture is on",
                fix="start the server with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3",
            )
        parts = list(aux) if isinstance(aux, list | tuple) else [aux]
        width = sum(part.shape[-1] for part in parts)
        if width != plan.width or states.shape[-1] != plan.hidden_size:
            raise StoreError(
                f"sample {sample}: aux is {width} wide, last {states.shape[-1]}",
                rule=f"{plan.points} points x {plan.hidden_size} = {plan.width}, and {plan.hidden_size}",
            )
        short = min(len(states), *(len(part) for part in parts))
        if short < rows.stop:
            raise StoreError(f"sample {sample}: {short} rows, tokens need {rows.stop}", rule="rows == tokens")
        ran = batch.input_ids[rows].to("cpu", torch.int64)
        planned = plan.input_ids(sample)[prefix : prefix + len(ran)]
        if not torch.equal(ran, planned):
            raise StoreError(
                f"sample {sample}: the engine ran other tokens than planned at {prefix} to {prefix + len(ran)}",
                rule="a request is sent as input_ids, with its own request id",
            )

    def _plan(self, id: str) -> Plan:
        if self._plan_now is None or self._plan_now.id != id:
            self._plan_now = read_plan(self.exchange, id)
            for key in [key for key in self._open if key[0] != id]:
                self._drop(key)  # one client at a time: what an earlier one left unfinished, nobody waits for
        return self._plan_now

    def _shard(self, plan: Plan, index: int) -> OpenShard:
        """The open shard, allocated when its first row comes; waits while memory is full of shards being written."""
        key = (plan.id, index)
        if key in self._open:
            return self._open[key]
        needed = plan.shard_bytes(index)
        deadline = time.monotonic() + self.patience
        with self._changed:
            while self._bytes + needed > self.max_bytes:
                if not self._queue or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise StoreError(
                        f"shard {index} needs {needed / 1e9:.2f} GB, {self._bytes / 1e9:.2f} of "
                        f"{self.max_bytes / 1e9:.2f} GB are taken by {len(self._open)} unfinished shards",
                        rule=f"shards fit into the hook's max_bytes, and the disk frees one in {self.patience:.0f} s",
                        fix="send fewer requests at once, or raise max_bytes",
                    )
            self._bytes += needed
        tokens = plan.shard_tokens[index]
        shard = OpenShard(
            torch.empty(tokens, plan.width, dtype=plan.dtype), torch.empty(tokens, plan.hidden_size, dtype=plan.dtype)
        )
        self._open[key] = shard
        return shard

    def _hand_over(self, plan: Plan, index: int) -> None:
        shard = self._open.pop((plan.id, index))
        self._written.add((plan.id, index))
        with self._changed:
            self._queue.append((plan, index, shard))
            self._changed.notify_all()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_forever, name="eagle3lab-shards", daemon=True)
            self._writer.start()

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                plan, index, shard = self._queue[0]
            try:
                self._write(plan, index, shard)
            except (Eagle3LabError, OSError, RuntimeError, ValueError) as error:
                self._fail(plan.id, error)
            del shard
            with self._changed:
                self._queue.popleft()  # only now: a waiting pass must not think that nothing is being written
                self._bytes -= plan.shard_bytes(index)
                self._changed.notify_all()

    def _write(self, plan: Plan, index: int, shard: OpenShard) -> None:
        members = plan.members[index]
        tensors = {
            "offsets": torch.tensor([0, *(plan.place[sample].stop for sample in members)], dtype=torch.int64),
            "sample_id": torch.tensor(members, dtype=torch.int64),
            "input_ids": torch.cat([plan.input_ids(sample) for sample in members]),
            "aux": shard.aux,
            "last": shard.last,
            "loss_mask": torch.cat([plan.loss_mask(sample) for sample in members]),
        }
        digest = write_shard(plan.folder / shard_name(index), tensors)
        tokens = plan.shard_tokens[index]
        write_receipt(self.exchange, plan.id, index, sha256=digest, samples=len(members), tokens=tokens)

    def _drop(self, key: tuple[str, int]) -> None:
        shard = self._open.pop(key)
        with self._changed:
            self._bytes -= sum(tensor.numel() * tensor.element_size() for tensor in (shard.aux, shard.last))

    def _fail(self, id: str, error: Exception) -> None:
        """Give up on a plan, and tell its client why. Called by the writer too, so it leaves the open shards alone."""
        self._failed.add(id)
        try:
            write_json(fault_path(self.exchange, id), {"error": str(error), "kind": type(error).__name__})
        except OSError as failure:  # nothing left to tell it with but the engine's log
            print(f"eagle3lab hook: {error}; and the exchange folder cannot be written ({failure})", flush=True)


def _first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
