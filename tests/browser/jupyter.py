"""A JupyterLab of its own on loopback, and what a reader does in it: open, run all cells, look."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

START_SECONDS = 120
ERROR = re.compile(r"^Traceback|^\w*(Error|Exception|Interrupt)(:|$)", re.MULTILINE)
SETTINGS: dict[str, dict[str, Any]] = {
    # Every cell stays in the page, so that the test sees what a reader would scroll to.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@dataclass
class Lab:
    """A running server. `url` opens its front page with the token."""

    port: int
    token: str
    folder: Path

    def url(self, notebook: str) -> str:
        """Page of one notebook."""
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?token={self.token}&reset"


@contextmanager
def serve(folder: Path, home: Path, environment: dict[str, str]) -> Iterator[Lab]:
    """JupyterLab over `folder`, with settings, sockets and history in `home`; stopped with its kernels at the end."""
    for name, value in SETTINGS.items():
        place = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(value))
    port, token = free_port(), secrets.token_hex(16)
    words = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    words += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    own = {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    log = (home / "jupyter.log").open("wb")
    process = subprocess.Popen(words, env={**os.environ, **own, **environment}, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={token}", process, home / "jupyter.log")
        yield Lab(port, token, folder)
    finally:
        process.terminate()  # the server ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `url` answers; an error with the end of the log when the server ends or is too slow."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"JupyterLab does not answer ({process.poll()}): {log.read_text()[-2000:]}")


@dataclass
class Seen:
    """One notebook after all its cells ran."""

    page: Any
    faults: list[str] = field(default_factory=list)

    def images(self, inside: str = ".jp-Notebook") -> list[str]:
        """Sources of the figures in the outputs."""
        return self.page.eval_on_selector_all(f"{inside} .jp-OutputArea img", "all => all.map(one => one.src)")

    def errors(self) -> list[str]:
        """Tracebacks, broken widgets and errors of the page itself."""
        # An error is shown like a stream: its last line tells them apart.
        shown = self.page.eval_on_selector_all(".jp-OutputArea-output", "all => all.map(one => one.innerText)")
        text = [
            one for one in shown if re.search(r"^Traceback|^\w*(Error|Exception|Interrupt)(:|$)", one, re.MULTILINE)
        ]
        body = self.page.inner_text("body")
        broken = [word for word in ("Error displaying widget", "Loading widget...", "Javascript Error") if word in body]
        return [*text, *broken, *self.faults]

    def counts(self) -> list[str]:
        """The prompts of the code cells: `[3]:` for one that ran."""
        return self.page.eval_on_selector_all(".jp-CodeCell .jp-InputPrompt", "all => all.map(one => one.innerText)")

    def screenshot(self, path: Path) -> None:
        """The whole notebook, not only the part in view."""
        page, wide = self.page, 1400
        heights = "all => Math.max(...all.map(one => one.scrollHeight))"
        tall = page.eval_on_selector_all(".jp-NotebookPanel, .jp-NotebookPanel *", heights)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.set_viewport_size({"width": wide, "height": min(int(tall) + 250, 15000)})
        page.eval_on_selector_all(".jp-NotebookPanel *", "all => all.forEach(one => { one.scrollTop = 0; })")
        page.wait_for_timeout(1500)
        page.screenshot(path=str(path))
        page.set_viewport_size({"width": wide, "height": 1000})


def open_and_run(page: Any, lab: Lab, notebook: str, *, seconds: float) -> Seen:
    """Open a notebook and run all its cells, as the menu does."""
    seen = Seen(page)
    page.on("pageerror", lambda error: seen.faults.append(str(error)))
    page.goto(lab.url(notebook))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=120_000)
    page.wait_for_timeout(1000)
    if page.locator(".jp-Dialog button.jp-mod-accept").count():  # which kernel? the one of the notebook stands there
        page.click(".jp-Dialog button.jp-mod-accept")
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        page.wait_for_timeout(1000)
        if seen.errors() or all(re.fullmatch(r"\[\d+\]:", one.strip()) for one in seen.counts()):
            break
    page.wait_for_timeout(1500)  # the last output is drawn after its cell is numbered
    return seen
