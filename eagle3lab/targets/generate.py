"""Batched generation by the target itself: greedy or sampled, seeded, with slots refilled as rows finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import SlotCache, causal_slot_mask, closed_up, padded, prefill_groups, prefix_length


@dataclass(frozen=True, slots=True)
class Generated:
    """One reply: its tokens (eos included when it ended by itself) and whether it did."""

    tokens: list[int]
    ended: bool


def generate(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    stop_ids: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Generated]:
    """Continue every prompt; results come in the order of `prompts`. A reply also ends where the context is full.

    Args:
        prompts: token ids of each prompt.
        temperature: 0 = greedy; otherwise softmax sampling from the full distribution.
        seed: of the sampler; same prompts, batch and seed give the same text on the same machine.
        batch: rows decoded together. A finished row's slot is given to the next prompt at once.
        progress: called with the number of tokens made so far.

    Raises:
        UsageError: an empty prompt, or one that leaves no room in the context.
    """
    limits = target.limits(prompts, max_new_tokens)
    stops = set(stop_ids if stop_ids is not None else target.eos_ids)
    generator = torch.Generator().manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows = min(batch, len(prompts))
    capacity = max((len(p) for p in prompts), default=1) + max_new_tokens + 1
    cache = SlotCache(rows, capacity)
    replies: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    owner = [-1] * rows
    length = torch.zeros(rows, dtype=torch.int64)
    current = torch.zeros(rows, dtype=torch.int64)
    waiting = list(reversed(order))
    made = 0

    def choose(last: Tensor) -> Tensor:
        logits = target.logits(last)
        if temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(-1)

    def take(row: int, token: int) -> None:
        """Record one new token of a row; frees the row when its reply is complete."""
        nonlocal made
        index = owner[row]
        replies[index].append(token)
        made += 1
        if token in stops or len(replies[index]) >= limits[index]:
            ended[index] = token in stops
            owner[row] = -1

    shared = prefix_length(prompts) if rows > 1 else 0
    if shared:
        target.prefill(cache, torch.tensor([prompts[0][:shared]]), torch.zeros(1, dtype=torch.int64), torch.tensor([0]))
        cache.share(shared)
    while waiting or any(index >= 0 for index in owner):
        free = [row for row, index in enumerate(owner) if index < 0]
        if waiting and len(free) >= max(1, len(owner) // 8):
            _fill(target, cache, prompts, waiting, free, owner, length, current, choose, take, shared)
            continue
        if free and not waiting:
            kept = closed_up([index >= 0 for index in owner])
            cache.keep(kept, int(length.max()))
            owner[:] = [owner[row] for row in kept.tolist()]
            length, current = length[kept], current[kept]
        visible = max(int(length[row]) for row, index in enumerate(owner) if index >= 0) + 1
        positions = length[:, None].clamp(max=visible - 1)  # idle rows write into a slot that nobody reads
        cache.place(positions, visible)
        last, _ = target.states(current[:, None], positions, cache, causal_slot_mask(positions, visible))
        for row, token in enumerate(choose(last[:, -1]).tolist()):
            if owner[row] >= 0:
                length[row] += 1
                current[row] = token
                take(row, token)
        if progress is not None:
            progress(made)
    return [Generated(tokens, done) for tokens, done in zip(replies, ended, strict=True)]


def _fill(
    target: Target,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    waiting: list[int],
    free: list[int],
    owner: list[int],
    length: Tensor,
    current: Tensor,
    choose: Callable[[Tensor], Tensor],
    take: Callable[[int, int], None],
    shared: int,
) -> None:
    """Prefill waiting prompts into free rows, right-padded: padding's slots are overwritten before they are seen.

    The first `shared` tokens of every prompt are in the cache already.
    """
    rows = free[: len(waiting)]
    for row in rows:
        owner[row] = waiting.pop()
    texts = [prompts[owner[row]][shared:] for row in rows]
    for group in prefill_groups([len(text) for text in texts]):
        places = torch.tensor([rows[i] for i in group])
        last, _ = target.prefill(cache, padded([texts[i] for i in group]), torch.full((len(group),), shared), places)
        ends = torch.tensor([len(texts[i]) for i in group])
        tokens = choose(last[torch.arange(len(group)), ends - 1])
        for row, end, token in zip(places.tolist(), ends.tolist(), tokens.tolist(), strict=True):
            length[row], current[row] = shared + end, token
            take(row, token)
