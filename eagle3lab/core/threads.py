"""A thread that works ahead of, or behind, the one that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def helper_thread(name: str, *, one_core: bool = True) -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread.

    Args:
        name: of the thread.
        one_core: its tensor operations stay on one core: a second team of threads beside the caller's would only wait
            for the cores. On two of them a training step took 1.5 times as long with a reader that had its own team,
            and a capture 1.1 times with a writer. False where the thread has much to compute.
    """
    import torch

    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        if one_core:
            own = torch.get_num_threads()
            pool.submit(_stay_on_one_core).result()
            torch.set_num_threads(own)  # which is also what other new threads begin with
        yield pool


def _stay_on_one_core() -> None:
    """For the calling thread. The first question makes PyTorch give it the common number, which must come before."""
    import torch

    torch.get_num_threads()
    torch.set_num_threads(1)
