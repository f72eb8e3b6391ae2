"""Speculative decoding with a chain of k drafted tokens, and KV caches for both models.

Of a row, the target has read x_0..x_{L-1}; x_L is known but not yet read. One round:

1. The drafter, which stands at slot L-1, drafts k tokens from there on its own states.
2. The target reads x_L and the k drafts in one forward and says what it would have chosen after each.
3. Drafts are kept up to the first that the rule refuses (greedy: that differs); the token after them is the bonus.
4. The drafter extends its cache by the slots whose states are new (slot t = target state a_t with token x_{t+1}).

Greedy text is therefore the target's, whatever the drafter says; `accept decode` compares it with plain decoding all
the same. At a temperature the distribution of the text is the target's (`sampling.py`). `TreeDecoder` replaces steps 1
and 2. A row whose reply is complete leaves the batch at once. Drafted tokens past the end of a reply (after its end
token, or past the limit) are proposed but cannot be accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eagle3lab.acceptance.counts import AcceptanceCounts, from_lengths
from eagle3lab.acceptance.sampling import Greedy, Rule
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target
from eagle3lab.targets.slots import (
    SlotCache,
    causal_slot_mask,
    closed_up,
    grouped_attention,
    padded,
    prefill_groups,
    prefix_length,
)

MANY_ROWS = 32
"""From so many rows on the head is computed place by place: below, reading its weights costs more than it saves."""


@dataclass(slots=True)
class Decoded:
    """One reply of speculative decoding.

    Attributes:
        tokens: the reply, end token included; the first comes from prefill and is nobody's draft.
        accepted: accepted drafts of every verify step, in order.
        drafts: the proposed tokens of every verify step (k of a chain, the nodes of a tree).
        ended: the target ended by itself.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    ended: bool = False

    def counts(self, name: str, k: int) -> AcceptanceCounts:
        """Counts of this prompt; k is the greatest number of drafts a step can keep."""
        counts = from_lengths(self.accepted, k=k, prompt=name, generated=len(self.tokens))
        return replace(counts, proposed=sum(len(nodes) for nodes in self.drafts))


@dataclass(frozen=True, slots=True)
class Round:
    """What one verify step found. R rows, D = greatest number of drafts a row can keep, N drafted tokens.

    Attributes:
        path: int64 [R, D], drafts from the current token on; the first `agreed` of a row are kept.
        agreed: int64 [R]. bonus: int64 [R], the token after the kept ones.
        states: [R, D+1, P*H], target states of the current token and of the path.
        proposed: int64 [R, N], every token that was checked.
    """

    path: Tensor
    agreed: Tensor
    bonus: Tensor
    states: Tensor
    proposed: Tensor


