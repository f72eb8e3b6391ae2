"""An OpenAI-style chat server on the loopback interface that answers from a table of faults."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[str, int], int | str | None]
"""(prompt, attempt from 1) -> HTTP state to answer with, `cut` = half an answer, `empty` = no text, None = a reply."""


class ChatServer:
    """Counts requests; a reply is the prompt in capitals, with a thought when `thinking`."""

    def __init__(self, fault: Fault = lambda prompt, attempt: None, *, seconds: float = 0.0, thinking: bool = False):
        self.attempts: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.busiest = self._busy = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "the-target"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][-1]["content"]
                with server._lock:
                    server.attempts[prompt] += 1
                    server.bodies.append(body)
                    server._busy += 1
                    server.busiest = max(server.busiest, server._busy)
                    attempt = server.attempts[prompt]
                time.sleep(seconds)
                with server._lock:
                    server._busy -= 1
                what = fault(prompt, attempt)
                if isinstance(what, int):
                    self._send(what, {"error": "not now"})
                    return
                message = {"role": "assistant", "content": "" if what == "empty" else prompt.upper()}
                if thinking:
                    message["reasoning_content"] = f"about {prompt}"
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._send(200, {"choices": [choice], "usage": {"completion_tokens": 7}}, cut=what == "cut")

            def _send(self, state: int, answer: dict[str, Any], cut: bool = False) -> None:
                data = json.dumps(answer).encode()
                self.send_response(state)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
