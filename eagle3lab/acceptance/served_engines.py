"""What differs between SGLang and vLLM: how they are recognised, asked, read and what they say of themselves.

SGLang puts counters into every /generate answer, so they belong to a prompt. vLLM has counters of the whole server in
/metrics; their difference over a group of prompts belongs to the group, if nobody else used the server meanwhile.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.served_http import Client, TransientError
from eagle3lab.acceptance.served_prompts import ServedPrompt
from eagle3lab.acceptance.sources import from_sglang_meta_info, from_vllm_metrics
from eagle3lab.core.errors import AcceptanceError, ServerError, UsageError

EngineName = Literal["sglang", "vllm"]
ALIASES = {"nextn": "eagle"}
"""SGLang's own alias."""
SGLANG_FACTS = (
    "model_path", "tokenizer_path", "revision", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_adaptive", "attention_backend", "max_running_requests",
    "context_length", "disable_radix_cache", "version",
)  # fmt: skip
SPEC_FIELDS = re.compile(r"^(spec_|completion_tokens$|prompt_tokens$|cached_tokens$)")
_SYNTHETIC = re.compile(r'"rejection_sample_method":\s*"synthetic"')
_METHOD = re.compile(r"method['\"]?\s*[=:]\s*['\"]([\w-]+)")
_VLLM_TOKENS = re.compile(r"^vllm:generation_tokens_total(?:\{.*\})?\s+(\S+)", re.MULTILINE)
_VLLM_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts", re.MULTILINE)


@dataclass(slots=True)
class Answer:
    """One streamed reply.

    Attributes:
        text: what was generated. tokens: how many, as the server counts; None when it does not say.
        finish: stop, length, ... ; None when the stream never said so.
        meta: the server's own counters for this request (SGLang).
    """

    text: str = ""
    tokens: int | None = None
    finish: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling of every request. raw: complete the prompt's text, without a chat template."""

    max_new_tokens: int
    temperature: float
    raw: bool


class Engine:
    """A running server. `report` is what it says of itself; `algorithm` None = it does not say, "none" = no drafts."""

    name: EngineName
    path: str

    def __init__(self, client: Client, report: dict[str, Any], algorithm: str | None) -> None:
        self.client, self.report, self.algorithm = client, report, algorithm

    def require(self, asked: str) -> list[str]:
        """Refuse a server that says it runs another algorithm; returns what could not be checked.

        Raises:
            ServerError: its own report differs from `asked` ("none" for plain decoding).
        """
        if self.algorithm is None:
            return [f"{self.client.url} does not report its speculative algorithm: asked {asked}, running unknown"]
        ours, theirs = (ALIASES.get(name.lower(), name.lower()) for name in (asked, self.algorithm))
        if ours != theirs and not (self.algorithm == UNNAMED and ours != "none"):
            raise ServerError(
                f"{self.client.url} runs speculative algorithm {self.algorithm}, asked {asked}",
                rule="acceptance of another algorithm is another number (EAGLE bypasses fc of an EAGLE-3 drafter)",
                fix="restart it with the right flag, or say --algorithm " + self.algorithm,
            )
        unnamed = self.algorithm == UNNAMED
        return [f"{self.client.url} speculates, but does not say with which algorithm"] if unnamed else []

    def tokens(self, usage: dict[str, Any], otherwise: int | None) -> int | None:
        """`completion_tokens` of an event, or `otherwise` when it has none."""
        value = usage.get("completion_tokens", otherwise)
        if value is not None and (type(value) is not int or value < 0):
            raise TransientError(f"{self.path} sent completion_tokens {value!r}", rule="a whole number")
        return value


UNNAMED = "unnamed"


class SGLang(Engine):
    """Native /generate, which carries `meta_info`."""

    name, path = "sglang", "/generate"

    def body(self, prompt: ServedPrompt, settings: Settings) -> dict[str, Any]:
        """Request of one prompt."""
        if not settings.raw and prompt.input_ids is None:
            raise UsageError(
                "SGLang's /generate takes rendered prompts, and only it reports counters",
                rule="chat prompts need the target's tokenizer",
                fix="add --tokenizer DIR, or --raw to send the text as it stands",
            )
        shown = {"text": prompt.text} if settings.raw else {"input_ids": list(prompt.input_ids or ())}
        sampling = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        return {**shown, "sampling_params": sampling, "stream": True}

    def read(self, answer: Answer, event: dict[str, Any]) -> None:
        """Take one event: the text so far and the counters so far."""
        meta = event.get("meta_info")
        if not isinstance(event.get("text"), str) or not isinstance(meta, dict):
            raise TransientError(f"{self.path} sent an event with the keys {sorted(event)}", rule="text and meta_info")
        answer.text = event["text"]
        answer.tokens = self.tokens(meta, answer.tokens)
        reason = meta.get("finish_reason")
        answer.finish = str(reason.get("type")) if isinstance(reason, dict) else reason
        answer.meta = {name: value for name, value in meta.items() if SPEC_FIELDS.match(name)}

    def counts(self, prompt: str, meta: dict[str, Any]) -> AcceptanceCounts | None:
        """Counters of one answer; None when it carries none."""
        steps, tokens = (self.report.get(f"speculative_num_{name}") for name in ("steps", "draft_tokens"))
        return from_sglang_meta_info(
            meta,
            steps=steps if type(steps) is int else None,
            draft_tokens=tokens if type(tokens) is int and not self.report.get("speculative_adaptive") else None,
            prompt=prompt,
        )


