"""Which float type this machine computes in: the target's own 16 bits where they are faster, else float32.

PyTorch multiplies in bfloat16 on every CPU, and nothing says how fast. In GFLOP/s, bfloat16 and float32 on two cores:
408 and 185 on an AMD Zen 4, 168 and 331 on an Intel Emerald Rapids whose AMX the hypervisor hides, 0.3 and 117 on an
AMD Zen 3, which has no instructions for it, as most laptops. So it is measured, once a process, on a product small
enough not to be noticed; in one thread's processor time, because where other work has the cores a product of 0.5 ms
waits for 10.
"""

from __future__ import annotations

import functools
import time
from typing import Literal

Precision = Literal["auto", "bf16", "fp32"]
SIDE = 256
"""Of the square matrices that are multiplied: 34 million operations, 0.2 s in all where 16 bits are slow."""
ROUNDS = 5
SLOWER = 1.25
"""Times as long as in float32 from which `auto` takes float32. Measured: 0.45 on the Zen 4, 1.9 on the Xeon."""
TOO_SLOW = 4.0
"""Times as long from which somebody who asked for the type is warned. Measured on the Zen 3: 47 to 67."""


def slow_here(dtype: str, limit: float = TOO_SLOW) -> str | None:
    """What to tell somebody who computes in `dtype` on a CPU; None when it takes at most `limit` times as long."""
    times = slowdown(dtype)
    if times <= limit:
        return None
    said = f"{times:.1f}" if times < 10 else f"{times:.0f}"
    return f"a matrix product in {dtype} takes {said} times as long as in float32 on this processor"


def compute_type(precision: Precision, wanted: str, device: str = "cpu") -> str:
    """The type to compute in, as PyTorch names it.

    Args:
        precision: `auto` takes `wanted` unless it is `SLOWER` here.
        wanted: the target's own type.
        device: on a GPU `auto` always takes `wanted`.
    """
    if precision != "auto":
        return {"bf16": "bfloat16", "fp32": "float32"}[precision]
    return "float32" if device == "cpu" and slow_here(wanted, SLOWER) else wanted


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
