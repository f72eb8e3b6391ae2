"""An engine server as a context: started in a group of its own, waited for, checked, and stopped whatever happens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3lab.core.errors import ServerError

READY_SECONDS = 1800.0
"""Default wait for readiness. The reference target takes more than four minutes from a warm page cache."""
PROGRESS_SECONDS = 10.0
GRACE_SECONDS = 20.0
GUARD = Path(__file__).with_name("guard.py")
_SHARDS = re.compile(r"(\d+)\s*/\s*(\d+)\s*\[")
"""The counter of a progress bar, such as `29/64 [02:10<`."""
_TIMED = re.compile(r"\[?\d{4}-\d\d-\d\d[ T]|(?:\(\S+ pid=\d+\) )?INFO ")
_CAUSE = re.compile(r"error|exception|out of memory|refused|killed", re.IGNORECASE)
# Environment proxies must never see requests to a local server.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request_json(url: str, body: Any = None, *, timeout: float = 60.0) -> Any:
    """GET `url`, or POST `body` as JSON; returns the parsed answer (None for an empty one).

    Raises:
        ServerError: no connection, a time-out, a status other than 2xx, or an answer that is not JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"} if data else {})
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode(errors="replace").strip()
        raise ServerError(f"{url} answered {error.code} {detail}") from error
    except (OSError, urllib.error.URLError) as error:
        raise ServerError(f"{url} cannot be reached ({getattr(error, 'reason', error)})", fix=f"curl {url}") from error
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise ServerError(f"{url} answered {text[:80]!r}", rule="JSON") from error


class EngineServer:
    """A server process and everything below it, from `with` to the end of the block.

    Args:
        command: the whole command line. port: the loopback port that it will listen on.
        log: file that receives its stdout and stderr. env: variables added to this process's environment.
        note: receives one line of progress at a time. grace: seconds from SIGTERM to SIGKILL when it is stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
        note: Callable[[str], None] = print,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.command, self.port, self.log, self.note, self.grace = list(command), port, log, note, grace
        self.url = f"http://127.0.0.1:{port}"
        self._env = {**os.environ, **(env or {})}
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the guard, the root of everything started; None before start and after stop."""
        return None if self._guard is None else self._guard.pid

    def start(self) -> None:
        """Start it under a guard that stops everything when this process ends in any way.

        Raises:
            ServerError: the port is taken, or the server is already started.
        """
        if self._guard is not None:
            raise ServerError(f"the server on port {self.port} is already started", rule="one start, one stop")
        require_free_port(self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reader, self._pipe = os.pipe()
        # Run by path and isolated (-I): the engine may live in another environment, whose variables stay as they are.
        guard = [sys.executable, "-I", str(GUARD), str(reader), str(self.grace), "--", *self.command]
        with self.log.open("ab") as output:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(reader,),
                env=self._env,
                start_new_session=True,  # Ctrl-C in the terminal reaches this process alone, which then stops the group
            )
        os.close(reader)

    def wait_ready(self, *, timeout: float = READY_SECONDS, path: str = "/health") -> float:
        """Wait for status 200 on `path`; returns the seconds it took.

        Raises:
            ServerError: the server exited (with the telling line of its log) or the time is over.
        """
        started = spoken = time.monotonic()
        while True:
            if not self.running:
                code = "unknown" if self._guard is None else self._guard.returncode
                raise ServerError(
                    f"the server exited with code {code}: {self._telling_line()}", fix=f"tail -50 {self.log}"
                )
            if _status(self.url + path) == 200:
                return time.monotonic() - started
            now = time.monotonic()
            if now - started > timeout:
                raise ServerError(
                    f"the server is not ready after {timeout:.0f} s: {self._telling_line()}", fix=f"tail -50 {self.log}"
                )
            if now - spoken >= PROGRESS_SECONDS:
                spoken = now
                self.note(f"loading for {now - started:.0f} s: {self.progress()}")
            time.sleep(0.25)

    def progress(self) -> str:
        """Loaded shards while the log counts them, else its last line with a time (others are warnings of imports)."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        told = [line for line in lines if _TIMED.match(line) or _SHARDS.search(line)] or lines
        if not told:
            return "no output yet"
        if counts := _SHARDS.findall(told[-1]):
            return f"{counts[-1][0]} of {counts[-1][1]} shards"
        return told[-1][:160]

    def wait(self) -> int:
        """Block until the server ends by itself; returns its exit code."""
        return 0 if self._guard is None else self._guard.wait()

    def stop(self) -> None:
        """Stop everything that was started; safe to call again."""
        guard, self._guard = self._guard, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)  # end of file is the order to stop
        if guard is None:
            return
        try:
            guard.wait(timeout=self.grace + 10)
        except subprocess.TimeoutExpired:
            os.killpg(guard.pid, 9)
            guard.wait()

    def _tail(self, size: int = 16384) -> str:
        try:
            with self.log.open("rb") as handle:
                handle.seek(max(0, handle.seek(0, os.SEEK_END) - size))
                return handle.read().decode(errors="replace").replace("\r", "\n")
        except OSError:
            return ""

    def _telling_line(self) -> str:
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        telling = [line for line in lines if _CAUSE.search(line)]
        return ((telling or lines)[-1][:300]) if lines else "it wrote nothing"


def check_report(report: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Compare what the server says of itself with what was asked; returns fields that it does not report.

    Raises:
        ServerError: naming every field that differs.
    """
    unknown = [name for name in asked if name not in report]
    wrong = [
        f"{name} is {report[name]!r}, asked {value!r}"
        for name, value in asked.items()
        if name in report and not _same(report[name], value)
    ]
    if wrong:
        raise ServerError(
            "the server does not run what was asked: " + "; ".join(wrong), fix="eagle3lab serve --dry-run"
        )
    return unknown


def require_free_port(port: int) -> None:
    """`ServerError` when something already listens on the loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerError(f"port {port} cannot be used ({reason})", fix=f"--port {free_port()}") from error


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _status(url: str) -> int | None:
    try:
        with _OPENER.open(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, urllib.error.URLError):
        return None  # not listening yet


def _same(reported: Any, asked: Any) -> bool:
    if isinstance(asked, str) and isinstance(reported, str):
        return reported.lower() == asked.lower() or Path(reported) == Path(asked)
    return (
        list(reported) == list(asked) if isinstance(asked, list) and isinstance(reported, list) else reported == asked
    )
