"""Delimiters of chat templates, to judge text that others have rendered. No findings in here.

The lab itself takes its loss mask from render boundaries (`corpus/chat.py`); the doctor has only the text or the tokens
of a foreign data set, and says what a trainer that searches for a header would find there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Template:
    """One family of delimiters. header: pattern before a reply; ends: literals that end it; turn: opens any turn."""

    name: str
    header: re.Pattern[str]
    ends: tuple[str, ...]
    turn: re.Pattern[str]


def _template(name: str, header: str, ends: tuple[str, ...], turn: str) -> Template:
    return Template(name, re.compile(header), ends, re.compile(turn))


# A line break that belongs to the header may be spelled as the byte-level tokenizers do. Where two headers match the
# same text, the narrower stands first.
TEMPLATES: dict[str, Template] = {
    item.name: item
    for item in (
        _template("kimi", r"<\|im_assistant\|>[^<]{0,80}<\|im_middle\|>", ("<|im_end|>",),
                  r"<\|im_(?:user|assistant|system)\|>"),
        _template("phi4", r"<\|im_start\|>assistant<\|im_sep\|>", ("<|im_end|>",), r"<\|im_start\|>"),
        _template("chatml", r"<\|im_start\|>assistant(?!<\|im_sep\|>)(?:\n|Ċ)?", ("<|im_end|>",), r"<\|im_start\|>"),
        _template("llama3", r"<\|start_header_id\|>assistant<\|end_header_id\|>(?:\n\n|ĊĊ)?",
                  ("<|eot_id|>", "<|eom_id|>"), r"<\|start_header_id\|>"),
        _template("llama4", r"<\|header_start\|>assistant<\|header_end\|>(?:\n\n|ĊĊ)?", ("<|eot|>", "<|eom|>"),
                  r"<\|header_start\|>"),
        _template("llama2", r"\[/INST\]", ("</s>",), r"\[INST\]"),
        _template("gemma", r"<start_of_turn>model\n?", ("<end_of_turn>",), r"<start_of_turn>"),
        _template("deepseek", r"<｜Assistant｜>", ("<｜end▁of▁sentence｜>",),
                  r"<｜(?:User|Assistant|tool▁outputs?▁begin)｜>"),
        _template("phi", r"<\|assistant\|>\n?", ("<|end|>",), r"<\|(?:user|assistant|system|tool)\|>"),
        _template("glm", r"<\|assistant\|>\n?", ("<|endoftext|>",), r"<\|(?:user|assistant|system|observation)\|>"),
        _template("gpt-oss",
                  r"<\|start\|>assistant[^<]{0,80}(?:<\|channel\|>[^<]{0,80})?(?:<\|constrain\|>[^<]{0,40})?<\|message\|>",
                  ("<|return|>", "<|end|>", "<|call|>"), r"<\|start\|>"),
        _template("vicuna", r"ASSISTANT: ?", ("</s>",), r"\bUSER:"),
    )
}  # fmt: skip
_FAMILIES = {
    "chatml": re.compile(
        r"chat-?ml|im-start|qwen|qwq|qvq|(?:open-?)?hermes|nous-hermes|smollm|yi(?:$|-|\d)|internlm-?[23]|mimo"
        r"|kimi-?dev"
    ),
    "kimi": re.compile(r"kimi(?!-?(?:dev|audio))|moonshot|moonlight"),
    "llama3": re.compile(r"(?:meta-)?llama-?3(?!\d)"),
    "llama4": re.compile(r"(?:meta-)?llama-?4(?!\d)"),
    "llama2": re.compile(
        r"(?:meta-)?llama-?2(?!\d)|"
        r"(?:open-)?(?:mistral|mixtral)|devstral|ministral|magistral|codestral|mathstral|pixtral"
    ),
    "deepseek": re.compile(r"deepseek(?:$|-?(?:v2\.5|v3|r1))"),
    "gpt-oss": re.compile(r"gpt-?oss|harmony"),
    "gemma": re.compile(r"gemma(?!-?4)"),
    "phi": re.compile(r"phi-?(?:3|4-(?:mini|multimodal))"),
    "phi4": re.compile(r"phi-?4(?!-(?:mini|multimodal))"),
    "glm": re.compile(r"(?:chat)?glm(?:$|-?[345])"),
    "vicuna": re.compile(r"vicuna"),
}
"""How the names of models begin that share a template, and where such a name goes on for a model of another one."""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def find_template(name: Any) -> Template | None:
    """The template of this name or of the model family that it begins with, None when it is unknown."""
    key = str(name or "").strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    family = next((family for family, names in _FAMILIES.items() if names.match(key)), "")
    return TEMPLATES.get(key) or TEMPLATES.get(family)


def template_of_header(header: str) -> Template | None:
    """The template that this assistant header belongs to, None when it is in none."""
    return next((item for item in TEMPLATES.values() if item.header.search(header)), None)


def likely(text: str) -> Template | None:
    """The template whose assistant header occurs most often in the text, None when none does."""
    name = commonest(hits(text))
    return TEMPLATES[name] if name else None


def commonest(counts: Mapping[str, int]) -> str | None:
    """The name with the highest count, the first of equal ones; None when there is none."""
    return max(counts, key=lambda name: counts[name], default=None)


def hits(text: str) -> dict[str, int]:
    """Assistant headers of every template that occur in the text."""
    counts = {name: len(item.header.findall(text)) for name, item in TEMPLATES.items()}
    return {name: count for name, count in counts.items() if count}


def fitting(text: str) -> Template | None:
    """The one template whose header and end marker fit every reply of the text, None when none or several do."""
    names = hits(text)
    fit = [name for name in names if all(one.closed for one in replies(text, TEMPLATES[name].header, TEMPLATES[name]))]
    if len(fit) != 1:
        return None
    # phi and glm share a header and differ by their end markers; another header in the text is another template
    places = {name: [at.start() for at in TEMPLATES[name].header.finditer(text)] for name in names}
    return TEMPLATES[fit[0]] if all(found == places[fit[0]] for found in places.values()) else None


def turn_openers(text: str) -> list[str]:
    """Templates that open a turn in the text by a token of their own, whoever speaks in it."""
    return [name for name, item in TEMPLATES.items() if name != "vicuna" and item.turn.search(text)]


def has_delimiters(reply: str) -> bool:
    """Whether a reply goes on into another turn, or ends with an end marker that its template writes once more."""
    glued = any(item.header.search(reply) for name, item in TEMPLATES.items() if name not in ("vicuna", "llama2"))
    return glued or reply.rstrip().endswith(tuple(end for item in TEMPLATES.values() for end in item.ends))


def only_thinks(reply: str) -> bool:
    """Whether a reply closes its thinking and says nothing after it."""
    return THINK_CLOSE in reply and not reply.rsplit(THINK_CLOSE, 1)[1].strip()


def still_thinks(reply: str) -> bool:
    """Whether a reply opens a thinking block that it never closes."""
    return reply.count(THINK_OPEN) > reply.count(THINK_CLOSE)


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply in characters: [start, stop) without its end marker, [start, end) with it; closed: it has one."""

    start: int
    stop: int
    end: int
    closed: bool


def replies(text: str, header: re.Pattern[str], family: Template | None) -> list[Reply]:
    """Every reply: from its header to the family's first end marker, or to the next turn or the end of the text."""
    ends = re.compile("|".join(re.escape(end) for end in family.ends)) if family else None
    found: list[Reply] = []
    position = 0
    while match := header.search(text, position):
        begin = max(match.end(), match.start() + 1)
        following = [header.search(text, begin), family.turn.search(text, begin) if family else None]
        limit = min((one.start() for one in following if one), default=len(text))
        end = ends.search(text, match.end(), limit) if ends else None
        stop = end.start() if end else limit
        found.append(Reply(match.end(), stop, end.end() if end else stop, end is not None))
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
    mask, at = [], 0  # replies and tokens both stand in order: one pass over each
    for start, stop in token_spans(tokens):
        while at < len(found) and found[at].end <= start:
            at += 1
        reply = found[at] if at < len(found) else None
        inside = reply is not None and reply.start <= start < stop <= (reply.end if with_end else reply.stop)
        mask.append(int(inside))
    return mask
