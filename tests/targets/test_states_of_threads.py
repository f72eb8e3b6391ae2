"""States belong to the forward that asked for them, also when a reader thread and the trainer use one target."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from eagle3lab.targets.model import Target
from tests.acceptance.lab import lab


def overlapping(target: Target) -> bool:
    """Whether a forward that is held before its end still gets its own states when a second one is asked for."""
    held, second = threading.Event(), threading.Event()
    long, short = torch.arange(9)[None], torch.arange(4)[None]
    expected = target.states(long, points=[1])[1][0]

    def hold(*_: object) -> None:
        if not held.is_set():
            held.set()
            second.wait(1.0)  # the second forward ends in this time if nothing keeps it waiting

    def ask() -> None:
        target.states(short, points=[1])
        second.set()

    handle = target.final_norm.register_forward_pre_hook(hold)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(target.states, long, points=[1])
            assert held.wait(10)
            wait([pool.submit(ask)])
        found = first.result()[1][0]
    finally:
        handle.remove()
    return found.shape == expected.shape and torch.equal(found, expected)


def test_two_threads_get_their_own_states(monkeypatch) -> None:
    target = lab().target
    assert overlapping(target)
    monkeypatch.setattr(target, "_forward", contextlib.nullcontext())
    assert not overlapping(target), "without the lock the first forward is handed the second one's states"
