"""Greedy speculative decoding with a chain of k drafted tokens, and KV caches for both models.

Of a row, the target has read x_0..x_{L-1}; x_L is known but not yet read. One round:

1. The drafter extends its cache by the slots whose states are new (slot t = target state a_t with token x_{t+1}), the
   last of which is slot L-1, and drafts k tokens from there on its own states.
2. The target reads x_L and the k drafts in one forward and says what it would have chosen after each.
3. Drafts are kept up to the first that differs; the target's own choice after them is the bonus token.

Greedy text is therefore the target's, whatever the drafter says; `accept decode` compares it with plain decoding all
the same. Drafted tokens past the end of a reply (after its end token, or past the limit) are proposed but cannot be
accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3lab.acceptance.counts import AcceptanceCounts, from_lengths
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import SlotCache, causal_slot_mask, grouped_attention


@dataclass(slots=True)
class Decoded:
    """One reply of speculative decoding.

    Attributes:
        tokens: the reply, end token included; the first comes from prefill and is nobody's draft.
        accepted: accepted drafts of every verify step, in order.
        drafts: the k proposed tokens of every verify step.
        ended: the target ended by itself.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    ended: bool = False

    def counts(self, name: str, k: int) -> AcceptanceCounts:
        """Counts of this prompt."""
        return from_lengths(self.accepted, k=k, prompt=name, generated=len(self.tokens))


@dataclass(slots=True)
class Clock:
    """Seconds spent per part of the loop."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rounds: int = 0


def draft_extend(
    drafter: Eagle3Drafter, cache: SlotCache, state: Tensor, ids: Tensor, positions: Tensor, rows: Tensor | None
) -> Tensor:
    """Run new slots through the drafter's layer.

    Args:
        state: [rows, q, H], fused target states or the drafter's own.
        ids: int64 [rows, q], the token each slot embeds.
        positions: int64 [rows, q], slot numbers.
        rows: rows of the cache that take part, None = all.

    Returns:
        pre-norm states [rows, q, H].
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    shape = ids.shape
    cos, sin = drafter.angles(positions.flatten())
    u, residual = layer.inputs(drafter.embed(ids).to(state.dtype).flatten(0, 1), state.flatten(0, 1))
    key, value = (x.unflatten(0, shape).transpose(1, 2) for x in attention.key_value(u, cos, sin))
    visible = int(positions.max()) + 1
    cache.place(positions, visible, rows)
    keys, values = cache.update(key, value, 0)
    query = attention.query(u, cos, sin).unflatten(0, shape).transpose(1, 2)
    mixed, _ = grouped_attention(layer, query, keys, values, causal_slot_mask(positions, visible), attention.scale)
    return layer.finish(residual, mixed.flatten(0, 1).flatten(1)).unflatten(0, shape)


