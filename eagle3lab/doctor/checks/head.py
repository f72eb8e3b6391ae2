"""Rows of the draft's lm_head against the target's: whether draft id i really speaks of the token that d2t says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle3lab.core.safetensors_header import Header, HeaderError, map_tensor, widen
from eagle3lab.doctor import vocabulary
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info
from eagle3lab.doctor.registry import check

ROWS = 256
ALIKE, APART = 0.9, 0.2
"""Mean cosine of rows that are the same token, and of rows that are not."""


def _rows(place: tuple[Header, str], rows: np.ndarray) -> np.ndarray:
    header, name = place
    return widen(header.tensors[name], map_tensor(header, name)[rows]).astype(np.float64)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=norms > 0)
    return float(cosines.mean())


@check(
    code="head-rows",
    title="rows of lm_head against the target's head",
    reads=("draft_headers", "target_config"),
    also=("d2t", "draft_config"),
    rule="row i of the draft's lm_head starts as, or is, row i + d2t[i] of the target's head",
    fix="export lm_head and d2t of the same training run",
    symptom="drafted ids mean other tokens: zero acceptance, nothing logged",
)
def head_rows(facts: Facts) -> Iterator[Finding]:
    """Only files hold rows. A head that moved far in training says nothing; one of other tokens does."""
    draft, target = facts.tensors.get("draft_lm_head"), facts.tensors.get("target_lm_head")
    if draft is None or target is None:
        return
    shapes = [header.tensors[name].shape for header, name in (draft, target)]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1] or not shapes[0][0]:
        return
    count, vocab = shapes[0][0], shapes[1][0]
    mapped = vocabulary.read(facts).targets
    if mapped is None or len(mapped) != count:
        mapped = np.arange(count)
    rows = np.unique(np.linspace(0, count - 1, ROWS).astype(np.int64))
    places = {"d2t as offsets": mapped[rows], "no map": rows, "d2t as absolute ids": mapped[rows] - rows}
    try:
        have = _rows(draft, rows)
        cosines = {
            name: _cosine(have, _rows(target, ids))
            for name, ids in places.items()
            if ids.min() >= 0 and ids.max() < vocab
        }
    except HeaderError as problem:
        yield could_not("lm_head", problem.what)
        return
    served = cosines.get("d2t as offsets", 0.0)
    best = max(cosines, key=lambda name: cosines[name], default="")
    told = {name: round(value, 4) for name, value in cosines.items()}
    if best and best != "d2t as offsets" and cosines[best] > ALIKE and served < APART:
        yield error(
            "lm_head.weight",
            f"rows of lm_head are those of other tokens: mean cosine with the target's head {served:.3f} through d2t, "
            f"{cosines[best]:.3f} with {best}",
            cosines=told,
            sampled=len(rows),
        )
    else:
        yield info(
            "lm_head.weight",
            f"mean cosine of lm_head with the target's head through d2t: {served:.3f} over {len(rows)} rows",
            cosines=told,
            sampled=len(rows),
        )
