"""How a drafter starts: fc by a named recipe, the block and the head fresh or warm from the target.

The recipe, its seed and the hash of the initial fc are written beside the checkpoint, so that `eagle3lab inspect` can
later say what moved.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3lab.core.errors import CheckpointError
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target

FcInit = Literal["kaiming-uniform", "normal-0.02", "pass-through"]
BlockInit = Literal["fresh", "target-last-block"]
HeadInit = Literal["fresh", "target-rows"]


def init_fc(weight: Tensor, family: FcInit, seed: int) -> None:
    """Fill fc [H, P*Ht] in place.

    kaiming-uniform: U(+-1/sqrt(P*Ht)), torch's nn.Linear default, drawn in fp32. normal-0.02: N(0, 0.02).
    pass-through: the highest point unchanged plus N(0, 1e-4/sqrt(P*Ht)): the drafter starts on the target's own stream.
    """
    generator = torch.Generator().manual_seed(seed)
    fan_in = weight.shape[1]
    with torch.no_grad():
        if family == "kaiming-uniform":
            weight.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
        elif family == "normal-0.02":
            weight.normal_(0.0, 0.02, generator=generator)
        else:
            size = weight.shape[0]
            weight.normal_(0.0, 1e-2 / math.sqrt(fan_in), generator=generator)
            weight[:, -size:] += torch.eye(size)


def build_drafter(
    config: DraftConfig,
    target: Target,
    kept: Tensor,
    *,
    seed: int,
    fc: FcInit = "pass-through",
    block: BlockInit = "target-last-block",
    head: HeadInit = "target-rows",
) -> tuple[Eagle3Drafter, dict[str, Any]]:
    """Make a drafter for a target, and the record of how it started.

    Args:
        kept: int64 [Vd] target ids of the draft vocabulary, ascending.

    Raises:
        CheckpointError: an MLA drafter that is to start from the target's last block.
    """
    if config.architecture == "mla" and block == "target-last-block":
        raise CheckpointError(
            "an MLA drafter cannot start from the target's last block",
            rule="its projections have other shapes",
            fix="block='fresh'",
        )
    torch.manual_seed(seed)
    d2t = kept - torch.arange(len(kept))
    drafter = Eagle3Drafter(config, target.embedding.weight.detach().float(), d2t)
    init_fc(drafter.fc.weight, fc, seed)
    with torch.no_grad():
        if block == "target-last-block":
            _warm_block(drafter, target)
        if head == "target-rows":
            drafter.lm_head.weight.copy_(target.head.weight[kept].float())
            drafter.norm.weight.copy_(target.final_norm.weight.float())
    recipe = {
        "fc": {"family": fc, "seed": seed, "sha256": tensor_sha256(drafter.fc.weight)},
        "block": block,
        "head": head,
        "seed": seed,
    }
    return drafter, recipe


def _warm_block(drafter: Eagle3Drafter, target: Target) -> None:
    """Copy the target's last block. Its q, k, v read H; ours read 2H: the state half gets the weights, the embedding
    half starts at zero-mean noise small enough to leave the block's function and large enough to break symmetry."""
    source: Any = target.layers[-1]
    layer, size = drafter.midlayer, drafter.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :size].mul_(0.5)
        weight[:, size:].copy_(getattr(source.self_attn, name).weight.float())
    layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight.float())
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight.float())
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight.float())
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight.float())


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's values as float32 bytes, row-major."""
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()
