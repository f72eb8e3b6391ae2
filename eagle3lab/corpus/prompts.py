"""Prompts: those written for this project, and those that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.core.errors import CorpusError

if TYPE_CHECKING:
    from eagle3lab.targets.model import Target


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message.

    Attributes:
        id: stable name, unique in its set.
        kind: `chat`, `code`, `maths`, `summarising`, or `own` when the target wrote it.
    """

    id: str
    kind: str
    prompt: str


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file (`.gz` is unpacked); a bad line is named by file and number."""
    import gzip

    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read ({error})", rule="prompts are UTF-8 JSON lines") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{path}:{number} is not JSON ({error})", rule="one object a line") from error
        if not isinstance(row, dict):
            raise CorpusError(f"{path}:{number} is a {type(row).__name__}", rule="one object a line")
        rows.append(row)
    return rows


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file with `prompt` and optional `id` and `kind`; an empty or repeated one is an error."""
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        text = row.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise CorpusError(f"{path}:{number} has prompt {text!r}", rule="prompt is text that is not empty")
        if text in seen:
            raise CorpusError(f"{path}:{number} repeats line {seen[text]}", rule="every prompt once")
        seen[text] = number
        prompts.append(Prompt(str(row.get("id", f"{path.stem}-{number:04d}")), str(row.get("kind", "chat")), text))
    if not prompts:
        raise CorpusError(f"{path} holds no prompt")
    return prompts


def own_header(target: Target, user_header: str, system_prompt: str | None) -> list[int]:
    """Token ids of everything that stands before the first word of a user message."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = target.tokenizer.apply_chat_template(messages, tokenize=False) if messages else ""
    return list(target.tokenizer(text + user_header, add_special_tokens=False)["input_ids"])


def write_own_prompts(
    target: Target,
    count: int,
    *,
    user_header: str,
    system_prompt: str | None,
    seed: int,
    batch: int = 128,
    max_tokens: int = 64,
    progress: Callable[[int], None] | None = None,
) -> list[Prompt]:
    """Let the target write user messages: sampled from the bare user header at temperature 1.

    Messages that did not end by themselves, are empty, or repeat an earlier one are dropped, so fewer than `count`
    come back.
    """
    from eagle3lab.targets.generate import generate

    header = own_header(target, user_header, system_prompt)
    replies = generate(
        target, [header] * count, max_new_tokens=max_tokens, temperature=1.0, seed=seed, batch=batch, progress=progress
    )
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for index, reply in enumerate(replies):
        text = target.tokenizer.decode(reply.tokens, skip_special_tokens=True).strip()
        key = " ".join(text.lower().split())
        if reply.ended and len(key) >= 8 and key not in seen:
            seen.add(key)
            prompts.append(Prompt(f"own-{index:05d}", "own", text))
    return prompts
