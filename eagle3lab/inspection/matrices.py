"""Every other tensor of the drafter in short form, and its vocabulary matrices beside the target's rows.

A drafter can have a fine fc and a head that was never loaded; this table shows it in one line. `embed_tokens` is
usually a frozen copy of the target's, `lm_head` row i belongs to the target's row i + d2t[i].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3lab.inspection.distribution import distribution
from eagle3lab.inspection.families import Family, families
from eagle3lab.inspection.formats import WEIGHT_FORMATS, to_float32
from eagle3lab.inspection.layout import FcLayout, Part, role_of
from eagle3lab.inspection.moments import PowerSums
from eagle3lab.inspection.scan import Scan, scan_fc
from eagle3lab.inspection.tensorfile import Checkpoint, Tensor
from eagle3lab.inspection.verdict import judge_block

ROWS_AT_ONCE = 1024
SHIFT = 1
"""Rows that a control comparison is off by: right rows must be nearer than these."""


@dataclass(frozen=True)
class MatrixLook:
    """One tensor. state: `at init`, `moved from init`, `unknown`, `dead`, or `` for what is not a matrix.
    family: the start that state speaks of. zero_rows: rows that are zero throughout, None where not counted."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    mean_se: float
    std: float
    std_se: float
    kurtosis: float
    not_finite: int
    state: str
    family: str | None = None
    zero_rows: int | None = None


def look_at_others(checkpoint: Checkpoint, fc_name: str) -> list[MatrixLook]:
    """Short form of every weight tensor but fc, in file order."""
    found = []
    for tensor in checkpoint:
        if tensor.name == fc_name or tensor.dtype not in WEIGHT_FORMATS or tensor.size == 0:
            continue
        role = role_of(tensor.name, tensor.shape)
        if role != "scale":
            found.append(_matrix(tensor, role) if len(tensor.shape) == 2 else _vector(tensor, role))
    return found


def as_layout(tensor: Tensor) -> FcLayout:
    """A matrix as a layout of one block."""
    rows, columns = tensor.shape
    return FcLayout(tensor.name, tensor.dtype, (rows, columns), [Part(tensor)], points=["all"], widths=[columns])


def _matrix(tensor: Tensor, role: str) -> MatrixLook:
    scan = scan_fc(as_layout(tensor))
    m = scan.pooled_moments()
    zero_rows = int((scan.rows.peak.sum(axis=1) == 0).sum())
    state, family = ("dead", None) if m.constant or m.nan or m.inf else _state(scan, role)
    return MatrixLook(tensor.name, role, tensor.shape, tensor.dtype, m.mean, m.mean_se, m.std, m.std_se, m.kurtosis,
                      m.nan + m.inf, state, family, zero_rows)  # fmt: skip


def _state(scan: Scan, role: str) -> tuple[str, str | None]:
    known = families(scan.shape)
    if role == "embedding":
        known.append(Family("normal-1", "normal", 1.0, used_by="torch.nn.Embedding default"))
    finding = judge_block(distribution(scan, dead=False), known, scan.fmt, scan.scale)
    names = {"init": "at init", "moved": "moved from init", "unknown": "unknown"}
    return names[finding.kind], finding.best.name if finding.best else None


def _vector(tensor: Tensor, role: str) -> MatrixLook:
    sums = PowerSums()
    sums.add(to_float32(np.array(tensor.raw()), tensor.dtype))
    m = sums.moments()
    state = "dead" if m.nan or m.inf or (m.constant and m.low == 0) else ""
    if m.constant and m.low == 1 and role in ("norm", "fc_norm"):
        state = "at init"
    return MatrixLook(tensor.name, role, tensor.shape, tensor.dtype, m.mean, m.mean_se, m.std, m.std_se, m.kurtosis,
                      m.nan + m.inf, state)  # fmt: skip


@dataclass(frozen=True)
class RowMatch:
    """Rows of a vocabulary matrix beside the target's.

    equal: share of rows equal to the bit. cosine, shifted: mean cosine with the right rows, and with their
    neighbours. rows: compared. problem: why it could not be compared, else empty.
    """

    role: str
    rows: int
    equal: float
    cosine: float
    shifted: float
    problem: str = ""

    def line(self) -> str:
        """One evidence line."""
        if self.problem:
            return f"{self.role} not compared with the target: {self.problem}"
        return (
            f"{self.role} against the target's rows: {self.equal:.2%} equal, mean cosine {self.cosine:.4f} "
            f"(neighbouring rows {self.shifted:.4f})"
        )


def match_target(drafter: Checkpoint, target: Checkpoint) -> list[RowMatch]:
    """Compare embed_tokens and lm_head, where the drafter has them, with the target's rows."""
    found = []
    offsets = _offsets(drafter)
    for role in ("embedding", "head"):
        mine = _by_role(drafter, role)
        if mine is None:
            continue
        theirs = _by_role(target, role) or (_by_role(target, "embedding") if role == "head" else None)
        ids = np.arange(mine.shape[0]) + (offsets if role == "head" and offsets is not None else 0)
        found.append(_match(role, mine, theirs, ids))
    return found


def _by_role(checkpoint: Checkpoint, role: str) -> Tensor | None:
    return next((t for t in checkpoint if len(t.shape) == 2 and role_of(t.name, t.shape) == role), None)


def _offsets(drafter: Checkpoint) -> np.ndarray | None:
    name = next((t for t in drafter if t.name.rsplit(".", 1)[-1] in ("d2t", "draft_id_to_target_id")), None)
    return None if name is None else np.asarray(name.raw(), dtype=np.int64).reshape(-1)


def _match(role: str, mine: Tensor, theirs: Tensor | None, ids: Any) -> RowMatch:
    unknown = float("nan")
    if theirs is None:
        return RowMatch(role, 0, unknown, unknown, unknown, "the target has none")
    if mine.shape[1] != theirs.shape[1]:
        problem = f"widths {mine.shape[1]} and {theirs.shape[1]}"
        return RowMatch(role, 0, unknown, unknown, unknown, problem)
    if np.shape(ids) != (mine.shape[0],) or ids.min() < 0 or ids.max() >= theirs.shape[0]:
        problem = (
            f"{mine.shape[0]} rows lead to ids outside the target's {theirs.shape[0]} (d2t holds offsets, not ids)"
        )
        return RowMatch(role, 0, unknown, unknown, unknown, problem)
    a, b = mine.raw(), theirs.raw()
    equal, cosine, shifted = 0, 0.0, 0.0
    for start in range(0, len(ids), ROWS_AT_ONCE):
        part = ids[start : start + ROWS_AT_ONCE]
        x = to_float32(np.array(a[start : start + ROWS_AT_ONCE]), mine.dtype)
        y = to_float32(np.array(b[part]), theirs.dtype)
        z = to_float32(np.array(b[(part + SHIFT) % len(b)]), theirs.dtype)
        equal += int((x == y).all(axis=1).sum())
        cosine += float(_cosines(x, y).sum())
        shifted += float(_cosines(x, z).sum())
    n = len(ids)
    return RowMatch(role, n, equal / n, cosine / n, shifted / n)


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cosine of each row pair; 0 for a zero row."""
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return np.divide(np.einsum("ij,ij->i", x, y), norms, out=np.zeros(len(x), dtype=np.float32), where=norms > 0)
