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

from .conftest import visit_facts
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
        for name, (kind, shape, _) in tensors.items():
            if name.endswith("norm.weight"):
                near_one = np.random.default_rng(5).normal(1, 0.1, shape)
                tensors[name] = (kind, shape, as_bytes(kind, near_one))
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


def test_random_numbers_in_place_of_every_tensor_are_told_apart(look) -> None:
    """A file that was made for a test: its norms lie around zero, where no norm ever is."""
    names = [name for name in headers(CONFIG) if name.endswith("norm.weight")]
    around_zero = {name.replace(".", "__"): np.random.default_rng(6).normal(0, 0.02, HIDDEN) for name in names}
    (finding,) = look(np.random.default_rng(7).normal(0, 0.02, FC), **around_zero)
    assert finding.severity == "info" and "made for a test" in finding.message
    one = {**around_zero, "norm__weight": np.random.default_rng(8).normal(1, 0.1, HIDDEN)}
    (finding,) = look(np.random.default_rng(7).normal(0, 0.02, FC), **one)
    assert finding.severity == "warning"


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


TWO = {"fc.weight": FC, "norm.weight": (HIDDEN,)}


def two_files(folder: Path, name: str, change: float, shape: tuple[int, ...] = FC, **more: str) -> list[Finding]:
    """A draft of two files that share fc.weight, in the second with `change` added to its last value."""
    fc = trained().reshape(-1)
    tensors = {"norm.weight": ("BF16", [HIDDEN], as_bytes("BF16", np.linspace(0.5, 1.5, HIDDEN)))}
    first = {**tensors, "fc.weight": ("BF16", list(FC), as_bytes("BF16", fc))}
    fc[-1] += change
    second = {**tensors, "fc.weight": ("BF16", list(shape), as_bytes("BF16", fc))}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", first)
    write_safetensors(folder / name, second)
    for extra, text in more.items():
        (folder / extra.replace("__", ".")).write_text(text)
    return [f for f in visit(Inputs(draft=str(folder))).findings if f.code == "contents-twice"]


def test_two_files_of_one_tensor(tmp_path: Path) -> None:
    [finding] = two_files(tmp_path, "old.safetensors", 1.0)
    assert finding.severity == "error"
    assert finding.message.startswith("fc.weight in model.safetensors and in old.safetensors")


def test_two_shapes_of_one_tensor(tmp_path: Path) -> None:
    assert len(two_files(tmp_path, "old.safetensors", 0.0, FC[::-1])) == 1


@pytest.mark.parametrize(("name", "change"), [("old.safetensors", 0.0), ("consolidated.safetensors", 1.0)])
def test_equal_copies_and_files_that_are_not_loaded(tmp_path: Path, name: str, change: float) -> None:
    assert not two_files(tmp_path, name, change)


def test_with_an_index_the_index_decides(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": dict.fromkeys(TWO, "model.safetensors")})
    assert not two_files(tmp_path, "old.safetensors", 1.0, model__safetensors__index__json=index)


@pytest.mark.parametrize(
    ("metadata", "right"),
    [(None, True), ({}, True), ({"format": "pt"}, True), ({"x": 1}, False), ({"x": None}, False), ([], False)],
)
def test_metadata_is_text_to_text(tmp_path: Path, metadata: object, right: bool) -> None:
    """As the safetensors library judges it: null is absent, a value that is no text is refused."""
    header = {"__metadata__": metadata, "w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    raw = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\x01")
    said = [f for f in visit(Inputs(draft=str(path))).findings if f.code == "file-is-weights"]
    assert bool(said) is not right
    described = {"file": {"tensors": {"w": ["U8", [1]]}, "metadata": metadata}}
    assert bool([f for f in visit_facts(described).findings if f.code == "file-is-weights"]) is not right
    library = pytest.importorskip("safetensors")
    try:
        library.deserialize(path.read_bytes())
    except library.SafetensorError:
        assert not right
    else:
        assert right
