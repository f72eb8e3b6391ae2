"""`--acceptance FILE`: acceptance in any of the forms that it is kept in.

- `accept ... --json` or a run's `metrics.json` -> `acceptance`
- answers of SGLang, one or many (JSON, a list, JSON lines, an event stream) -> `meta_info` or `answers`
- answers of vLLM with their numbers per request, results of `vllm bench serve` -> `acceptance`
- the text of a /metrics page, or the same numbers as JSON -> `acceptance` (vLLM's counters) or `accept_length`
  (SGLang's gauge)
- SGLang's /server_info, and results of its benchmarks -> `accept_length`, a gauge
- numbers by fact name (YAML or JSON) -> those facts
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.acceptance import saved
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.sources import from_vllm_metrics
from eagle3lab.core.errors import AcceptanceError, UsageError, nearest
from eagle3lab.doctor.facts import VOCABULARY, Facts
from eagle3lab.doctor.readers.bounded import ReadError, parse_json, parse_yaml, read_text
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import items, mapping, real, whole

_GAUGE = re.compile(r"^sglang:(spec_\w+)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_PAGE = re.compile(r"^(?:#.*)?(?:vllm:spec_decode|sglang:spec_)\w+(?:\{.*\})?\s+\S", re.MULTILINE)
_METRIC = re.compile(r"(?:vllm|sglang):")
_BENCHMARK = frozenset(
    {"backend", "endpoint_type", "dataset_name", "request_rate", "max_concurrency", "duration", "completed", "tag"}
    | {"num_prompts", "server_info", "input_lens", "output_lens", "run_name", "batch_size", "latency"}
)
_BENCHMARK_KEY = re.compile(r"_throughput$|_ms$|^total_(?:input|output)")
GAUGE = "a gauge"
"""In the source of `accept_length`: what it is a mean over is not known."""
NO_READING = "no verify step yet, speculation is off, or the server is older"


def read(value: str, facts: Facts) -> None:
    """Add the facts of one file. Something that is none of the above is a `UsageError`."""
    path = existing(value, "--acceptance")
    try:
        text = read_text(path)
        if text.lstrip()[:1] not in ("{", "[") and _PAGE.search(text):
            read_metrics(text, str(path), facts)
            return
        parsed = saved.last_of_stream(text) or [{"meta_info": {}}] if saved.is_stream(text) else _parsed(text, path)
    except ReadError as error:
        facts.broken(str(path), error.what, fix="measure again")
        return
    add(parsed, str(path), facts)


def _parsed(text: str, path: Path) -> Any:
    """The value of a file: JSON lines as a list, also under another suffix (benchmarks append to what is there)."""
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        return [parse_json(line, str(path)).value for line in lines]
    if text.lstrip()[:1] not in ("{", "["):
        return parse_yaml(text, str(path))
    try:
        return parse_json(text, str(path)).value
    except ReadError:
        if len(lines) > 1 and all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
            return [parse_json(line, str(path)).value for line in lines]
        raise


def add(parsed: Any, source: str, facts: Facts) -> None:
    """Facts of a parsed file."""
    if not isinstance(parsed, (list, Mapping)):
        raise UsageError(f"{source} holds a {type(parsed).__name__}", rule="a mapping or a list", fix="see --help")
    if not parsed:
        raise UsageError(
            f"{source} holds nothing", rule="an acceptance number", fix="eagle3lab accept ... --json > FILE"
        )
    if isinstance(parsed, Mapping) and ("counts" in parsed or "sets" in parsed):
        facts.put("acceptance", dict(parsed), source)
        return
    rows = [mapping(row) for row in parsed] if isinstance(parsed, list) else [parsed]
    if any(form(rows, source, facts) for form in (_metrics, _benchmarks, _vllm_answers, _answers, _servers)):
        return
    if isinstance(parsed, list):
        raise UsageError(
            f"{source} holds a list without meta_info",
            rule="a list of answers of SGLang or vLLM, of benchmark results, or of metrics",
            fix="see --help",
        )
    for name, fact in parsed.items():
        if str(name) not in VOCABULARY:
            raise UsageError(
                f"{source} holds {str(name)[:60]!r}, which is no acceptance number",
                rule=nearest(str(name), VOCABULARY),
                fix="eagle3lab accept ... --json > FILE",
            )
        facts.put(str(name), fact, source)


def _metrics(rows: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> bool:
    """Metrics as JSON: name -> value, or objects with a name and a value, as `LLM.get_metrics()` gives them."""
    inner = [mapping(one) for row in rows for one in items(row.get("metrics"))]
    listed = [one for one in (inner or rows) if _METRIC.match(str(one.get("name", "")))]
    named = {str(key): value for row in rows for key, value in row.items() if _METRIC.match(str(key))}
    if not listed and not named:
        return False
    try:
        counts = from_vllm_metrics(listed or named)
    except AcceptanceError as error:
        facts.broken(source, error.what, fix="read the metrics again")
        return True
    gauges = {str(one["name"]): one.get("value") for one in listed} | named
    _put_metrics(counts, {name.removeprefix("sglang:"): value for name, value in gauges.items()}, source, facts)
    return True


def _benchmarks(rows: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> bool:
    """Results of `vllm bench serve`, which counts, and of SGLang's benchmarks, which read a gauge."""
    if any(saved.is_vllm_benchmark(row) for row in rows):
        reports: dict[str, Any] = {}
        for number, row in enumerate(rows):
            if saved.is_vllm_benchmark(row):
                _put_counted(_bench_report, row, f"result {number}", source, reports, facts)
        if reports:
            facts.put("acceptance", {"sets": reports} if len(rows) > 1 else next(iter(reports.values())), source)
        return True
    if not any(_is_benchmark(row) for row in rows):
        return False
    lengths = {f"result {n}": row.get("accept_length", row.get("acc_length")) for n, row in enumerate(rows)}
    for row in rows[-1:]:
        _put_settings(saved.server_infos(row), source, facts)
    _put_gauges(lengths, f"{source}: accept_length of a benchmark, {GAUGE}", facts)
    return True


