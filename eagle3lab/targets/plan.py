"""What fits: GPU memory of the target, disk for its states, memory to train a drafter. Arithmetic, nothing is run.

SGLang divides GPU memory into a static part (weights and KV pool, `--mem-fraction-static`) and a reserve for
activations and graphs. The reserve follows its own rule (SGLang 0.5.23, arg_groups/memory_hook.py): 512 MiB + 1.5 MiB
for each token of a prefill chunk + 1 GiB for each 8 ranks + graph buffers, at least 10 GiB on GPUs above 60 GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from eagle3lab.core.errors import UsageError
from eagle3lab.targets.shapes import TargetShape

GIB = 1024**3
MIB = 1024**2
KNOWN_MEMORIES = (64 * GIB, 80 * GIB, 96 * GIB, 141 * GIB, 192 * GIB)
SMALLEST_USEFUL_CONTEXT = 8192
"""Tokens of KV cache below which a server is not worth starting for capture: one long conversation."""
SMALL_CHUNK = 2048
MLA_GRAPH_MIB = 1536
DECODE_GRAPH_MIB = 2 * 512
ID_AND_MASK_BYTES = 8 + 1
"""Bytes a stored token takes besides its states: int64 id, bool loss mask."""
ADAMW_BYTES = 2 + 2 + 4 + 4 + 4
"""Bytes a trained parameter: bf16 weight and gradient, fp32 master weight and two moments."""
Verdict = Literal["fits", "tight", "refused"]
_UNITS = {"": GIB, "g": GIB, "gib": GIB, "gb": 10**9, "mib": MIB, "mb": 10**6, "t": 1024 * GIB, "tib": 1024 * GIB}


@dataclass(frozen=True)
class DrafterShape:
    """One Llama-like EAGLE-3 block: widths and vocabularies."""

    hidden_size: int
    points: int
    target_hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int

    @property
    def trained_parameters(self) -> int:
        """fc, attention over [embedding, hidden], MLP, norms and the draft head; embeddings are the target's."""
        h, heads, kv = self.hidden_size, self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        fc = self.points * self.target_hidden_size * h
        attention = 2 * h * (heads + 2 * kv) + heads * h
        return fc + attention + 3 * h * self.intermediate_size + 4 * h + self.draft_vocab_size * h

    @property
    def frozen_parameters(self) -> int:
        """Embedding table, and the target's head and final norm for the teacher."""
        return self.vocab_size * (self.hidden_size + self.target_hidden_size) + self.target_hidden_size

    def kv_bytes_per_token(self, ranks: int) -> int:
        """bf16 KV bytes a token on each rank."""
        return 2 * 2 * self.head_dim * max(1, -(-self.kv_heads // ranks))


@dataclass(frozen=True)
class Fit:
    """One rank's GPU memory. Sizes in bytes.

    weights: an even share of all weights. replicated_extra: what ranks hold beyond it, because it is not divided.
    reserve: kept from the static part; usual_reserve: what SGLang would keep by itself.
    """

    gpu_memory: int
    ranks: int
    weights: float
    replicated_extra: float
    reserve: int
    usual_reserve: int
    prefill_chunk: int
    graphs: bool
    kv_pool: float
    kv_bytes_per_token: int
    verdict: Verdict
    reason: str

    @property
    def margin(self) -> float:
        """Bytes left for KV under the usual reserve; negative when it lacks."""
        return self.gpu_memory - self.weights - self.replicated_extra - self.usual_reserve

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds, all requests together."""
        return max(0, int(self.kv_pool // self.kv_bytes_per_token))

    @property
    def mem_fraction(self) -> float:
        """`--mem-fraction-static`, rounded down so that the reserve is never cut."""
        return int((self.gpu_memory - self.reserve) / self.gpu_memory * 1000) / 1000

    def context(self, limit: int | None) -> int:
        """Longest context one request can have: the pool, or the model's own limit."""
        return self.kv_tokens if limit is None else min(self.kv_tokens, limit)


def parse_memory(text: str) -> int:
    """`96GiB`, `96GB`, `96` (GiB) -> bytes. `UsageError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise UsageError(f"memory '{text}'", rule="a positive number with GiB, GB or MiB, such as 96GiB")
    return int(float(match.group(1)) * unit)


def reserve_bytes(gpu_memory: int, ranks: int, chunk: int, *, graphs: bool, mla: bool) -> int:
    """SGLang's reserve for activations and graphs, by its own rule (module docstring)."""
    mib = 512 + 1.5 * max(chunk, SMALL_CHUNK) + ranks / 8 * 1024
    if graphs:
        mib += DECODE_GRAPH_MIB + (MLA_GRAPH_MIB if mla else 0)
        if gpu_memory > 60 * GIB:
            mib = max(mib, 10 * 1024)
    return int(mib * MIB)


def usual_chunk(gpu_memory: int) -> int:
    """Prefill chunk that SGLang 0.5.23 takes for a GPU of this size, in tokens."""
    for limit, chunk in ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192)):
        if gpu_memory < limit:
            return chunk
    return 16384


