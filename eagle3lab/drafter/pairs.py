"""Attention that reads pairs: its first projections take u = (embedding half, state half), [rows, 2H].

A product with u is the sum of a product with each half, and the embedding half is the same for a token wherever it is
embedded. Training-time test embeds a token at up to K slots, so `halves` lets it project every token once and add the
state half's product at each step; decoding embeds a token once and projects u whole (`query`, `key_value`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PairAttention(nn.Module):
    """What `eagle3lab.drafter.model.Attention` and `eagle3lab.drafter.mla.LatentAttention` share.

    Attributes:
        QUERY, KEY_VALUE: names of the projections that read u, in the order in which their outputs lie side by side.
    """

    QUERY: tuple[str, ...]
    KEY_VALUE: tuple[str, ...]

    def make_query(self, read: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [rows, heads, d] of what `QUERY` read, [rows, out]; cos and sin [rows, d turned]."""
        raise NotImplementedError

    def make_key_value(self, read: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys [rows, kv_heads, d] and plain values [rows, kv_heads, v] of what `KEY_VALUE` read."""
        raise NotImplementedError

    def query(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [rows, heads, d] of inputs u [rows, 2H]."""
        return self.make_query(self._read(self.QUERY, u), cos, sin)

    def key_value(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys [rows, kv_heads, d] and plain values [rows, kv_heads, v] of inputs u [rows, 2H]."""
        return self.make_key_value(self._read(self.KEY_VALUE, u), cos, sin)

    def halves(self, names: Sequence[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The weights of these projections for the embedding half and for the state half, each [out, H] in `dtype`."""
        weights = [getattr(self, name).weight for name in names]
        embedding, state = (torch.cat(part).to(dtype) for part in zip(*(w.chunk(2, 1) for w in weights), strict=True))
        return embedding, state

    def _read(self, names: Sequence[str], u: Tensor) -> Tensor:
        parts = [getattr(self, name)(u) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