class VLLM(Engine):
    """OpenAI routes; counters from /metrics."""

    name, path = "vllm", "/v1/chat/completions"

    def body(self, prompt: ServedPrompt, settings: Settings) -> dict[str, Any]:
        """Request of one prompt."""
        shown = {"prompt": prompt.text} if settings.raw else {"messages": list(prompt.messages)}
        return {
            **shown,
            "model": self.report.get("model"),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, answer: Answer, event: dict[str, Any]) -> None:
        """Take one event: a piece of text, or the usage at the end."""
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise TransientError(f"{self.path} sent an event with the keys {sorted(event)}", rule="choices")
        for choice in choices:
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            answer.text += piece + ((choice.get("delta") or {}).get("reasoning_content") or "")
            answer.finish = choice.get("finish_reason") or answer.finish
        usage = event.get("usage")
        if isinstance(usage, dict):
            answer.tokens = self.tokens(usage, None)

    def scrape(self) -> tuple[str, AcceptanceCounts, int | None]:
        """/metrics: its text, counters of the whole server, generated tokens of the whole server."""
        status, body = self.client.get("/metrics")
        text = body.decode(errors="replace")
        if status != 200:
            raise TransientError(f"{self.client.url}/metrics answered {status}")
        tokens = _VLLM_TOKENS.findall(text)
        none = AcceptanceCounts(verify_steps=0, accepted=0, proposed=0)
        return text, from_vllm_metrics(text) or none, round(sum(map(float, tokens))) if tokens else None


def recognise(client: Client, engine: EngineName | None = None) -> SGLang | VLLM:
    """Ask a server what it is.

    Raises:
        ServerError: nothing answers, or neither engine does. AcceptanceError: vLLM says that it invents acceptance.
    """
    for path in ("/server_info", "/get_server_info"):
        report = client.get_json(path)
        if engine != "vllm" and isinstance(report, dict) and ("speculative_algorithm" in report or "tp_size" in report):
            return SGLang(client, _sglang_facts(report), _sglang_algorithm(report))
    status, metrics = client.get("/metrics")
    text = metrics.decode(errors="replace") if status == 200 else ""
    if engine != "sglang" and "vllm:" in text:
        return VLLM(client, *_vllm_facts(client, text))
    raise ServerError(
        f"{client.url} answers neither as SGLang (/server_info) nor as vLLM (vllm: in /metrics)",
        rule="acceptance counters come from the engine",
        fix=f"curl {client.url}/server_info; curl {client.url}/metrics",
    )


def _sglang_facts(report: dict[str, Any]) -> dict[str, Any]:
    facts = {name: report[name] for name in SGLANG_FACTS if name in report}
    states = report.get("internal_states")
    gauges = (
        [s.get("avg_spec_accept_length") for s in states if isinstance(s, dict)] if isinstance(states, list) else []
    )
    return facts | ({"avg_spec_accept_length_gauge": gauges} if any(g is not None for g in gauges) else {})


def _sglang_algorithm(report: dict[str, Any]) -> str | None:
    if "speculative_algorithm" not in report:
        return None
    value = report["speculative_algorithm"]
    return "none" if value in (None, "", "NONE") else str(value)


def _vllm_facts(client: Client, metrics: str) -> tuple[dict[str, Any], str | None]:
    version, models = client.get_json("/version"), client.get_json("/v1/models")
    try:
        model = models["data"][0]["id"]
    except (TypeError, KeyError, IndexError) as error:
        raise ServerError(
            f"{client.url}/v1/models names no model", rule="a request must name one", fix=f"curl {client.url}/v1/models"
        ) from error
    facts = {"model": model, "version": version.get("version") if isinstance(version, dict) else None}
    facts["max_model_len"] = models["data"][0].get("max_model_len")
    if not _VLLM_DRAFTS.search(metrics):  # vLLM registers these counters only when it speculates
        return facts, "none"
    config = client.get_json("/server_info")  # served in vLLM's development mode only
    if config is not None and _SYNTHETIC.search(json.dumps(client.get_json("/server_info?config_format=json"))):
        raise AcceptanceError(
            f"{client.url} runs rejection_sample_method synthetic: the server invents its acceptance",
            rule="a measurement needs standard or block",
            fix="drop rejection_sample_method and synthetic_* from --speculative-config, restart the server",
        )
    method = _METHOD.search(json.dumps(config).replace('\\"', '"')) if config is not None else None
    return facts, method[1] if method else UNNAMED
