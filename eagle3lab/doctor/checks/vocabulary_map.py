"""Draft vocabulary: d2t holds offsets, t2d marks the kept ids, and five lengths agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from eagle3lab.doctor import vocabulary
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import draft_of
from eagle3lab.doctor.vocabulary import VocabularyMap, few

ENOUGH = 64
"""Rows from which a d2t that never repeats a value is suspicious: frequent tokens have adjacent ids, equal offsets."""
MOSTLY = 0.9
"""Share of d2t's own values among the ids of t2d from which they are ids, not offsets."""
_READS = ("draft_config|d2t|t2d|tensors",)
_ALSO = ("draft_config", "draft_headers", "d2t", "t2d", "t2d_true_ids", "tensors", "target", "target_config")
_SYMPTOM = "training accuracy looks fine, accept length is near 1: drafted ids mean other tokens"


@check(
    code="vocab-missing",
    title="reduced draft vocabulary without a map",
    reads=("draft_config",),
    also=(*_ALSO, "side_files"),
    rule="draft_vocab_size below vocab_size needs d2t in the weights; engines read a missing one as identity",
    fix="write d2t (int64 offsets) and t2d (bool) into the safetensors file",
    symptom=_SYMPTOM,
)
def vocab_missing(facts: Facts) -> Iterator[Finding]:
    """No map at all, or only in a file that no engine reads."""
    seen = vocabulary.read(facts)
    size = seen.draft_vocab or seen.lm_head_rows
    if not seen.d2t_absent or not size or not seen.vocab or size >= seen.vocab:
        return
    side = list(facts.mapping("side_files"))
    side.sort(key=lambda name: "d2t" not in name.lower())
    numbers: dict[str, Any] = {"draft_vocab": size, "vocab": seen.vocab}
    if side:
        yield error(
            "d2t",
            f"d2t is not in the weights, only in {side[0]}, which no engine reads: {size} of {seen.vocab} ids",
            actual=None,
            found_in=side[0],
            **numbers,
        )
        return
    effect = f"draft ids 0..{size - 1} are read as target ids 0..{size - 1}"
    yield error(
        "d2t",
        f"d2t is missing with a draft vocabulary of {size} of {seen.vocab}: {effect}",
        actual=None,
        effect=effect,
        **numbers,
    )


@check(
    code="vocab-lengths",
    title="five lengths of the vocabulary map",
    reads=_READS,
    also=_ALSO,
    rule="draft_vocab_size = rows of d2t = true entries of t2d = rows of lm_head, and t2d is as long as vocab_size",
    fix="rebuild the map from the token counts and export the draft again",
    symptom="a shape error when the model is loaded, or wrong ids",
)
def vocab_lengths(facts: Facts) -> Iterator[Finding]:
    """The majority tells which one is odd; all five are printed."""
    seen = vocabulary.read(facts)
    numbers = seen.numbers()
    told = ", ".join(f"{name} {value if value is not None else 'unknown'}" for name, value in numbers.items())
    for name, shape in seen.odd_shapes.items():
        yield error(
            name, f"{name} has the shape {shape}, one dimension is needed", actual=shape, fix=f"{name}.flatten()"
        )
    long_enough = seen.t2d_length is None or seen.vocab is None or seen.t2d_length == seen.vocab
    if not long_enough:
        yield error(
            "t2d",
            f"t2d has length {seen.t2d_length}, needed {seen.vocab}, the vocabulary: {told}",
            actual=seen.t2d_length,
            length=seen.t2d_length,
            needed=seen.vocab,
            odd_one="t2d_length",
            numbers=numbers,
        )
    if seen.draft_vocab and seen.vocab and seen.draft_vocab > seen.vocab:
        yield error(
            "draft_vocab_size",
            f"draft_vocab_size is {seen.draft_vocab}, above vocab_size {seen.vocab}: {told}",
            actual=seen.draft_vocab,
            needed=seen.vocab,
            numbers=numbers,
        )
    yield from _borrowed_head(facts, seen)
    left_out = ("t2d_length",) if long_enough else ("t2d_length", "t2d_true")
    judged = {name: value for name, value in numbers.items() if name not in left_out and value is not None}
    if len(judged) < 2 or len(set(judged.values())) == 1:
        if long_enough and len(judged) > 1:
            yield info("vocabulary", f"lengths agree: {told}", numbers=numbers)
        return
    votes = Counter(judged.values())
    first, count = votes.most_common(1)[0]
    needed = first if count > 1 else (seen.draft_vocab or first)
    subject = {"d2t_rows": "d2t", "t2d_true": "t2d", "lm_head_rows": "lm_head.weight"}
    for name, value in judged.items():
        if value == needed:
            continue
        what = {"d2t_rows": "rows", "t2d_true": "true entries", "lm_head_rows": "rows"}.get(name, "as value")
        yield error(
            subject.get(name, name),
            f"{subject.get(name, name)} has {value} {what}, needed {needed}: {told}",
            actual=value,
            rows=value,
            needed=needed,
            odd_one=name,
            numbers=numbers,
        )


