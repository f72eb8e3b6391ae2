"""Capture with a served target: the client's side of `eagle3lab.capture.sglang_hook`.

The client sends token ids, the hook inside the engine writes the shards, and the client enters each into the manifest
after it has checked that the states predict the text. No state crosses HTTP: Kimi-K2.5 has 21,504 numbers a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3lab.capture.manifest import Shard
from eagle3lab.capture.plan import HOOK_FILE, Plan, fault_path, receipt_path, write_plan
from eagle3lab.capture.shards import shard_name
from eagle3lab.capture.store import StoreWriter
from eagle3lab.core.errors import ServerError, StoreError
from eagle3lab.core.files import read_json
from eagle3lab.core.parallel import in_parallel
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.engine import request_json

OUTLIER = 0.5
"""A shard whose next-token agreement is below this share of the best shard's does not belong to its tokens."""
CHECKED_POSITIONS = 256
"""Supervised positions of a shard that are compared with its text: 0.09 at most from the rate of all, 3 sigma."""
RECEIPT_SECONDS = 300.0


def capture_served(
    samples: Sequence[Rendered],
    writer: StoreWriter,
    shards: Sequence[Sequence[int]],
    *,
    server: str,
    exchange: Path,
    concurrency: int = 32,
    head: Tensor | None = None,
    request_seconds: float = 600.0,
    receipt_seconds: float = RECEIPT_SECONDS,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] = print,
) -> dict[int, float]:
    """Have every pending shard captured by the server at `server`.

    Args:
        samples: rendered conversations; a sample's id is its place here. shards: as planned.
        exchange: the folder that the hook was started with.
        concurrency: requests in flight. They are sent shard by shard, so few shards are open in the engine at a time.
        head: the target's head [V, H]; with it each shard's agreement with its text is printed and judged.
        progress: called with the number of tokens captured by this call.

    Returns:
        shard -> next-token agreement, for the shards of this call; empty without `head`.

    Raises:
        ServerError: no hook there, a refused request, or a shard that the hook never wrote.
        StoreError: the hook found the states wrong, or a shard does not agree with its text.
    """
    pending = writer.pending()
    if not pending:
        return {}
    if not (exchange / HOOK_FILE).is_file():
        raise ServerError(
            f"no {HOOK_FILE} in {exchange}: the server runs without the capture hook, or with another folder",
            rule="the hook writes it when the server starts",
            fix="eagle3lab serve --dry-run shows --forward-hooks",
        )
    manifest = writer.manifest
    members = [(sample, samples[sample].input_ids, samples[sample].loss_mask) for i in pending for sample in shards[i]]
    plan = write_plan(
        exchange,
        writer.folder,
        members,
        [index for index in pending for _ in shards[index]],
        points=len(manifest.points),
        hidden_size=manifest.hidden_size,
        dtype=manifest.dtype,
    )
    rates: dict[int, float] = {}
    done = 0
    try:
        for index in _send(plan, server, concurrency, request_seconds):
            shard = _receipt(exchange, plan, index, receipt_seconds)
            if head is not None:
                agreeing, checked = agreement(writer.folder / shard.name, head)
                rates[index] = agreeing / checked
                note(f"{shard.name}: the target's head agrees with {agreeing} of {checked} checked next tokens")
            writer.add(shard)
            _judge(writer, rates)
            done += shard.tokens
            if progress is not None:
                progress(done)
    except ServerError as error:
        raise _cause(exchange, plan) or error from error
    finally:
        for path in exchange.glob(f"*-{plan.id}*"):
            path.unlink(missing_ok=True)
    return rates


