"""The pairs of checks that only files can make speak, and a mutation of each rule that they catch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases.artefacts import as_bytes, write_safetensors

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.registry import find_check
from eagle3lab.doctor.run import Inputs, collect

from .mutants import mutants
from .test_contents import CONFIG, FC, HIDDEN, fresh, trained, with_value
from .test_pairs import FILES

VOCAB, COUNT = 40, 10


def fc_folder(place: Path, fc: np.ndarray) -> Inputs:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(place / "model.safetensors", {"fc.weight": ("BF16", list(FC), as_bytes("BF16", fc))})
    return Inputs(draft=str(place))


def head_folders(place: Path, right: bool) -> Inputs:
    """A draft whose lm_head holds the rows that d2t names, or the rows of the offsets read as ids."""
    rng = np.random.default_rng(1)
    head = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    kept = np.sort(rng.choice(np.arange(1, VOCAB), COUNT, replace=False))
    offsets = kept - np.arange(COUNT)
    rows = head[kept] if right else head[offsets]
    for name in ("draft", "target"):
        (place / name).mkdir(parents=True)
    config = {**CONFIG, "vocab_size": VOCAB, "draft_vocab_size": COUNT}
    (place / "draft" / "config.json").write_text(json.dumps(config))
    (place / "target" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": HIDDEN}))
    d2t = ("I64", [COUNT], offsets.astype("<i8").tobytes())
    draft = {"lm_head.weight": ("F32", [COUNT, HIDDEN], rows.tobytes()), "d2t": d2t}
    write_safetensors(place / "draft" / "model.safetensors", draft)
    whole = {"lm_head.weight": ("F32", [VOCAB, HIDDEN], head.tobytes())}
    write_safetensors(place / "target" / "model.safetensors", whole)
    return Inputs(draft=str(place / "draft"), target=str(place / "target"))


def pair(code: str, place: Path) -> tuple[Facts, Facts]:
    """(failing, passing) facts of one check, read from files."""
    if code == "head-rows":
        made = [head_folders(place / name, right) for name, right in (("bad", False), ("good", True))]
    elif code == "contents-twice":
        made = [fc_folder(place / name, trained()) for name in ("bad", "good")]
        for name, values in (("bad", fresh()), ("good", trained())):
            tensors = {"fc.weight": ("BF16", list(FC), as_bytes("BF16", values))}
            write_safetensors(place / name / "old.safetensors", tensors)
    else:
        bad = with_value(np.nan) if code == "contents-values" else fresh()
        made = [fc_folder(place / name, fc) for name, fc in (("bad", bad), ("good", trained()))]
    failing, passing = (collect(inputs) for inputs in made)
    return failing, passing


def said(function, facts: Facts) -> list[str] | str:
    try:
        return [finding.severity for finding in function(facts)]
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("code", sorted(FILES))
def test_fails_and_passes_and_a_turned_rule_is_caught(code: str, tmp_path: Path) -> None:
    check, both = find_check(code), pair(code, tmp_path)
    right = [said(check.function, facts) for facts in both]
    assert set(right[0]) & {"error", "warning"} and not set(right[1]) & {"error", "warning"}, right
    assert any([said(function, facts) for facts in both] != right for _, function in mutants(check.function))
