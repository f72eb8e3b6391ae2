"""One training on several ranks: who this process is, how the drafter is spread, how sums and errors are shared.

    torchrun --nproc-per-node 8 -m -- eagle3lab train --run RUN              plain data parallel
    torchrun --nproc-per-node 8 -m -- eagle3lab train --run RUN --shards 8   weights and optimiser spread over 8 ranks

Both are FSDP2 on a mesh of replicas x shards. The whole drafter is one group: its single layer is used again at every
TTT step, so weights are gathered once a step and gradients are exchanged once, after the backward pass; weights, their
gradients and the optimiser's moments are divided by the number of shards between steps. Gradients are *added*, never
averaged: every rank's loss is divided by the numbers of the whole batch (`conventions.divisors`).
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3lab.core.errors import TrainingError
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.ranks import launched

Made = TypeVar("Made")
PATIENCE = datetime.timedelta(hours=12)
"""How long a rank waits for the others: rank 0 may have to capture first."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of a training; alone by default.

    Attributes:
        shards: ranks that one copy of the drafter is spread over; size / shards copies exist.
        device: where this rank computes.
    """

    rank: int = 0
    size: int = 1
    shards: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leader(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def same(self, value: Made) -> Made:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        word = [value if self.leader else None]
        dist.broadcast_object_list(word, src=0)
        return word[0]  # type: ignore[return-value]

    def lead(self, work: Callable[[], Made]) -> Made:
        """Let rank 0 do `work`; all have its result, or raise its error: no rank waits for one that has left.

        Raises:
            TrainingError: on the other ranks, when rank 0 fails.
        """
        if self.size == 1:
            return work()
        result, failure = None, None
        if self.leader:
            try:
                result = work()
            except (Exception, KeyboardInterrupt) as error:
                failure = error
        told = self.same((result, None if failure is None else str(failure) or type(failure).__name__))
        if failure is not None:
            raise failure
        if told[1] is not None:
            raise TrainingError(f"rank 0: {told[1]}")
        return told[0]  # type: ignore[return-value]

    def meet(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(shards: int = 1, device: str | None = None) -> World:
    """Join the ranks that `torchrun` started; alone without it.

    Args:
        shards: ranks that one copy of the drafter is spread over, 1 = every rank has its own.
        device: of this rank; None = its GPU if there is one, else the CPU.

    Raises:
        TrainingError: ranks that do not divide into copies of `shards` ranks.
    """
    several = launched()
    size = int(os.environ["WORLD_SIZE"]) if several else 1
    if shards < 1 or size % shards:
        raise TrainingError(
            f"--shards {shards} on {size} ranks",
            rule="every copy of the drafter takes the same number of ranks",
            fix=f"torchrun --nproc-per-node {max(shards, 1)} -m -- eagle3lab train --shards {max(shards, 1)}",
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(device or (f"cuda:{local}" if torch.cuda.is_available() else "cpu"))
    if not several:
        return World(device=chosen)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    return World(dist.get_rank(), size, shards, chosen)


def spread(drafter: Eagle3Drafter, world: World, compute: torch.dtype) -> Eagle3Drafter:
    """Put the drafter on this rank's device and, with several ranks, make it one of their common drafter.

    Args:
        compute: type that weights are gathered in; gradients are added up in float32.

    Returns:
        a plain drafter of the same weights for `whole` to fill; the drafter itself when this process is alone.
    """
    drafter.to(world.device)
    if world.size == 1:
        return drafter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain = copy.deepcopy(drafter, {id(drafter.embedding): drafter.embedding})
    mesh = init_device_mesh(
        world.device.type, (world.size // world.shards, world.shards), mesh_dim_names=("copies", "shards")
    )
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    group: Any = fully_shard(drafter, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    group.set_gradient_divide_factor(1.0)
    if world.device.type == "cpu":
        group.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds
    return plain.requires_grad_(False)


@torch.no_grad()
def whole(drafter: Eagle3Drafter, plain: Eagle3Drafter) -> Eagle3Drafter:
    """The drafter with all its weights, for evaluation and export. Every rank must call it."""
    if plain is not drafter:
        parts = dict(drafter.named_parameters())
        for name, parameter in plain.named_parameters():
            parameter.copy_(full(parts[name]))
    return plain


def full(tensor: Tensor) -> Tensor:
    """A tensor that is spread over ranks, whole; every rank must call it. Others are returned as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a spread tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
