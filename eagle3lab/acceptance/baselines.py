"""What acceptance would be without a drafter's knowledge: an n-gram look-up, and how much text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3lab.acceptance.counts import AcceptanceCounts, accepted_prefix, from_lengths, total

LOOKUP_LENGTHS = (3, 2, 1)
"""Lengths of the context that the look-up tries to find earlier in the text, longest first."""
REPEAT = 4


def lookup(context: Sequence[int], k: int) -> list[int]:
    """Up to k tokens that followed the latest earlier occurrence of the context's last 3 (2, 1) tokens."""
    for size in LOOKUP_LENGTHS:
        tail = tuple(context[-size:])
        for start in range(len(context) - size - 1, -1, -1):
            if tuple(context[start : start + size]) == tail:
                return list(context[start + size : start + size + k])
    return []


def lookup_counts(
    prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], names: Sequence[str], k: int
) -> AcceptanceCounts:
    """Acceptance of the look-up drafter along the decode path of known greedy replies.

    Args:
        prompts, replies: token ids; the first reply token comes from prefill.
    """
    single = []
    for prompt, reply, name in zip(prompts, replies, names, strict=True):
        accepted, place = [], 1
        while place < len(reply):
            drafted = lookup([*prompt, *reply[:place]], k)
            rest = reply[place : place + k]
            kept = accepted_prefix([a == b for a, b in zip(drafted, rest, strict=False)])
            accepted.append(kept)
            place += kept + 1
        single.append(from_lengths(accepted, k=k, prompt=name, generated=len(reply)))
    return total(single)


def repeats(prompt: Sequence[int], reply: Sequence[int]) -> list[bool]:
    """Per reply token: does the 4-gram that ends in it occur earlier in prompt and reply?"""
    text, seen, flags = [*prompt, *reply], set(), []
    for end in range(1, len(text) + 1):
        gram = tuple(text[end - REPEAT : end]) if end >= REPEAT else None
        if end > len(prompt):
            flags.append(gram is not None and gram in seen)
        if gram is not None:
            seen.add(gram)
    return flags


def without_repeats(
    prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]
) -> tuple[float | None, float | None]:
    """Share of verify steps that start inside a repeated 4-gram, and the accept length of the other steps.

    A verify step starts inside a repetition when its first drafted token completes a 4-gram that occurred before.

    Args:
        accepted: per prompt, accepted drafts of every verify step along the decode path.
    """
    steps = inside = kept = other = 0
    for prompt, reply, lengths in zip(prompts, replies, accepted, strict=True):
        flags, place = repeats(prompt, reply), 1
        for number in lengths:
            steps += 1
            if flags[place]:
                inside += 1
            else:
                other += 1
                kept += number
            place += number + 1
    return (inside / steps if steps else None), (1 + kept / other if other else None)
