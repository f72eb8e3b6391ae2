"""`eagle3lab accept served`: acceptance, speed and text of a running server, beside a server without a drafter."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.served import Effort, Measured, measure_server
from eagle3lab.acceptance.served_engines import VLLM, EngineName, Settings, SGLang, recognise
from eagle3lab.acceptance.served_http import Client
from eagle3lab.acceptance.served_log import ServedLog
from eagle3lab.acceptance.served_prompts import ServedPrompt, read_served_prompts, rendered
from eagle3lab.acceptance.sources import refuse_simulated
from eagle3lab.core.errors import CorpusError, UsageError
from eagle3lab.core.files import require_place, write_json
from eagle3lab.core.hashes import sha256_json
from eagle3lab.steps.accept_outcome import AcceptOutcome, check_options, shown

NO_ALGORITHM = "none"


def served(
    url: str,
    prompts: Path,
    *,
    algorithm: str = "EAGLE3",
    engine: str | None = None,
    baseline: str | None = None,
    limit: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    raw: bool = False,
    tokenizer: Path | None = None,
    effort: Effort | None = None,
    timeout: float = 600.0,
    resume: Path | None = None,
    out: Path | None = None,
    gate: float | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int, int], None] | None = None,
) -> AcceptOutcome:
    """Measure a server on prompts of a JSONL file.

    Args:
        algorithm: what the server must say that it runs. engine: sglang or vllm when the server is not to be asked.
        baseline: URL of the same target without a drafter, for speed and text.
        tokenizer: folder of the target's tokenizer; SGLang needs it for chat prompts.
        resume: JSON lines of finished requests; used again, only the missing ones are sent.
        out: the result as JSON. progress: called with (server or baseline, done, of, failed).

    Raises:
        ServerError: no such server, or it runs another algorithm. AcceptanceError: acceptance is simulated.
    """
    refuse_simulated(os.environ)
    if engine not in (None, "sglang", "vllm"):
        raise UsageError(f"engine {engine!r}", rule="sglang or vllm")
    if max_new_tokens < 2:
        raise UsageError(f"max_new_tokens is {max_new_tokens}", rule="2 or more: the first token is nobody's draft")
    check_options(gate=gate, temperature=temperature, seed=seed, limit=limit)
    if out is not None:
        require_place(out)
    effort = effort or Effort()
    asked = read_served_prompts(prompts, limit)
    if tokenizer is not None and not raw:
        asked = rendered(asked, _encoder(tokenizer))
    settings = Settings(max_new_tokens, temperature, raw)
    name: EngineName | None = engine  # type: ignore[assignment]  # one of two words, checked above
    server = recognise(Client(url, timeout=timeout), name)
    notes = server.require(algorithm)
    plain = None if baseline is None else recognise(Client(baseline, timeout=timeout), name)
    notes += [] if plain is None else plain.require(NO_ALGORITHM)
    identity = {
        "url": server.client.url,
        "baseline": None if plain is None else plain.client.url,
        "server": {k: v for k, v in server.report.items() if not k.endswith("_gauge")},
        "prompts": sha256_json([asdict(prompt) for prompt in asked]),
        "settings": asdict(settings),
        "concurrency": effort.concurrency,
    }
    log = ServedLog(resume, identity)

    def tell(role: str) -> Callable[[int, int, int], None] | None:
        return None if progress is None else lambda done, of, failed: progress(role, done, of, failed)

    measured = measure_server(server, asked, settings, effort, log, progress=tell("server"))
    compared = None
    if plain is not None:
        compared = measure_server(plain, asked, settings, effort, log, role="baseline", progress=tell("baseline"))
    outcome = _outcome(server, asked, settings, effort, measured, compared, notes, log, gate, seed)
    if out is not None:
        write_json(
            out, outcome.as_json() | {"replies": measured.replies, "baseline_replies": compared and compared.replies}
        )
    return outcome


def _outcome(
    server: SGLang | VLLM,
    asked: list[ServedPrompt],
    settings: Settings,
    effort: Effort,
    measured: Measured,
    compared: Measured | None,
    notes: list[str],
    log: ServedLog,
    gate: float | None,
    seed: int,
) -> AcceptOutcome:
    counts = measured.counts
    metrics: dict[str, Any] = dict.fromkeys(
        (
            "accept_length",
            "accept_length_interval",
            "accepted_per_step",
            "accept_rate",
            "joint",
            "conditional",
            "counts",
        )
    ) | {"per_prompt": []}
    if counts is not None:
        metrics |= counts.to_json(seed=seed)
    same = _same_text(measured, compared)
    metrics |= {
        "lossless": None if same is None or settings.temperature > 0 else same[0] == same[1],
        "same_text": None if same is None else {"same": same[0], "compared": same[1]},
        "kinds": _by_kind(asked, counts, seed) if isinstance(server, SGLang) else None,
        "interval_over": measured.over,
        "prompts": len(asked),
        "replies": len(measured.replies),
        "retried": sum(1 for record in measured.replies.values() if record["errors"]),
        "failures": [
            {"prompt": n, "error": r["error"], "attempts": r["attempts"]} for n, r in measured.failures.items()
        ],
        "without_counters": measured.without_counters,
        "groups_left_out": measured.unclean,
        "server": {"url": server.client.url, "engine": server.name, "algorithm": server.algorithm, **server.report},
        "notes": notes + ([f"{log.dropped} bytes of a half-written line dropped"] if log.dropped else []),
        "timing": {"server": measured.timing(), "baseline": None if compared is None else compared.timing()},
    }
    settings_shown = {"k": server.report.get("speculative_num_steps"), **asdict(settings), **asdict(effort)}
    return AcceptOutcome(
        metrics,
        f"{server.name} at {server.client.url}, {len(measured.replies)} of {len(asked)} prompts answered",
        gate=gate,
        lines=_lines(metrics),
        problems=_problems(measured, compared),
        interval_over=measured.over,
        settings={name: "unknown" if value is None else value for name, value in settings_shown.items()},
    )


def _problems(measured: Measured, compared: Measured | None) -> tuple[str, ...]:
    found = []
    for role, result in (("server", measured), ("baseline", compared)):
        if result is not None and result.failures:
            name, record = next(iter(result.failures.items()))
            found.append(f"{len(result.failures)} prompts of the {role} failed, the first {name}: {record['error']}")
    if measured.without_counters:
        names = measured.without_counters
        found.append(f"{len(names)} replies carry no acceptance counters, the first {names[0]}")
    found += [f"{name} left out of the counts: {why}" for name, why in measured.unclean.items()]
    return tuple(found)


def _lines(metrics: dict[str, Any]) -> tuple[str, ...]:
    lines = []
    for role, timing in metrics["timing"].items():
        if timing is not None:
            lines.append(
                f"{role}: {shown(timing['tokens_per_second'])} tokens/s, first token after "
                f"{shown(timing['first_token_seconds_median'])} s (median)"
            )
    if metrics["same_text"] is not None:
        lines.append(f"same text as the baseline: {metrics['same_text']['same']} of {metrics['same_text']['compared']}")
    return (*lines, *(f"note: {note}" for note in metrics["notes"]))


def _same_text(measured: Measured, compared: Measured | None) -> tuple[int, int] | None:
    if compared is None:
        return None
    common = measured.replies.keys() & compared.replies.keys()
    return sum(measured.replies[n]["text"] == compared.replies[n]["text"] for n in common), len(common)


def _by_kind(asked: list[ServedPrompt], counts: AcceptanceCounts | None, seed: int) -> dict[str, Any]:
    kinds = {prompt.id: prompt.kind for prompt in asked}
    parts: dict[str, list[AcceptanceCounts]] = {}
    for one in counts.per_prompt if counts is not None else ():
        parts.setdefault(kinds[one.prompt], []).append(one)
    shortened = {kind: total(part).to_json(seed=seed) for kind, part in sorted(parts.items())}
    return {kind: {k: v for k, v in values.items() if k != "per_prompt"} for kind, values in shortened.items()}


def _encoder(folder: Path) -> Callable[[list[dict[str, str]]], list[int]]:
    """The chat template of a local tokenizer folder."""
    from eagle3lab.corpus.chat import render_prompt

    try:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise CorpusError(
            f"{folder} gives no tokenizer: {str(error).splitlines()[0]}", rule="a folder with tokenizer files",
            fix="--raw sends prompts without one",
        ) from error  # fmt: skip
    return lambda messages: render_prompt(tokenizer, messages)
