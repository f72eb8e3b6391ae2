"""Many slow calls at a time, for work that waits on a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[tuple[Item, Result]]:
    """Yield `(item, work(item))` as they finish, `workers` at a time; items are started in their order.

    The first exception of `work` is raised here, and nothing more is started. The threads are daemons: Ctrl-C, or a
    caller that stops listening, does not wait for calls that hang on a server.
    """
    waiting, lock, stop = iter(items), threading.Lock(), threading.Event()
    finished: queue.SimpleQueue[tuple[Item, Result] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            while not stop.is_set():
                with lock:
                    item = next(waiting)
                finished.put((item, work(item)))
        except StopIteration:
            pass  # the items are used up
        except BaseException as error:  # handed to the caller, who raises it
            finished.put(error)
        finished.put(None)

    for number in range(workers):
        threading.Thread(target=run, name=f"worker-{number}", daemon=True).start()
    try:
        while workers:
            got = finished.get()
            if got is None:
                workers -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        stop.set()
