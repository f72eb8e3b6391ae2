"""Counts from what engines report: SGLang `meta_info` and log lines, vLLM metrics, plain numbers.

Absent is unknown: a reader returns None when a source holds no counter, and never fills one in. A gauge (`accept len`
in a log line, `avg_spec_accept_length`) is no count: it is a mean over the last decode-log interval, 40 forward passes
by default, so it lags and its last value belongs to work that is over.

Sources: SGLang 0.5.23 (0.5.5 to 0.5.9 for the older names) and vLLM 0.33.0, as read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.definitions import first_rise
from eagle3lab.core.errors import AcceptanceError

SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
LEGACY_SIMULATE = "SGL_SIMULATE_ACC_LEN"
"""The older name: SGLang renames it when it is imported, over one that has the newer name (srt/environ.py)."""
GAUGE_INTERVAL = 40
"""Forward passes between two decode log lines of SGLang (`--decode-log-interval`): how far a gauge lags."""

ENOUGH_DRAFTED = 32
"""Drafted tokens of which none was accepted, below which lines that do not tell their steps prove little."""

LONGEST_CHAIN = 1024
"""Draft steps beyond which a number is no number of steps."""

_SGLANG_NAMES = {
    "verify_steps": ("spec_verify_ct",),
    "accepted": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "proposed": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
}
_VLLM_NAMES = {
    "verify_steps": "vllm:spec_decode_num_drafts",
    "proposed": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SGLANG_LINE = re.compile(r"accept len:\s*([-+.\deE]+)(?:,\s*accept rate:\s*([-+.\deE]+))?")
_VLLM_LINE = re.compile(r"Mean acceptance length:\s*([-+.\deE]+|nan)")
_VLLM_COUNTS = re.compile(r"Accepted:\s*(\d+) tokens,\s*Drafted:\s*(\d+) tokens")
_VLLM_PER_POSITION = re.compile(r"Per-position acceptance rate:\s*(\d+(?:\.\d+)?(?:,\s*\d+(?:\.\d+)?)*)")
_ESCAPES = re.compile(
    r"(?:\x1b|\^\[|\\x1[bB]|\\u001[bB]|\\033|\\e|#033)\[[0-?]{0,40}[ -/]{0,4}[@-~]"  # as JSON, syslog write it
    r"|\x9b[0-?]{0,40}[ -/]{0,4}[@-~]"
    r"|\x1b\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)"  # titles and links
    r"|\x1b[ -/]{0,4}[0-~]"
)


def simulated_by(environment: Mapping[str, Any]) -> tuple[str, str] | None:
    """(name, value) of the variable that SGLang reads for its simulated acceptance, None when none is set."""
    for name in (LEGACY_SIMULATE, SIMULATE):
        if environment.get(name) is not None:
            return name, str(environment[name]).strip()
    return None


def refuse_simulated(environment: Mapping[str, str]) -> None:
    """Raise `AcceptanceError` when the environment makes SGLang invent acceptance (a value above 0)."""
    name, raw = simulated_by(environment) or (SIMULATE, "")
    try:
        value = float(raw) if raw else 0.0
    except ValueError:
        value = 0.0  # SGLang warns and takes its default, which is off
    if value > 0:
        raise AcceptanceError(
            f"{name}={raw}: the server invents its acceptance", rule="a measurement needs it unset",
            fix=f"unset {name}, restart the server",
        )  # fmt: skip


def from_sglang_meta_info(
    meta: Mapping[str, Any], *, steps: int | None = None, draft_tokens: int | None = None, prompt: str = ""
) -> AcceptanceCounts | None:
    """Counts of one SGLang answer, or None when it carries none (speculation off, older server, no verify step yet).

    Args:
        meta: `meta_info` of a /generate answer. Its `spec_accept_length` is not used: it is completion / verify steps,
            and the first completion token comes from prefill, so zero acceptance reads n / (n - 1), above 1.
        steps: --speculative-num-steps; pads the histogram, which SGLang ends at the longest run it saw.
        draft_tokens: --speculative-num-draft-tokens; each verify step proposes one less.

    Raises:
        AcceptanceError: the counters contradict each other, or the draft tokens.
    """
    found = {name: _first(meta, keys) for name, keys in _SGLANG_NAMES.items()}
    if found["verify_steps"] is None or found["accepted"] is None:
        return None
    histogram = found["histogram"]
    counts = AcceptanceCounts(
        verify_steps=found["verify_steps"],
        accepted=found["accepted"],
        proposed=found["proposed"],
        histogram=_padded(histogram, steps) if isinstance(histogram, (list, tuple)) and histogram else None,
        generated_tokens=meta.get("completion_tokens"),
        prompt=prompt,
    )
    proposed = meta.get("spec_num_proposed_drafts")  # the older name is not counted in the same way everywhere
    if draft_tokens and proposed is not None and proposed != counts.verify_steps * (draft_tokens - 1):
        raise AcceptanceError(
            f"{prompt + ': ' if prompt else ''}{proposed} drafts proposed in {counts.verify_steps} verify steps of "
            f"{draft_tokens} draft tokens",
            rule=f"verify steps x (draft tokens - 1) = {counts.verify_steps * (draft_tokens - 1)}",
            fix="ask the server again, and read --speculative-num-draft-tokens of the same server",
        )
    if draft_tokens and counts.accepted > counts.verify_steps * (draft_tokens - 1):
        raise AcceptanceError(
            f"{prompt + ': ' if prompt else ''}{counts.accepted} drafts accepted in {counts.verify_steps} verify steps",
            rule=f"at most draft tokens - 1 = {draft_tokens - 1} in each",
        )
    return counts


def least_from_sglang_meta_info(
    meta: Mapping[str, Any], *, steps: int | None = None, draft_tokens: int | None = None, prompt: str = ""
) -> AcceptanceCounts | None:
    """Counts of an answer that tells verify steps and no accepted drafts, the least that they can be; None without.

    A step yields its accepted drafts and the bonus, and the first token comes from prefill, so accepted =
    completion - 1 - verify steps; more when the last step was cut at the end of the answer. For the arguments and what
    it raises see `from_sglang_meta_info`, which is for measuring: this is for judging.
    """
    verify, tokens = _first(meta, _SGLANG_NAMES["verify_steps"]), meta.get("completion_tokens")
    histogram = _first(meta, _SGLANG_NAMES["histogram"])
    rate: Any = meta.get("spec_accept_rate")
    if _first(meta, _SGLANG_NAMES["accepted"]) is not None:
        return None
    verify = steps_behind(meta) if verify is None else verify
    if isinstance(verify, bool) or not isinstance(verify, int) or verify == 0:
        return None  # before the first verify step nothing was accepted or rejected
    if isinstance(histogram, (list, tuple)) and histogram and all(type(count) is int for count in histogram):
        accepted = sum(j * count for j, count in enumerate(histogram))
    elif type(tokens) is int:
        accepted = max(int(tokens or 0) - 1 - verify, 1 if _is_number(rate) and rate > 0 else 0)
    elif _is_number(rate) and rate == 0:
        accepted = 0
    else:
        return None
    known = {**meta, _SGLANG_NAMES["verify_steps"][0]: verify, _SGLANG_NAMES["accepted"][0]: accepted}
    return from_sglang_meta_info(known, steps=steps, draft_tokens=draft_tokens, prompt=prompt)


def steps_behind(meta: Mapping[str, Any]) -> int | None:
    """Verify steps of an answer that does not tell them, None when they do not follow.

    `spec_accept_length` is completion / verify steps; at a rate of 0 every step gave one token after that of prefill.
    """
    length, rate, tokens = (meta.get(key) for key in ("spec_accept_length", "spec_accept_rate", "completion_tokens"))
    none = _is_number(rate) and rate == 0
    counted = tokens if type(tokens) is int and tokens > 1 else None
    if length is None:
        return counted - 1 if none and counted is not None else None
    if not _is_number(length) or length < 1:
        return None  # 0 stands for no reading
    if counted is not None:
        steps = min(round(counted / length), counted - 1)
        return steps if abs(counted / steps - length) <= (5e-3 if none else 5e-4) else None
    if not none or length <= 1:
        return None
    steps = max(round(1 / (length - 1)), 1)
    return steps if abs(1 + 1 / steps - length) <= 5e-3 else None


def prefill_floor(completion_tokens: int) -> float | None:
    """What SGLang's `spec_accept_length` reads when nothing was accepted: n / (n - 1); None below 2 tokens."""
    return completion_tokens / (completion_tokens - 1) if completion_tokens > 1 else None


