"""Files that are taken for weights and are none, or whose numbers nothing can read: what they are is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab.core.safetensors_header import HeaderError, read_header
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.steps.inspect import inspect

from .conftest import serious
from .test_contents import CONFIG

OTHERS = {
    "a zip": (b"PK\x03\x04\x14\x00\x08\x08" + b"\0" * 300, "zip, most often a PyTorch pickle"),
    "html": (b"<!DOCTYPE html><html>Access denied</html>", "an HTML page, so the download was refused"),
    "gguf": (b"GGUF\3\0\0\0" + b"\0" * 64, "a GGUF file"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML answer of a server"),
    "numpy": (b"\x93NUMPY\x01\x00v\x00" + b" " * 118, "a numpy array"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_file_is_named_by_all_readers(name: str, tmp_path: Path) -> None:
    data, what = OTHERS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(HeaderError, match=what) as told:
        read_header(path)
    assert told.value.fix and told.value.rule
    assert what in str(inspect(path).as_text()) and "next: fetch the file again" in inspect(path).as_text()
    findings = [f for f in visit(Inputs(draft=str(path))).findings if f.code == "file-is-weights"]
    assert [(f.severity, what in f.message) for f in findings] == [("error", True)]


def test_a_length_of_0_is_no_file_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 8 + b'{"w": 1}')
    [finding] = [f for f in visit(Inputs(draft=str(path))).findings if f.code == "file-is-weights"]
    assert "declares a header of 0 bytes" in finding.message and "all zero" not in finding.message
    path.write_bytes(b"\0" * 64)
    [finding] = [f for f in visit(Inputs(draft=str(path))).findings if f.code == "file-is-weights"]
    assert "all zero" in finding.message


def test_an_impossible_shape_is_told_of_its_tensor(tmp_path: Path) -> None:
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = visit(Inputs(draft=str(tmp_path))).findings
    assert any(f.code == "file-is-weights" and "fc.weight: shape" in f.message for f in found)
    assert not [f.message for f in found if f.code == "fact-type"]


FP8 = ["F8_E4M3", [8, 24]]
PLAIN = ["F64", [16, 8]]


@pytest.mark.parametrize(
    ("headers", "wrong"),
    [
        ({"fc.weight": FP8, "midlayer.mlp.up_proj.weight": PLAIN}, True),
        ({"fc.weight": ["F4", [8, 24]]}, True),
        ({"fc.weight": FP8, "fc.weight_scale_inv": ["F32", [1]]}, False),
        ({"fc.weight": FP8, "fc.input_scale": ["F32", [1]], "fc.scale": ["F8_E8M0", [1]]}, False),
        ({"fc.weight": FP8, "midlayer.mlp.up_proj.weight_scale": ["F32", [1]]}, True),
        ({"fc.weight": ["BF16", [8, 24]], "midlayer.mlp.up_proj.weight": PLAIN}, False),
    ],
)
def test_8_bits_need_a_scale(headers: dict, wrong: bool) -> None:
    told = [message for _, message in serious({"draft_config": CONFIG, "draft_headers": headers})]
    assert any("without a scale beside them (fc.weight)" in message for message in told) is wrong
