"""Delimiters of chat templates, to judge text that others have rendered. No findings in here.

The lab itself takes its loss mask from render boundaries (`corpus/chat.py`); the doctor has only the text or the tokens
of a foreign data set, and says what a trainer that searches for a header would find there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Template:
    """One family of delimiters. header: pattern before a reply; end: literal that ends it; users: a user turn."""

    name: str
    header: re.Pattern[str]
    end: str
    users: re.Pattern[str]


def _template(name: str, header: str, end: str, users: str) -> Template:
    return Template(name, re.compile(header), end, re.compile(users))


TEMPLATES: dict[str, Template] = {
    item.name: item
    for item in (
        _template("kimi", r"<\|im_assistant\|>[^<]{0,80}<\|im_middle\|>", "<|im_end|>", r"<\|im_user\|>"),
        _template("chatml", r"<\|im_start\|>assistant\n?", "<|im_end|>", r"<\|im_start\|>user"),
        _template(
            "llama3",
            r"<\|start_header_id\|>assistant<\|end_header_id\|>(?:\n\n)?",
            "<|eot_id|>",
            r"<\|start_header_id\|>user",
        ),
        _template(
            "llama4", r"<\|header_start\|>assistant<\|header_end\|>(?:\n\n)?", "<|eot|>", r"<\|header_start\|>user"
        ),
        _template("llama2", r"\[/INST\]", "</s>", r"\[INST\]"),
        _template("gemma", r"<start_of_turn>model\n?", "<end_of_turn>", r"<start_of_turn>user"),
        _template("deepseek", r"<｜Assistant｜>", "<｜end▁of▁sentence｜>", r"<｜User｜>"),
        _template("phi", r"<\|assistant\|>\n?", "<|end|>", r"<\|user\|>"),
        _template("gpt-oss", r"<\|start\|>assistant(?:<\|channel\|>[^<]{0,40})?<\|message\|>", "<|return|>",
                  r"<\|start\|>user"),
        _template("vicuna", r"ASSISTANT: ?", "</s>", r"USER: ?"),
    )
}  # fmt: skip
ALIASES = {
    **dict.fromkeys(("kimi-k2", "kimi_k2", "kimi-k2.5", "kimi_k25", "kimi-k25", "moonshot"), "kimi"),
    **dict.fromkeys(("qwen", "qwen2", "qwen3", "smollm2", "im_start"), "chatml"),
    **dict.fromkeys(("llama-3", "llama-3.1", "llama3.1", "llama-3.3"), "llama3"),
    **dict.fromkeys(("mistral", "llama-2"), "llama2"),
    **dict.fromkeys(("harmony", "gpt_oss"), "gpt-oss"),
    **dict.fromkeys(("deepseek-v3", "deepseek_v3", "deepseek-r1"), "deepseek"),
}
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def find_template(name: Any) -> Template | None:
    """The template of this name or alias, None when it is unknown."""
    key = str(name or "").strip().lower()
    return TEMPLATES.get(ALIASES.get(key, key))


def hits(text: str) -> dict[str, int]:
    """Assistant headers of every template that occur in the text."""
    counts = {name: len(item.header.findall(text)) for name, item in TEMPLATES.items()}
    return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply in characters: [start, stop) without its end marker, [start, end) with it; closed: it has one."""

    start: int
    stop: int
    end: int
    closed: bool


def replies(text: str, header: re.Pattern[str], end: str) -> list[Reply]:
    """Every reply: from its header to the end marker, or to the next header or the end of the text."""
    found: list[Reply] = []
    position = 0
    while match := header.search(text, position):
        stop = text.find(end, match.end()) if end else -1
        following = header.search(text, max(match.end(), match.start() + 1))
        limit = following.start() if following else len(text)
        closed = 0 <= stop <= limit
        stop = stop if closed else limit
        found.append(Reply(match.end(), stop, stop + len(end) if closed else stop, closed))
        position = max(stop, match.start() + 1)
    return found


def token_spans(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """[start, stop) of every token in the joined text."""
    spans, at = [], 0
    for token in tokens:
        spans.append((at, at + len(token)))
        at += len(token)
    return spans


def token_mask(tokens: Sequence[str], found: Sequence[Reply], *, with_end: bool) -> list[int]:
    """1 for every token that lies wholly inside a reply (its end marker counts when `with_end`)."""
    mask = []
    for start, stop in token_spans(tokens):
        inside = any(r.start <= start and stop <= (r.end if with_end else r.stop) and start < stop for r in found)
        mask.append(int(inside))
    return mask
