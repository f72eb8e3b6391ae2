"""Capture with the target in this process: hooks at the points, no logits, padding never reaches the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.ranks import Sink
from eagle3lab.capture.shards import Sample
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.model import Target

TOKENS_PER_SHARD = 32_768


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
    batch_tokens: int = 4096,
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
    done = 0
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="shard") as pool:
        for index in writer.pending():
            captured: dict[int, Sample] = {}
            for batch in _batches(shards[index], samples, batch_tokens):
                captured.update(capture_batch(target, samples, batch, writer.manifest))
                done += sum(len(samples[member].input_ids) for member in batch)
                if progress is not None:
                    progress(done)
            if writing is not None:
                writing.result()  # at most one shard is written while the next is computed: memory stays bounded
            writing = pool.submit(writer.write, index, [captured[member] for member in shards[index]])
        if writing is not None:
            writing.result()
    return writer.manifest


def _batches(members: list[int], samples: Sequence[Rendered], batch_tokens: int) -> list[list[int]]:
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
    target: Target, samples: Sequence[Rendered], batch: list[int], manifest: StatesManifest
) -> dict[int, Sample]:
    """States of a few samples in one forward, right-padded to the longest."""
    lengths = [len(samples[member].input_ids) for member in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    for row, member in enumerate(batch):
        ids[row, : lengths[row]] = torch.tensor(samples[member].input_ids)
    last, states = target.states(ids.to(target.device), points=manifest.points, pre_norm=manifest.last == "pre_norm")
    result = {}
    for row, (member, length) in enumerate(zip(batch, lengths, strict=True)):
        aux = torch.cat([state[row, :length] for state in states], -1)
        result[member] = Sample(
            member,
            ids[row, :length].clone(),
            torch.tensor(samples[member].loss_mask),
            aux.cpu(),
            last[row, :length].cpu().clone(),
        )
    return result
