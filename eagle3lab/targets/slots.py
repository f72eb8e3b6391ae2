"""A key/value cache with one slot per row and per position, for batches whose rows stand at different lengths.

transformers' own caches grow all rows together. Speculative decoding accepts a different number of tokens in each row
and throws the rest away; here a token at position p of row b is written to slot p of row b, so a rejected token is
simply overwritten by the next one that comes to that position, and the attention mask never shows a slot that is
ahead of its query. `update` is called by transformers' attention layers like any cache of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ATTENTION = "eagle3lab_grouped"
"""Name under which `grouped_attention` is registered with transformers."""
FEW_QUERIES = 16
"""Up to so many queries of a key/value head, float32 on a CPU: two plain products are faster than the fused kernel."""
PREFILL_TOKENS = 1024
"""Tokens, padding counted, that one forward reads of new prompts: enough for a fast matrix product on a CPU."""


class SlotCache:
    """Keys and values of all layers, `[rows, kv_heads, capacity, head_dim]` each, allocated at first use.

    Args:
        rows: number of sequences B.
        capacity: number of positions a row can hold.
    """

    is_compileable = False

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._active: Tensor | None = None
        self._positions: Tensor | None = None
        self._visible = 0

    def place(self, positions: Tensor, visible: int, active: Tensor | None = None) -> None:
        """Say where the next forward writes.

        Args:
            positions: int64 [active rows, q], slot of every new token.
            visible: number of leading slots that attention reads (the largest position + 1).
            active: int64 [active rows], the rows that take part; None = all, in order (no copy of the cache).
        """
        self._positions, self._visible, self._active = positions, visible, active

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[rows, kv_heads, q, head_dim]`.

        Returns:
            those to attend to, `[rows, kv_heads, visible, head_dim]` each.
        """
        if layer_idx == len(self.keys):
            for layers, new in ((self.keys, keys), (self.values, values)):
                shape = (self.rows, new.shape[1], self.capacity, new.shape[-1])
                layers.append(torch.zeros(shape, dtype=new.dtype, device=new.device))
        rows = self._active if self._active is not None else torch.arange(self.rows, device=keys.device)
        seen: list[Tensor] = []
        for stored, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            stored[rows[:, None], :, self._positions] = new.transpose(1, 2)
            here = slice(None) if self._active is None else self._active
            seen.append(stored[here, :, : self._visible])
        return seen[0], seen[1]

    @torch.inference_mode()  # as the tensors that it writes to
    def keep(self, rows: Tensor, used: int) -> None:
        """Leave finished rows out for good; cheapest where most rows stay in place (`closed_up`).

        Args:
            rows: int64 [n], the old row that each of the n rows from now on is.
            used: leading slots that hold text in any of them.
        """
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        self.rows = len(rows)
        for stored in (self.keys, self.values):
            for layer, whole in enumerate(stored):
                whole[moved, :, :used] = whole[rows[moved], :, :used]
                stored[layer] = whole[: self.rows]

    @torch.inference_mode()
    def share(self, count: int) -> None:
        """Copy the first `count` slots of row 0 to every row: a text that all of them begin with is read once."""
        for stored in (*self.keys, *self.values):
            stored[1:, :, :count] = stored[:1, :, :count]

    def move(self, rows: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy slots within rows in every layer (a tree's accepted branch becomes the row's text).

        Args:
            rows: int64 [m]; source, destination: int64 [m, q] slots.
        """
        for stored in (*self.keys, *self.values):
            stored[rows[:, None], :, destination] = stored[rows[:, None], :, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of visible slots: what transformers asks a cache for."""
        return self._visible

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """(visible slots, offset 0); only asked for when no 4-d mask is given."""
        return self._visible, 0


def closed_up(going: Sequence[bool]) -> Tensor:
    """int64 [n], the n rows that go on, each in its place or, from the end, in the gap of one that does not."""
    rows = [row for row, on in enumerate(going) if on]
    tail = [row for row in rows if row >= len(rows)]
    return torch.tensor([row if going[row] else tail.pop() for row in range(len(rows))], dtype=torch.int64)


def prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all prompts share, one less than the shortest at most: 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    # In the order of a dictionary: what the first and the last share, all share.
    first, last = min(prompts, key=tuple), max(prompts, key=tuple)
    most = min(map(len, prompts)) - 1
    return next((place for place in range(most) if first[place] != last[place]), most)


def prefill_groups(lengths: Sequence[int], tokens: int = PREFILL_TOKENS) -> list[range]:
    """Neighbouring prompts that are read together: as many as fit into `tokens` when padded to the longest of them."""
    groups, start, longest = [], 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place > start and (place + 1 - start) * longest > tokens:
            groups.append(range(start, place))
            start, longest = place, length
    return [*groups, range(start, len(lengths))] if lengths else []


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """int64 [rows, longest], zeros behind the shorter texts."""
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    return ids


def causal_slot_mask(positions: Tensor, visible: int) -> Tensor:
    """bool [rows, 1, q, visible]: a query at position p sees the slots 0..p of its row."""
    slots = torch.arange(visible, device=positions.device)
    return (slots[None, None, :] <= positions[:, :, None])[:, None]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention for grouped heads that never copies keys or values.

    The query heads of one key/value head are laid along the query axis: `[B, heads, q, d]` becomes
    `[B, kv_heads, group * q, d]`. With few queries and a long cache the copy that `repeat_kv` makes would cost more
    than the attention itself.
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if attention_mask is None:  # a plain prefill without cache: the fused causal kernel
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=group > 1
        )
        return output.transpose(1, 2).contiguous(), None
    packed = query.reshape(batch, kv_heads, group * length, dim)
    if group * length <= FEW_QUERIES and query.dtype == torch.float32 and not query.is_cuda:
        output = _few_queries(packed, key, value, attention_mask, dim**-0.5 if scaling is None else scaling)
    else:
        mask = attention_mask.expand(batch, 1, length, key.shape[2]).repeat(1, 1, group, 1)
        output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.view(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None


def _few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention as two batched products: the fused CPU kernel works on blocks of queries that would be mostly empty.

    Args:
        query: [B, kv_heads, group * q, d]. key, value: [B, kv_heads, n, d]. mask: bool [B or 1, 1, q, n].

    Returns:
        [B, kv_heads, group * q, d of the value].
    """
    batch, kv_heads, rows, _ = query.shape
    length = mask.shape[-2]
    scores = (query * scale).flatten(0, 1) @ key.flatten(0, 1).transpose(1, 2)
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    scores.view(batch, kv_heads * rows // length, length, -1).add_(hidden)
    return (scores.softmax(-1) @ value.flatten(0, 1)).view(batch, kv_heads, rows, -1)
