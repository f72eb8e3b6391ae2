"""The batch of `bench_training.py`: random numbers at the embedded target's sizes, in the parity tests' files.

Speed does not depend on the values, and no target has to be fetched. The draft vocabulary holds what the target chooses
at 95 % of the distinct choices, as the shipped corpus is covered, and the teacher is peaked like a language model's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eagle3lab.drafter.config import DraftConfig  # noqa: E402
from eagle3lab.drafter.model import Eagle3Drafter, kept_to_d2t  # noqa: E402
from tests.parity.peers.exchange import write_batch  # noqa: E402

CASES = {"1x512": (1, 512, 0.73), "4x512": (4, 512, 0.73), "2x2048": (2, 2048, 0.35)}
"""Samples, tokens of each, share of supervised tokens (a prompt, then a reply)."""
V, VD, H, POINTS = 49152, 8192, 576, [2, 15, 27]
COVERED = 0.95
SHARP = 6.0
"""Standard deviation of the teacher's logits."""


def make_case(folder: Path, samples: int, length: int, share: float, steps: int) -> None:
    """Write batch.safetensors and config.json for every arm."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": H,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": V,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    head, norm = torch.randn(V, H) * SHARP / H**0.5, torch.rand(H) + 0.5
    pre = torch.randn(samples * length, H).bfloat16().float()
    post = pre * torch.rsqrt(pre.square().mean(-1, keepdim=True) + 1e-5) * norm
    choice = torch.cat([(piece @ head.T).argmax(-1) for piece in post.split(512)])
    chosen = choice.unique()
    known = chosen[torch.randperm(len(chosen))[: int(COVERED * len(chosen))]]
    free = torch.ones(V, dtype=torch.bool)
    free[chosen] = False
    kept = torch.cat([known, free.nonzero().squeeze(-1)[: VD - len(known)]]).sort().values
    drafter_shape = {
        **shape,
        "target_hidden_size": H,
        "points": POINTS,
        "target_blocks": 30,
        "target_family": "llama",
        "draft_vocab_size": VD,
    }
    drafter = Eagle3Drafter(DraftConfig(**drafter_shape), head, kept_to_d2t(kept))
    tensors = {
        "target.embedding": head,
        "target.head": head.clone(),
        "target.norm": norm,
        "d2t": drafter.d2t,
        "t2d": drafter.t2d,
    }
    tensors |= {f"drafter.{name}": parameter for name, parameter in drafter.named_parameters()}
    ids, aux = torch.randint(0, V, (samples * length,)), torch.randn(samples * length, len(POINTS) * H)
    mask = (torch.arange(length) >= round(length * (1 - share))).long()
    for i in range(samples):
        part = slice(i * length, (i + 1) * length)
        tensors |= {f"ids.{i}": ids[part], f"mask.{i}": mask, f"aux.{i}": aux[part].bfloat16().float()}
        tensors |= {f"pre.{i}": pre[part], f"post.{i}": post[part], f"choice.{i}": choice[part]}
    llama = {**shape, "num_hidden_layers": 1, "tie_word_embeddings": False, "pad_token_id": None, "pretraining_tp": 1}
    llama["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    write_batch(
        folder,
        {name: tensor.clone() for name, tensor in tensors.items()},
        {
            "llama": llama,
            "drafter": drafter_shape,
            "draft_vocab_size": VD,
            "points": POINTS,
            "samples": samples,
            "steps": [steps],
        },
    )
