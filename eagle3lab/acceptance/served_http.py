"""HTTP to an engine with standard library means: one streamed request with deadlines, and errors told apart.

Transient: no connection, a time-out, 408, 429, 5xx, a stream that breaks off or holds half an event. Worth a retry.
Permanent: the server understood and said no (other 4xx). A retry would get the same answer.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from eagle3lab.core.errors import ServerError, UsageError

READ_BYTES = 65_536
DETAIL_BYTES = 300
_RETRY = {408, 429}
_PLAIN = re.compile(r"[!-~]+")
"""Printable ASCII without a blank: what a URL is made of."""


class TransientError(ServerError):
    """A request that failed in a way that another try may not."""


class PermanentError(ServerError):
    """A request that the server refuses."""


class Client:
    """Requests to one server. Environment proxies are not used.

    Args:
        url: http://host:port, a path prefix may follow.
        timeout: seconds that one request may take in all, however the server trickles.
    """

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port  # read late, and refused when it is none
        except ValueError as error:
            raise UsageError(f"server URL {url!r} ({error})", rule="http://host:port") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or not _PLAIN.fullmatch(url):
            raise UsageError(f"server URL {url!r}", rule="http://host:port")
        if not 0 < timeout < math.inf:
            raise UsageError(f"timeout {timeout:g} s", rule="a number above 0")
        self.url, self.timeout = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", timeout
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")

    def get(self, path: str, *, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a GET; `TransientError` without an answer."""
        body = bytearray()
        with closing(self._kind(self._host, self._port, timeout=timeout)) as connection:
            try:
                connection.request("GET", self._prefix + path)
                answer = connection.getresponse()
                body += answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise TransientError(f"{self.url}{path}: {_reason(error)}", fix=f"curl {self.url}{path}") from error
            return answer.status, bytes(body)

    def get_json(self, path: str) -> Any:
        """Parsed body of a GET with status 200, None for any other status or a body that is not JSON."""
        status, body = self.get(path)
        try:
            return json.loads(body) if status == 200 else None
        except ValueError:
            return None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST `body` and yield the JSON of every server-sent event up to `[DONE]`.

        Raises:
            TransientError, PermanentError: see the module docstring; a stream without `[DONE]` is transient.
        """
        deadline = time.monotonic() + self.timeout
        with closing(self._kind(self._host, self._port, timeout=self.timeout)) as connection:
            try:
                connection.request("POST", self._prefix + path, json.dumps(body), {"Content-Type": "application/json"})
                socket = connection.sock  # the answer may take it over
                answer = connection.getresponse()
                if answer.status != 200:
                    raise _refusal(path, answer.status, answer.read(DETAIL_BYTES))
                rest = b""
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TransientError(f"{path} took more than {self.timeout:g} s")
                    socket.settimeout(left)
                    piece = answer.read1(READ_BYTES)
                    if not piece:
                        raise TransientError(f"{path} broke off after {len(rest)} bytes of an event, without [DONE]")
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        event = _event(path, line)
                        if event is DONE:
                            return
                        if event is not None:
                            yield event
            except (OSError, http.client.HTTPException) as error:
                raise TransientError(f"{path}: {_reason(error)}") from error


DONE: dict[str, Any] = {}
"""The event `[DONE]`, compared by identity."""


def _event(path: str, line: bytes) -> dict[str, Any] | None:
    """The object of a `data:` line; None for comments and blank lines; `DONE`."""
    if not line.startswith(b"data:"):
        return None
    text = line[5:].strip()
    if text == b"[DONE]":
        return DONE
    try:
        event = json.loads(text)
    except ValueError as error:
        raise TransientError(f"{path} sent half an event {text[:60]!r}") from error
    if not isinstance(event, dict):
        raise TransientError(f"{path} sent the event {text[:60]!r}", rule="events are objects")
    if "error" in event:
        raise TransientError(f"{path} reported {str(event['error'])[:200]} inside the stream")
    return event


def _refusal(path: str, status: int, body: bytes) -> ServerError:
    detail = " ".join(body.decode(errors="replace").split())
    kind = TransientError if status >= 500 or status in _RETRY else PermanentError
    return kind(f"{path} answered {status} {detail}".rstrip())


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return f"{type(error).__name__} {error}".strip()
