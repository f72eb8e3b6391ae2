"""Values in weight files: what the samples catch, and what `inspection` says of a fresh fc."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases.artefacts import as_bytes, header_contents, write_safetensors

from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import Inputs, visit

from .healthy import headers
from .hostile import TINY

HIDDEN = 128
CONFIG = {**TINY, "hidden_size": HIDDEN, "head_dim": HIDDEN // 2, "intermediate_size": 256}
FC = (HIDDEN, 3 * HIDDEN)
BOUND = 1 / np.sqrt(3 * HIDDEN)


def fresh() -> np.ndarray:
    """fc as torch's Linear starts it: uniform within 1/sqrt(fan_in)."""
    return np.random.default_rng(3).uniform(-BOUND, BOUND, FC)


def trained() -> np.ndarray:
    return fresh() + np.random.default_rng(4).normal(0, 0.5 * BOUND, FC)


def with_value(value: float) -> np.ndarray:
    changed = trained()
    changed[5, 7] = value
    return changed


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., list[Finding]]:
    def run(fc: np.ndarray, dtype: str = "BF16", **others: np.ndarray) -> list[Finding]:
        tensors = header_contents(headers(CONFIG))
        tensors["fc.weight"] = (dtype, list(FC), as_bytes(dtype, fc))
        for name, values in others.items():
            tensors[name.replace("__", ".")] = ("BF16", list(values.shape), as_bytes("BF16", values))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return [f for f in visit(Inputs(draft=str(tmp_path))).findings if f.code.startswith("contents-")]

    return run


def test_a_trained_fc_passes(look) -> None:
    assert [f.severity for f in look(trained())] == ["info"]


def test_a_fresh_fc_is_a_warning(look) -> None:
    (finding,) = look(fresh())
    assert (finding.severity, finding.code) == ("warning", "contents-untouched") and "AT-INIT" in finding.message


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("value", "word"), [(np.nan, "1 NaN"), (np.inf, "1 infinite"), (-np.inf, "1 infinite")])
def test_not_finite(look, dtype: str, value: float, word: str) -> None:
    found = [f for f in look(with_value(value), dtype) if f.code == "contents-values"]
    assert [f.severity for f in found] == ["error"] and word in found[0].message


def test_zero_and_constant(look) -> None:
    found = {f.subject: f for f in look(np.zeros(FC), norm__weight=np.ones(HIDDEN)) if f.code == "contents-values"}
    assert found["fc.weight"].severity == "error" and "all zero" in found["fc.weight"].message
    assert found["norm.weight"].severity == "info"  # a norm of ones may be one that never moved


def test_a_big_tensor_is_sampled_over_its_whole_length(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1000, 200)).astype(np.float32)
    values[-1, -10:] = np.nan
    write_safetensors(tmp_path / "model.safetensors", {"fc.weight": ("F32", [1000, 200], values.tobytes())})
    found = [f for f in visit(Inputs(draft=str(tmp_path))).findings if f.code == "contents-values"]
    assert [f.severity for f in found] == ["error"] and "sampled" in found[0].message


@pytest.mark.parametrize(("shift", "severity"), [(0, "info"), (1, "error")])
def test_head_rows_of_other_tokens(tmp_path: Path, shift: int, severity: str) -> None:
    """lm_head copied from the target by a map of absolute ids is not the head that d2t as offsets speaks of."""
    rng = np.random.default_rng(1)
    vocab, count = 40, 10
    head = rng.normal(size=(vocab, HIDDEN)).astype(np.float32)
    kept = np.sort(rng.choice(np.arange(1, vocab), count, replace=False))
    offsets = kept - np.arange(count)
    rows = head[kept] if shift == 0 else head[offsets]
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "draft" / "config.json").write_text(
        json.dumps({**CONFIG, "vocab_size": vocab, "draft_vocab_size": count})
    )
    (tmp_path / "target" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": HIDDEN}))
    write_safetensors(
        tmp_path / "draft" / "model.safetensors",
        {
            "lm_head.weight": ("F32", [count, HIDDEN], rows.tobytes()),
            "d2t": ("I64", [count], offsets.astype("<i8").tobytes()),
        },
    )
    write_safetensors(
        tmp_path / "target" / "model.safetensors", {"lm_head.weight": ("F32", [vocab, HIDDEN], head.tobytes())}
    )
    report = visit(Inputs(draft=str(tmp_path / "draft"), target=str(tmp_path / "target")))
    assert [f.severity for f in report.findings if f.code == "head-rows"] == [severity]
