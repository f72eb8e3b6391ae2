"""What a training needs before it runs: operations of a step, the machine's matrix rate, bytes of memory.

Only operations that the mathematics needs are counted: a multiply-add is two, a backward pass costs twice its forward
(fc's input and the teacher need no gradient of their own), elementwise work and recomputation count nothing. Model FLOP
utilisation is that number over what the machine's own large matrix product would do in the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle3lab.core.errors import TrainingError
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed
from eagle3lab.training.batches import Share
from eagle3lab.training.distributed import World
from eagle3lab.training.loss import Supervision, chunk_rows

ADAMW_BYTES = 4 + 4 + 4 + 4
"""A trained parameter in float32: weight, gradient, two moments."""
HEAP_SHARE = 0.65
"""On a CPU, freed pieces that the C library keeps, as a share of what comes and goes. With 0.5, peaks of nine shapes
(H 256 and 576, 512 to 2048 tokens, K 3 to 7, both precisions) were 0.43 to 1.03 of the estimate on an AMD Zen 4, and
the narrow one, again, 1.05 to 1.17 of it on a Zen 3. On a GPU not measured."""
MATRIX_SIDE = 1024
CGROUP_LIMIT, CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def step_flops(
    drafter: Eagle3Drafter,
    batch: Packed,
    supervision: Supervision,
    steps: int,
    head_rows: int | None = None,
    *,
    head_trained: bool = True,
) -> float:
    """Operations of one optimiser step on this batch (N tokens, M active slots, J teacher positions).

    Args:
        head_rows: rows of the head that the loss is taken over; None = all Vd.
        head_trained: whether the head itself gets a gradient.
    """
    c, layer = drafter.config, drafter.midlayer
    n, m, j = batch.tokens, len(batch.active), len(supervision.teacher)
    pairs = int(supervision.counted.sum())
    seen = sum(_causal_pairs(s.active - s.start, s.stop - s.start) for s in batch.segments)
    attention = layer.self_attn
    # of what reads (embedding, state) the embedding's half is needed once a token, the state's at every step
    query_half, pair_half = (_numbers(attention, names) // 2 for names in (attention.QUERY, attention.KEY_VALUE))
    keys = pair_half + _numbers(attention, ("kv_b_proj",))
    rest = query_half + _numbers(attention, ("q_b_proj", "o_proj")) + 3 * c.hidden_size * c.intermediate_size
    value_width = getattr(attention, "value_dim", attention.head_dim)
    each_pair = attention.heads * (attention.head_dim + value_width)
    later = m * steps * (steps - 1) // 2  # keys of earlier steps at the same slot
    embedded = pair_half * n + query_half * m
    matrices = 3 * (embedded + keys * (n + m * (steps - 1)) + rest * m * steps + each_pair * (seen * steps + later))
    fusion = 2 * n * c.fc_in * c.hidden_size
    rows = c.draft_vocab_size if head_rows is None else head_rows
    head = (3 if head_trained else 2) * pairs * c.hidden_size * rows
    teacher = j * c.target_hidden_size * rows
    return 2.0 * (matrices + fusion + head + teacher)


def _causal_pairs(first: int, length: int) -> int:
    """Query-key pairs of slots first..length-1 that each see all slots up to their own."""
    return (length * (length + 1) - first * (first + 1)) // 2


def _numbers(module: nn.Module, names: tuple[str, ...]) -> int:
    # in x out of the layer, not the tensor's size: over several ranks a tensor holds only its part
    layers = [getattr(module, name) for name in names if hasattr(module, name)]
    return sum(layer.in_features * layer.out_features for layer in layers)


def matrix_rate(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """Operations a second of a large matrix product here and now: the best of as many as fit into `seconds`."""
    side = MATRIX_SIDE * (8 if device.type == "cuda" else 1)
    a = torch.ones(side, side, dtype=dtype, device=device)
    out, best, stop = torch.empty_like(a), float("inf"), time.monotonic() + seconds
    while best == float("inf") or time.monotonic() < stop:
        _finish(device)
        started = time.monotonic()
        torch.mm(a, a, out=out)
        _finish(device)
        best = min(best, time.monotonic() - started)
    return 2.0 * side**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Meter:
    """Clock, tokens and operations of a training, over all ranks.

    Args:
        drafter: with its whole weights, for their shapes.
        steps: K.
        rate: operations a second that this rank's matrix product reaches.
        head_trained: whether the head gets a gradient; the drafter's own flags say nothing when it is a copy.
    """

    def __init__(
        self, drafter: Eagle3Drafter, steps: int, rate: float, world: World, head_trained: bool = True
    ) -> None:
        self.drafter, self.depth, self.rate, self.world = drafter, steps, rate, world
        self.head_trained = head_trained
        self.started = self.since = time.monotonic()
        self.tokens = self.steps = 0
        self.flops = 0.0

    def seconds(self) -> float:
        """Since the start, pauses included."""
        return time.monotonic() - self.started

    def count(self, share: Share) -> None:
        """One step: its tokens and this rank's operations."""
        self.steps += 1
        self.tokens += share.tokens
        rows = None if share.rows is None else len(share.rows)
        self.flops += step_flops(
            self.drafter, share.batch, share.bare, self.depth, rows, head_trained=self.head_trained
        )

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Evaluations and checkpoints do not count as training."""
        begun = time.monotonic()
        yield
        self.since += time.monotonic() - begun

    def row(self, steps_left: int) -> dict[str, Any]:
        """Speed since the last row, and begin anew."""
        now = time.monotonic()
        seconds = now - self.since
        flops, rate = self.world.sum(torch.tensor([self.flops, self.rate], dtype=torch.float64)).tolist()
        row = {
            "tokens_per_second": self.tokens / seconds,
            "model_flop_utilisation": flops / (seconds * rate),
            "seconds_left": steps_left * seconds / self.steps,
        }
        self.since, self.tokens, self.steps, self.flops = now, 0, 0, 0.0
        return row


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a training will still take on one rank, beyond what is loaded when it starts."""

    optimizer: int
    gathered: int
    activations: int
    loss: int
    batch: int
    heap: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(getattr(self, name) for name in self.__dataclass_fields__)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in parts.items() if size)


