"""Replies written by a served target: an OpenAI-style server answers many prompts at a time, and none twice.

`FILE` gets one JSON line a reply, in the order in which they arrive; `FILE.json` beside it says how they were made. An
interrupted run is continued by the same command: what is in the file is kept, other settings are refused. At the end
the lines are put into the order of the prompts, so that the file does not depend on the server's timing.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import CorpusError, ServerError
from eagle3lab.core.files import read_json, write_json, write_text
from eagle3lab.core.hashes import sha256_json
from eagle3lab.core.parallel import in_parallel
from eagle3lab.corpus.prompts import Prompt, read_jsonl

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP states that pass: the request is repeated."""
GONE = 16
"""So many prompts in a row without an answer, each with all its repetitions: the server is gone."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# Environment proxies must never see requests to a local server.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Settings:
    """How the target is asked. All of it is recorded, and must be the same on resume.

    Attributes:
        model: name that the server gives the target. temperature: 0 = greedy. seed: sent with each request.
        max_tokens: of one reply. template: variables of the chat template, such as {"thinking": false}.
        system: system message of every conversation, or None.
    """

    model: str
    temperature: float
    max_tokens: int
    seed: int = 0
    top_p: float = 1.0
    system: str | None = None
    template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply as the server gave it.

    Attributes:
        reasoning: what a reasoning parser took out of the reply, or None.
        finish: `stop` = the target ended by itself, `length` = cut.
        tokens: completion tokens that the server counted, None when it did not say.
    """

    id: str
    kind: str
    prompt: str
    reply: str
    reasoning: str | None
    finish: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did: replies in the file, new ones of them, repeated requests, and who got none, with why."""

    replies: int
    new: int
    retries: int
    failed: dict[str, str]
    seconds: float


def served_model(server: str, *, seconds: float = 30.0) -> str:
    """Name of the first model that the server lists. `ServerError` when it lists none."""
    try:
        listed = _request(f"{server}/v1/models", None, seconds)
    except _Passing as error:
        raise ServerError(f"no model server: {error}", fix=f"curl {server}/v1/models") from error
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{server}/v1/models lists no model: {str(listed)[:120]}", fix="--model NAME") from error


def regenerate(
    prompts: Sequence[Prompt],
    out: Path,
    settings: Settings,
    *,
    server: str,
    concurrency: int = 32,
    retries: int = 5,
    request_seconds: float = 1800.0,
    pause: float = FIRST_PAUSE,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] = print,
) -> Outcome:
    """Ask for every prompt that has no reply in `out` yet.

    Args:
        retries: repetitions of one request after a lost connection or a passing HTTP state; the pause doubles.
        progress: called with (replies in the file, prompts).

    Raises:
        CorpusError: `out` was made with other settings or other prompts, or a line of it is not one of ours.
        ServerError: the server refuses the very requests (4xx), or is gone: many prompts in a row got no answer.
    """
    _same_settings(out, prompts, settings)
    have = _read_back(out, {prompt.id for prompt in prompts}, note)
    missing = [prompt for prompt in prompts if prompt.id not in have]
    started, before = time.monotonic(), len(have)
    client = _Client(server.rstrip("/"), settings, retries, request_seconds, pause)
    with out.open("a", encoding="utf-8") as file:
        for prompt, answer in in_parallel(client.ask, missing, min(concurrency, len(missing))):
            if answer is None:
                continue
            have[prompt.id] = asdict(answer)
            file.write(json.dumps(have[prompt.id], ensure_ascii=False) + "\n")
            file.flush()  # a kill loses the replies in flight, no others
            if progress is not None:
                progress(len(have), len(prompts))
    rows = [have[prompt.id] for prompt in prompts if prompt.id in have]
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    seconds = time.monotonic() - started
    return Outcome(len(rows), len(rows) - before, client.retried, dict(sorted(client.failed.items())), seconds)


def read_answers(path: Path) -> list[Answer]:
    """Replies of a file, in order. `CorpusError` names a line with other keys."""
    answers = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            answers.append(Answer(**row))
        except TypeError as error:
            built = {"prompt", "reply", "ended"} <= row.keys()
            raise CorpusError(
                f"{path}:{number} is no reply of eagle3lab regenerate ({error})",
                rule="those of eagle3lab corpus build are for a run, which finds them by itself" if built else "",
                fix="eagle3lab run --profile NAME" if built else "eagle3lab regenerate --help",
            ) from error
    return answers


def settings_path(out: Path) -> Path:
    """File beside `out` that says how its replies were made."""
    return out.with_name(out.name + ".json")


class _Client:
    """Asks one server, from many threads; counts what went wrong."""

    def __init__(self, server: str, settings: Settings, retries: int, seconds: float, pause: float) -> None:
        self.url, self.settings = f"{server}/v1/chat/completions", settings
        self.retries, self.seconds, self.pause = retries, seconds, pause
        self.retried = self.lost = 0
        self.failed: dict[str, str] = {}
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt) -> Answer | None:
        """One reply, or None when the prompt has to be given up (recorded with the reason)."""
        for attempt in range(self.retries + 1):
            try:
                answer = _parse(prompt, _request(self.url, _body(prompt, self.settings), self.seconds))
            except _Passing as error:
                if attempt == self.retries:
                    self._give_up(prompt, str(error))
                    return None
                with self._lock:
                    self.retried += 1
                time.sleep(min(LONGEST_PAUSE, self.pause * 2**attempt) * random.uniform(0.5, 1.0))
            except CorpusError as error:
                self.failed[prompt.id] = str(error)
                return None
            else:
                self.lost = 0
                return answer
        return None

    def _give_up(self, prompt: Prompt, reason: str) -> None:
        """Note a prompt that nobody answered; too many in a row mean that the server is gone."""
        with self._lock:
            self.failed[prompt.id] = reason
            self.lost += 1
            lost = self.lost
        if lost >= GONE:
            raise ServerError(
                f"{lost} prompts in a row got no answer; the last: {reason}",
                rule="replies that have arrived are kept",
                fix="start the server, then the same command again",
            )


class _Passing(Exception):
    """A failure that a repetition may cure."""


def _request(url: str, body: dict[str, Any] | None, seconds: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"} if data else {})
    try:
        with _OPENER.open(request, timeout=seconds) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        detail = " ".join(error.read(300).decode(errors="replace").split())
        if error.code in AGAIN:
            raise _Passing(f"{url} answered {error.code} {detail}") from error
        raise ServerError(
            f"{url} answered {error.code} {detail}", rule="the server takes OpenAI chat requests"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, cut in the middle, half a text
        raise _Passing(f"{url}: {getattr(error, 'reason', error)}") from error


def _body(prompt: Prompt, settings: Settings) -> dict[str, Any]:
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": [*system, {"role": "user", "content": prompt.prompt}],
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "stream": False,
    }
    if settings.template:
        body["chat_template_kwargs"] = settings.template
    return body


def _parse(prompt: Prompt, answer: Any) -> Answer:
    """Read a chat completion. `CorpusError` when it has no text: an empty reply would leave nothing to supervise."""
    try:
        choice = answer["choices"][0]
        message, finish = choice["message"], str(choice["finish_reason"])
    except (KeyError, IndexError, TypeError) as error:
        raise CorpusError(
            f"the server answered {str(answer)[:120]}", rule="a chat completion has one choice"
        ) from error
    reply, reasoning = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
    if not (reply or reasoning):
        raise CorpusError("the reply is empty")
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    return Answer(prompt.id, prompt.kind, prompt.prompt, reply, reasoning, finish, tokens)


def _same_settings(out: Path, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Write how the replies are made, or refuse a file that was begun otherwise."""
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) != len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise CorpusError(f"two prompts are called '{twice}'", rule="a prompt's id is unique")
    facts = {
        "schema": "eagle3lab-regenerated/1",
        **asdict(settings),
        "prompts": len(prompts),
        "prompts_sha256": sha256_json([[prompt.id, prompt.prompt] for prompt in prompts]),
    }
    path = settings_path(out)
    if not path.exists():
        if out.exists():
            raise CorpusError(f"{out} exists without {path.name}", rule="nothing is overwritten", fix="--out OTHER")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)
        return
    found = read_json(path)
    for name, value in facts.items():
        if found.get(name) != value:
            raise CorpusError(
                f"{out} was begun with {name} = {found.get(name)!r}, now {value!r}",
                rule="one file holds replies made in one way",
                fix="--out OTHER",
            )


def _read_back(out: Path, known: set[str], note: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Replies in the file; a last line torn by a kill is cut off."""
    if not out.exists():
        return {}
    data = out.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        note(f"{out}: the last line is torn ({len(data) - whole} bytes): asked again")
        with out.open("r+b") as file:
            file.truncate(whole)
    rows = {answer.id: asdict(answer) for answer in read_answers(out)}
    if strangers := rows.keys() - known:
        raise CorpusError(f"{out} has a reply to '{min(strangers)}', which is none of the prompts", fix="--out OTHER")
    return rows
