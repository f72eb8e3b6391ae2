"""A training corpus: rows without a reply, templates that do not fit, and what a tokenizer cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import items, mapping, whole

_KINDS = {
    "no_reply": ("no assistant turn", "write their replies with the target: eagle3lab regenerate"),
    "empty_reply": ("an empty reply", "drop them, or regenerate their replies"),
    "thinking_not_closed": ("a thinking block that never closes", "regenerate them with more tokens"),
    "thinking_only": ("a reply that thinks and answers nothing", "regenerate them with more tokens"),
    "unknown_form": ("neither messages, prompt and reply, text nor input_ids", "convert them to messages"),
    "delimiters_in_reply": (
        "a chat template's own delimiters inside a reply",
        "cut the replies there: decode them with skip_special_tokens",
    ),
    "no_ids": ("something else than token ids, marks of 0 and 1, or labels in its lists", "tokenize these rows again"),
    "mask_and_labels": ("a loss_mask and labels that supervise different tokens", "leave one of the two out"),
    "mask_length": ("a loss_mask or labels of another length than input_ids", "write one mark or label a token"),
}

_SUPERVISED = frozenset({"thinking_only", "delimiters_in_reply", "mask_and_labels"})
"""Rows that a trainer does learn from, though not what they are for."""
_REFUSED = frozenset({"no_ids"})
"""Rows at which a trainer stops, or reads beyond its embedding."""


@check(
    code="corpus-rows",
    title="rows of a training corpus",
    reads=("corpus",),
    rule="every row is a JSON object with a reply in it",
    fix="correct or drop the named rows",
    symptom="an epoch is shorter than it looks",
)
def rows(facts: Facts) -> Iterator[Finding]:
    """Each kind of bad row once, with its share; all rows bad is an error."""
    corpus = mapping(facts.get("corpus"))
    if "samples" not in corpus:
        return
    count = whole(corpus.get("samples")) or 0
    broken = items(corpus.get("broken_lines"))
    if broken:
        text = f"{len(broken)} lines are not JSON objects, first line {broken[0]}"
        yield error("corpus", text, actual=broken[0], lines=broken)
    if not count:
        yield error("corpus", "the corpus holds no row", actual=0)
        return
    for key, (what, fix) in _KINDS.items():
        bad = whole(corpus.get(f"{key}_count")) or 0
        if bad:
            told = error if key in _REFUSED or (bad == count and key not in _SUPERVISED) else warning
            first = items(corpus.get(key)) or ["unknown"]
            yield told(
                "corpus", f"{bad} of {count} rows have {what}, first row {first[0]}", actual=bad, fix=fix, rows=first
            )
    yield info("corpus", f"{count} rows read", samples=count)


@check(
    code="corpus-template",
    title="chat template against the corpus",
    reads=("corpus",),
    rule="the text of a corpus has the delimiters of the tokenizer's own template, and its template renders every row",
    fix="render messages with the target's template instead of keeping text",
    symptom="an all-zero mask, or a drafter for another format",
)
def template(facts: Facts) -> Iterator[Finding]:
    """Delimiters found in text against those of the template, rows that fail to render, and slow tokenizers."""
    corpus = mapping(facts.get("corpus"))
    tokenizer = mapping(corpus.get("tokenizer"))
    if not tokenizer:
        return
    seen = {str(name): whole(count) or 0 for name, count in mapping(corpus.get("templates")).items()}
    own = tokenizer.get("template") if isinstance(tokenizer.get("template"), str) else None
    if corpus.get("has_template") is False:
        yield warning("tokenizer", "the tokenizer has no chat template", fix="give the folder of the chat model")
    if seen and own and own not in seen:
        other = max(seen, key=lambda name: seen[name])
        text = f"the text has {other} delimiters in {seen[other]} rows and none of {own}, the tokenizer's template"
        yield error("template", text, actual=other, suggest=other, header_found=0, hits=seen)
    beyond = mapping(corpus.get("beyond_vocabulary"))
    if beyond:
        text = f"row {beyond.get('row')} holds token {beyond.get('id')}, the tokenizer has {beyond.get('size')}"
        yield error("tokenizer", text, actual=beyond.get("id"), fix="give the tokenizer that made these ids", **beyond)
    failed = items(corpus.get("render_failed"))
    if failed:
        text = f"the template cannot render {len(failed)} rows, first row {failed[0]}"
        yield error("template", text, actual=failed[0], rows=failed)
    if tokenizer.get("fast") is False:
        text = "the tokenizer gives no character positions: a mask found in text cannot be mapped to its tokens"
        yield info("tokenizer", text, fast=False)
