"""A target over several processes: tensor parallelism as transformers does it, and a table of who holds what.

    torchrun --nproc-per-node 8 -m -- eagle3lab capture --profile kimi-thin --replies FILE --out FOLDER

Every rank runs every forward; the residual stream is the same on all of them after each block's all-reduce, so rank 0
alone writes it down. On CPUs the ranks talk through gloo, on GPUs through nccl.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle3lab.core.errors import FetchError, UsageError
from eagle3lab.targets.model import Target, load_target


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds of a target: parameters and bytes in its own memory, and its device."""

    rank: int
    device: str
    parameters: int
    bytes: int


def launched() -> bool:
    """Whether this process is one of several (`torchrun` sets WORLD_SIZE)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """This process's number; 0 when it is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """How many processes share the target; 1 when this one is alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join() -> int:
    """Join the process group that `torchrun` announced; returns the rank.

    Raises:
        UsageError: the process was not started by `torchrun`.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(
                f"several ranks without {', '.join(missing)} in the environment",
                rule="ranks are started together",
                fix="torchrun --nproc-per-node 8 -m -- eagle3lab capture --profile kimi-thin --replies FILE --out OUT",
            )
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def load_split(folder: Path, *, dtype: str = "float32", trust_remote_code: bool = False) -> Target:
    """Load this rank's part of a target: transformers' own plan for the architecture (`tp_plan="auto"`).

    A plan splits what it names (here: experts, MLPs, head); every rank holds the rest in full. Each rank reads from
    the file only what it keeps.

    Raises:
        FetchError: the folder is no target, or its widths do not divide over the ranks.
    """
    join()
    check_widths(read_text_config(folder), dist.get_world_size())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Passing `tp_plan` directly", FutureWarning)
        return load_target(folder, dtype=dtype, trust_remote_code=trust_remote_code, options=_plan())


def check_widths(text: Mapping[str, Any], ranks: int) -> None:
    """Refuse widths that this many ranks cannot share; grouped matrix products want multiples of 8 on each."""
    for name in ("moe_intermediate_size", "intermediate_size"):
        width = text.get(name)
        if width is not None and width % (8 * ranks):
            raise FetchError(
                f"{name} {width} over {ranks} ranks is {width / ranks:g} columns a rank",
                rule="a multiple of 8 on every rank",
                fix=f"torchrun --nproc-per-node {_largest(width, ranks)} ...",
            )


def read_text_config(folder: Path) -> dict[str, Any]:
    """Text config of a local target."""
    from eagle3lab.targets.config import read_config, text_config

    return text_config(read_config(folder))


def share_of(target: Target) -> RankShare:
    """What this rank holds."""
    tensors = [getattr(p, "_local_tensor", p) for p in target.model.parameters()]  # of a split tensor: the local part
    return RankShare(
        rank(),
        str(tensors[0].device),
        sum(tensor.numel() for tensor in tensors),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )


def rank_table(target: Target) -> list[RankShare]:
    """The shares of all ranks, by rank; on every rank the same list. One process: a list of one."""
    own = share_of(target)
    if not dist.is_initialized():
        return [own]
    shares: list[RankShare | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    return [share for share in shares if share is not None]


def _plan() -> dict[str, Any]:
    """Keywords of `from_pretrained` for the model's own plan over all ranks."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:  # transformers before its distributed package
        return {"tp_plan": "auto"}
    if "tp_plan" not in DistributedConfig.__dataclass_fields__:
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def _largest(width: int, ranks: int) -> int:
    """The largest number of ranks up to `ranks` that can share `width`."""
    return next((count for count in range(ranks, 0, -1) if width % (8 * count) == 0), 1)
