"""`--server URL`: what a running SGLang or vLLM really runs, asked of the server itself.

SGLang: /server_info (settings in force), then one prompt through /generate, whose `meta_info` has the counts. vLLM:
/v1/models, then the difference of /metrics before and after one prompt. With `--states` one stored sample is captured
again. Answers are bounded and never trusted; the
environment's proxies are not used. This is the one reader that goes over the network, and only to the URL it is given.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.sources import from_vllm_metrics
from eagle3lab.core.errors import AcceptanceError, UsageError
from eagle3lab.doctor.facts import Engine, Facts
from eagle3lab.doctor.readers.bounded import ReadError, parse_json
from eagle3lab.doctor.readers.server_states import compare_with_server
from eagle3lab.doctor.views import items, mapping

PROMPT = "Write the numbers from one to thirty in words, one a line."
TOKENS = 64
ANSWER_LIMIT = 64_000_000
CHUNK = 1 << 20
SECONDS = 10.0
GENERATE_SECONDS = 120.0
SETTLE_SECONDS = 2.0
"""Longest wait for vLLM's counters to come to rest after an answer."""
SETTINGS = (
    *("model_path", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"),
    *("speculative_eagle_topk", "speculative_num_draft_tokens", "attention_backend", "context_length"),
    *("speculative_draft_attention_backend", "tp_size"),
)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Silent(ReadError):
    """The server did not answer as asked; the message is one line."""


def read(value: str, facts: Facts) -> None:
    """Ask the server. A URL that cannot be reached is a `UsageError`; an answer that is wrong is a remark."""
    url = _base(value)
    _reachable(url)
    info = _maybe(url, ("/server_info", "/get_server_info"))
    if isinstance(info, dict) and any(key.startswith("speculative_") or key == "model_path" for key in _flat(info)):
        _sglang(url, _flat(info), facts)
        return
    models = _maybe(url, ("/v1/models",))
    names = [mapping(item).get("id") for item in items(mapping(models).get("data")) if isinstance(item, dict)]
    if names and isinstance(names[0], str):
        _vllm(url, names[0], facts)
        return
    facts.could_not(url, "it answers neither /server_info nor /v1/models", fix=f"curl {url}/server_info")


def _base(value: str) -> str:
    try:
        parts = urllib.parse.urlsplit(value if "://" in value else f"http://{value}")
    except ValueError:  # a bracket that is not closed
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--server {value[:120]!r} is no URL", rule="http://HOST:PORT", fix="--server http://127.0.0.1:30000"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _reachable(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((str(parts.hostname), port), timeout=SECONDS):
            return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--server {url} cannot be reached ({reason})", rule="a running server", fix=f"curl {url}/health"
        ) from error


def ask(url: str, body: Any = None, *, seconds: float | None = None) -> str:
    """Text of one answer of at most `ANSWER_LIMIT` bytes within `seconds` in all; `Silent` when there is none."""
    seconds = SECONDS if seconds is None else seconds
    until = time.monotonic() + seconds
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"} if data else {})
    try:
        with _OPENER.open(request, timeout=seconds) as answer:
            raw = bytearray()
            while part := answer.read1(CHUNK):  # a server that drips one byte a second resets no clock of ours
                raw += part
                if len(raw) > ANSWER_LIMIT or time.monotonic() > until:
                    break
            else:
                _whole(answer, raw)
    except urllib.error.HTTPError as error:
        raise Silent(f"{url} answered {error.code}") from error
    except TimeoutError as error:
        raise Silent(f"{url} did not answer within {seconds:g} s") from error
    except Exception as error:  # http.client has a dozen classes for an answer that breaks off
        raise Silent(f"{url} broke off ({type(error).__name__}: {' '.join(str(error).split())[:120]})") from error
    if time.monotonic() > until:
        raise Silent(f"{url} did not finish within {seconds:g} s")
    if len(raw) > ANSWER_LIMIT:
        raise Silent(f"{url} answered more than {ANSWER_LIMIT} bytes")
    return raw.decode("utf-8", "replace")


def _whole(answer: Any, raw: bytearray) -> None:
    """Refuse an answer that ended before the length it announced (`read1` does not)."""
    announced = str(answer.headers.get("Content-Length") or "")
    if announced.isdigit() and len(raw) < int(announced):
        raise ConnectionError(f"{len(raw)} of {announced} bytes")


