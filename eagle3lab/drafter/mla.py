"""Latent attention of the MLA drafter (`Eagle3DeepseekV2ForCausalLM`), the one that Kimi drafters use.

    q = q_b(norm(q_a(u)))                               [heads, nope + rope]
    c, r = split(kv_a(u))                               [kv_lora_rank], [rope]: r is one key part for all heads
    k, v = split(kv_b(norm(c)))                         [heads, nope], [heads, v]
    scores = (q_nope . k + rope(q_rope) . rope(r)) * scale

Only the rope part is rotated, in neighbouring pairs. u is [rows, 2H] as in the Llama drafter; everything around the
attention (fc, norms, residual, MLP, head) is the same, so `Eagle3Drafter` runs both. Keys are nope + rope wide and
values v wide. Engines keep c and r in their cache and fold kv_b into q and o; the products are the same.
Source: DeepSeek-V2 (arXiv 2405.04434); SGLang 0.5.23 models/kimi_k25_eagle3.py, TorchSpec 6dda2bf for names and order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle3lab.core.errors import CheckpointError
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.norm import RMSNorm
from eagle3lab.drafter.pairs import PairAttention
from eagle3lab.drafter.rope import rotate_pairs, softmax_factor

SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_sizes(config: DraftConfig) -> tuple[int, int, int, int, int]:
    """`SIZES` of an MLA drafter; `CheckpointError` names what is missing."""
    sizes = config.mla or {}
    missing = [name for name in SIZES if sizes.get(name, 0) <= 0]
    if missing:
        raise CheckpointError(
            f"an MLA drafter without {', '.join(missing)}", rule="SGLang needs all of " + ", ".join(SIZES)
        )
    q_rank, kv_rank, nope, rope, value = (sizes[name] for name in SIZES)
    return q_rank, kv_rank, nope, rope, value


class LatentAttention(PairAttention):
    """Projections of the MLA drafter's layer; the same methods as `eagle3lab.drafter.model.Attention`."""

    QUERY, KEY_VALUE = ("q_a_proj",), ("kv_a_proj_with_mqa",)

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        q_rank, kv_rank, self.nope, self.rope, self.value_dim = latent_sizes(config)
        both, eps = 2 * config.hidden_size, config.rms_norm_eps
        self.heads = self.kv_heads = config.num_attention_heads
        self.head_dim = self.nope + self.rope
        self.kv_rank = kv_rank
        self.q_a_proj = nn.Linear(both, q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(q_rank, eps)
        self.q_b_proj = nn.Linear(q_rank, self.heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(both, kv_rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps)
        self.kv_b_proj = nn.Linear(kv_rank, self.heads * (self.nope + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, config.hidden_size, bias=False)
        self.scale = self.head_dim**-0.5 * softmax_factor(config.rope_scaling)

    def make_query(self, read: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries [rows, heads, nope + rope] of q_a_proj's output [rows, q_rank]; the rope part is rotated."""
        q = self.q_b_proj(self.q_a_layernorm(read)).unflatten(-1, (self.heads, self.head_dim))
        plain, turned = q.split([self.nope, self.rope], -1)
        return torch.cat([plain, rotate_pairs(turned, cos, sin)], -1)

    def make_key_value(self, read: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [rows, heads, nope + rope] and values [rows, heads, v] of kv_a_proj_with_mqa's output."""
        latent, shared = read.split([self.kv_rank, self.rope], -1)
        wide = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, self.nope + self.value_dim))
        plain, value = wide.split([self.nope, self.value_dim], -1)
        turned = rotate_pairs(shared[:, None], cos, sin).expand(-1, self.heads, -1)
        return torch.cat([plain, turned], -1), value
