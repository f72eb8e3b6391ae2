"""The draft vocabulary: the target tokens that a drafter can propose, and what it covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from eagle3lab.core.errors import CorpusError


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Kept target ids, ascending, and how they were chosen.

    Attributes:
        kept: int64 [Vd].
        covered, total: supervised tokens inside the vocabulary, and all of them.
        padded: kept ids that never occur among the supervised tokens (lowest unused ids).
    """

    kept: np.ndarray
    covered: int
    total: int
    padded: int

    @property
    def coverage(self) -> float:
        """Share of supervised tokens that the drafter can propose."""
        return self.covered / self.total

    @property
    def d2t(self) -> np.ndarray:
        """int64 [Vd] offsets: target id = draft id + d2t[draft id]."""
        return self.kept - np.arange(len(self.kept))


def choose_vocabulary(replies: Iterable[Iterable[int]], vocab_size: int, draft_vocab_size: int) -> DraftVocabulary:
    """Keep the `draft_vocab_size` most frequent tokens of the replies; ties go to the lower id.

    A corpus with fewer distinct tokens is padded with the lowest unused ids, and says how many.
    """
    if not 0 < draft_vocab_size <= vocab_size:
        raise CorpusError(
            f"draft vocabulary {draft_vocab_size} of a target with {vocab_size} tokens", rule="0 < Vd <= V"
        )
    counts = np.zeros(vocab_size, dtype=np.int64)
    for reply in replies:
        ids = np.fromiter(reply, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise CorpusError(
                f"token id {int(ids.max())} in a corpus for a target with {vocab_size} tokens", rule="0 <= id < V"
            )
        np.add.at(counts, ids, 1)
    total = int(counts.sum())
    if total == 0:
        raise CorpusError("0 supervised tokens in the corpus", rule="the draft vocabulary is counted on reply tokens")
    order = np.lexsort((np.arange(vocab_size), -counts))[:draft_vocab_size]
    kept = np.sort(order)
    return DraftVocabulary(kept, int(counts[kept].sum()), total, int((counts[kept] == 0).sum()))