def fit(
    shape: TargetShape, ranks: int, gpu_memory: int, *, context: int | None = None, drafter: DrafterShape | None = None
) -> Fit:
    """Judge one rank: `fits` with the usual reserve, `tight` only with small chunks and no graphs, else `refused`.

    Args:
        ranks: tensor-parallel size = GPUs.
        gpu_memory: bytes of one GPU.
        context: tokens that one request must have; default `SMALLEST_USEFUL_CONTEXT`.
        drafter: served beside the target; its weights and KV count too.
    """
    weights = shape.stored_bytes / ranks + (2 * drafter.trained_parameters / ranks if drafter else 0)
    extra = shape.replicated_bytes * (1 - 1 / ranks)
    kv = shape.kv_bytes_per_token(ranks) + (drafter.kv_bytes_per_token(ranks) if drafter else 0)
    wanted = context or min(SMALLEST_USEFUL_CONTEXT, shape.context or SMALLEST_USEFUL_CONTEXT)
    mla, chunk = shape.kv_heads is None, usual_chunk(gpu_memory)
    usual = reserve_bytes(gpu_memory, ranks, chunk, graphs=True, mla=mla)
    small = reserve_bytes(gpu_memory, ranks, SMALL_CHUNK, graphs=False, mla=mla)

    def judge(verdict: Verdict, reason: str, *, lean: bool) -> Fit:
        reserve = small if lean else usual
        pool = gpu_memory - reserve - weights - extra
        prefill = SMALL_CHUNK if lean else chunk
        return Fit(gpu_memory, ranks, weights, extra, reserve, usual, prefill, not lean, pool, kv, verdict, reason)

    if reason := _impossible(shape, ranks, wanted):
        return judge("refused", reason, lean=False)
    full = judge("fits", "", lean=False)
    if full.kv_tokens >= wanted:
        return full
    needed = weights + extra + small + wanted * kv
    if needed <= gpu_memory:
        words = f"--chunked-prefill-size {SMALL_CHUNK} and CUDA graphs off"
        return judge(
            "tight", f"fits only with {words}; SGLang's own reserve lacks {-full.margin / GIB:.1f} GiB", lean=True
        )
    sizes = f"weights {(weights + extra) / GIB:.1f} + reserve {small / GIB:.1f} + KV {wanted * kv / GIB:.2f} GiB"
    lack = f"{(needed - gpu_memory) / GIB:.1f} GiB lack on each of {ranks} GPUs"
    return judge("refused", f"{sizes} = {needed / GIB:.1f} GiB > {gpu_memory / GIB:.0f} GiB: {lack}", lean=True)


def _impossible(shape: TargetShape, ranks: int, context: int) -> str:
    if shape.attention_heads % ranks:
        return f"{shape.attention_heads} attention heads do not divide over {ranks} GPUs"
    if shape.context is not None and context > shape.context:
        return f"context {context} is above the model's {shape.context} positions"
    return ""


def state_bytes_per_token(hidden_size: int, points: int, *, last: bool = True, bytes_per_value: int = 2) -> int:
    """Bytes of `aux` and `last` for one stored token: 57,344 for 3 points of 7168 in bf16."""
    return (points + (1 if last else 0)) * hidden_size * bytes_per_value


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one rank that trains with AdamW; activations are an estimate, the rest is arithmetic."""

    parameters: int
    optimiser_and_weights: int
    frozen: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.optimiser_and_weights + self.frozen + self.activations


def training_memory(drafter: DrafterShape, *, tokens: int, ttt_steps: int) -> TrainingMemory:
    """Memory for one batch of `tokens` slots and `ttt_steps` TTT steps, nothing recomputed, loss kept in fp32.

    Activations a slot and step: about 16 hidden-wide and 3 MLP-wide bf16 tensors, and three fp32 rows of draft logits
    (logits, log-probabilities, gradient); once a slot: the states read and one fp32 teacher row.
    """
    step = 2 * (16 * drafter.hidden_size + 3 * drafter.intermediate_size) + 3 * 4 * drafter.draft_vocab_size
    once = 2 * (drafter.points + 1) * drafter.target_hidden_size + 4 * drafter.draft_vocab_size
    return TrainingMemory(
        parameters=drafter.trained_parameters,
        optimiser_and_weights=drafter.trained_parameters * ADAMW_BYTES,
        frozen=2 * drafter.frozen_parameters,
        activations=tokens * (ttt_steps * step + once),
    )