def memory(
    config: DraftConfig,
    parameters: int,
    *,
    tokens: int,
    steps: int,
    compute: torch.dtype,
    shards: int = 1,
    ranks: int = 1,
    device: str = "cpu",
) -> Memory:
    """Estimate from shapes; the largest batch counts, every token of it taken as active.

    Args:
        parameters: trained numbers of the drafter.
        tokens: N of the largest batch on this rank.
        steps: K.
        shards: ranks that one copy is spread over; ranks: all of them. With more than one, a step gathers the weights
            whole, and their gradients before they are added up.
    """
    size, half = torch.finfo(compute).bits // 8, config.head_dim * config.num_attention_heads
    narrow = 2 * config.head_dim * config.num_key_value_heads
    # Kept for the backward pass of one TTT step and slot: inputs and outputs of the norms, q, k, v, the attention's
    # output, gate, up and their product. Once a token: the embedding and its projections besides.
    hidden = 6 * config.hidden_size + 2 * half + narrow + 3 * config.intermediate_size
    kept = size * hidden
    once = 4 * config.hidden_size + size * (config.fc_in + 4 * config.hidden_size + half + 2 * narrow)
    chunk = min(tokens * steps, chunk_rows(compute)) * config.draft_vocab_size
    head = config.draft_vocab_size * config.hidden_size
    activations = tokens * (steps * kept + once)
    loss = (4 + size) * head + chunk * (size + 4) + 2 * tokens * steps * config.hidden_size * size
    batch = 2 * tokens * (config.fc_in + config.target_hidden_size) * 2
    return Memory(
        # gradient and two moments; the weights are there already. Autocast keeps a copy of the weights for the step.
        optimizer=(ADAMW_BYTES - 4) * parameters // shards + (size * parameters if size < 4 and ranks == 1 else 0),
        gathered=(size + 4) * parameters if ranks > 1 else 0,
        activations=activations,
        loss=loss,
        batch=batch,
        heap=round(HEAP_SHARE * (activations + loss + batch)) if device == "cpu" else 0,
    )


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still get: of the GPU, or of the machine and its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    if limit.isdigit() and CGROUP_USED.is_file():
        free = min(free, int(limit) - int(CGROUP_USED.read_text()))
    return free


def require_memory(needed: Memory, available: int, batch_tokens: int) -> None:
    """Refuse what will not fit.

    Raises:
        TrainingError: the estimate is above what is available.
    """
    if needed.total > available:
        raise TrainingError(
            f"training needs about {needed.total / 1e6:.0f} MB ({needed}), {max(available, 0) / 1e6:.0f} MB are free",
            rule="the estimate must fit before the first step",
            fix=f"fewer batch_tokens than {batch_tokens}, a smaller draft vocabulary, or more ranks with --shards",
        )
