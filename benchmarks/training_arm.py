"""One arm of `bench_training.py`: a process that does one training step each time it is asked.

Imported by every arm in its own environment, so it needs torch alone. The parent writes one word a line and is answered
with one JSON line. `release`: freed memory goes back to the system, so that many large arms can wait side by side.
`step`: one optimiser step (learning rate 0, so that the loss stays), seconds and loss. `peak`: most
memory that two steps take above the level with model, optimiser and batch loaded. `rate`: a large matrix product's
operations a second. `attention` (ours alone): seconds of the attention calls of one step. `quit`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RATE_SIZE = 2048


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """The optimiser of every arm, its state made before memory is measured. Rate 0 keeps the loss comparable."""
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def train_step(optimizer: torch.optim.AdamW, loss_of: Callable[[], torch.Tensor]) -> float:
    """Forward, backward, clipping, AdamW: the same in every arm. Returns the loss."""
    loss = loss_of()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations a second of a square product of 2048 in this precision; the best of three."""
    a, b = (torch.randn(RATE_SIZE, RATE_SIZE).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * RATE_SIZE**3 / best


def memory(field: str) -> int:
    """Bytes of VmRSS (now), RssFile (of it from files) or VmHWM (most so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak(step: Callable[[], float]) -> dict[str, int]:
    """Memory level before, and the most during two steps, in bytes.

    `code`: the part of the growth that is not memory of the step but the libraries' code, paged in from their files as
    kernels are called for the first time.
    """
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM falls back to VmRSS
    level, code = memory("VmRSS"), memory("RssFile")
    for _ in range(2):
        step()
    return {"level": level, "peak": memory("VmHWM"), "code": memory("RssFile") - code}


def serve(
    step: Callable[[], float], precision: str, attention: Callable[[], float] | None = None, **facts: float
) -> None:
    """Answer the parent until `quit`; `facts` go with the first answer. What the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": True, **facts}) + "\n")
    for line in sys.stdin:
        word, answer = line.strip(), dict[str, Any]()
        if word == "quit":
            return
        if word == "release":
            ctypes.CDLL(None).malloc_trim(0)
        elif word == "step":
            started = time.perf_counter()
            answer["loss"] = step()
            answer["seconds"] = time.perf_counter() - started
        elif word == "attention" and attention is not None:
            answer["seconds"] = attention()
        elif word == "peak":
            answer = peak(step)
        else:
            answer["rate"] = matrix_rate(torch.bfloat16 if precision == "bf16" else torch.float32)
        answers.write(json.dumps(answer) + "\n")
