"""`--server URL --states DIR`: one stored sample captured again, alone in its batch, and compared row by row.

SGLang only, started with --enable-return-aux-hidden-states (or --enable-return-hidden-states): then
`meta_info.hidden_states` holds the prompt's rows [tokens, P * H]. The shortest sample is taken: a row of the reference
target is 21,504 numbers of JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.safetensors_header import HeaderError, map_tensor, read_header, widen
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError
from eagle3lab.doctor.rows import from_values
from eagle3lab.doctor.views import items, mapping

WHAT = "stored states against a capture at batch 1"
LONGEST = 512


def compare_with_server(ask: Callable[[dict[str, Any]], Any], info: Mapping[str, Any], facts: Facts) -> None:
    """Add `cosine_to_batch_1`, or what could not be compared. ask: sends a body to /generate, returns parsed JSON."""
    source = facts.sources.get("states")
    if source is None:
        return
    if not (info.get("enable_return_aux_hidden_states") or info.get("enable_return_hidden_states")):
        facts.could_not(WHAT, "the server returns no states", fix="start it with --enable-return-aux-hidden-states")
        return
    try:
        sample = _shortest(Path(source).parent, facts)
    except (HeaderError, OSError, ValueError) as error:
        facts.could_not(WHAT, str(getattr(error, "what", error))[:160])
        return
    if sample is None:
        facts.could_not(WHAT, f"no stored sample has 4 to {LONGEST} tokens")
        return
    name, tokens, stored = sample
    body = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_hidden_states": True,
    }
    try:
        answer = ask(body)
    except ReadError as error:
        facts.could_not(WHAT, error.what)
        return
    answer = answer[0] if isinstance(answer, list) and answer else answer
    given = items(mapping(mapping(answer).get("meta_info")).get("hidden_states"))
    fresh = from_values(given[0] if given and isinstance(given[0], list) else None)
    if fresh is None or fresh.shape[1] != stored.shape[1]:
        got = "no rows" if fresh is None else f"rows of {fresh.shape[1]} numbers"
        facts.could_not(WHAT, f"the server returned {got}, stored rows have {stored.shape[1]}")
        return
    if len(fresh) != len(tokens):
        facts.put("hidden_rows", len(fresh), "the server's answer")
        facts.put("prompt_tokens", len(tokens), name)
        return
    with np.errstate(all="ignore"):
        sizes = np.linalg.norm(fresh, axis=1) * np.linalg.norm(stored, axis=1)
        cosine = np.where(sizes > 0, (fresh * stored).sum(axis=1) / sizes, 0.0)
    facts.put("cosine_to_batch_1", [round(float(value), 6) for value in np.nan_to_num(cosine)], name)
    facts.put("rows_compared", len(tokens), name)


def _shortest(folder: Path, facts: Facts) -> tuple[str, list[int], np.ndarray] | None:
    """(name, tokens, rows of aux) of the shortest sample of the first whole shard."""
    for shard in items(facts.get("shards")):
        entry = mapping(shard)
        if entry.get("state") != "good" or entry.get("problem"):
            continue
        header = read_header(folder / str(entry.get("name")))
        tokens, offsets = np.asarray(map_tensor(header, "input_ids")), np.asarray(map_tensor(header, "offsets"))
        spans = [(stop - start, start, stop) for start, stop in pairwise(offsets.tolist())]
        usable = [span for span in spans if 4 <= span[0] <= LONGEST and 0 <= span[1] < span[2] <= len(tokens)]
        if usable:
            _, start, stop = min(usable)
            rows = widen(header.tensors["aux"], map_tensor(header, "aux")[start:stop]).astype(np.float32)
            return f"{entry.get('name')}, tokens {start} to {stop}", tokens[start:stop].tolist(), rows
    return None
