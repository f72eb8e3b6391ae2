"""Capturing hidden states: launch arguments that lose rows, rows against tokens, resume and disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.readers.launch import Launch, parse_args, speculative_config
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.rows import longest_shared_prefix
from eagle3lab.doctor.views import given_twice, mapping, whole

RADIX, CHUNK = "--disable-radix-cache", "--chunked-prefill-size"
LISTED = 1000
"""Shards that a finding lists; its counts are complete."""
CAPTURE_FLAGS = ("enable-return-aux-hidden-states", "enable-return-hidden-states")


def captures(launch: Launch) -> bool:
    """Whether this SGLang line hands hidden states out."""
    return any(launch.has(flag) for flag in CAPTURE_FLAGS) or hooked(launch)


def hooked(launch: Launch) -> bool:
    """Whether states are taken by a forward hook, which sees every chunk of a prompt."""
    return "capture" in " ".join(launch.flags.get("forward-hooks", []))


def captures_vllm(launch: Launch) -> bool:
    """Whether this vLLM line hands hidden states out."""
    method = str(speculative_config(launch).get("method", ""))
    connector = " ".join(launch.flags.get("kv-transfer-config", []))
    return "hidden_states" in method or "HiddenStates" in connector


@check(
    code="capture-prefix-cache",
    title="prefix cache while capturing",
    reads=("launch_args",),
    also=("shards",),
    rule="rows of a prefix that the cache already holds are not computed, so they are not returned",
    fix=f"add {RADIX} (vLLM: --no-enable-prefix-caching) and capture again",
    symptom="the second prompt that begins alike comes back with fewer rows than tokens",
)
def prefix_cache(facts: Facts) -> Iterator[Finding]:
    """SGLang's radix cache and vLLM's prefix caching are both on unless switched off."""
    launch = parse_args(facts["launch_args"])
    complete = [name for name, tokens, rows, _ in _rows_of(facts) if rows == tokens]
    short = [name for name, tokens, rows, _ in _rows_of(facts) if rows < tokens]
    after = "; nothing is missing here, but the cache is on" if complete and not short else ""
    effect = "rows of a shared prefix are not returned"
    if "sglang" in facts.engine_names() and captures(launch) and not launch.has("disable-radix-cache"):
        yield warning(RADIX, f"{RADIX} is missing: {effect}{after}", fix=f"add {RADIX}", effect=effect)
    elif captures_vllm(launch) and not launch.has("no-enable-prefix-caching"):
        off = "--no-enable-prefix-caching"
        if (launch.value("enable-prefix-caching") or "").lower() not in ("false", "0"):
            yield warning(off, f"{off} is missing: {effect}{after}", fix=f"add {off}", effect=effect)


@check(
    code="capture-chunked-prefill",
    title="chunked prefill while capturing",
    reads=("launch_args",),
    also=("prompt_tokens", "shards"),
    rule="of a prompt that is prefilled in chunks only the rows of the last chunk come back",
    fix=f"{CHUNK} -1",
    symptom="long prompts come back with a few rows, short ones are whole",
)
def chunked_prefill(facts: Facts) -> Iterator[Finding]:
    """SGLang only; a capturing forward hook sees all chunks."""
    launch = parse_args(facts["launch_args"])
    if "sglang" not in facts.engine_names() or not captures(launch) or hooked(launch):
        return
    if not launch.has("chunked-prefill-size"):
        yield warning(CHUNK, f"{CHUNK} -1 is missing: the default cuts long prompts", needed=-1)
        return
    size = launch.number("chunked-prefill-size")
    if size is None:
        yield warning(CHUNK, f"{CHUNK} {launch.value('chunked-prefill-size')!r} is not a number", needed=-1)
    if size is None or size <= 0:
        return
    prompts = prompt_lengths(facts)
    returned = [last_chunk(length, size) for length in prompts]
    cut = [(length, rows) for length, rows in zip(prompts, returned, strict=True) if rows < length]
    evidence: dict[str, Any] = {
        "value": size,
        "rows_returned": returned,
        "rule": "only the rows of the last chunk come back",
    }
    if cut:
        lost = sum(length - rows for length, rows in cut)
        text = f"{CHUNK} {size}: {len(cut)} of {len(prompts)} prompts are longer, {lost} rows are lost"
        yield error(CHUNK, text, actual=size, prompts_affected=len(cut), rows_lost=lost, **evidence)
    elif prompts:
        text = f"{CHUNK} {size}: no prompt is longer, but prompts sent together share a chunk"
        yield info(CHUNK, text, actual=size, **evidence)
    else:
        yield warning(CHUNK, f"{CHUNK} {size}: prompts longer than {size} tokens lose rows", actual=size, **evidence)


def last_chunk(length: int, size: int) -> int:
    """Rows of the last chunk of a prompt of `length` tokens."""
    return (length - 1) % size + 1 if length else 0


def prompt_lengths(facts: Facts) -> list[int]:
    """Prompt lengths of `prompt_tokens` (a number or a list), else of the shards."""
    given = facts.get("prompt_tokens")
    items = given if isinstance(given, list) else [given]
    lengths = [length for item in items if (length := whole(item)) is not None and length >= 0]
    return lengths or [tokens for _, tokens, _, _ in _rows_of(facts)]


@check(
    code="states-rows",
    title="rows against tokens in every shard",
    reads=("shards",),
    also=("launch_args",),
    rule="one row a token of the captured pass",
    fix="capture the named shards again with the prefix cache and chunked prefill off",
    symptom="training pairs states with the wrong tokens",
)
def rows(facts: Facts) -> Iterator[Finding]:
    """A short shard cannot be repaired: which rows are missing is not in the file."""
    shards = list(_rows_of(facts))
    lists = {name: tokens for name, _, _, tokens in shards if tokens}
    good = [name for name, count, held, _ in shards if count == held]
    for name, count, held, tokens in shards:
        if held == count:
            continue
        evidence: dict[str, Any] = {"rows": held, "tokens": count, "ok": good}
        if held > count:
            text = f"shard {name} has {held} rows for {count} tokens: {held - count} too many"
            yield error(f"shard {name}", text, actual=held, fix=f"capture {name} again", **evidence)
            continue
        missing = count - held
        other, shared = longest_shared_prefix(tokens, {k: v for k, v in lists.items() if k != name})
        cause, fix = _cause(facts, count, held, shared)
        evidence |= {"missing": missing, "because": cause}
        if shared:
            evidence["longest_shared_prefix_with"] = {"shard": other, "tokens": shared}
        alike = f"; its first {shared} tokens are those of shard {other}" if shared else ""
        text = f"shard {name} has {held} rows for {count} tokens, {missing} are missing{alike}: {cause}"
        yield error(f"shard {name}", text, actual=held, fix=f"capture {name} again {fix}", **evidence)


def _cause(facts: Facts, count: int, held: int, shared: int) -> tuple[str, str]:
    """(likely cause, what to switch off)."""
    size = parse_args(facts["launch_args"]).number("chunked-prefill-size") if facts.get("launch_args") else None
    if size and size > 0 and held == last_chunk(count, size):
        return "chunked prefill", f"with {CHUNK} -1"
    if 0 < count - held <= shared:
        return "prefix cache", "with the prefix cache off"
    if count - held == 1:
        return "last token: a generated token has no row before it is fed", "with the reply sent as input_ids"
    return "prefix cache or chunked prefill", f"with {RADIX} and {CHUNK} -1"


def _rows_of(facts: Facts) -> Iterator[tuple[str, int, int, list[Any]]]:
    """(name, tokens, rows, token list or []) of every shard that tells both."""
    for index, raw in enumerate(facts.get("shards") or []):
        shard = mapping(raw)
        tokens, held = shard.get("tokens"), whole(shard.get("hidden_rows", shard.get("rows")))
        listed = tokens if isinstance(tokens, list) else []
        count = len(listed) if isinstance(tokens, list) else whole(tokens)
        if count is not None and held is not None:
            yield str(shard.get("name", shard.get("i", index))), count, held, listed


@check(
    code="states-generated-rows",
    title="rows of a prompt and its reply",
    reads=("hidden_rows", "prompt_tokens|tokens"),
    also=("completion_tokens",),
    rule="prompt rows + completion rows - 1: the last generated token is never fed, so it has no row",
    fix="capture again with the prefix cache and chunked prefill off",
)
def generated_rows(facts: Facts) -> Iterator[Finding]:
    """One answer of the server."""
    tokens = facts.get("tokens")
    listed = len(tokens) if isinstance(tokens, list) else None
    prompt = whole(facts.get("prompt_tokens"))
    prompt = listed if prompt is None else prompt
    held, reply = whole(facts.get("hidden_rows")), whole(facts.get("completion_tokens")) or 0
    if prompt is None or held is None:
        return
    expected = prompt + max(reply - 1, 0)
    if held == expected:
        yield info("hidden_rows", f"{held} rows = {prompt} prompt + {reply} reply - 1" if reply else f"{held} rows",
                   expected_rows=expected, rule="prompt rows + completion rows - 1")  # fmt: skip
        return
    text = f"{held} rows, needed {expected}: {prompt} prompt + {reply} reply tokens - 1"
    missing: dict[str, Any] = {"missing": expected - held} if held < expected else {"extra": held - expected}
    yield error("hidden_rows", text, actual=held, expected_rows=expected, **missing)


@check(
    code="states-resume",
    title="shards that a resumed capture does again",
    reads=("shards",),
    also=("conversations", "one_conversation_per_shard"),
    rule="a good shard is never written again; a damaged or outdated one is",
    fix="eagle3lab capture again: it resumes and redoes only these",
)
def resume(facts: Facts) -> Iterator[Finding]:
    """Groups the bad shards by what is wrong with them."""
    states = [(whole(mapping(raw).get("i")), mapping(raw)) for raw in facts.get("shards") or []]
    known = [(index if index is not None else place, shard) for place, (index, shard) in enumerate(states)]
    told = [(index, str(shard["state"])) for index, shard in known if shard.get("state") is not None]
    if not told:
        return
    valid = [index for index, state in told if _reason(state) is None]
    bad: dict[str, list[int]] = {}
    for index, state in told:
        reason = _reason(state)
        if reason is not None:
            bad.setdefault(reason, []).append(index)
    redo = sorted(index for indices in bad.values() for index in indices)
    evidence: dict[str, Any] = {"valid": valid, "redo": redo, "rewritten_good_shards": 0, **bad}
    planned = whole(facts.get("conversations"))
    if planned is not None and facts.get("one_conversation_per_shard"):
        seen = {index for index, _ in told if 0 <= index < planned}
        first = range(min(planned, LISTED + len(seen)))
        todo = [index for index in first if index not in seen][:LISTED]
        evidence |= {"todo": todo, "work": max(planned, 0) - len(seen) + len(redo)}
    twice = given_twice(valid)
    if twice:
        text = f"{valid.count(twice[0])} good shards have the number {twice[0]}: their samples count more than once"
        yield error("shards", text, actual=twice[:20], fix="keep one shard of a number")
    if not redo:
        yield info("shards", f"{len(valid)} shards are good, none is redone", **evidence)
        return
    count = "1 shard is" if len(redo) == 1 else f"{len(redo)} shards are"
    why = ", ".join(f"{reason} {indices}" for reason, indices in bad.items())
    yield warning("shards", f"{count} redone: {why}", actual=len(redo), **evidence)


_GOOD = frozenset({"good", "ok", "okay", "valid", "whole", "complete", "completed", "done", "intact", "verified"})
_CHECKED = frozenset(
    {"and", "checked", "hash", "sha256", "checksum", "matches", "match", "by", "written", "finished", "all"}
)
_REASONS = ("truncated", "tokenizer", "template", "target", "points", "missing", "empty", "hash", "dtype")


def _reason(state: str) -> str | None:
    """One word for what is wrong with a shard, None for a good one."""
    words = state.strip().lower()
    if (said := set(re.findall(r"[a-z0-9]+", words))) & _GOOD and said <= _GOOD | _CHECKED:
        return None
    return next((reason for reason in _REASONS if reason in words), words or "unknown")