def _maybe(url: str, paths: tuple[str, ...]) -> Any:
    for path in paths:
        try:
            return parse_json(ask(url + path), url + path).value
        except ReadError:
            continue  # the next path, or another engine
    return None


def _flat(info: dict[str, Any]) -> dict[str, Any]:
    """Settings of /server_info; some versions nest them under `server_args`."""
    return {**mapping(info.get("server_args")), **info}


def _sglang(url: str, info: dict[str, Any], facts: Facts) -> None:
    settings = {name: info[name] for name in SETTINGS if info.get(name) not in (None, "", [])}
    words = [word for name, item in settings.items() for word in ("--" + name.replace("_", "-"), str(item))]
    words += [
        "--" + n.replace("_", "-")
        for n in ("disable_radix_cache", "enable_return_aux_hidden_states")
        if info.get(n) is True
    ]
    if not facts.has("launch_args") and words:
        facts.put("launch_args", words, f"{url}/server_info")
    states = [mapping(item) for item in items(info.get("internal_states")) if isinstance(item, dict)]
    gauges = [item["avg_spec_accept_length"] for item in states if item.get("avg_spec_accept_length") is not None]
    server = {
        "engine": "sglang",
        "version": info.get("version"),
        "algorithm": info.get("speculative_algorithm"),
        "model": info.get("model_path"),
        "draft": info.get("speculative_draft_model_path"),
        "gauges": gauges[:64],
        "url": url,
    }
    facts.put("server", server, f"{url}/server_info")
    facts.engines, facts.chosen = (Engine("sglang"),), True
    for name, key in (("steps", "speculative_num_steps"), ("draft_tokens", "speculative_num_draft_tokens")):
        if isinstance(info.get(key), int) and not facts.has(name):
            facts.put(name, info[key], f"{url}/server_info")
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    try:
        parsed = parse_json(ask(f"{url}/generate", body, seconds=GENERATE_SECONDS), f"{url}/generate").value
    except ReadError as error:
        facts.could_not("acceptance of one prompt", error.what, fix=f"curl {url}/generate")
        return
    compare_with_server(
        lambda wanted: parse_json(ask(f"{url}/generate", wanted, seconds=GENERATE_SECONDS), f"{url}/generate").value,
        info,
        facts,
    )
    answer = parsed[0] if isinstance(parsed, list) and parsed else parsed
    meta = mapping(answer).get("meta_info")
    if isinstance(meta, dict):
        kept = {name: item for name, item in meta.items() if name != "hidden_states"}
        facts.put("meta_info", kept, f"{url}/generate")
    else:
        facts.could_not("acceptance of one prompt", f"{url}/generate answered without meta_info")


def _vllm(url: str, model: str, facts: Facts) -> None:
    facts.engines, facts.chosen = (Engine("vllm"),), True
    server: dict[str, Any] = {"engine": "vllm", "model": model, "url": url, "algorithm": "unknown"}
    try:
        before = from_vllm_metrics(ask(f"{url}/metrics"))
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        ask(f"{url}/v1/completions", body, seconds=GENERATE_SECONDS)
        counts = _settled(url, before)
    except (ReadError, AcceptanceError) as error:
        facts.could_not("acceptance of one prompt", error.what, fix=f"curl {url}/metrics")
        facts.put("server", server, url)
        return
    server["speculating"] = counts is not None
    facts.put("server", server, url)
    if counts is not None:
        facts.put("acceptance", json.loads(json.dumps(counts.to_json())), f"{url}/metrics, one prompt")


def _settled(url: str, before: AcceptanceCounts | None) -> AcceptanceCounts | None:
    """Counts since `before`, once two readings agree: vLLM counts after it has answered, one counter after another.

    None: the server has no such counters, or none of them moved. Counters that never make sense: `AcceptanceError`.
    """
    last, deadline = None, time.monotonic() + SETTLE_SECONDS
    while True:
        text, counts, late = ask(f"{url}/metrics"), None, time.monotonic() > deadline
        try:
            after = from_vllm_metrics(text)
            if after is None:
                return None
            moved = after if before is None else after.since(before)
            counts = moved if moved.verify_steps else None
        except AcceptanceError:
            if late:
                raise
        if late or (counts is not None and counts == last):
            return counts
        last = counts
        time.sleep(SETTLE_SECONDS / 10)