def from_vllm_metrics(metrics: str | Mapping[str, Any] | Iterable[Any], *, prompt: str = "") -> AcceptanceCounts | None:
    """Counts from vLLM: the text of /metrics, a mapping name -> value, or the objects of `LLM.get_metrics()`.

    Series of several engines (data parallel) are added. With counts by position the histogram follows, because a step
    that accepted position j accepted all before it. None when there is no counter or nothing was drafted yet.
    """
    series = _parse_prometheus(metrics) if isinstance(metrics, str) else _vllm_objects(metrics)
    drafts, accepted = series.get("verify_steps"), series.get("accepted")
    if drafts is None or accepted is None or drafts == 0:
        return None
    per_position, proposed = series.get("per_position"), series.get("proposed")
    if per_position and proposed is not None and proposed > drafts * len(per_position):
        raise AcceptanceError(
            f"{proposed} tokens drafted in {drafts} drafts of {len(per_position)} positions",
            rule=f"at most drafts x positions = {drafts * len(per_position)}",
            fix="read all counters at one time, from one server",
        )
    return AcceptanceCounts(
        verify_steps=drafts,
        accepted=accepted,
        proposed=proposed,
        histogram=histogram_from_positions(drafts, per_position) if per_position else None,
        prompt=prompt,
    )