class ChainDecoder:
    """Speculative decoding of a list of prompts, up to `batch` rows together.

    Args:
        target, drafter: must have the same width, vocabulary and points.
        k: drafted tokens a round.
    """

    def __init__(self, target: Target, drafter: Eagle3Drafter, k: int) -> None:
        if k < 1:
            raise AcceptanceError(f"k is {k}", rule="a chain has at least one drafted token")
        if drafter.config.vocab_size != target.vocab_size or drafter.config.target_hidden_size != target.hidden_size:
            raise AcceptanceError(
                f"drafter for H {drafter.config.target_hidden_size}, V {drafter.config.vocab_size}; target has "
                f"H {target.hidden_size}, V {target.vocab_size}",
                rule="a drafter serves the target it was made for",
            )
        self.target, self.drafter, self.k = target, drafter, k
        self.kept = drafter.kept_ids
        self.clock = Clock()

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        batch: int = 32,
        progress: Callable[[int], None] | None = None,
    ) -> list[Decoded]:
        """Decode every prompt greedily; results in the order of `prompts`. Rows of a batch finish together or idle."""
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        replies: list[Decoded | None] = [None] * len(prompts)
        done = 0
        for start in range(0, len(order), batch):
            members = order[start : start + batch]
            for index, reply in zip(members, self._batch([prompts[i] for i in members], max_new_tokens), strict=True):
                replies[index] = reply
                done += len(reply.tokens)
            if progress is not None:
                progress(done)
        return [reply for reply in replies if reply is not None]

    def _batch(self, prompts: list[list[int]], limit: int) -> list[Decoded]:
        rows, k = len(prompts), self.k
        lengths = torch.tensor([len(p) for p in prompts])
        capacity = int(lengths.max()) + limit + k + 2
        context = getattr(self.target.model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and capacity > context:
            raise AcceptanceError(
                f"prompt {int(lengths.max())} + {limit} new + {k} drafted tokens = {capacity}",
                rule=f"context is {context}",
                fix="lower max_new_tokens",
            )
        cache, draft_cache = SlotCache(rows, capacity), SlotCache(rows, capacity)
        clock = time.perf_counter()
        ids = torch.zeros(rows, int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        points = self.drafter.config.points
        last, states = self.target.prefill(cache, ids, torch.zeros(rows, dtype=torch.int64), points=points)
        current = self.target.logits(last[torch.arange(rows), lengths - 1]).argmax(-1)
        replies = [Decoded([token]) for token in current.tolist()]
        # slot t embeds x_{t+1}: the prompt moved by one, its last slot gets the first new token
        following = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        following[torch.arange(rows), lengths - 1] = current
        fresh, begin, count = torch.cat(states, -1), torch.zeros_like(lengths), lengths.clone()
        self.clock.prefill += time.perf_counter() - clock
        active = torch.tensor([r for r in range(rows) if not self._finished(replies[r], limit)], dtype=torch.int64)
        fresh, following, begin, count = fresh[active], following[active], begin[active], count[active]
        length, current = lengths[active], current[active]
        while len(active):
            clock = time.perf_counter()
            drafts = self._draft(draft_cache, fresh, following, begin, count, active if len(active) < rows else None)
            middle = time.perf_counter()
            fed = torch.cat([current[:, None], drafts], 1)
            last, states = self.target.prefill(
                cache, fed, length, active if len(active) < rows else None, points=points
            )
            choice = self.target.logits(last).argmax(-1)
            agreed = (choice[:, :k] == drafts).long().cumprod(1).sum(1)
            going = []
            for i, row in enumerate(active.tolist()):
                reply, number = replies[row], int(agreed[i])
                new = [*drafts[i, :number].tolist(), int(choice[i, number])]
                room = limit - len(reply.tokens)
                stop = next((j for j, token in enumerate(new) if token in self.target.eos_ids), None)
                kept = new[: min(room, len(new) if stop is None else stop + 1)]
                reply.tokens += kept
                reply.accepted.append(min(number, len(kept)))
                reply.drafts.append(drafts[i].tolist())
                if not self._finished(reply, limit):
                    going.append(i)
            keep = torch.tensor(going, dtype=torch.int64)
            begin, count = length[keep], agreed[keep] + 1
            fresh = torch.cat(states, -1)[keep]
            following = torch.cat([drafts, choice[:, -1:]], 1)[keep]  # token after fed slot j is draft j+1 ...
            bonus = choice[keep, agreed[keep]]
            following[torch.arange(len(keep)), agreed[keep]] = bonus  # ... and the bonus after the last kept one
            current, active, length = bonus, active[keep], length[keep] + count
            self.clock.draft += middle - clock
            self.clock.verify += time.perf_counter() - middle
            self.clock.rounds += 1
        return replies

    def _finished(self, reply: Decoded, limit: int) -> bool:
        reply.ended = reply.tokens[-1] in self.target.eos_ids
        return reply.ended or len(reply.tokens) >= limit

    def _draft(
        self, cache: SlotCache, fresh: Tensor, following: Tensor, begin: Tensor, count: Tensor, rows: Tensor | None
    ) -> Tensor:
        """int64 [rows, k] target ids. fresh [rows, q, P*H]: new states, `count` of them valid, first slot `begin`."""
        width = int(count.max())
        positions = begin[:, None] + torch.arange(width)
        state = self.drafter.fuse(fresh[:, :width].to(self.drafter.fc.weight.dtype))
        h = draft_extend(self.drafter, cache, state, following[:, :width], positions, rows)
        h = h[torch.arange(len(count)), count - 1][:, None]
        slot = (begin + count - 1)[:, None]
        drafts = []
        for step in range(self.k):
            normed = self.drafter.norm(h)
            token = self.kept[self.drafter.lm_head(normed[:, 0]).argmax(-1)]
            drafts.append(token)
            if step + 1 < self.k:
                slot = slot + 1
                h = draft_extend(self.drafter, cache, self.drafter.carry(h, normed), token[:, None], slot, rows)
        return torch.stack(drafts, 1)