def agreement(path: Path, head: Tensor, positions: int = CHECKED_POSITIONS) -> tuple[int, int]:
    """(agreeing, checked) supervised tokens: agreeing when the state before, through the head, has it as its top.

    Args:
        path: a shard whose `last` is post-norm. head: [V, H]. positions: evenly spread ones are checked.

    Raises:
        StoreError: the shard has no supervised token.
    """
    with safe_open(path, framework="pt") as file:
        ids, mask, last = (file.get_slice(name) for name in ("input_ids", "loss_mask", "last"))
        supervised = mask[:]
        supervised[file.get_tensor("offsets")[:-1]] = False  # the first token of a sample follows no state of its own
        places = supervised.nonzero().squeeze(-1)
        if not len(places):
            raise StoreError(f"{path} has no supervised token", rule="every sample has a reply")
        places = places[torch.linspace(0, len(places) - 1, min(positions, len(places))).long()]
        states = torch.cat([last[place - 1 : place] for place in places.tolist()]).to(head.dtype)
        tops = (states @ head.T).argmax(-1)
        return int((tops == ids[:][places]).sum()), len(places)


def head_weight(folder: Path) -> Tensor:
    """The head [V, H] of a local target, mapped from its safetensors file (the embedding when the two are tied).

    Raises:
        StoreError: no tensor of a known name.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    names = [name for ending in ("lm_head.weight", "embed_tokens.weight") for name in found if name.endswith(ending)]
    if not names:
        raise StoreError(f"no lm_head.weight or embed_tokens.weight in {folder}", rule="a target has a head")
    with safe_open(found[names[0]], framework="pt") as file:
        return file.get_slice(names[0])[:]


def _send(plan: Plan, server: str, concurrency: int, seconds: float) -> Iterator[int]:
    """Send every sample in shard order; yields each shard when all its requests are answered."""
    left = {index: len(members) for index, members in plan.members.items()}
    samples = [sample for members in plan.members.values() for sample in members]

    def ask(sample: int) -> None:
        body = {
            "rid": plan.rid(sample),
            "input_ids": plan.input_ids(sample).tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "stream": False,
        }
        request_json(f"{server}/generate", body, timeout=seconds)

    for sample, _ in in_parallel(ask, samples, concurrency):
        index = plan.place[sample].shard
        left[index] -= 1
        if left[index] == 0:
            yield index


def _receipt(exchange: Path, plan: Plan, index: int, seconds: float) -> Shard:
    """Wait for the hook's word that a shard is on disk."""
    path, deadline = receipt_path(exchange, plan.id, index), time.monotonic() + seconds
    while not path.is_file():
        if fault_path(exchange, plan.id).is_file():
            raise ServerError(f"shard {index} was given up by the hook")
        if time.monotonic() > deadline:
            raise ServerError(
                f"the hook has not written {shard_name(index)} {seconds:.0f} s after its last request was answered",
                rule="the hook sees every row: CUDA graphs off, pattern matching the target's logits processor",
                fix="grep -i hook in the server's log",
            )
        time.sleep(0.02)
    facts = read_json(path)
    return Shard(name=shard_name(index), sha256=facts["sha256"], samples=facts["samples"], tokens=facts["tokens"])


def _cause(exchange: Path, plan: Plan) -> StoreError | None:
    path = fault_path(exchange, plan.id)
    if not path.is_file():
        return None
    return StoreError(f"the hook gave up: {read_json(path)['error']}", rule="finished shards are kept")


def _judge(writer: StoreWriter, rates: dict[int, float]) -> None:
    """Refuse shards whose states belong to other tokens; they leave the manifest, so that a resume redoes them."""
    best = max(rates.values(), default=0.0)
    wrong = {index: rate for index, rate in sorted(rates.items()) if rate < OUTLIER * best}
    if not wrong:
        return
    writer.forget(list(wrong))
    listed = ", ".join(f"{shard_name(index)} {rate:.2f}" for index, rate in wrong.items())
    raise StoreError(
        f"{writer.folder}: states do not predict their text in {listed}; the best shard has {best:.2f}",
        rule=f"every shard agrees at least {OUTLIER} times as often as the best",
        fix="eagle3lab capture again: only the named shards are redone",
    )
