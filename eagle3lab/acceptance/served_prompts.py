"""Prompts for a server, from JSON lines in the styles that benchmarks use.

`prompt` (ours, HumanEval), `question` (GSM8K), `turns` (MT-bench: the first turn; the later ones need a reply) or
`messages` (OpenAI). The name is `id`, `task_id` or `question_id`, else file and line; the kind `kind` or `category`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import CorpusError
from eagle3lab.corpus.prompts import read_jsonl

NAMES, KINDS = ("id", "task_id", "question_id"), ("kind", "category")


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """One request.

    Attributes:
        id: unique in the file. kind: for the table by kind, "unknown" when the file does not say.
        messages: chat turns that end with the user's.
        text: what to complete when the prompt is sent raw. input_ids: rendered token ids, when a tokenizer is at hand.
    """

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]
    text: str
    input_ids: tuple[int, ...] | None = None


def read_served_prompts(path: Path, limit: int | None = None) -> list[ServedPrompt]:
    """Prompts of a file, the first `limit` of them.

    Raises:
        CorpusError: unreadable, no prompt, a line in no known style, or a name that stands twice.
    """
    prompts: list[ServedPrompt] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        messages = _messages(row)
        if messages is None:
            raise CorpusError(
                f"{path}:{number} has the keys {sorted(row)}",
                rule="a prompt is text in prompt or question, a list in turns, or chat turns in messages",
            )
        name = str(next((row[key] for key in NAMES if row.get(key) is not None), f"{path.stem}-{number:04d}"))
        if name in seen:
            raise CorpusError(f"{path}:{number} is named {name} like line {seen[name]}", rule="names are unique")
        seen[name] = number
        kind = str(next((row[key] for key in KINDS if row.get(key) is not None), "unknown"))
        prompts.append(ServedPrompt(name, kind, messages, messages[-1]["content"]))
    if not prompts:
        raise CorpusError(f"{path} holds no prompt")
    return prompts[:limit]


def rendered(
    prompts: Sequence[ServedPrompt], encode: Callable[[list[dict[str, str]]], list[int]]
) -> list[ServedPrompt]:
    """The same prompts with token ids; `encode` applies a chat template up to the assistant's header."""
    return [replace(prompt, input_ids=tuple(encode(list(prompt.messages)))) for prompt in prompts]


def _messages(row: dict[str, Any]) -> tuple[dict[str, str], ...] | None:
    if isinstance(row.get("messages"), list):
        turns = row["messages"]
        good = turns and all(isinstance(t, dict) and isinstance(t.get("content"), str) and "role" in t for t in turns)
        return tuple({"role": str(t["role"]), "content": t["content"]} for t in turns) if good else None
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else row.get("prompt", row.get("question"))
    return ({"role": "user", "content": first},) if isinstance(first, str) and first.strip() else None
