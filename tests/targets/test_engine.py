"""A server process: readiness, the telling line of a failed start, its own report, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3lab.core.errors import ServerError
from eagle3lab.targets.engine import EngineServer, check_report, free_port, request_json, require_free_port

FAKE = Path(__file__).with_name("fake_server.py")


def alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], seconds: float = 10) -> list[int]:
    """Those of `pids` that still live after `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


@pytest.fixture
def make(tmp_path):
    made: list[EngineServer] = []

    def build(*, grace: float = 5.0, note=lambda line: None, **env: str) -> EngineServer:
        port = free_port()
        settings = {"FAKE_PIDS": str(tmp_path / "pids"), **env}
        words = [sys.executable, str(FAKE), "--port", str(port), "--model-path", "M"]
        made.append(EngineServer(words, port=port, log=tmp_path / "log", env=settings, note=note, grace=grace))
        return made[-1]

    yield build
    for server in made:
        server.stop()


def pids_of(tmp_path: Path, seconds: float = 10) -> list[int]:
    """[server, hidden grandchild], as the fake server wrote them."""
    path, deadline = tmp_path / "pids", time.monotonic() + seconds
    while not (path.is_file() and len(path.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


def test_ready_report_and_stop(make, tmp_path) -> None:
    with make(FAKE_DELAY="0.5") as server:
        assert server.wait_ready(timeout=20) >= 0.2
        assert request_json(f"{server.url}/server_info")["model_path"] == "M"
        pids = pids_of(tmp_path)
        assert all(map(alive, pids))
    assert wait_gone(pids, 1) == [] and not server.running
    server.stop()  # again is fine


def test_an_error_in_the_block_stops_everything(make, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), make() as server:
        server.wait_ready(timeout=20)
        pids = pids_of(tmp_path)
        raise KeyboardInterrupt
    assert wait_gone(pids, 1) == []


def test_a_deaf_server_is_killed_after_the_grace_time(make, tmp_path) -> None:
    server = make(FAKE_DEAF="1", grace=0.5)
    server.start()
    server.wait_ready(timeout=20)
    pids, started = pids_of(tmp_path), time.monotonic()
    server.stop()
    assert wait_gone(pids, 1) == [] and 0.4 < time.monotonic() - started < 5


OWNER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
from pathlib import Path
from eagle3lab.targets.engine import EngineServer
server = EngineServer(sys.argv[3:], port=int(sys.argv[1]), log=Path(sys.argv[2]), grace=2.0)
server.start()
server.wait_ready(timeout=20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nobody_outlives_a_dead_owner(tmp_path, signum: int) -> None:
    port = free_port()
    words = [
        sys.executable,
        "-c",
        OWNER,
        str(port),
        str(tmp_path / "log"),
        sys.executable,
        str(FAKE),
        "--port",
        str(port),
    ]
    env = {**os.environ, "FAKE_PIDS": str(tmp_path / "pids")}
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True)
    try:
        assert owner.stdout.readline() == "ready\n"
        pids = pids_of(tmp_path)
        os.kill(owner.pid, signum)
        owner.wait(timeout=10)
        assert wait_gone(pids) == []
    finally:
        owner.kill()


def test_a_killed_guard_takes_the_server_along(make, tmp_path) -> None:
    server = make()
    server.start()
    server.wait_ready(timeout=20)
    leader, hidden = pids_of(tmp_path)
    try:
        os.kill(server.pid, signal.SIGKILL)
        assert wait_gone([leader]) == []
    finally:
        os.kill(hidden, signal.SIGKILL)  # nothing is left that could know of it


def test_started_in_a_thread_that_ends_it_lives_on(make) -> None:
    server = make()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    server.wait_ready(timeout=20)
    time.sleep(0.5)
    assert server.running and request_json(f"{server.url}/server_info")["tp_size"] == 1


def test_a_start_that_fails_shows_the_telling_line(make) -> None:
    server = make(FAKE_LINE="torch.OutOfMemoryError: CUDA out of memory", FAKE_EXIT="3")
    with server, pytest.raises(ServerError, match=r"code 3: torch\.OutOfMemoryError") as error:
        server.wait_ready(timeout=20)
    assert "\n" not in str(error.value)


def test_a_command_that_is_not_there(tmp_path) -> None:
    server = EngineServer(["/no/such/python"], port=free_port(), log=tmp_path / "log")
    with server, pytest.raises(ServerError, match="code 127: cannot start /no/such/python"):
        server.wait_ready(timeout=20)


def test_not_ready_in_time_says_where_it_was(make) -> None:
    with make(FAKE_DELAY="60", FAKE_LINE="Loading shards:  45%|## | 29/64 [02:10<02:30]") as server:
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_ready(timeout=1)
        assert server.progress() == "29 of 64 shards"


def test_progress_is_spoken(make, monkeypatch) -> None:
    monkeypatch.setattr("eagle3lab.targets.engine.PROGRESS_SECONDS", 0.3)
    lines: list[str] = []
    with make(FAKE_DELAY="1.2", FAKE_LINE="Capturing graphs", note=lines.append) as server:
        server.wait_ready(timeout=20)
    assert lines and "Capturing graphs" in lines[-1] and len(lines) < 20


def test_port_that_is_taken() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(ServerError, match="--port"):
            require_free_port(busy.getsockname()[1])
    with pytest.raises(ServerError, match="70000"):
        require_free_port(70000)


ASKED = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/d",
    "return_aux_hidden_state_layer_ids": [2, 30, 58],
}


def test_report_that_agrees() -> None:
    assert check_report({**ASKED, "speculative_algorithm": "eagle3", "other": 1}, ASKED) == []
    assert check_report({"speculative_algorithm": "EAGLE3"}, ASKED) == list(ASKED)[1:]


@pytest.mark.parametrize(
    "wrong",
    [
        {"speculative_algorithm": "EAGLE"},
        {"speculative_algorithm": None},
        {"speculative_draft_model_path": "/other"},
        {"return_aux_hidden_state_layer_ids": [1, 29, 57]},
        {"return_aux_hidden_state_layer_ids": None},
    ],
)
def test_report_that_differs_names_the_field(wrong: dict) -> None:
    with pytest.raises(ServerError, match=next(iter(wrong))):
        check_report({**ASKED, **wrong}, ASKED)


def test_request_errors_are_one_line(make) -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        request_json(f"http://127.0.0.1:{free_port()}/health", timeout=2)
    with make(FAKE_DELAY="60") as server:
        with pytest.raises(ServerError):
            server.wait_ready(timeout=1)
        with pytest.raises(ServerError, match="answered 503"):
            request_json(f"{server.url}/health")
