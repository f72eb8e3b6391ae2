"""What is known of a draft's vocabulary map, from any of the forms in which it is given. No findings in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.inventory import take
from eagle3lab.doctor.views import draft_of, mapping, target_of, whole


@dataclass(frozen=True)
class VocabularyMap:
    """Sizes and contents; None where unknown.

    Fields:
        vocab: target vocabulary V. draft_vocab: draft_vocab_size as written.
        d2t_rows, t2d_length, t2d_true, lm_head_rows: the other four numbers that must agree.
        d2t: offsets int64 [Vd]. kept: ascending true places of t2d, unknown when it is not V long.
        dtypes: name -> stored dtype.
        odd_shapes: d2t and t2d of more or fewer dimensions than one.
        d2t_absent: known not to be in the weights (not merely not given).
    """

    vocab: int | None
    draft_vocab: int | None
    d2t_rows: int | None
    t2d_length: int | None
    t2d_true: int | None
    lm_head_rows: int | None
    d2t: np.ndarray | None
    kept: np.ndarray | None
    dtypes: dict[str, str]
    odd_shapes: dict[str, list[int]]
    d2t_absent: bool

    def numbers(self) -> dict[str, int | None]:
        """The five lengths under their names."""
        return {
            "draft_vocab_size": self.draft_vocab,
            "d2t_rows": self.d2t_rows,
            "t2d_true": self.t2d_true,
            "lm_head_rows": self.lm_head_rows,
            "t2d_length": self.t2d_length,
        }

    @property
    def targets(self) -> np.ndarray | None:
        """Target id of every draft id: i + d2t[i]."""
        return None if self.d2t is None else self.d2t + np.arange(len(self.d2t))


SHOWN = 16
"""Ids of a long list that a finding prints."""


def few(values: Any) -> list[int]:
    """The first ids of a list, as plain numbers for evidence."""
    return [int(v) for v in list(values)[:SHOWN]]


def integers(values: Any) -> np.ndarray | None:
    """A list of whole numbers (or truth values) as int64; None when something else is in it."""
    if not isinstance(values, list):
        return None
    if not all(isinstance(v, (int, bool)) or (isinstance(v, float) and whole(v) is not None) for v in values):
        return None
    try:
        return np.array([int(v) for v in values], dtype=np.int64)
    except OverflowError:
        return None


def read(facts: Facts) -> VocabularyMap:
    """Collect the map from `d2t`, `t2d`, `t2d_true_ids`, `tensors`, `draft_headers` and the configs."""
    draft, target = draft_of(facts), target_of(facts)
    headers = facts.mapping("draft_headers")
    tensors = {k: mapping(v) for k, v in facts.mapping("tensors").items()}
    lengths: dict[str, int | None] = {}
    dtypes: dict[str, str] = {}
    odd_shapes: dict[str, list[int]] = {}
    for wanted in ("d2t", "t2d", "lm_head.weight"):
        spelt = _spelling(headers, wanted)
        shape = names.shape_of(headers, spelt) if spelt else None
        dtype = names.dtype_of(headers, spelt) if spelt else None
        given = tensors.get(wanted, {})
        if isinstance(given.get("shape"), list) and given["shape"]:
            shape, dtype = [whole(n) or 0 for n in given["shape"]], given.get("dtype")
        lengths[wanted] = shape[0] if shape else None
        if shape is not None and len(shape) != 1 and wanted != "lm_head.weight":
            odd_shapes[wanted] = shape
        if isinstance(dtype, str):
            dtypes[wanted] = dtype
    d2t, t2d = integers(facts.get("d2t")), integers(facts.get("t2d"))
    kept = np.flatnonzero(t2d) if t2d is not None else integers(facts.get("t2d_true_ids"))
    true_count = whole(tensors.get("t2d", {}).get("true_count"))
    vocab = draft.vocab or (target.vocab if target else None)
    t2d_fits = t2d is None or vocab is None or len(t2d) == vocab
    return VocabularyMap(
        vocab=vocab,
        draft_vocab=draft.draft_vocab,
        d2t_rows=len(d2t) if d2t is not None else lengths["d2t"],
        t2d_length=len(t2d) if t2d is not None else lengths["t2d"],
        t2d_true=len(kept) if kept is not None else true_count,
        lm_head_rows=lengths["lm_head.weight"],
        d2t=d2t,
        kept=np.sort(kept) if kept is not None and t2d_fits else None,
        dtypes=dtypes,
        odd_shapes=odd_shapes,
        d2t_absent=_absent(facts, lengths["d2t"]),
    )


def _spelling(headers: dict[str, Any], wanted: str) -> str | None:
    return next((name for name in headers if name == wanted or name.endswith("." + wanted)), None)


def _absent(facts: Facts, rows: int | None) -> bool:
    """d2t is known to be missing: said so, or the file holds an lm_head and no d2t."""
    if facts.has("d2t"):
        return facts["d2t"] is None
    if rows is not None or not facts.mapping("draft_headers"):
        return False
    inventory = take(facts)
    head = any(name.endswith("lm_head.weight") for name in facts.mapping("draft_headers"))
    return head or bool(inventory and inventory.whole)
