"""Views in other spellings: numpy's and torch's functions and methods, and nothing that is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3lab.doctor.memoryorder import array_of, view_of

from .conftest import visit_facts

A = "arange(12) as float32, shape [3, 4]"
FULL = np.arange(12, dtype=np.float32).reshape(3, 4)


def said(save: str, a: str = A) -> Any:
    return next(f for f in visit_facts({"a": a, "save": save}).findings if f.code == "file-memory-order")


@pytest.mark.parametrize(
    ("save", "want"),
    [
        ("a[..., ::2]", FULL[:, ::2]),
        ("np.flip(a, axis=1)", FULL[:, ::-1]),
        ("np.transpose(a, axes=(1, 0))", FULL.T),
        ("np.moveaxis(a, source=0, destination=1)", FULL.T),
        ("a[:, np.newaxis].T", FULL[:, None].T),
        ("np.broadcast_to(a[0], (3, 4))", np.broadcast_to(FULL[0], (3, 4))),
        ("a[0].expand(3, 4)", np.broadcast_to(FULL[0], (3, 4))),
        ("a.astype(float64).T", FULL.T),
        ("np.einsum('ij->ji', a)", FULL.T),
        ("np.hsplit(a, 2)[0]", FULL[:, :2]),
        ("torch.transpose(a, 0, 1)", FULL.T),
        ("torch.from_numpy(a).permute(1, 0)", FULL.T),
        ("a.permute(dims=(1, 0))", FULL.T),
        ("np.copy(a.T)", FULL.T),  # keeps the order of its source
        ("a.diagonal()", FULL.diagonal()),
        ("a.select(1, 2)", FULL[:, 2]),
    ],
)
def test_views(save: str, want: np.ndarray) -> None:
    finding = said(save)
    assert finding.severity == "error" and "not row-major" in finding.message
    assert finding.evidence["want"] == want.tolist()


@pytest.mark.parametrize(
    "save",
    [
        *("a.flatten()", "a.T.copy()", "a[1:]", "a[[0, 2]]", "a.reshape(4, 3)", "a.view(4, 3)", "np.vsplit(a, 3)[1]"),
        *("a.permute(1, 0).contiguous()", "a.astype(np.float64)", "np.stack([a, a], axis=1)", "a.unsqueeze(0)"),
        *("a.ravel(order='F')", "torch.flip(a, (0,))", "np.ascontiguousarray(np.flip(a, axis=1))", "a.T.clone()"),
    ],
)
def test_row_major(save: str) -> None:
    assert (said(save).severity, said(save).message) == ("info", f"{save} is row-major")


@pytest.mark.parametrize(
    ("a", "first"),
    [
        ("arange(0, 12) as float32, shape [3, 4]", 0),
        ("arange(6, 18), float32, shape (3, 4)", 6),
        ("np.arange(12, dtype=np.float32).reshape(3, 4)", 0),
        ("arange(1, 25, 2), shape 3x4", 1),
    ],
)
def test_bases(a: str, first: int) -> None:
    finding = said("a.T", a)
    assert finding.severity == "error" and finding.evidence["want"][0][0] == first


@pytest.mark.parametrize(
    "a", ["arange(13), shape [3, 4]", "arange(9999999), shape [9999999]", "arange(0, 12, 0), shape [12]", "zeros(12)"]
)
def test_other_bases(a: str) -> None:
    assert array_of(a) is None


@pytest.mark.parametrize(
    "save",
    [
        *("a.tofile('made')", "np.save('made', a)", "open('made', 'w')", "__import__('os').system('touch made')"),
        *("a.T @ a", "(lambda: a)()", "a.__class__", "np.lib.format", "a.astype('S99999999')", "a.astype('object')"),
        *("np.broadcast_to(a, (99999, 3, 4))", "np.ascontiguousarray(np.broadcast_to(a, (99999, 3, 4)))", "a[10**9]"),
        *(
            "np.stack([a] * 99999)",
            "np.einsum('ij,kl->ijkl', a, a)",
            "np.copy(a, out=a)",
            "a[9]",
            "a.T.T.nothing",
            "b.T",
        ),
        "a" + ".T" * 2000,
    ],
)
def test_nothing_else_is_run(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert view_of(save, FULL) is None
    assert not list(tmp_path.iterdir())
