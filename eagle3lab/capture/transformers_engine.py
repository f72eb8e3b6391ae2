"""Capture with the target in this process: hooks at the points, no logits, padding never reaches the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.ranks import Sink
from eagle3lab.capture.shards import Sample
from eagle3lab.core.threads import helper_thread
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import SlotCache, causal_slot_mask, padded, prefix_length

TOKENS_PER_SHARD = 32_768
BATCH_TOKENS = 2048
"""Tokens a forward, padding included. On a CPU 4096 were a quarter slower: a layer's activations leave the caches."""


def plan_shards(lengths: Sequence[int], tokens_per_shard: int = TOKENS_PER_SHARD) -> list[list[int]]:
    """Split samples, in order, into shards of about `tokens_per_shard` tokens. The plan depends on lengths alone."""
    shards: list[list[int]] = [[]]
    filled = 0
    for index, length in enumerate(lengths):
        if shards[-1] and filled + length > tokens_per_shard:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += length
    return shards


def capture(
    target: Target,
    samples: Sequence[Rendered],
    writer: Sink,
    shards: list[list[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> StatesManifest:
    """Capture every sample; finished shards of an earlier, interrupted capture are kept.

    Args:
        samples: rendered conversations; a sample's id is its place here.
        writer: the folder, opened (`StoreWriter`, or `shared_sink` over several ranks).
        shards: `plan_shards`.
        batch_tokens: tokens a forward, padding included.
        progress: called with the number of tokens captured by this call.
    """
    shared = prefix_length([sample.input_ids for sample in samples])
    points, pre_norm = writer.manifest.points, writer.manifest.last == "pre_norm"
    done = 0
    writing: Future[None] | None = None
    with helper_thread("shard") as pool:
        for index in writer.pending():
            captured: dict[int, Sample] = {}
            for batch in _batches(shards[index], samples, batch_tokens):
                captured.update(capture_batch(target, samples, batch, points, pre_norm=pre_norm, shared=shared))
                done += sum(len(samples[member].input_ids) for member in batch)
                if progress is not None:
                    progress(done)
            if writing is not None:
                writing.result()  # at most one shard is written while the next is computed: memory stays bounded
            writing = pool.submit(writer.write, index, [captured[member] for member in shards[index]])
        if writing is not None:
            writing.result()
    return writer.manifest


def capture_in_memory(target: Target, samples: Sequence[Rendered], points: list[int]) -> list[Sample]:
    """States of all samples, in their order, post-norm `last`; nothing is written."""
    shared = prefix_length([sample.input_ids for sample in samples])
    found: dict[int, Sample] = {}
    for batch in _batches(range(len(samples)), samples, BATCH_TOKENS):
        found.update(capture_batch(target, samples, batch, points, shared=shared))
    return [found[number] for number in range(len(samples))]


def _batches(members: Sequence[int], samples: Sequence[Rendered], batch_tokens: int) -> list[list[int]]:
    """Group samples of similar length, so that right-padding costs little compute."""
    batches: list[list[int]] = []
    for member in sorted(members, key=lambda m: (len(samples[m].input_ids), m)):
        length = len(samples[member].input_ids)
        if batches and length * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(member)
        else:
            batches.append([member])
    return batches


def capture_batch(
    target: Target,
    samples: Sequence[Rendered],
    batch: list[int],
    points: list[int],
    *,
    pre_norm: bool = False,
    shared: int = 0,
) -> dict[int, Sample]:
    """States of a few samples, right-padded to the longest.

    Args:
        pre_norm: take the last state before the target's final norm.
        shared: leading tokens that all of them begin with (a system prompt): read once for the batch, not in every row.
    """
    lengths = [len(samples[member].input_ids) for member in batch]
    ids = padded([samples[member].input_ids for member in batch]).to(target.device)

    def read(ids: Tensor, **placed: Any) -> Tensor:
        """[rows, q, (P+1)*H]: the points' states, then the last."""
        last, states = target.states(ids, points=points, pre_norm=pre_norm, **placed)
        return torch.cat([*states, last], -1)

    if not shared or len(batch) == 1:
        found = read(ids)
    else:
        cache = SlotCache(*ids.shape)
        first = torch.arange(shared, device=ids.device)[None]
        cache.place(first, shared, torch.tensor([0], device=ids.device))
        prefix = read(ids[:1, :shared], positions=first, cache=cache, mask=causal_slot_mask(first, shared))
        cache.share(shared)
        rest = torch.arange(shared, ids.shape[1], device=ids.device).expand(len(batch), -1)
        cache.place(rest, ids.shape[1])
        found = read(ids[:, shared:], positions=rest, cache=cache, mask=causal_slot_mask(rest, ids.shape[1]))
        found = torch.cat([prefix.expand(len(batch), -1, -1), found], 1)
    result, width = {}, target.hidden_size
    for row, (member, length) in enumerate(zip(batch, lengths, strict=True)):
        states = found[row, :length].cpu()
        mask = torch.tensor(samples[member].loss_mask)
        aux, last = states[:, :-width].clone(), states[:, -width:].clone()
        result[member] = Sample(member, ids[row, :length].cpu().clone(), mask, aux, last)
    return result
