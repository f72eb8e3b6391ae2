"""What engines and their benchmarks save about acceptance: answers, streams, benchmark results, /server_info.

Sources: SGLang 0.5.23 (`/generate`, OpenAI answers with `return_meta_info` or `sglext`, `/server_info`,
`bench_serving`) and vLLM 0.33.0 (`metrics.speculative_decoding` of an answer, `vllm bench serve`), as read. A gauge
stays a gauge: no counts are made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.sources import histogram_from_positions

_DATA_LINE = re.compile(r"^data:[ \t]*(.*)$", re.MULTILINE)
_STREAM = re.compile(r"^data:[ \t]*(?:[\[{]|\[DONE\])", re.MULTILINE)


def is_stream(text: str) -> bool:
    """Whether the text is a saved event stream (`data: {...}` lines)."""
    return text.lstrip()[:1] not in ("{", "[") and _STREAM.search(text) is not None


def last_of_stream(text: str) -> list[Mapping[str, Any]]:
    """Of every answer in a stream the last event that tells of acceptance: its numbers grow from event to event."""
    latest: dict[Any, Mapping[str, Any]] = {}
    for match in _DATA_LINE.finditer(text):
        try:
            event = json.loads(match[1])
        except (ValueError, RecursionError):
            continue  # [DONE], or an event that the end of the file cut off
        for one in event if isinstance(event, list) else [event]:
            if isinstance(one, Mapping) and (meta_infos(one) or vllm_block(one) is not None):
                latest[_identity(one)] = one
    return list(latest.values())


def _identity(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Which answer an event belongs to: request id, and the places of its choices."""
    own = _mapping(event.get("meta_info")).get("id", event.get("id"))
    return (str(own), *(str(choice.get("index")) for choice in _mappings(event.get("choices"))))


def meta_infos(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every `meta_info` of an SGLang answer: of /generate, of OpenAI choices, or in its `sglext`."""
    places = [answer, *_mappings(answer.get("choices"))]
    found = [dict(meta) for place in places if (meta := _mapping(place.get("meta_info")))]
    for place in places:
        details = _mapping(place.get("sglext")).get("spec_tokens_details")
        found += [
            dict(one) for one in (_mappings(details) if isinstance(details, list) else [_mapping(details)]) if one
        ]
    tokens = _mapping(answer.get("usage")).get("completion_tokens")
    if len(found) == 1 and tokens is not None:
        found[0].setdefault("completion_tokens", tokens)
    return found


def vllm_block(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """vLLM's per-request numbers of an answer, or the answer when it is that block; None when there is neither."""
    for block in (answer, _mapping(_mapping(answer.get("metrics")).get("speculative_decoding"))):
        if "acceptance_histogram" in block or {"num_spec_steps", "num_accepted_draft_tokens"} <= block.keys():
            return block
    inner = answer.get("speculative_decoding")
    return vllm_block(inner) if isinstance(inner, Mapping) else None


def from_vllm_request(block: Mapping[str, Any], *, prompt: str = "") -> AcceptanceCounts:
    """Counts of one answer of vLLM; `AcceptanceError` when its numbers contradict each other."""
    given = block.get("acceptance_histogram")
    histogram = tuple(given) if isinstance(given, (list, tuple)) and all(type(n) is int for n in given) else None
    steps, accepted = block.get("num_spec_steps"), block.get("num_accepted_draft_tokens")
    if histogram is not None:
        steps = sum(histogram) if steps is None else steps
        accepted = sum(j * count for j, count in enumerate(histogram)) if accepted is None else accepted
    return AcceptanceCounts(
        verify_steps=_count(steps), accepted=_count(accepted), proposed=_count(block.get("num_draft_tokens")),
        histogram=histogram, prompt=prompt,
    )  # fmt: skip


def is_vllm_benchmark(row: Mapping[str, Any]) -> bool:
    """Whether this is a result of `vllm bench serve` against a server that speculates."""
    return "spec_decode_num_drafts" in row and "spec_decode_accepted_tokens" in row


def from_vllm_benchmark(row: Mapping[str, Any]) -> AcceptanceCounts:
    """Counts of `vllm bench serve`; the histogram follows where the rates by position give whole counts."""
    drafts, accepted = _count(row.get("spec_decode_num_drafts")), _count(row.get("spec_decode_accepted_tokens"))
    rates = row.get("spec_decode_per_position_acceptance_rates")
    histogram = None
    if isinstance(drafts, int) and isinstance(rates, list) and all(isinstance(rate, (int, float)) for rate in rates):
        at_least = [round(rate * drafts) for rate in rates]
        if at_least and sum(at_least) == accepted and at_least == sorted(at_least, reverse=True):
            histogram = histogram_from_positions(drafts, at_least) if at_least[0] <= drafts else None
    return AcceptanceCounts(
        verify_steps=drafts, accepted=accepted, proposed=_count(row.get("spec_decode_draft_tokens")),
        histogram=histogram,
    )  # fmt: skip


def server_infos(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The /server_info of SGLang in a file: itself, those of its decode servers, or the one inside a benchmark."""
    inner = value.get("server_info")
    if isinstance(inner, Mapping):
        return server_infos(inner)
    if isinstance(value.get("internal_states"), list):
        return [value]
    return [one for one in _mappings(value.get("decode")) if isinstance(one.get("internal_states"), list)]


def gauges_of(info: Mapping[str, Any]) -> list[float]:
    """`avg_spec_accept_length` of every data-parallel rank that has a reading; 0 is none."""
    read = [state.get("avg_spec_accept_length") for state in _mappings(info.get("internal_states"))]
    return [float(value) for value in read if isinstance(value, (int, float)) and not isinstance(value, bool) and value]


def settings_of(info: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Draft steps, branches and draft tokens of a /server_info, under the names of the facts."""
    flat = {**_mapping(info.get("server_args")), **info}
    if flat.get("speculative_adaptive") is True:
        return  # the server changes them while it runs
    for name, key in (("steps", "num_steps"), ("topk", "eagle_topk"), ("draft_tokens", "num_draft_tokens")):
        value = flat.get(f"speculative_{key}")
        if type(value) is int and value > 0:
            yield name, value


def _count(value: Any) -> Any:
    """A count that was written as 500.0 is 500; anything else is left for the counts to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> Sequence[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
