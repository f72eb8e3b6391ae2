"""A stand-in for an engine: answers /health and /server_info on the loopback, and leaves a grandchild that hides.

Standard library only. `--fake-*` words steer it: delay before it is ready, a log line, an exit code, deaf to SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def value(name: str, default: str = "") -> str:
    """Last value of `--name` on the command line."""
    words = sys.argv[1:]
    found = [words[i + 1] for i, word in enumerate(words[:-1]) if word == name]
    return found[-1] if found else default


class Handler(BaseHTTPRequestHandler):
    started = time.monotonic()

    def answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        ready = time.monotonic() - self.started > float(os.environ.get("FAKE_DELAY", "0"))
        report = {
            "model_path": value("--model-path"),
            "tp_size": int(value("--tp-size", "1")),
            "speculative_algorithm": os.environ.get("FAKE_ALGORITHM", value("--speculative-algorithm")) or None,
        }
        self.answer(200 if ready else 503, report if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {"text": " Paris"})

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if line := os.environ.get("FAKE_LINE"):
        print(line, flush=True)
    if code := os.environ.get("FAKE_EXIT"):
        sys.exit(int(code))
    if os.environ.get("FAKE_DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A scheduler in a session of its own: a signal to the process group does not reach it.
    hidden = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {hidden.pid}")
    ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
