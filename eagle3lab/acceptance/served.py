"""Acceptance of a running SGLang or vLLM server: prompts in, counts out, and nothing lost on the way.

Every prompt ends as a reply or as a named failure. SGLang counts a prompt; vLLM counts the whole server, so prompts go
in groups with a reading of its counters between them, and a group whose tokens do not add up (other traffic, a retry
that left work behind) is named and left out of the counts.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.served_engines import VLLM, Answer, Settings, SGLang
from eagle3lab.acceptance.served_http import PermanentError, TransientError
from eagle3lab.acceptance.served_log import ServedLog
from eagle3lab.acceptance.served_prompts import ServedPrompt
from eagle3lab.core.errors import AcceptanceError, UsageError

CONCURRENCY = range(1, 65)
GROUPS = 16
"""Groups that a vLLM measurement is cut into at most: enough for an interval over groups."""
BACKOFF_SECONDS, LONGEST_BACKOFF = 0.5, 8.0
SETTLE_SECONDS = 2.0
"""How long vLLM's counters may lag behind the last byte of a reply."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try. retries: after the first attempt. backoff: seconds before the first retry, doubling."""

    concurrency: int = 8
    retries: int = 3
    backoff: float = BACKOFF_SECONDS

    def __post_init__(self) -> None:
        if self.concurrency not in CONCURRENCY or self.retries < 0:
            raise UsageError(
                f"concurrency {self.concurrency}, retries {self.retries}", rule="concurrency 1..64, retries 0 or more"
            )


@dataclass(slots=True)
class Measured:
    """All prompts of one server.

    Attributes:
        replies: name -> record (text, tokens, seconds, first_token_seconds, attempts, errors, meta).
        failures: name -> record (error, attempts).
        counts: acceptance; None = no counters at all. Its per_prompt are prompts (SGLang) or groups (vLLM).
        over: what the interval is over. without_counters: prompts whose reply carried none.
        unclean: groups left out, and why.
        wall_seconds: of this session; fresh_tokens: generated in it; resumed: prompts taken from the log.
    """

    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: AcceptanceCounts | None = None
    over: str = "prompts"
    without_counters: list[str] = field(default_factory=list)
    unclean: dict[str, str] = field(default_factory=dict)
    wall_seconds: float = 0.0
    fresh_tokens: int = 0
    resumed: int = 0

    def timing(self) -> dict[str, Any]:
        """Tokens a second and time to first token; unknown is null."""
        first = sorted(r["first_token_seconds"] for r in self.replies.values() if r["first_token_seconds"] is not None)
        return {
            "wall_seconds": self.wall_seconds,
            "tokens_per_second": self.fresh_tokens / self.wall_seconds if self.fresh_tokens else None,
            "first_token_seconds_median": statistics.median(first) if first else None,
            "first_token_seconds_p95": first[min(len(first) - 1, round(0.95 * (len(first) - 1)))] if first else None,
            "prompts_of_an_earlier_session": self.resumed,
        }


def measure_server(
    engine: SGLang | VLLM,
    prompts: Sequence[ServedPrompt],
    settings: Settings,
    effort: Effort,
    log: ServedLog,
    *,
    role: str = "server",
    progress: Callable[[int, int, int], None] | None = None,
) -> Measured:
    """Send every prompt and collect replies, failures and counts.

    Args:
        log: finished prompts in it are not sent again. role: `server` or `baseline`, its name in the log.
        progress: called with (done, of, failed) after every prompt.
    """
    for prompt in prompts:
        engine.body(prompt, settings)  # a prompt that cannot be sent is an error before anything is
    found = Measured()
    plan = _plan(engine, prompts, effort.concurrency, log, role)
    sent = {prompt.id for members in plan.values() for prompt in members}
    found.resumed = len(prompts) - len(sent)
    finished, failed = found.resumed, 0

    def report(record: dict[str, Any]) -> None:
        nonlocal finished, failed
        finished, failed = finished + 1, failed + ("error" in record)
        if progress is not None:
            progress(finished, len(prompts), failed)

    started = time.monotonic()
    for name, members in plan.items():
        _send_group(engine, name, members, settings, effort, log, role, report)
    found.wall_seconds = time.monotonic() - started
    records = log.latest("prompt", role)
    for prompt in prompts:
        record = records[prompt.id]
        (found.failures if "error" in record else found.replies)[prompt.id] = record
    found.fresh_tokens = sum(r["tokens"] or 0 for name, r in found.replies.items() if name in sent)
    _count(engine, found, log.latest("group", role))
    return found