def _borrowed_head(facts: Facts, seen: VocabularyMap) -> Iterator[Finding]:
    """Without a draft_vocab_size engines build a head of the whole vocabulary (SGLang only where it is null)."""
    draft = draft_of(facts)
    null = "draft_vocab_size" in draft.config and draft.config["draft_vocab_size"] is None
    absent = "draft_vocab_size" not in draft.config and "sglang" not in facts.engine_names()
    if (null or absent) and draft.vocab and seen.lm_head_rows and seen.lm_head_rows < draft.vocab:
        yield error(
            "draft_vocab_size",
            f"draft_vocab_size is {'null' if null else 'missing'}: a head of all {draft.vocab} rows is built, and "
            f"lm_head.weight has {seen.lm_head_rows}",
            actual=None,
            fix=f'"draft_vocab_size": {seen.lm_head_rows} in config.json',
            rows=seen.lm_head_rows,
            needed=draft.vocab,
        )


@check(
    code="vocab-dtypes",
    title="dtypes of d2t and t2d",
    reads=("draft_headers|tensors",),
    rule="d2t is I64, t2d is BOOL",
    fix="store d2t as int64 and t2d as bool",
)
def vocab_dtypes(facts: Facts) -> Iterator[Finding]:
    """Whole numbers of another width work in most readers; fractions work in none."""
    dtypes = vocabulary.read(facts).dtypes
    usual = {"d2t": "I64", "t2d": "BOOL"}
    odd = {name: dtypes[name] for name in usual if name in dtypes and dtypes[name] != usual[name]}
    if not odd:
        return
    fractions = [name for name, dtype in odd.items() if "F" in dtype]
    tell = error if fractions else warning
    told = ", ".join(f"{name} is {dtype}" for name, dtype in odd.items())
    yield tell("dtypes", f"{told}; usual are I64 and BOOL", actual=odd, **odd, usual=["I64", "BOOL"])


