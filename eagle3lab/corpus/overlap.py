"""Does held-out text occur in training text? By runs of 13 tokens and by shares of 5-grams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RUN = 13
"""A shared run of this many tokens is a copy."""
GRAM = 5
SHARE = 0.5
"""At most this share of a held-out prompt's 5-grams may occur anywhere in the training text."""


def grams(tokens: Sequence[int], size: int) -> set[tuple[int, ...]]:
    """All runs of `size` consecutive tokens."""
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


@dataclass(frozen=True, slots=True)
class Overlap:
    """What one held-out prompt shares with the training text.

    Attributes:
        run: it shares a run of `RUN` tokens.
        share: share of its 5-grams that occur there, 0 for a prompt shorter than five tokens.
    """

    run: bool
    share: float

    @property
    def clean(self) -> bool:
        """Neither rule is broken."""
        return not self.run and self.share < SHARE


class TrainingText:
    """Index over training text. Texts are token lists without chat template."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._runs: set[tuple[int, ...]] = set()
        self._grams: set[tuple[int, ...]] = set()
        for text in texts:
            self._runs |= grams(text, RUN)
            self._grams |= grams(text, GRAM)

    def overlap(self, prompt: Sequence[int]) -> Overlap:
        """What `prompt` (token list without template) shares with the training text."""
        own = grams(prompt, GRAM)
        shared = sum(gram in self._grams for gram in own)
        return Overlap(not self._runs.isdisjoint(grams(prompt, RUN)), shared / len(own) if own else 0.0)