def _is_benchmark(row: Mapping[str, Any]) -> bool:
    own = any(str(key) in _BENCHMARK or _BENCHMARK_KEY.search(str(key)) for key in row)
    return own and not any(key in row for key in ("meta_info", "choices", "internal_states"))


def _bench_report(row: Mapping[str, Any]) -> dict[str, Any]:
    """A result of `vllm bench serve` as a report; its rate is in per cent."""
    counts, rate = saved.from_vllm_benchmark(row), real(row.get("spec_decode_acceptance_rate"))
    stated = {
        "accept_length": row.get("spec_decode_acceptance_length"),
        "accept_rate": None if rate is None else rate / 100,
        "joint": row.get("spec_decode_per_position_acceptance_rates"),
    }
    return _report(counts, stated)


def _vllm_answers(rows: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> bool:
    """Answers of vLLM: counts of each are added; the numbers beside the counts of one answer are kept."""
    blocks = [block for row in rows if (block := saved.vllm_block(row)) is not None]
    if not blocks:
        return False
    if len(blocks) < len(rows):
        what = f"acceptance of {len(rows) - len(blocks)} of {len(rows)} answers"
        facts.could_not(what, "they hold no speculative_decoding numbers")
    reports: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        _put_counted(_request_report, block, f"answer {number}", source, reports, facts)
    if len(reports) == 1:
        facts.put("acceptance", next(iter(reports.values())), source)
    elif reports:
        counts = total([AcceptanceCounts.from_json(report) for report in reports.values()])
        facts.put("acceptance", json.loads(json.dumps(counts.to_json())), source)
    return True


def _request_report(block: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's block of one answer as a report; without a verify step its length and rate are no readings."""
    counts = saved.from_vllm_request(block)
    stated = {"accept_length": block.get("mean_acceptance_length"), "accept_rate": block.get("draft_acceptance_rate")}
    return _report(counts, stated if counts.verify_steps else {})


def _report(counts: AcceptanceCounts, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The report of these counts with the numbers that the source states itself."""
    told = {name: value for name, value in stated.items() if value is not None and value != []}
    report: dict[str, Any] = json.loads(json.dumps(counts.to_json()))
    return {**report, **told}


def _put_counted(
    make: Callable[[Mapping[str, Any]], dict[str, Any]], row: Mapping[str, Any], name: str, source: str,
    reports: dict[str, Any], facts: Facts,
) -> None:  # fmt: skip
    """Add one report, or tell that its numbers contradict each other."""
    try:
        reports[name] = make(row)
    except AcceptanceError as error:
        facts.broken(f"{source}, {name}", error.what, fix="measure again")


def _answers(rows: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> bool:
    """Answers of SGLang, or their meta_info alone."""
    if len(rows) == 1 and any(str(key).startswith("spec_") for key in rows[0]):
        facts.put("meta_info", dict(rows[0]), source)
        return True
    found = [saved.meta_infos(row) for row in rows]
    if not any(found):
        if not any("meta_info" in row or "choices" in row for row in rows):
            return False
        facts.put("meta_info", rows[0].get("meta_info", {}) if len(rows) == 1 else {}, source)
        return True
    metas = [meta for metas in found for meta in metas or [{}]]
    if len(metas) == len(rows) == 1:
        facts.put("meta_info", metas[0], source)
    else:
        facts.put("answers", metas, source)
    return True


def _servers(rows: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> bool:
    """SGLang's /server_info: one gauge a data-parallel rank."""
    infos = [info for row in rows for info in saved.server_infos(row)]
    if not infos:
        return False
    _put_settings(infos, source, facts)
    gauges = {f"rank {n}": value for n, value in enumerate(g for info in infos for g in saved.gauges_of(info))}
    _put_gauges(gauges, f"{source}: avg_spec_accept_length, {GAUGE}", facts)
    return True


def _put_settings(infos: Sequence[Mapping[str, Any]], source: str, facts: Facts) -> None:
    for name, number in (pair for info in infos[:1] for pair in saved.settings_of(info)):
        if not facts.has(name):
            facts.put(name, number, f"{source}: server_info")


def _put_gauges(lengths: Mapping[str, Any], source: str, facts: Facts) -> None:
    """Lengths that a server tells without counts: one as a number, several by name; 0 and null are no reading."""
    read = {name: value for name, value in lengths.items() if (number := real(value)) is not None and number > 0}
    wrong = [value for value in lengths.values() if value is not None and real(value) is None]
    if wrong:
        facts.broken(source.partition(":")[0], f"its accept length is {str(wrong[0])[:40]!r}, a number is needed")
    elif not read:
        facts.could_not("acceptance", f"{source.partition(':')[0]} holds no accept length above 0: {NO_READING}")
    else:
        facts.put("accept_length", read if len(read) > 1 else next(iter(read.values())), source)


def read_metrics(text: str, source: str, facts: Facts) -> None:
    """Facts of a /metrics page."""
    try:
        counts = from_vllm_metrics(text)
    except AcceptanceError as error:
        facts.broken(source, error.what, fix="read /metrics again")
        return
    # SGLang exports its gauges from the start, at 0, with speculation or without: 0 is no reading
    gauges = {name: number for name, value in _GAUGE.findall(text) if (number := real(_number(value)))}
    _put_metrics(counts, gauges, source, facts)


def _put_metrics(counts: AcceptanceCounts | None, gauges: Mapping[str, Any], source: str, facts: Facts) -> None:
    """Counters of vLLM, else the gauge of SGLang and the draft steps beside it, else what is missing."""
    if counts is not None:
        facts.put("acceptance", json.loads(json.dumps(counts.to_json())), source)
        return
    length, steps = real(gauges.get("spec_accept_length")), whole(gauges.get("spec_num_steps"))
    if not length:
        facts.could_not(
            "acceptance", f"{source} holds no counter or gauge above 0: no verify step yet, or speculation is off"
        )
        return
    facts.put("accept_length", length, f"{source}: sglang:spec_accept_length, {GAUGE}")
    if steps:
        facts.put("steps", steps, source)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None
