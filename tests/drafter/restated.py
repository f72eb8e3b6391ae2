"""The drafter of the papers, written again slot by slot in float64: no packing, no merged softmax, no modules.

`wrong` names one deliberate mistake; the tests require each to be noticed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3lab.drafter.config import DraftConfig

EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, position: int, theta: float, *, pairs: bool, factor: float = 1.0) -> Tensor:
    """Rotate the last axis by complex numbers: neighbours (0,1), (2,3) when `pairs`, else (i, i + d/2)."""
    d = x.shape[-1]
    angle = position * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    re, im = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : d // 2], x[..., d // 2 :])
    z = torch.complex(re, im) * torch.polar(torch.full_like(angle, factor), angle)
    return torch.stack([z.real, z.imag], -1).flatten(-2) if pairs else torch.cat([z.real, z.imag], -1)


def fused(w: dict[str, Tensor], c: DraftConfig, aux: Tensor, wrong: str = "") -> Tensor:
    def wide(a: Tensor) -> Tensor:
        return normed(a, w["input_norm.weight"]) if c.norm_before_fc and wrong != "no input_norm" else a

    def narrow(a: Tensor) -> Tensor:
        if not c.fc_norm or wrong == "no fc_norm":
            return a
        order = (2, 0, 1) if wrong == "fc_norm of another point" else (0, 1, 2)
        parts = [normed(p, w[f"fc_norm.{i}.weight"]) for p, i in zip(a.chunk(3, -1), order, strict=True)]
        return torch.cat(parts, -1)

    a = wide(narrow(aux)) if wrong == "narrow norm first" else narrow(wide(aux))
    return a @ w["fc.weight"].T


def llama_qkv(w: dict[str, Tensor], c: DraftConfig, u: Tensor, place: int, wrong: str) -> tuple[Tensor, Tensor, Tensor]:
    """q [heads, d], k and v [heads, d] (repeated for grouped heads) of one slot."""
    q = (w["midlayer.self_attn.q_proj.weight"] @ u).view(c.num_attention_heads, c.head_dim)
    k = (w["midlayer.self_attn.k_proj.weight"] @ u).view(c.num_key_value_heads, c.head_dim)
    v = (w["midlayer.self_attn.v_proj.weight"] @ u).view(c.num_key_value_heads, c.head_dim)
    repeat = c.num_attention_heads // c.num_key_value_heads
    q, k = (turned(x, place, c.rope_theta, pairs=wrong == "pairs") for x in (q, k))
    return q, k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)


def mla_qkv(w: dict[str, Tensor], c: DraftConfig, u: Tensor, place: int, wrong: str) -> tuple[Tensor, Tensor, Tensor]:
    m, heads, at = c.mla or {}, c.num_attention_heads, "midlayer.self_attn."
    nope, rope, value = m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"]
    q = w[at + "q_b_proj.weight"] @ normed(w[at + "q_a_proj.weight"] @ u, w[at + "q_a_layernorm.weight"])
    q = q.view(heads, nope + rope)
    down = w[at + "kv_a_proj_with_mqa.weight"] @ u
    latent, shared = down[: m["kv_lora_rank"]], down[m["kv_lora_rank"] :]
    if wrong != "no kv norm":
        latent = normed(latent, w[at + "kv_a_layernorm.weight"])
    up = (w[at + "kv_b_proj.weight"] @ latent).view(heads, nope + value)
    pairs = wrong != "half-split"
    q_rope, k_rope = (turned(x, place, c.rope_theta, pairs=pairs) for x in (q[:, nope:], shared[None]))
    k = torch.cat([up[:, :nope], k_rope.expand(heads, -1)], -1)
    return torch.cat([q[:, :nope], q_rope], -1), k, up[:, nope:]


def restate(
    w: dict[str, Tensor], c: DraftConfig, embedding: Tensor, ids: Tensor, aux: Tensor, steps: int, wrong: str = ""
) -> list[Tensor]:
    """norm(h) [T, H] of every step, float64."""
    w = {name: tensor.double() for name, tensor in w.items()}
    size, at = len(ids), "midlayer."
    state = fused(w, c, aux.double(), wrong)
    qkv = llama_qkv if c.mla is None else mla_qkv
    width = c.head_dim if c.mla is None else c.mla["qk_nope_head_dim"] + c.mla["qk_rope_head_dim"]
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    outputs = []
    for step in range(steps):
        keys.append([])
        values.append([])
        following, seen = [], []
        for slot in range(size):
            token = ids[slot + step + 1] if slot + step + 1 < size else 0
            inner = normed(state[slot], w[at + "hidden_norm.weight"])
            u = torch.cat([normed(embedding[token].double(), w[at + "input_layernorm.weight"]), inner])
            q, k, v = qkv(w, c, u, slot + step, wrong)
            keys[step].append(k)
            values[step].append(v)
            ks = torch.stack(keys[0][: slot + 1] + [keys[i][slot] for i in range(1, step + 1)])
            vs = torch.stack(values[0][: slot + 1] + [values[i][slot] for i in range(1, step + 1)])
            p = (torch.einsum("hd,nhd->hn", q, ks) / math.sqrt(width)).softmax(-1)
            mixed = torch.einsum("hn,nhd->hd", p, vs).flatten()
            kept = inner if c.norm_before_residual and wrong != "un-normed residual" else state[slot]
            h = kept + w[at + "self_attn.o_proj.weight"] @ mixed
            x = normed(h, w[at + "post_attention_layernorm.weight"])
            gate, up = (w[f"{at}mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            h = h + w[at + "mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
            seen.append(normed(h, w["norm.weight"]))
            following.append(seen[-1] if c.norm_output and wrong != "pre-norm fed back" else h)
        outputs.append(torch.stack(seen))
        state = torch.stack(following)
    return outputs