@dataclass(slots=True)
class Clock:
    """Seconds spent per part of the loop; prefill is that of both models."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rounds: int = 0


def draft_extend(
    drafter: Eagle3Drafter,
    cache: SlotCache,
    state: Tensor,
    ids: Tensor,
    slots: Tensor,
    rows: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Run new slots through the drafter's layer.

    Args:
        state: [rows, q, H], fused target states or the drafter's own.
        ids: int64 [rows, q], the token each slot embeds.
        slots: int64 [rows, q], where keys and values go.
        rows: rows of the cache that take part, None = all.
        positions: int64 [rows, q] for the rotary embedding; None = the slots (a chain).
        mask: bool [rows, 1, q, last slot + 1]; None = every slot up to the query's own (a chain).

    Returns:
        pre-norm states [rows, q, H].
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    shape = ids.shape
    cos, sin = drafter.angles((slots if positions is None else positions).flatten())
    u, residual = layer.inputs(drafter.embed(ids).to(state.dtype).flatten(0, 1), state.flatten(0, 1))
    key, value = (x.unflatten(0, shape).transpose(1, 2) for x in attention.key_value(u, cos, sin))
    visible = int(slots.max()) + 1
    cache.place(slots, visible, rows)
    mask = causal_slot_mask(slots, visible) if mask is None else mask
    keys, values = cache.update(key, value, 0)
    query = attention.query(u, cos, sin).unflatten(0, shape).transpose(1, 2)
    mixed, _ = grouped_attention(layer, query, keys, values, mask, attention.scale)
    return layer.finish(residual, mixed.flatten(0, 1).flatten(1)).unflatten(0, shape)


class ChainDecoder:
    """Speculative decoding of a list of prompts, up to `batch` rows together.

    Args:
        target, drafter: must have the same width, vocabulary and points.
        k: drafted tokens a round.
        rule: how drafts are made and kept; None = greedy.

    Raises:
        AcceptanceError: the drafter was made for another target, or k is below 1.
    """

    def __init__(self, target: Target, drafter: Eagle3Drafter, k: int, rule: Rule | None = None) -> None:
        if k < 1:
            raise AcceptanceError(f"k is {k}", rule="a chain has at least one drafted token")
        if drafter.config.vocab_size != target.vocab_size or drafter.config.target_hidden_size != target.hidden_size:
            raise AcceptanceError(
                f"drafter for H {drafter.config.target_hidden_size}, V {drafter.config.vocab_size}; target has "
                f"H {target.hidden_size}, V {target.vocab_size}",
                rule="a drafter serves the target it was made for",
            )
        self.target, self.drafter, self.k = target, drafter, k
        self.rule: Rule = rule or Greedy()
        self.kept = drafter.kept_ids
        self.clock = Clock()

    @property
    def spare(self) -> int:
        """Slots that a round may write beyond the text."""
        return self.k + 2

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        batch: int = 32,
        progress: Callable[[int], None] | None = None,
    ) -> list[Decoded]:
        """Decode every prompt; results in the order of `prompts`. The next batch starts when the last row is complete.

        A reply also ends where prompt and reply fill the target's context.

        Raises:
            AcceptanceError: no new tokens, or no rows, are asked for.
            UsageError: an empty prompt, or one that leaves no room in the context.
        """
        if max_new_tokens < 1 or batch < 1:
            raise AcceptanceError(f"max_new_tokens {max_new_tokens}, batch {batch}", rule="both are 1 or more")
        self.target.limits(prompts, max_new_tokens)  # refuses before anything is decoded
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
        rows, stops = len(prompts), set(self.target.eos_ids)
        length = torch.tensor([len(p) for p in prompts])
        limits = self.target.limits(prompts, limit)
        capacity = int(length.max()) + limit + self.spare
        cache, draft_cache = SlotCache(rows, capacity), SlotCache(rows, capacity)
        clock = time.perf_counter()
        current, h = self._prefill(cache, draft_cache, prompts)
        self.clock.prefill += time.perf_counter() - clock
        replies = [Decoded([token], ended=token in stops) for token in current.tolist()]
        owner = list(range(rows))

        def close_up() -> Tensor:
            """Leave complete replies out of both caches and of `owner`; the rows that stay, as they are now."""
            going = [not replies[r].ended and len(replies[r].tokens) < limits[r] for r in owner]
            kept = self._closed_up(going)
            if not all(going):
                for one in (cache, draft_cache):
                    one.keep(kept, int(length.max()))
                owner[:] = [owner[row] for row in kept.tolist()]
            return kept

        kept = close_up()
        h, current, length = h[kept], current[kept], length[kept]
        while owner:
            found = self._round(cache, draft_cache, h, current, length)
            for row, number, path, bonus, proposed in zip(
                owner, found.agreed.tolist(), found.path.tolist(), found.bonus.tolist(), found.proposed.tolist(),
                strict=True,
            ):  # fmt: skip
                reply = replies[row]
                new = [*path[:number], bonus][: limits[row] - len(reply.tokens)]
                stop = next((j for j, token in enumerate(new) if token in stops), None)
                reply.ended = stop is not None
                new = new if stop is None else new[: stop + 1]
                reply.tokens += new
                reply.accepted.append(min(number, len(new)))  # what the end of the reply cuts off is not accepted
                reply.drafts.append(proposed)
            length = length + found.agreed + 1
            kept = close_up()
            count, current, length = found.agreed[kept] + 1, found.bonus[kept], length[kept]
            following = torch.cat([found.path, found.path[:, :1]], 1)[kept]  # after the current token comes draft 1 ...
            following[torch.arange(len(kept)), count - 1] = current  # ... and after the last kept one the bonus
            if owner:
                clock = time.perf_counter()
                h = self._extend(draft_cache, found.states[kept], following, length - count, count, None)
                self.clock.draft += time.perf_counter() - clock
            self.clock.rounds += 1
        return replies

    def _closed_up(self, going: list[bool]) -> Tensor:
        """Rows that go on, int64 [n]."""
        return closed_up(going)

    def _prefill(self, cache: SlotCache, draft_cache: SlotCache, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Read all prompts: the first new token of each int64 [R], and the drafter's state [R, 1, H] there.

        What all prompts begin with (a system prompt) the target reads once.
        """
        shared, first = prefix_length(prompts), torch.zeros(1, dtype=torch.int64)
        prefix = None
        if shared:
            _, prefix = self._read(cache, torch.tensor([prompts[0][:shared]]), first, first)
            cache.share(shared)
        tokens, states = [], []
        for group in prefill_groups([len(prompt) for prompt in prompts]):
            rows, ids = torch.tensor(group), padded([prompts[i] for i in group])
            last, fresh = self._read(cache, ids[:, shared:], torch.full_like(rows, shared), rows)
            if prefix is not None:
                fresh = torch.cat([prefix.expand(len(group), -1, -1), fresh], 1)
            ends = torch.tensor([len(prompts[i]) for i in group]) - 1
            place = torch.arange(len(group))
            tokens.append(self.rule.choose(self.target.logits(last[place, ends - shared])))
            # slot t embeds x_{t+1}: the prompt moved by one, its last slot gets the first new token
            following = torch.cat([ids[:, 1:], ids[:, :1]], 1)
            following[place, ends] = tokens[-1]
            states.append(self._extend(draft_cache, fresh, following, torch.zeros_like(rows), ends + 1, rows))
        return torch.cat(tokens), torch.cat(states)

    def _read(
        self,
        cache: SlotCache,
        ids: Tensor,
        start: Tensor,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Target forward over ids [R, q] in slots `start`...: last state [R, q, H] and fc's input [R, q, P*H].

        Args:
            rows: rows of the cache, None = all.
            positions: int64 [R, q]; None = the slots. mask: bool [R, 1, q, last slot + 1]; None = causal by slot.
        """
        slots = start[:, None] + torch.arange(ids.shape[1])
        visible = int(slots.max()) + 1
        cache.place(slots, visible, rows)
        positions = slots if positions is None else positions
        context = self.target.context
        if context is not None:  # a draft past the context can never be kept, but must not reach the embedding
            positions = positions.clamp(max=context - 1)
        mask = causal_slot_mask(slots, visible) if mask is None else mask
        last, states = self.target.states(ids, positions, cache, mask, self.drafter.config.points)
        return last, torch.cat(states, -1)

    def _round(self, cache: SlotCache, draft_cache: SlotCache, h: Tensor, current: Tensor, length: Tensor) -> Round:
        """Draft and verify once.

        Args:
            h: [R, 1, H], the drafter's state at slot length - 1.
            current: int64 [R], known token that the target has not read; it stands at position `length` int64 [R].
        """
        clock = time.perf_counter()
        drafts, q = self._draft(draft_cache, h, length)
        middle = time.perf_counter()
        last, states = self._read(cache, torch.cat([current[:, None], drafts], 1), length)
        if self.rule.by_place and len(drafts) >= MANY_ROWS:
            agreed, bonus = self._judge_by_place(last, drafts)
        else:
            agreed, bonus = self.rule.verify(self.target.logits(last), drafts, self.kept, q)
        self.clock.draft += middle - clock
        self.clock.verify += time.perf_counter() - middle
        return Round(drafts, agreed, bonus, states, drafts)

    def _judge_by_place(self, last: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """As `Rule.verify`, but the head reads a place only in the rows whose drafts were kept up to it: most rows
        refuse the first, and the head is a fifth of a small target.

        Args:
            last: [R, k+1, H], the target's last states. drafts: int64 [R, k].
        """
        going = torch.arange(len(drafts), device=drafts.device)
        agreed, bonus = torch.zeros_like(going), torch.zeros_like(going)
        for place in range(self.k + 1):
            choice = self.rule.choose(self.target.logits(last[going, place]))
            bonus[going] = choice
            if place < self.k:
                going = going[choice == drafts[going, place]]
                agreed[going] += 1
            if not len(going):
                break
        return agreed, bonus

    def _extend(
        self, cache: SlotCache, fresh: Tensor, following: Tensor, begin: Tensor, count: Tensor, rows: Tensor | None
    ) -> Tensor:
        """Bring the drafter's cache up to the text; its state [R, 1, H] at the last valid slot."""
        width = int(count.max())
        slots = begin[:, None] + torch.arange(width)
        state = self.drafter.fuse(fresh[:, :width].to(self.drafter.fc.weight.dtype))
        h = draft_extend(self.drafter, cache, state, following[:, :width], slots, rows)
        return h[torch.arange(len(count)), count - 1][:, None]

    def _draft(self, cache: SlotCache, h: Tensor, slot: Tensor) -> tuple[Tensor, Tensor | None]:
        """k drafts from state h [R, 1, H]; `slot` int64 [R] is the first free one. Target ids [R, k], and q."""
        drafts, weights = [], []
        for step in range(self.k):
            normed = self.drafter.norm(h)
            choice, q = self.rule.draft(self.drafter.lm_head(normed[:, 0]))
            drafts.append(self.kept[choice])
            weights.append(q)
            if step + 1 < self.k:
                state, token = self.drafter.carry(h, normed), drafts[-1][:, None]
                h = draft_extend(self.drafter, cache, state, token, (slot + step)[:, None])
        known = [q for q in weights if q is not None]
        return torch.stack(drafts, 1), torch.stack(known, 1) if known else None
