"""Chat text and its loss mask: what a trainer that searches for the assistant's header will supervise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.templates import (
    THINK_CLOSE,
    THINK_OPEN,
    Reply,
    Template,
    commonest,
    find_template,
    fitting,
    hits,
    likely,
    only_thinks,
    replies,
    still_thinks,
    template_of_header,
    token_mask,
)
from eagle3lab.doctor.views import mapping, whole


@dataclass(frozen=True)
class Sample:
    """One rendered conversation: tokens ([] when only text is known), its text, and the delimiters asked for.

    header is None when neither a header nor a known template was given. family: whose end markers and turns hold, that
    of the given header, else the template's, else the text's.
    """

    tokens: list[str]
    text: str
    template: Template | None
    header: re.Pattern[str] | None
    family: Template | None
    with_end: bool
    max_length: int | None


def sample_of(facts: Facts) -> Sample:
    """The conversation in the facts. A header given in full wins over the template's."""
    given = facts.get("tokens")
    tokens = [str(token) for token in given] if isinstance(given, list) else []
    template = find_template(facts.get("template"))
    header = str(facts.get("assistant_header") or "")
    policy = str(facts.get("policy") or "").lower()
    text = "".join(tokens) if tokens else str(facts.get("text") or "")
    if template is None and not header:
        template = fitting(text)
    pattern = _given_header(header, text)
    return Sample(
        tokens=tokens,
        text=text,
        template=template,
        header=pattern or (template.header if template else None),
        family=template_of_header(header) or template or likely(text),
        with_end="not supervised" not in policy and "unsupervised" not in policy,
        max_length=whole(facts.get("max_length")),
    )


def _given_header(header: str, text: str) -> re.Pattern[str] | None:
    """The header as it is written, None without one. A header that only begins another family's is not in the text."""
    own = template_of_header(header) if header else None
    if own is not None and hits(text) and own.name not in hits(text):
        return own.header
    return re.compile(re.escape(header)) if header else None


@check(
    code="mask-empty",
    title="loss mask of a conversation",
    reads=("template|assistant_header", "tokens|text"),
    also=("max_length", "policy", "tokenizer"),
    rule="every sample supervises at least one token of a reply; 0 supervised tokens have no loss",
    fix="render with the target's own chat template and take the mask from render boundaries",
    symptom="loss 0.00 or nan from the first step, or a drafter that never learns",
)
def mask(facts: Facts) -> Iterator[Finding]:
    """Header found or not, reply empty or cut, and the mask itself."""
    sample = sample_of(facts)
    if _no_offsets(facts.get("tokenizer")) and not sample.tokens:
        return  # told by mask-offsets
    if sample.header is None:
        yield _unknown_template(facts, sample)
        return
    found = replies(sample.text, sample.header, sample.family)
    if not found:
        yield _no_header(facts, sample)
        return
    kept = sample.tokens if sample.max_length is None else sample.tokens[: max(sample.max_length, 0)]
    full = token_mask(sample.tokens, found, with_end=sample.with_end)
    marks = full[: len(kept)]
    supervised: int | str = sum(marks) if sample.tokens else "unknown"
    evidence: dict[str, Any] = {"supervised": supervised, "mask": marks[:4096], "replies": len(found)}
    if sample.tokens and sum(marks) == 0 and sum(full) > 0:
        starts = full.index(1)
        evidence |= {"kept": len(kept), "max_length": sample.max_length, "reply_starts": starts}
        text = f"cut before the reply: {len(kept)} tokens are kept, the reply starts at token {starts}"
        yield error("max_length", text, actual=sample.max_length, fix=f"--max-length above {starts}", **evidence)
        return
    empty = [reply for reply in found if not sample.text[reply.start : reply.stop].strip()]
    if sample.tokens and sum(marks) == 0:
        text = "no supervised token: the reply is empty and its end token is not supervised"
        yield error("reply", text, actual=0, fix="drop the sample, or regenerate its reply", **evidence)
        return
    if empty:
        only = "end token only" if sample.with_end and len(empty) == len(found) else f"{len(empty)} empty replies"
        told = {**evidence, "supervised": only, "supervised_tokens": supervised}
        count = f"{supervised} supervised: {only}" if sample.tokens else only
        yield warning("reply", f"reply is empty ({count})", fix="drop the sample, or regenerate its reply", **told)
    yield from _thinking(sample, found)
    if len(kept) < len(sample.tokens) and sum(full) > sum(marks):
        lost = sum(full) - sum(marks)
        yield info("max_length", f"{lost} of {sum(full)} supervised tokens are cut off", kept=len(kept), lost=lost)
    if not empty:
        name = facts.get("template")
        known = find_template(name) is not None or facts.get("assistant_header")
        how = "" if known else f", judged as {sample.template.name}" if sample.template else ""
        asked = f" (template {str(name)[:40]!r} is not known{how})" if name and how else how
        yield info("mask", f"{supervised} supervised tokens in {len(found)} replies{asked}", **evidence)


