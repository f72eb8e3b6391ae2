"""Costs of single forwards, measured on this machine: what a forecast and a speed ceiling are made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from eagle3lab.acceptance.chain import draft_extend
from eagle3lab.acceptance.forecast import Costs, CostTable
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import SlotCache, causal_slot_mask

REPEATS = 7


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: Eagle3Drafter,
    *,
    batches: Sequence[int],
    verify_tokens: Sequence[int],
    draft_tokens: Sequence[int],
    context: int = 256,
    repeats: int = REPEATS,
) -> Costs:
    """Median seconds of a target forward (with head and argmax) and of a drafter pass (with head and argmax).

    Args:
        batches: rows together. verify_tokens, draft_tokens: tokens a row.
        context: slots of text in the cache before the new tokens.
        repeats: timed rounds over all sizes, one after the other, so that a busy moment falls on all of them; one more
            round before them is not timed.
    """
    verify: dict[tuple[int, int], list[float]] = {}
    draft: dict[tuple[int, int], list[float]] = {}
    for batch in batches:
        capacity = context + max(*verify_tokens, *draft_tokens) + 1
        cache, draft_cache = SlotCache(batch, capacity), SlotCache(batch, capacity)
        calls = [(verify, (batch, n), _verify(target, cache, batch, n, context)) for n in verify_tokens]
        calls += [(draft, (batch, n), _draft(drafter, draft_cache, batch, n, context)) for n in draft_tokens]
        for turn in range(repeats + 1):
            for table, size, call in calls:
                started = time.perf_counter()
                call()
                if turn:
                    table.setdefault(size, []).append(time.perf_counter() - started)
    return Costs(_table("verify", verify), _table("draft", draft))


def _table(name: str, seconds: dict[tuple[int, int], list[float]]) -> CostTable:
    return CostTable(name, {size: statistics.median(values) for size, values in seconds.items()})


def _verify(target: Target, cache: SlotCache, batch: int, tokens: int, context: int) -> Callable[[], object]:
    slots = (context + torch.arange(tokens)).expand(batch, -1)
    ids = torch.randint(0, target.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))

    def call() -> object:
        cache.place(slots, context + tokens)
        last, _ = target.states(ids, slots, cache, causal_slot_mask(slots, context + tokens))
        return target.logits(last).argmax(-1)

    return call


def _draft(drafter: Eagle3Drafter, cache: SlotCache, batch: int, tokens: int, context: int) -> Callable[[], object]:
    slots = (context + torch.arange(tokens)).expand(batch, -1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, drafter.config.vocab_size, (batch, tokens), generator=generator)
    state = torch.randn(batch, tokens, drafter.config.hidden_size, generator=generator).to(drafter.fc.weight.dtype)

    def call() -> object:
        h = draft_extend(drafter, cache, state, ids, slots)
        return drafter.lm_head(drafter.norm(h[:, -1])).argmax(-1)

    return call