def histogram_from_positions(verify_steps: int, at_least: Sequence[int]) -> tuple[int, ...]:
    """Histogram from counts by position: `at_least[j-1]` steps accepted at least j tokens. A rise is impossible."""
    tails = [verify_steps, *at_least, 0]
    for j, (before, now) in enumerate(pairwise(tails), 1):
        if now > before:
            raise AcceptanceError(
                f"position {j} was accepted {now} times, the one before it {before} times",
                rule="counts by position cannot rise: a kept token stands behind kept tokens",
            )
    return tuple(before - now for before, now in pairwise(tails))


def from_numbers(
    *, verify_steps: int, accepted: int, proposed: int | None = None, histogram: Sequence[int] | None = None,
    generated_tokens: int | None = None, prompt: str = "",
) -> AcceptanceCounts:  # fmt: skip
    """Counts that a person types (vLLM's names: drafts, accepted, drafted)."""
    return AcceptanceCounts(
        verify_steps=verify_steps, accepted=accepted, proposed=proposed, generated_tokens=generated_tokens,
        histogram=None if histogram is None else tuple(histogram), prompt=prompt,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """One reading of a gauge: a mean over one log interval (or one data-parallel rank), not a count.

    Fields:
        accept_length: bonus in. accept_rate: accepted / proposed; None when the line has none. line: 1-based, 0: none.
        steps: verify steps behind it when the source tells (vLLM), else None.
    """

    accept_length: float
    accept_rate: float | None = None
    line: int = 0
    steps: int | None = None


def without_escapes(text: str) -> str:
    """The text without a terminal's escape sequences: a log that was coloured reads as one that was not."""
    return _ESCAPES.sub("", text)


def gauges_from_sglang_log(text: str) -> list[Gauge]:
    """`accept len` readings of an SGLang log, in order."""
    found = []
    for number, line in enumerate(without_escapes(text).splitlines(), 1):
        match = _SGLANG_LINE.search(line)
        length = _finite(match[1]) if match else None
        if match and length is not None:
            found.append(Gauge(accept_length=length, accept_rate=_finite(match[2]), line=number))
    return found


def from_sglang_log(text: str) -> Gauge | None:
    """All `accept len` readings of a log as one: their plain mean (a log gives no weights). None without a reading.

    It is a mean of means and is no accept length of anything in particular; counts need `meta_info`.
    """
    readings = gauges_from_sglang_log(text)
    if not readings:
        return None
    rates = [one.accept_rate for one in readings if one.accept_rate is not None]
    return Gauge(
        accept_length=sum(one.accept_length for one in readings) / len(readings),
        accept_rate=sum(rates) / len(rates) if len(rates) == len(readings) else None,
    )


def from_vllm_log(text: str) -> AcceptanceCounts | None:
    """Counts from vLLM's `SpecDecoding metrics` lines; each covers one interval, so they add up. None without one.

    Drafts are not printed: they follow from drafted / positions, or from the mean length and the accepted tokens where
    some drafts were shorter. Lines that tell neither are left to `gauges_from_vllm_log`.

    Raises:
        AcceptanceError: the numbers of a line contradict each other.
    """
    found = []
    for one in _vllm_lines(text):
        if one.drafted and one.steps:
            found.append(AcceptanceCounts(verify_steps=one.steps, accepted=one.accepted, proposed=one.drafted))
            _joint(one.rates, one.mean, one.number)
    return _without_prompts(total(found)) if found else None


def gauges_from_vllm_log(text: str) -> list[Gauge]:
    """Readings of vLLM's lines from which no counts follow: the printed mean, or 1.00 where no draft was accepted.

    Lines without a mean tell that only together: when none of the log accepted a draft, of enough that were drafted.
    """
    lines = list(_vllm_lines(text))
    none = not any(one.accepted for one in lines) and sum(one.drafted for one in lines) >= ENOUGH_DRAFTED
    found = []
    for one in lines:
        if one.steps or (one.counted and not one.accepted and not (none and one.drafted)):
            continue
        rate = one.accepted / one.drafted if one.drafted else None
        length = 1.0 if one.counted and not one.accepted else one.mean
        if length is not None:
            if length == 1 and rate:
                length += rate  # the print is rounded; a step drafts at least one token, so this is the least
            found.append(Gauge(accept_length=length, accept_rate=rate, line=one.number))
    return found


@dataclass(frozen=True, slots=True)
class _VllmLine:
    """One line as printed. counted: it has token counts; mean: None when absent or nan."""

    number: int
    mean: float | None
    counted: bool
    accepted: int
    drafted: int
    rates: tuple[float, ...]

    @property
    def steps(self) -> int | None:
        """Verify steps behind the line, None when they do not follow from it."""
        positions = len(self.rates)
        if not self.drafted:
            return None
        if positions and self.drafted % positions == 0:
            return self.drafted // positions
        if self.accepted and self.mean is not None and self.mean > 1:
            return round(self.accepted / (self.mean - 1))
        return math.ceil(self.drafted / positions) if positions else None  # the least: some drafts were shorter


def _vllm_lines(text: str) -> Iterator[_VllmLine]:
    for number, line in enumerate(without_escapes(text).splitlines(), 1):
        length, counts = _VLLM_LINE.search(line), _VLLM_COUNTS.search(line)
        if length or counts:
            printed = _VLLM_PER_POSITION.search(line)
            accepted, drafted = (int(counts[1]), int(counts[2])) if counts else (0, 0)
            rates = tuple(float(rate) for rate in printed[1].split(",")) if printed else ()
            mean = _finite(length[1]) if length else None
            yield _VllmLine(number, mean, counts is not None, accepted, drafted, rates)


def _joint(rates: Sequence[float], mean: float | None, line: int) -> None:
    """Raise where rates by position cannot be vLLM's: they are joint, so none rises and they sum to the mean - 1."""
    if (at := first_rise([1.0, *rates])) is not None:
        before = f"{rates[at - 3]:g} to " if at > 2 else ""
        raise AcceptanceError(
            f"line {line}: per-position acceptance is {before}{rates[at - 2]:g} at position {at - 1}",
            rule="joint rates lie between 0 and 1 and cannot rise: a kept token stands behind kept tokens",
        )
    if rates and mean is not None and abs(1 + sum(rates) - mean) > 0.01 + 0.001 * len(rates):
        raise AcceptanceError(
            f"line {line}: mean acceptance length is {mean:g}, its per-position rates make {1 + sum(rates):.4g}",
            rule="mean acceptance length = 1 + the sum of the joint rates",
        )


def weighted_mean(gauges: Sequence[Gauge]) -> float | None:
    """Accept length over data-parallel ranks, weighted by verify steps; None when a weight is unknown.

    A plain mean over ranks counts an idle rank as much as a busy one.
    """
    if not gauges or any(one.steps is None for one in gauges):
        return None
    steps = sum(one.steps or 0 for one in gauges)
    return sum(one.accept_length * (one.steps or 0) for one in gauges) / steps if steps else None


def _first(meta: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((meta[key] for key in keys if meta.get(key) is not None), None)


def _padded(histogram: Sequence[int], steps: int | None) -> tuple[int, ...]:
    missing = max((steps or 0) + 1 - len(histogram), 0) if (steps or 0) <= LONGEST_CHAIN else 0
    return (*histogram, *([0] * missing))


def _finite(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _without_prompts(counts: AcceptanceCounts) -> AcceptanceCounts:
    return AcceptanceCounts(verify_steps=counts.verify_steps, accepted=counts.accepted, proposed=counts.proposed)


def _parse_prometheus(text: str) -> dict[str, Any]:
    """Counters of the four names, added over label sets; positions by their `position` label."""
    rows: list[tuple[str, dict[str, str], float]] = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        value = _finite(match[3]) if match else None
        if match and value is not None:
            rows.append((match[1].removesuffix("_total"), dict(_LABEL.findall(match[2] or "")), value))
    return _series(rows)


def _series(rows: Iterable[tuple[str, Mapping[str, str], float]]) -> dict[str, Any]:
    known = {metric: name for name, metric in _VLLM_NAMES.items()}
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for metric, labels, value in rows:
        name = known.get(metric)
        if name == "per_position" and str(labels.get("position", "")).isdigit():
            place = int(labels["position"])
            positions[place] = positions.get(place, 0) + round(value)
        elif name and name != "per_position":
            sums[name] = sums.get(name, 0) + round(value)
    if positions and sorted(positions) == list(range(len(positions))):
        return {**sums, "per_position": [positions[place] for place in sorted(positions)]}
    return dict(sums)


def _vllm_objects(metrics: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    """A mapping name -> number or list, or objects (as JSON: mappings) with .name and .value / .values."""
    named = isinstance(metrics, Mapping)
    pairs = metrics.items() if isinstance(metrics, Mapping) else ((_name(one), _value(one)) for one in metrics)
    pairs = ((str(name), _value(one) if named and isinstance(one, Mapping) else one) for name, one in pairs)
    rows: list[tuple[str, Mapping[str, str], float]] = []
    for metric, value in pairs:
        if isinstance(value, (list, tuple)):
            rows += [(metric, {"position": str(j)}, item) for j, item in enumerate(value) if _is_number(item)]
        elif _is_number(value):
            rows.append((metric, {}, value))
    return _series((metric.removesuffix("_total"), labels, value) for metric, labels, value in rows)


def _name(metric: Any) -> str:
    return str(metric.get("name", "") if isinstance(metric, Mapping) else getattr(metric, "name", ""))


def _value(metric: Any) -> Any:
    if isinstance(metric, Mapping):
        return metric.get("values", metric.get("value"))
    return getattr(metric, "values", None) if hasattr(metric, "values") else getattr(metric, "value", None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
