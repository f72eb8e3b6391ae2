"""How a draft vocabulary was built: coverage of a corpus, padding, stale caches, logits gathered twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor import vocabulary
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, same_setting, whole
from eagle3lab.doctor.vocabulary import few


@check(
    code="vocab-coverage",
    title="which share of a corpus the draft vocabulary covers",
    reads=("d2t",),
    also=("draft_config", "target", "target_config", "token_counts"),
    rule="the kept ids are the most frequent of the training corpus",
    fix="build the map from the training corpus's counts and train the head anew: eagle3lab train",
    symptom="accept length is capped by the share of tokens that the draft can say at all",
)
def vocab_coverage(facts: Facts) -> Iterator[Finding]:
    """All zeros with a reduced vocabulary is the map of the first ids; with counts, coverage against the best map."""
    seen = vocabulary.read(facts)
    targets = seen.targets
    if targets is None or not len(targets) or not seen.vocab:
        return
    size = len(targets)
    first_ids = size < seen.vocab and seen.d2t is not None and not seen.d2t.any()
    counts = _counts(facts)
    text, numbers, best_possible = "", dict[str, Any](), False
    if counts:
        total = sum(counts.values())
        kept = set(targets.tolist())
        covered = sum(n for token, n in counts.items() if token in kept)
        best = sorted(sorted(counts), key=lambda token: -counts[token])[:size]
        best_covered = sum(counts[token] for token in best)
        best_share, best_possible = best_covered / total, covered == best_covered
        numbers = {
            "coverage": round(covered / total, 6),
            "covered": covered,
            "total": total,
            "covered_ids": few(sorted(kept & counts.keys())),
            f"best_{size}_ids": few(sorted(best)),
            "best_coverage": round(best_share, 6),
        }
        text = f"covers {covered} of {total} tokens ({covered / total:.4g}), the best {size} ids cover {best_share:.4g}"
        if not first_ids and covered / total < best_share - 0.1:
            yield warning("d2t", f"the map {text}", **numbers)
            return
    if first_ids and not best_possible:
        why = f": {text}" if text else ", not the frequent ones"
        yield warning("d2t", f"the map is the first {size} ids{why}", actual="all zero", **numbers)
    elif text:
        yield info("d2t", f"the map {text}", **numbers)


def _counts(facts: Facts) -> dict[int, int]:
    """token_counts with whole-number keys and positive counts."""
    pairs = ((_token(key), whole(count)) for key, count in facts.mapping("token_counts").items())
    return {token: count for token, count in pairs if token is not None and count is not None and count > 0}


def _token(key: Any) -> int | None:
    try:
        return int(key)
    except (TypeError, ValueError):
        return None


@check(
    code="vocab-built",
    title="a map built from too few tokens, or cached for another size",
    reads=("built_map|cached_map",),
    also=("built_map", "cached_map", "asked", "corpus_distinct_tokens", "draft_vocab_size", "vocab_size"),
    rule="a map has draft_vocab_size rows, padded when the corpus has fewer tokens; a cache key holds the size",
    fix="rebuild the map",
    symptom="a shape error in training, or a map of another vocabulary used by name",
)
def vocab_built(facts: Facts) -> Iterator[Finding]:
    """Padding is right; too few rows and a stale cache are not."""
    built = facts.mapping("built_map")
    distinct, wanted = whole(facts.get("corpus_distinct_tokens")), whole(facts.get("draft_vocab_size"))
    vocab = whole(facts.get("vocab_size"))
    if wanted and vocab and wanted > vocab:
        text = f"draft_vocab_size is {wanted}, above vocab_size {vocab}: no padding fills the map"
        yield error("draft_vocab_size", text, actual=wanted, needed=vocab, fix="ask for a smaller draft vocabulary")
        return
    if facts.has("built_map") and wanted:
        rows = whole(built.get("d2t_rows")) or (
            min(distinct, wanted) if distinct is not None and built.get("padded") is False else None
        )
        if rows is not None and rows != wanted:
            yield error(
                "d2t",
                f"the map has {rows} rows, needed {wanted}",
                actual=rows,
                fix="pad the map with ids that never occur",
                rows=rows,
                needed=wanted,
            )
        elif built.get("padded") and distinct is not None and distinct < wanted:
            padded = wanted - distinct
            yield info(
                "d2t",
                f"{distinct} distinct tokens for {wanted} rows: padded with {padded} ids that never occur",
                padded=padded,
                padding_ids=padded,
                zero_count_ids=padded,
            )
    cached = facts.mapping("cached_map")
    asked = mapping(facts.get("asked"))
    cached = {"draft_vocab_size": cached.get("d2t_rows"), **cached}  # a map has as many rows as ids
    for key, value in asked.items():
        if cached.get(key) is not None and not same_setting(cached[key], value):
            yield error(
                "cached map",
                f"the cached map has {key} {cached[key]}, asked for {value}",
                actual=cached[key],
                fix="rebuild; the cache key must hold the size and the hash of the counts",
                cached=cached[key],
                asked=value,
            )


@check(
    code="logits-width",
    title="width of logits is a multiple of the vocabulary",
    reads=("vocab_size", "logits_width"),
    also=("tensor_parallel",),
    rule="logits are vocab_size wide, or padded a little; a multiple was gathered once too often",
    fix="gather the logits of the ranks once",
    symptom="argmax ids beyond the vocabulary",
)
def logits_width(facts: Facts) -> Iterator[Finding]:
    """A whole multiple, padding, or too narrow."""
    vocab, width = whole(facts["vocab_size"]), whole(facts["logits_width"])
    if not vocab or not width or vocab < 1 or width == vocab:
        return
    ranks = whole(facts.get("tensor_parallel"))
    if width % vocab == 0:
        times = width // vocab
        yield error(
            "logits",
            f"width {width} = {times} x {vocab}: each rank holds the full vocabulary and was gathered again",
            actual=width,
            multiple=times,
            tensor_parallel=ranks,
            likely="each rank holds the full vocabulary and was gathered again",
        )
    elif width >= 2 * vocab:
        times = ranks if ranks and width % ranks == 0 and width // ranks >= vocab else width // vocab
        each = f" = {times} x {width // times}" if width % times == 0 else ""
        yield error(
            "logits",
            f"width {width}{each} for a vocabulary of {vocab}: it was gathered more than once, padding counted",
            actual=width,
            multiple=times,
            tensor_parallel=ranks,
            likely="each rank holds the full vocabulary and was gathered again",
        )
    elif width < vocab:
        yield error("logits", f"width {width} is below the vocabulary {vocab}", actual=width, missing=vocab - width)
    else:
        yield info(
            "logits", f"width {width} is the vocabulary {vocab} padded by {width - vocab}", padding=width - vocab
        )
