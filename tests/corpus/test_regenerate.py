"""Replies from a served target: every prompt once, whatever the server does, and a file that can be continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.core.errors import CorpusError, ServerError, UsageError
from eagle3lab.corpus.prompts import Prompt
from eagle3lab.corpus.regenerate import Outcome, Settings, read_answers, regenerate, served_model, settings_path
from eagle3lab.steps.regenerate import regenerate_file
from tests.corpus.openai_server import ChatServer

PROMPTS = [Prompt(f"p{index:03d}", "chat", f"say {index}") for index in range(40)]
GREEDY = Settings("the-target", 0.0, 64)


def run(out: Path, server: ChatServer, **changes: object) -> Outcome:
    values = {"server": server.url, "concurrency": 8, "pause": 0.01, "note": lambda _: None}
    return regenerate(PROMPTS, out, GREEDY, **(values | changes))  # type: ignore[arg-type]


def test_every_prompt_is_answered_once_and_in_order(tmp_path: Path) -> None:
    out = tmp_path / "replies.jsonl"
    with ChatServer(seconds=0.02) as server:
        done = run(out, server)
    assert (done.replies, done.new, done.retries, done.failed) == (40, 40, 0, {})
    assert set(server.attempts.values()) == {1}
    assert 2 <= server.busiest <= 8
    answers = read_answers(out)
    assert [answer.id for answer in answers] == [prompt.id for prompt in PROMPTS]
    assert answers[3].reply == "SAY 3"
    assert (answers[3].finish, answers[3].tokens, answers[3].reasoning) == ("stop", 7, None)


def test_one_at_a_time_is_one_at_a_time(tmp_path: Path) -> None:
    with ChatServer() as server:
        run(tmp_path / "a.jsonl", server, concurrency=1)
    assert server.busiest == 1


def test_temperature_and_all_settings_are_sent_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "replies.jsonl"
    settings = Settings("the-target", 0.7, 99, seed=5, top_p=0.9, system="Be brief.", template={"thinking": False})
    with ChatServer() as server:
        regenerate(PROMPTS[:2], out, settings, server=server.url)
    sent = server.bodies[0]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"], sent["top_p"]) == (0.7, 99, 5, 0.9)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent["chat_template_kwargs"] == {"thinking": False}
    recorded = json.loads(settings_path(out).read_text())
    assert (recorded["temperature"], recorded["model"], recorded["prompts"]) == (0.7, "the-target", 2)


def test_reasoning_is_kept_apart(tmp_path: Path) -> None:
    with ChatServer(thinking=True) as server:
        run(tmp_path / "a.jsonl", server)
    assert read_answers(tmp_path / "a.jsonl")[1].reasoning == "about say 1"


@pytest.mark.parametrize("fault", [503, 429, "cut"])
def test_passing_faults_are_repeated(tmp_path: Path, fault: int | str) -> None:
    with ChatServer(lambda prompt, attempt: fault if attempt < 3 and prompt.endswith("7") else None) as server:
        done = run(tmp_path / "a.jsonl", server)
    assert (done.replies, done.retries, done.failed) == (40, 8, {})
    assert server.attempts["say 17"] == 3
    assert server.attempts["say 16"] == 1


def test_a_prompt_that_never_works_is_named_and_asked_again_later(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    with ChatServer(lambda prompt, _: 500 if prompt == "say 5" else None) as server:
        done = run(out, server, retries=2)
    assert done.replies == 39
    assert list(done.failed) == ["p005"]
    assert "answered 500" in done.failed["p005"]
    assert server.attempts["say 5"] == 3
    with ChatServer() as server:
        done = run(out, server)
    assert (done.replies, done.new) == (40, 1)
    assert dict(server.attempts) == {"say 5": 1}
    assert [answer.id for answer in read_answers(out)] == [prompt.id for prompt in PROMPTS]


def test_an_empty_reply_is_no_reply(tmp_path: Path) -> None:
    with ChatServer(lambda prompt, _: "empty" if prompt == "say 5" else None) as server:
        done = run(tmp_path / "a.jsonl", server)
    assert done.failed == {"p005": "the reply is empty"}
    assert server.attempts["say 5"] == 1


def test_a_refused_request_stops_at_once(tmp_path: Path) -> None:
    with ChatServer(lambda *_: 400) as server, pytest.raises(ServerError, match="answered 400"):
        run(tmp_path / "a.jsonl", server)
    assert sum(server.attempts.values()) <= 8


def test_a_server_that_is_gone_stops_the_run_and_keeps_the_replies(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    many = [Prompt(f"p{index:03d}", "chat", f"say {index}") for index in range(200)]

    def dies(prompt: str, _: int) -> int | None:
        return None if int(prompt.split()[1]) < 20 else 503

    with ChatServer(dies) as server, pytest.raises(ServerError, match="16 prompts in a row"):
        regenerate(many, out, GREEDY, server=server.url, concurrency=8, retries=1, pause=0.001)
    assert len(read_answers(out)) >= 20 - 8  # all but those in flight when the run gave up
    assert sum(server.attempts.values()) < 150, "it went on asking a dead server"
    with pytest.raises(ServerError, match="no model server"):
        served_model(server.url, seconds=1)


@pytest.mark.parametrize(
    "changed", [{"temperature": 1.0}, {"max_tokens": 65}, {"seed": 1}, {"model": "x"}, {"template": {"thinking": True}}]
)
def test_other_settings_do_not_continue_a_file(tmp_path: Path, changed: dict[str, object]) -> None:
    out = tmp_path / "a.jsonl"
    with ChatServer() as server:
        run(out, server)
        before = out.read_bytes()
        values = {"model": "the-target", "temperature": 0.0, "max_tokens": 64} | changed
        with pytest.raises(CorpusError, match=next(iter(changed))):
            regenerate(PROMPTS, out, Settings(**values), server=server.url)
        with pytest.raises(CorpusError, match="prompts"):
            regenerate(PROMPTS[:-1], out, GREEDY, server=server.url)
    assert out.read_bytes() == before


def test_a_torn_line_is_asked_again(tmp_path: Path) -> None:
    out, notes = tmp_path / "a.jsonl", []
    with ChatServer() as server:
        run(out, server)
        reference = out.read_bytes()
        lines = reference.splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:10]) + lines[10][:25])
        done = run(out, server, note=notes.append)
    assert (done.replies, done.new) == (40, 30)
    assert out.read_bytes() == reference
    assert "torn" in notes[0]


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.corpus.test_regenerate import GREEDY, PROMPTS
from eagle3lab.corpus.regenerate import regenerate
regenerate(PROMPTS, Path(sys.argv[1]), GREEDY, server=sys.argv[2], concurrency=4)
"""


