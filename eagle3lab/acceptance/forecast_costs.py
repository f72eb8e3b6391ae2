"""Costs of single forwards, measured on this machine: what a forecast and a speed ceiling are made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
    extend_tokens: Sequence[int],
    context: int = 256,
    repeats: int = REPEATS,
) -> Costs:
    """Median seconds of the forwards that decoding is made of, each with the head's argmax; see `Costs`.

    Args:
        batches: rows together. verify_tokens, draft_tokens, extend_tokens: tokens a row.
        context: slots of text in the cache before the new tokens.
        repeats: timed rounds over all sizes, one after the other, so that a busy moment falls on all of them; one more
            round before them is not timed.
    """
    tables: dict[str, dict[tuple[int, int], list[float]]] = {}
    for batch in batches:
        capacity = context + max(*verify_tokens, *draft_tokens, *extend_tokens) + 1
        cache, draft_cache = SlotCache(batch, capacity), SlotCache(batch, capacity)
        points = drafter.config.points
        calls = [("plain", 1, _target(target, cache, batch, 1, context, None))]
        calls += [("verify", n, _target(target, cache, batch, n, context, points)) for n in verify_tokens]
        calls += [("draft", n, _draft(drafter, draft_cache, batch, n, context)) for n in draft_tokens]
        calls += [("extend", n, _extend(drafter, draft_cache, batch, n, context)) for n in extend_tokens]
        for turn in range(repeats + 1):
            for name, tokens, call in calls:
                started = time.perf_counter()
                call()
                if turn:
                    seconds = time.perf_counter() - started
                    tables.setdefault(name, {}).setdefault((batch, tokens), []).append(seconds)
    return Costs(**{name: _table(name, seconds) for name, seconds in tables.items()})


def _table(name: str, seconds: dict[tuple[int, int], list[float]]) -> CostTable:
    return CostTable(name, {size: statistics.median(values) for size, values in seconds.items()})


def _target(
    target: Target, cache: SlotCache, batch: int, tokens: int, context: int, points: list[int] | None
) -> Callable[[], object]:
    slots = (context + torch.arange(tokens)).expand(batch, -1)
    ids = torch.randint(0, target.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))

    def call() -> object:
        cache.place(slots, context + tokens)
        last, states = target.states(ids, slots, cache, causal_slot_mask(slots, context + tokens), points)
        return target.logits(last).argmax(-1), torch.cat(states, -1) if states else None

    return call


def _draft(drafter: Eagle3Drafter, cache: SlotCache, batch: int, tokens: int, context: int) -> Callable[[], object]:
    slots, ids, state = _inputs(drafter, batch, tokens, context, drafter.config.hidden_size)

    def call() -> object:
        return drafter.lm_head(drafter.norm(draft_extend(drafter, cache, state, ids, slots))).argmax(-1)

    return call


def _extend(drafter: Eagle3Drafter, cache: SlotCache, batch: int, tokens: int, context: int) -> Callable[[], object]:
    slots, ids, states = _inputs(drafter, batch, tokens, context, drafter.config.fc_in)

    def call() -> object:
        h = draft_extend(drafter, cache, drafter.fuse(states), ids, slots)
        return drafter.lm_head(drafter.norm(h[:, -1])).argmax(-1)

    return call


def _inputs(drafter: Eagle3Drafter, batch: int, tokens: int, context: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = (context + torch.arange(tokens)).expand(batch, -1)
    ids = torch.randint(0, drafter.config.vocab_size, (batch, tokens), generator=generator)
    state = torch.randn(batch, tokens, width, generator=generator).to(drafter.fc.weight.dtype)
    return slots, ids, state
