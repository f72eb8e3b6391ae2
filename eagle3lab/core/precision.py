"""Which float type this machine computes in: 16 bits where it has instructions for them, float32 where it has none.

PyTorch multiplies in bfloat16 on every CPU. One without such instructions (no AVX-512, no AMX: most laptops) does it
number by number, and nothing says so: 0.3 GFLOP/s against 117 in float32 on an AMD Zen 3. So it is measured, once a
process, on a product small enough not to be noticed; in one thread's processor time, because where other work has the
cores a product of 0.5 ms waits for 10.
"""

from __future__ import annotations

import functools
import time
from typing import Literal

Precision = Literal["auto", "bf16", "fp32"]
SIDE = 256
"""Of the square matrices that are multiplied: 34 million operations, 0.2 s in all where 16 bits are slow."""
ROUNDS = 5
TOO_SLOW = 4.0
"""Times slower than float32. Measured: 0.45 on a Zen 4, which has the instructions, 47 to 67 on a Zen 3."""


def slow_here(dtype: str) -> str | None:
    """What to tell somebody who asked for `dtype` on a CPU; None when it is fast enough."""
    times = slowdown(dtype)
    if times <= TOO_SLOW:
        return None
    return f"a matrix product in {dtype} takes {times:.0f} times as long as in float32 on this processor"


def compute_type(precision: Precision, wanted: str, device: str = "cpu") -> str:
    """The type to compute in, as PyTorch names it.

    Args:
        precision: `auto` takes `wanted` unless it is `TOO_SLOW` here.
        wanted: the target's own type.
        device: on a GPU `auto` always takes `wanted`.
    """
    if precision != "auto":
        return {"bf16": "bfloat16", "fp32": "float32"}[precision]
    return "float32" if device == "cpu" and slow_here(wanted) else wanted


@functools.cache
def slowdown(dtype: str) -> float:
    """How many times longer than in float32 a matrix product in `dtype` takes on this CPU; 1.0 for float32 itself."""
    return 1.0 if dtype == "float32" else _seconds(dtype) / _seconds("float32")


def _seconds(dtype: str) -> float:
    import torch

    a = torch.ones(SIDE, SIDE, dtype=getattr(torch, dtype))
    threads, best = torch.get_num_threads(), float("inf")
    torch.set_num_threads(1)
    try:
        for _ in range(ROUNDS):
            started = time.thread_time()
            torch.mm(a, a)
            best = min(best, time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best