def _no_header(facts: Facts, sample: Sample) -> Finding:
    """Why nothing is supervised: another template's text, or no reply at all."""
    other = hits(sample.text)
    named = facts.get("template") or (sample.template.name if sample.template else None)
    asked = str(named or facts.get("assistant_header") or "assistant").strip()[:60]
    suggest = commonest(other)
    evidence: dict[str, Any] = {
        "supervised": 0,
        "header_found": 0,
        "hits": {asked: 0, **other},
        "loss": "undefined (0 tokens)",
    }
    if suggest is not None and sample.template and suggest == sample.template.name:
        text = f"no supervised token: assistant_header is found 0 times as it is written, the text is {suggest}"
        return error("assistant_header", text, actual=facts.get("assistant_header"), suggest=suggest, **evidence)
    if suggest is not None:
        header = f"the {asked} header" if named else f"assistant_header {asked!r}"
        text = f"no supervised token: {header} is found 0 times, the {suggest} header {other[suggest]} times"
        return error("template", text, actual=asked, fix=f"use the template {suggest}", suggest=suggest, **evidence)
    text = "no assistant turn: 0 supervised tokens"
    return error("tokens", text, actual=0, fix="drop the sample, or write its reply with the target", **evidence)


def _unknown_template(facts: Facts, sample: Sample) -> Finding:
    """The mask cannot be judged; text with delimiters that are known shows that the name is to blame."""
    name, other = facts.get("template"), hits(sample.text)
    suggest = sample.family.name if sample.family else None
    asked = f"template {str(name)[:40]!r} is not known" if name else "no template is named"
    seen = f", the text looks like {suggest}" if suggest else ""
    told = warning if name and suggest else info
    text = f"{asked}{seen}: give its assistant_header"
    return told("template", text, actual=name and str(name)[:40], hits=other, suggest=suggest)


def _thinking(sample: Sample, found: list[Reply]) -> Iterator[Finding]:
    """Thinking blocks that never close, or that are all there is."""
    for number, reply in enumerate(found):
        text = sample.text[reply.start : reply.stop]
        if still_thinks(text):
            said = f"reply {number} opens {THINK_OPEN} and never closes it: it was cut while thinking"
            yield warning("reply", said, fix="regenerate it with more tokens", reply=number)
        elif only_thinks(text):
            said = f"reply {number} ends with {THINK_CLOSE}: it thinks and answers nothing"
            yield warning("reply", said, fix="regenerate it with more tokens", reply=number)


_POSITIONS = r"\b(?:offsets?|positions?|fast)\b"
_NO_OFFSETS = re.compile(
    rf"\b(?:no|not|without|lacks?|lacking|missing|cannot|can't|doesn't)\b[^.,;]*{_POSITIONS}"
    rf"|{_POSITIONS}(?: mapping)?\s*(?:[:=]|is|are)?\s*(?:none|null|false|no)\b"
    rf"|{_POSITIONS}[^.,;]{{0,30}}\b(?:unavailable|unsupported|missing|absent|raises?|fails?"
    r"|not (?:available|supported|implemented|given|returned))\b"
    r"|(?<!not )\bslow\b"
)


def _no_offsets(tokenizer: Any) -> bool:
    """Whether the tokenizer is said to give no character positions, or is of the kind that has none."""
    described = mapping(tokenizer)
    if described:
        fields = ("offsets", "offset_mapping", "is_fast", "fast", "name", "class", "tokenizer_class", "type")
        given = [key for key in fields if key in described and (described[key] is not None or "offset" in key)]
        tokenizer = ", ".join(f"{key}: {described[key]}" for key in given)
    text = str(tokenizer or "").lower().replace("_", " ")
    return bool(_NO_OFFSETS.search(text)) or ("tiktoken" in text and not re.search(_POSITIONS, text))


@check(
    code="mask-offsets",
    title="tokenizer that cannot give character positions",
    reads=("tokenizer",),
    also=("tokens", "text"),
    rule="a mask found in text needs the tokenizer's character positions; Kimi's tokenizer has none",
    fix="take the mask from render boundaries: tokenize the prompt and the reply apart",
    symptom="every token is supervised, or none",
)
def offsets(facts: Facts) -> Iterator[Finding]:
    """Text alone, and a tokenizer without offsets."""
    if _no_offsets(facts.get("tokenizer")) and not facts.get("tokens"):
        text = "cannot map characters to tokens: the tokenizer gives no offsets"
        yield error("tokenizer", text, actual=str(facts.get("tokenizer"))[:80])


@check(
    code="mask-share",
    title="samples without a supervised token",
    reads=("samples_supervised_tokens",),
    rule="every sample supervises at least one token",
    fix="drop these samples; eagle3lab doctor --corpus FILE --tokenizer DIR says why they are empty",
    symptom="an epoch is shorter than it looks",
)
def share(facts: Facts) -> Iterator[Finding]:
    """Counts over a corpus."""
    counts = [whole(value) for value in facts.get("samples_supervised_tokens") or []]
    if not counts:
        yield warning("samples", "the corpus holds no sample", actual=0)
        return
    if negative := next((count for count in counts if count is not None and count < 0), None):
        yield error("samples", f"a sample has {negative} supervised tokens: a count is not negative", actual=negative)
        return
    empty = [index for index, count in enumerate(counts) if not count]
    usable = len(counts) - len(empty)
    evidence: dict[str, Any] = {
        "usable": f"{usable}/{len(counts)}",
        "dropped_share": len(empty) / len(counts),
        "supervised": sum(count or 0 for count in counts),
    }
    if not empty:
        yield info("samples", f"all {len(counts)} samples have supervised tokens", **evidence)
        return
    text = f"{len(empty)} of {len(counts)} samples have no supervised token"
    found = error if usable == 0 else warning
    yield found("samples", text, actual=len(empty), samples=empty[:100], **evidence)
