"""The EAGLE-3 drafter: fc, one decoder layer over (embedding, state) pairs, a head over the draft vocabulary.

Slot t holds the target's states a_t and the *next* token x_{t+1}; at TTT step k it embeds x_{t+k+1} and predicts
x_{t+k+2}. fc is applied once, before the step loop; step k+1 takes the drafter's own pre-norm state of step k.

    a_t [P*Ht] --fc--> g_t [H] = h_0
    u = cat(input_layernorm(embed(x_{t+k+1})), hidden_norm(h_k))      [2H], embedding half first
    h = h_k + o(attention(q(u), k(u), v(u)))                          residual is the un-normed h_k
    h_{k+1} = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h_{k+1}))                                   [Vd]

Parameter names are those of the SGLang / SpecForge checkpoint. Source: EAGLE-3 (arXiv 2503.01840) and the trainers
named in docs/sources.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.drafter.attention import ttt_attention
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.mla import LatentAttention, latent_sizes
from eagle3lab.drafter.norm import RMSNorm
from eagle3lab.drafter.packed import Packed, rows_ahead
from eagle3lab.drafter.pairs import PairAttention
from eagle3lab.drafter.rope import rotary, rotate


class Attention(PairAttention):
    """Projections of the decoder layer: q, k, v read 2H, o writes H. No bias."""

    QUERY, KEY_VALUE = ("q_proj",), ("k_proj", "v_proj")

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.scale = self.head_dim**-0.5

    def make_query(self, read: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [rows, heads, d] of q_proj's output [rows, heads*d]."""
        return rotate(read.unflatten(-1, (self.heads, self.head_dim)), cos, sin)

    def make_key_value(self, read: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [rows, kv_heads, d] of the outputs of k_proj and v_proj side by side."""
        key, value = read.unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        return rotate(key, cos, sin), value


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). No bias."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """States [rows, H] to [rows, H]."""
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))


class _Gated(torch.autograd.Function):
    """silu(gate) * up, with silu(gate) made again in the backward pass instead of kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        active = nn.functional.silu(gate)
        return torch.ops.aten.silu_backward(grad * up, gate), active.mul_(grad)


class MidLayer(nn.Module):
    """The one decoder layer, named `midlayer` as in the checkpoints."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = LatentAttention(config) if config.architecture == "mla" else Attention(config)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def inputs(self, embedded: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """u [rows, 2H], embedding half first, and the residual [rows, H]."""
        normed, residual = self.state_input(h)
        return torch.cat([self.input_layernorm(embedded), normed], -1), residual

    def state_input(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The state half of u and the residual, both [rows, H]."""
        normed = self.hidden_norm(h)
        return normed, normed if self.norm_before_residual else h

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual and MLP: attention output [rows, heads*d] -> state [rows, H]."""
        h = residual + self.self_attn.o_proj(mixed)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Drafter(nn.Module):
    """An EAGLE-3 drafter with a Llama-class layer or, for `architecture` mla, latent attention in it.

    Args:
        config: sizes and flags.
        embedding: the target's embedding weight [V, H]; frozen and not part of the state dict, as in the engines.
        d2t: int64 [Vd] offsets, target id = draft id + d2t[draft id]; None when Vd = V.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    inverse_frequency: Tensor

    def __init__(self, config: DraftConfig, embedding: Tensor, d2t: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fc_in, size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.points)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.fc_in, eps)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if d2t is None:
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", d2t)
        kept = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept[d2t + torch.arange(len(d2t))] = True
        self.register_buffer("t2d", kept)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        turned = config.head_dim if config.architecture == "llama" else latent_sizes(config)[3]
        frequency, self.rotary_factor = rotary(turned, config.rope_theta, config.rope_scaling)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    @property
    def kept_ids(self) -> Tensor:
        """int64 [Vd], target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Draft id of target ids, -1 where a token is out of the draft vocabulary. Any shape."""
        lookup = torch.full((self.config.vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
        lookup[self.kept_ids] = torch.arange(len(self.d2t), device=target_ids.device)
        return lookup[target_ids]

    def fuse(self, aux: Tensor) -> Tensor:
        """fc with the norms before it: [N, P*Ht] -> g [N, H]. With both norms, the wide one comes first, as in SGLang
        0.5.23, vLLM 0.32.0 and speculators."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            aux = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, aux.chunk(len(self.fc_norm), -1), strict=True)], -1
            )
        return self.fc(aux)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the target's embedding."""
        return nn.functional.embedding(ids, self.embedding)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, d] of rotary positions [rows], in half-split layout."""
        phase = positions.float()[:, None] * self.inverse_frequency
        phase = torch.cat([phase, phase], -1)
        return phase.cos() * self.rotary_factor, phase.sin() * self.rotary_factor

    def carry(self, h: Tensor, normed: Tensor) -> Tensor:
        """What the next step receives as its state: pre-norm (EAGLE-3) or post-norm (`norm_output`)."""
        return normed if self.config.norm_output else h

    def forward(self, batch: Packed, steps: int, attention: Callable[..., Tensor] = ttt_attention) -> list[Tensor]:
        """Training-time test over a packed batch.

        Args:
            batch: N tokens with M active slots.
            steps: K.
            attention: `ttt_attention` or `reference_attention`.

        Returns:
            K tensors [M, H]: norm(h) of every step at the active slots, ready for `lm_head`.
        """
        dtype = self.fc.weight.dtype if not torch.is_autocast_enabled(batch.aux.device.type) else None
        aux = batch.aux if dtype is None else batch.aux.to(dtype)
        layer, active, places = self.midlayer, batch.active, batch.positions()
        read: PairAttention = layer.self_attn
        state = self.fuse(aux)
        (query_embedded, query_state), (pair_embedded, pair_state) = (
            read.halves(names, state.dtype) for names in (read.QUERY, read.KEY_VALUE)
        )
        # The embedding half's products, of every slot's next token: row r + k holds those of row r at step k. A
        # sample's last slot embeds token 0, and so does every slot whose token at step k lies past its end.
        embedded = layer.input_layernorm(self.embed(batch.shifted(batch.input_ids, 1)).to(state.dtype))
        query_read = nn.functional.linear(embedded[active], query_embedded)
        pair_read = nn.functional.linear(embedded, pair_embedded)
        outputs: list[Tensor] = []
        later: list[tuple[Tensor, Tensor]] = []
        key = value = None
        for step in range(steps):
            normed, residual = layer.state_input(state)
            cos, sin = self.angles(places + step)
            if step == 0:
                key, value = read.make_key_value(torch.addmm(pair_read, normed, pair_state.T), cos, sin)
                normed, residual, pair_read = (x[active] for x in (normed, residual, pair_read))
                places, cos, sin = (x[active] for x in (places, cos, sin))
            else:
                mine = torch.addmm(rows_ahead(pair_read, batch.segments, step), normed, pair_state.T)
                later.append(read.make_key_value(mine, cos, sin))
            query = read.make_query(
                torch.addmm(rows_ahead(query_read, batch.segments, step), normed, query_state.T), cos, sin
            )
            mixed = attention(query, key, value, later, batch.segments, layer.self_attn.scale)
            state = layer.finish(residual, mixed.flatten(1))
            outputs.append(self.norm(state))
            state = self.carry(state, outputs[-1])
        return outputs


def kept_to_d2t(kept: Sequence[int] | Tensor) -> Tensor:
    """Offsets of an ascending list of kept target ids: d2t[i] = kept[i] - i."""
    ids = torch.as_tensor(kept, dtype=torch.int64)
    return ids - torch.arange(len(ids))