def _plan(
    engine: SGLang | VLLM, prompts: Sequence[ServedPrompt], concurrency: int, log: ServedLog, role: str
) -> dict[str, list[ServedPrompt]]:
    """Prompts that are still to be sent, by group. A vLLM group is sent whole or not at all: it is counted whole."""
    replied = {name for name, record in log.latest("prompt", role).items() if "error" not in record}
    if not isinstance(engine, VLLM):
        todo = [prompt for prompt in prompts if prompt.id not in replied]
        return {"all": todo} if todo else {}
    size = max(concurrency, -(-len(prompts) // GROUPS)) if concurrency > 1 else 1
    counted = {name for name, group in log.latest("group", role).items() if not group["problem"]}
    plan = {}
    for start in range(0, len(prompts), size):
        name, members = f"group-{start // size + 1:03d}", list(prompts[start : start + size])
        if name not in counted or any(prompt.id not in replied for prompt in members):
            plan[name] = members
    return plan


def _send_group(
    engine: SGLang | VLLM,
    name: str,
    prompts: Sequence[ServedPrompt],
    settings: Settings,
    effort: Effort,
    log: ServedLog,
    role: str,
    report: Callable[[dict[str, Any]], None],
) -> None:
    before = engine.scrape() if isinstance(engine, VLLM) else None
    records = _send_all(engine, prompts, settings, effort, log, role, report)
    if before is None or not isinstance(engine, VLLM):
        return
    expected = sum(record.get("tokens") or 0 for record in records)
    counts, problem = _settled(engine, before, expected, name)
    group: dict[str, Any] = {"kind": "group", "role": role, "name": name, "prompts": [r["name"] for r in records]}
    log.add(group | {"counts": None if counts is None else counts.to_json()["counts"], "problem": problem})


def _settled(engine: VLLM, before: Any, expected: int, name: str) -> tuple[AcceptanceCounts | None, str | None]:
    """Counts of a group and what is wrong with them, once the server's token counter has caught up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        _, counters, tokens = engine.scrape()
        made = None if tokens is None or before[2] is None else tokens - before[2]
        if made is None or made >= expected or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    try:
        counts = counters.since(before[1], name)
    except AcceptanceError as error:
        return None, f"{error.what}: {error.rule}"
    if made is None:
        return counts, None  # no counter of tokens to check with
    problem = f"the server made {made} tokens, the replies hold {expected}" if made != expected else None
    return counts, problem


def _send_all(
    engine: SGLang | VLLM,
    prompts: Sequence[ServedPrompt],
    settings: Settings,
    effort: Effort,
    log: ServedLog,
    role: str,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Records of all prompts, sent by `concurrency` threads; each is in the log before it is reported."""
    waiting: queue.SimpleQueue[ServedPrompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    results: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                record = {"kind": "prompt", "role": role, "name": prompt.id, "prompt_kind": prompt.kind}
                record |= ask(engine, prompt, settings, effort)
                log.add(record)
                results.put(record)
            except BaseException as error:  # handed to the caller: a thread must not die unseen
                results.put(error)
                return

    for _ in range(min(effort.concurrency, len(prompts))):
        threading.Thread(target=work, daemon=True).start()  # daemon: Ctrl-C must not wait for a hanging server
    records = []
    try:
        for _ in prompts:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            records.append(result)
            report(result)
    finally:
        stop.set()
    return records


def ask(engine: SGLang | VLLM, prompt: ServedPrompt, settings: Settings, effort: Effort) -> dict[str, Any]:
    """One prompt, retried: a record with the reply, or with `error` when every attempt failed."""
    errors: list[str] = []
    route = "/v1/completions" if isinstance(engine, VLLM) and settings.raw else engine.path
    for attempt in range(effort.retries + 1):
        if attempt:
            time.sleep(min(effort.backoff * 2 ** (attempt - 1), LONGEST_BACKOFF))
        answer, started, first = Answer(), time.monotonic(), None
        try:
            for event in engine.client.events(route, engine.body(prompt, settings)):
                engine.read(answer, event)
                if first is None and answer.text:
                    first = time.monotonic() - started
            if answer.finish is None:
                raise TransientError(f"{route} ended without a finish reason")
            if answer.tokens is None:
                raise TransientError(f"{route} does not say how many tokens it made")
        except (TransientError, PermanentError) as error:
            errors.append(error.what)
            if isinstance(error, PermanentError):
                break
            continue
        return {
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish,
            "seconds": time.monotonic() - started,
            "first_token_seconds": first,
            "attempts": len(errors) + 1,
            "errors": errors,
            "meta": answer.meta,
        }
    return {"error": errors[-1], "attempts": len(errors), "errors": errors}


def _count(engine: SGLang | VLLM, found: Measured, groups: dict[str, dict[str, Any]]) -> None:
    each: list[AcceptanceCounts] = []
    if isinstance(engine, SGLang):
        for name, record in found.replies.items():
            counts = engine.counts(name, record["meta"])
            if counts is not None:
                each.append(counts)
            elif (record["tokens"] or 0) > 1:  # one token comes from prefill: there was nothing to verify
                found.without_counters.append(name)
    else:
        sizes = [len(group["prompts"]) for group in groups.values()]
        found.over = f"groups of {max(sizes)} prompts" if sizes and max(sizes) > 1 else "prompts"
        for name, group in groups.items():
            if group["problem"] or group["counts"] is None:
                found.unclean[name] = group["problem"] or "no counters"
            else:
                each.append(AcceptanceCounts.from_json({"counts": group["counts"] | {"prompt": name}}))
    found.counts = total(each) if any(one.verify_steps for one in each) else None
