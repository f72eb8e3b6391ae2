"""Runs one notebook through papermill in a kernel of this very interpreter, with two ways to stop it.

`stop()` first interrupts the kernel, so that the cell sees KeyboardInterrupt and can save what it has; after a while,
or when it is called again, the kernel is killed. Both Ctrl-C and --max-minutes use it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

ENGINE = "eagle3lab"
GRACE_SECONDS = 30.0
"""How long an interrupted cell may take to save its work before its kernel is killed."""


class Stopped(Exception):
    """The notebook was stopped from outside before it had run its last cell."""


class Control:
    """Stops the running notebook, from a signal handler or a timer.

    Attributes:
        reason: None while nobody asked to stop; else `interrupt` or `deadline`.
    """

    def __init__(self, *, grace_seconds: float | None = None) -> None:
        self.reason: str | None = None
        self._grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._manager: AsyncKernelManager | None = None
        self._timers: list[threading.Timer] = []

    def attach(self, manager: AsyncKernelManager | None) -> None:
        """The kernel that `stop` acts on; None when there is none."""
        self._manager = manager
        if manager is None:
            self._cancel()

    def stop(self, reason: str) -> None:
        """Interrupt the kernel; a second call kills it, and so does a cell that goes on for `grace_seconds`."""
        if self.reason is not None:
            self._signal(signal.SIGKILL)
            return
        self.reason = reason
        self._signal(signal.SIGINT)
        self._after(self._grace, lambda: self._signal(signal.SIGKILL))

    @contextlib.contextmanager
    def listening(self, deadline: float | None) -> Iterator[None]:
        """Stop on Ctrl-C, on SIGTERM, and at `deadline` (`time.monotonic()`); signals only in the main thread."""
        kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {kind: signal.signal(kind, lambda *_: self.stop("interrupt")) for kind in kinds}
        if deadline is not None:
            self._after(max(0.0, deadline - time.monotonic()), lambda: self.stop("deadline"))
        try:
            yield
        finally:
            self._cancel()
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _signal(self, kind: signal.Signals) -> None:
        """Signal the kernel and what it started (a kernel leads its own process group)."""
        provisioner = getattr(self._manager, "provisioner", None)
        pid = getattr(provisioner, "pid", None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, kind)


class LabKernelManager(AsyncKernelManager):
    """A kernel of the running interpreter, whatever `python3` means in the user's Jupyter folders.

    It talks over sockets in a private folder, not over TCP ports that every user of the machine can connect to.
    """

    def __init__(self, environment: dict[str, str], **traits: Any) -> None:
        # Socket paths are limited to about 100 bytes, so the folder is made in /tmp, not in the run directory.
        self._sockets = tempfile.mkdtemp(prefix="eagle3lab-", dir="/tmp")
        super().__init__(transport="ipc", ip=f"{self._sockets}/k", kernel_name="python3", **traits)
        self._environment = environment

    @property
    def kernel_spec(self) -> KernelSpec:
        """The interpreter that runs this process, started as an IPython kernel."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            env=self._environment,
            metadata={"debugger": False},
        )

    async def cleanup_resources(self, restart: bool = False) -> None:  # type: ignore[override]  # run_sync has no type
        """Also removes the socket folder."""
        await super()._async_cleanup_resources(restart=restart)
        if not restart:
            shutil.rmtree(self._sockets, ignore_errors=True)


class LabClient(PapermillNotebookClient):
    """Executes cells until the end, an error, or `control.stop`."""

    control: Control
    on_text: Callable[[str], None]

    def execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
        """Run one cell, unless a stop was asked for between two cells."""
        if self.control.reason is not None and cell["cell_type"] == "code":
            raise Stopped
        return super().execute_cell(cell, cell_index, *args, **kwargs)

    def process_message(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        """Hand what the cells print to `on_text` as it comes."""
        if msg["msg_type"] == "stream":
            self.on_text(msg["content"]["text"])
        return super().process_message(msg, *args, **kwargs)


class LabEngine(NBClientEngine):
    """The papermill engine `eagle3lab`."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        control: Control,
        environment: dict[str, str],
        on_text: Callable[[str], None],
        start_timeout: int = 60,
        **_: Any,
    ) -> Any:
        """Execute all cells in a fresh kernel that is gone afterwards, whatever happened."""
        manager = LabKernelManager(environment)
        client = LabClient(
            nb_man,
            km=manager,
            timeout=None,
            startup_timeout=start_timeout,
            kernel_name="python3",
            shutdown_kernel="immediate",  # all is on disk by then; a kernel asked to leave takes a second and more
            extra_arguments=["--HistoryManager.enabled=False"],
        )
        client.owns_km = True  # so that the client also stops it
        client.control, client.on_text = control, on_text
        control.attach(manager)
        try:
            client.execute()
        finally:
            control.attach(None)


papermill_engines.register(ENGINE, LabEngine)


def execute(
    source: Path,
    destination: Path,
    parameters: dict[str, Any],
    *,
    control: Control,
    environment: dict[str, str],
    folder: Path,
    on_text: Callable[[str], None] = lambda _: None,
) -> str | None:
    """Execute `source` into `destination`; the executed notebook is on disk whatever happened.

    Args:
        parameters: plain values for the cell tagged `parameters`, already checked.
        environment: variables of the kernel beside the inherited ones.
        folder: working directory of the kernel.

    Returns:
        None, or why the runner stopped: `died`, `stopped`, `raised`. How the cells ended is for `judge` to say.
    """
    from papermill import execute_notebook

    try:
        execute_notebook(
            source,
            destination,
            parameters=parameters,
            engine_name=ENGINE,
            progress_bar=False,
            cwd=folder,
            control=control,
            environment=environment,
            on_text=on_text,
        )
    except Stopped:
        return "stopped"
    except (DeadKernelError, CellTimeoutError):
        return "died"
    except RuntimeError as error:
        # jupyter_client has no class for a kernel that ends, or is stopped, before it has answered at all.
        if not str(error).startswith("Kernel "):
            raise
        return "died" if control.reason is None else "stopped"
    except PapermillExecutionError:
        return "raised"
    return None