def test_killed_and_continued_nothing_is_lost_or_asked_twice(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    root = Path(__file__).parents[2]
    with ChatServer(seconds=0.05) as server:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(out), server.url, str(root)])
        while not out.exists() or out.read_bytes().count(b"\n") < 12:
            assert child.poll() is None
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        arrived = [answer.id for answer in read_answers(out)] if out.read_bytes().endswith(b"\n") else None
        time.sleep(0.2)
        server.attempts.clear()
        done = run(out, server)
    assert done.replies == 40
    if arrived is not None:
        assert not {f"say {int(id[1:])}" for id in arrived} & set(server.attempts)
    assert [answer.id for answer in read_answers(out)] == [prompt.id for prompt in PROMPTS]


def test_the_step_reads_prompts_and_reports(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {index}"}) + "\n" for index in range(5)))
    with ChatServer(lambda prompt, _: "empty" if prompt == "say 3" else None) as server:
        done = regenerate_file(server=server.url, prompts=prompts, out=out, temperature=0.5)
    assert done.exit_code == 1
    assert done.settings.model == "the-target"
    assert "4 of 5 replies" in done.as_text()
    assert "prompts-0004: the reply is empty" in done.as_text()
    assert done.as_json()["temperature"] == 0.5
    with pytest.raises(UsageError, match="--server localhost"):
        regenerate_file(server="localhost:1", prompts=prompts, out=out)
    with pytest.raises(UsageError, match="--temperature 3"):
        regenerate_file(server=server.url, prompts=prompts, out=out, temperature=3)


@pytest.mark.parametrize(
    ("server", "out", "told"),
    [
        ("http://[::1", "o", "--server"),
        ("http://127.0.0.1:99999", "o", "--server"),
        ("http://127.0.0.1:9", ".", "is a folder"),
    ],
)
def test_an_address_or_a_place_that_is_none_is_one_line(tmp_path, capfd, server, out, told):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    words = ["--server", server, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / out)]
    assert cli.run(["regenerate", *words]) == 2
    assert told in capfd.readouterr().err


def test_replies_of_another_command_are_told(tmp_path: Path) -> None:
    path = tmp_path / "replies-float32-00.jsonl"
    path.write_text(json.dumps({"id": "a", "kind": "k", "prompt": "p", "reply": "r", "ended": True}) + "\n")
    with pytest.raises(CorpusError, match=r"corpus build are for a run.*next: eagle3lab run"):
        read_answers(path)