@check(
    code="vocab-offsets",
    title="d2t holds something other than offsets",
    reads=("d2t",),
    also=_ALSO,
    rule="target id = draft id + d2t[draft id], inside the vocabulary, each once, and true in t2d",
    fix="d2t[i] = kept[i] - i with kept the ascending true ids of t2d",
    symptom=_SYMPTOM,
)
def vocab_offsets(facts: Facts) -> Iterator[Finding]:
    """Absolute ids, ids out of range, ids that t2d does not mark, repeats."""
    seen = vocabulary.read(facts)
    if facts["d2t"] is None:
        return
    targets = seen.targets
    if targets is None or seen.d2t is None:
        yield error("d2t", "d2t holds values that are not whole numbers", fix="store d2t as int64 offsets")
        return
    if not len(targets):
        yield error("d2t", "d2t is empty")
        return
    outside = targets < 0
    if seen.vocab:
        outside = outside | (targets >= seen.vocab)
    agree = np.isin(targets, seen.kept) if seen.kept is not None else None
    numbers: dict[str, Any] = {"targets": few(targets)}
    if agree is not None:
        numbers["agree_with_t2d"] = f"{int(agree.sum())}/{len(targets)}"
        numbers["agreeing_ids"] = few(targets[agree])
    absolute = _absolute(seen, targets, outside)
    if absolute:
        yield _absolute_ids(seen, targets, outside, absolute, numbers)
    elif outside.any():
        place = int(np.argmax(outside))
        legal = f"0..{seen.vocab - 1}" if seen.vocab else "0 or more"
        yield error(
            f"d2t[{place}]",
            f"d2t[{place}] = {seen.d2t[place]} gives target {targets[place]}, legal {legal}; "
            f"{int(outside.sum())} of {len(targets)} are out of range",
            actual=int(seen.d2t[place]),
            target=int(targets[place]),
            legal=[0, seen.vocab - 1] if seen.vocab else None,
            out_of_range=few(targets[outside]),
            **numbers,
        )
    elif agree is not None and not agree.all() and seen.t2d_true != len(targets):
        text = f"{int((~agree).sum())} of {len(targets)} targets are not marked by t2d, which marks {seen.t2d_true}"
        yield info("d2t", f"{text}: its count is told by vocab-lengths", **numbers)
    elif agree is not None and not agree.all():
        place = int(np.argmin(agree))
        unmapped = np.setdiff1d(seen.kept, targets) if seen.kept is not None else np.array([])
        yield error(
            f"d2t[{place}]",
            f"d2t[{place}] gives target {targets[place]}, which t2d does not mark; {numbers['agree_with_t2d']} agree, "
            f"unmapped: {few(unmapped)}",
            actual=int(seen.d2t[place]),
            target=int(targets[place]),
            not_in_t2d=few(targets[~agree]),
            unmapped=few(unmapped),
            **numbers,
        )
    elif len(np.unique(targets)) < len(targets):
        values, counts = np.unique(targets, return_counts=True)
        yield error(
            "d2t", f"{int((counts > 1).sum())} target ids are reached twice: {few(values[counts > 1])}", **numbers
        )
    elif seen.kept is not None and (np.diff(targets) < 0).any():  # ModelOpt orders by count and writes no t2d
        place = int(np.argmax(np.diff(targets) < 0)) + 1
        yield error(
            f"d2t[{place}]",
            f"target ids are not ascending at d2t[{place}]: training takes the rows of t2d in ascending order",
            **numbers,
        )
    elif (
        seen.kept is None
        and seen.t2d_length is None
        and len(targets) >= ENOUGH
        and (np.diff(seen.d2t) > 0).all()
        and (seen.d2t != np.arange(len(seen.d2t))).any()  # as ids 0, 1, 2, ... would be no selection
    ):
        yield warning(
            "d2t",
            f"d2t ascends at every step over {len(targets)} rows: absolute ids do, offsets hardly ever; t2d is not "
            "there to tell",
            **numbers,
        )
    else:
        yield info("d2t", f"d2t maps {len(targets)} draft ids to {few(targets)[:4]}...", **numbers)


def _absolute(seen: VocabularyMap, targets: np.ndarray, outside: np.ndarray) -> str:
    """Why d2t must hold absolute ids, "" when it need not."""
    if seen.d2t is None or not len(seen.d2t):
        return ""
    if seen.kept is not None:
        if np.array_equal(seen.d2t, seen.kept) and not np.array_equal(targets, seen.kept):
            return "equals the true ids of t2d exactly"
        raw, read = (float(np.isin(ids, seen.kept).mean()) for ids in (seen.d2t, targets))
        once = len(np.unique(seen.d2t)) == len(seen.d2t)
        return f"{raw:.0%} of its values are true ids of t2d" if once and raw > read and raw >= MOSTLY else ""
    ascending = len(seen.d2t) > 1 and bool((np.diff(seen.d2t) > 0).all()) and seen.d2t[0] >= 0
    in_range = seen.vocab is not None and bool((seen.d2t < seen.vocab).all())
    return "ascending ids, out of range when read as offsets" if ascending and in_range and outside.any() else ""


def _absolute_ids(
    seen: VocabularyMap, targets: np.ndarray, outside: np.ndarray, why: str, numbers: dict[str, Any]
) -> Finding:
    offsets = seen.d2t - np.arange(len(targets)) if seen.d2t is not None else targets
    out = few(targets[outside])
    agreed = f", {numbers['agree_with_t2d']} agree with t2d" if "agree_with_t2d" in numbers else ""
    return error(
        "d2t",
        f"d2t holds absolute ids, not offsets ({why}): targets {few(targets)[:8]}{agreed}"
        + (f", out of range {out}" if out else "")
        + f"; offsets are {few(offsets)[:8]}",
        actual=few(seen.d2t if seen.d2t is not None else []),
        fix=f"d2t[i] -= i, so that it begins {few(offsets)[:8]}",
        out_of_range=out,
        equals=why,
        offsets=few(offsets),
        **numbers,
    )
