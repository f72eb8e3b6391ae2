"""Artefacts that are damaged or made to harm: each gives a finding in one line, and nothing outside is read."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
import zipfile
from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.core.safetensors_header import HeaderError, read_header
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.render import to_html, to_text
from eagle3lab.doctor.run import Inputs, visit

from .hostile import TINY, nested, write_artefacts


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_artefacts(tmp_path / "healthy")["draft"]


def report_on(draft: Path) -> Report:
    return visit(Inputs(draft=str(draft)))


def said(report: Report, code: str, *words: str) -> None:
    messages = [f"{f.subject} {f.message}" for f in report.findings if f.code == code]
    assert any(all(word in message for word in words) for message in messages), (code, words, messages)


def test_healthy_is_quiet(draft: Path) -> None:
    report = report_on(draft)
    assert [f.message for f in report.findings if f.severity != "info"] == []
    assert report.exit_code(strict=True) == 0


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (struct.pack("<Q", 100 * 10**9) + b"{}", "100000000000"),
        (struct.pack("<Q", 2**64 - 1), str(2**64 - 1)),
        (struct.pack("<Q", 10**9), "1000000000"),
        (b"", "empty"),
        (b"abc", "3 bytes"),
        (bytes(64), "all zero"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS pointer"),
        (struct.pack("<Q", 4) + b"[[[[", "not JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "UTF-8"),
        (struct.pack("<Q", 2) + b"[]", "list"),
        (struct.pack("<Q", 40) + b'{"fc.weight": {"dtype": "BF16"}}        ', "fc.weight"),
    ],
)
def test_header(draft: Path, head: bytes, word: str) -> None:
    (draft / "model.safetensors").write_bytes(head)
    report = report_on(draft)
    said(report, "file-is-weights", word)
    assert report.exit_code() == 1


def test_a_header_of_100_gb_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", 100 * 10**9))
        handle.truncate(100 * 10**9 + 8)
    with pytest.raises(HeaderError, match="100000000000") as caught:
        read_header(path)
    assert caught.value.kind == "too-large"


def test_a_million_tensors(draft: Path) -> None:
    entry = '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    raw = ("{" + ",".join(entry % i for i in range(400_000)) + "}").encode()
    (draft / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    started = time.process_time()
    said(report_on(draft), "artefact-broken", str(len(raw)))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"hidden_size": NaN}', "NaN"),
        ('{"hidden_size": 8, "hidden_size": 9}', "hidden_size"),
        (json.dumps(nested(190))[:-5], "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"a": nested(300)}), "nested"),
        ("[1, 2]", "list"),
        ("", "not JSON"),
    ],
)
def test_config(draft: Path, text: str, word: str) -> None:
    (draft / "config.json").write_text(text)
    said(report_on(draft), "artefact-broken", word)


def test_config_that_is_not_utf8(draft: Path) -> None:
    (draft / "config.json").write_bytes(b'{"architectures": ["\xff"]}')
    said(report_on(draft), "artefact-broken", "UTF-8")


def test_links_out_of_the_folder_are_not_followed(draft: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({**TINY, "hidden_size": 777}))
    (draft / "config.json").unlink()
    (draft / "config.json").symlink_to(secret)
    (draft / "loop").symlink_to(draft / "loop")
    (draft / "up").symlink_to(draft.parent)
    opened: list[str] = []
    active = [True]

    def watch(event: str, arguments: tuple) -> None:
        if active[0] and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)  # a hook cannot be removed, so it is switched off
    try:
        report = report_on(draft)
    finally:
        active[0] = False
    said(report, "not-checked", "config.json", "link")
    mine = [path for path in opened if path.startswith(str(tmp_path))]
    assert mine and all(path.startswith(str(draft)) for path in mine), mine
    assert "777" not in json.dumps(report.as_json())


def test_hub_cache_layout_is_followed(draft: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    for place in (blobs, snapshot):
        place.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (draft / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert report_on(snapshot).exit_code(strict=True) == 0
    assert not [f for f in report_on(snapshot).findings if "link" in f.message]


def test_pipes_are_not_opened(draft: Path) -> None:
    (draft / "config.json").unlink()
    os.mkfifo(draft / "config.json")
    said(report_on(draft), "artefact-broken", "not a regular file")


def test_pickles_are_not_opened(draft: Path) -> None:
    (draft / "model.safetensors").unlink()
    (draft / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    said(report_on(draft), "not-checked", "pytorch_model.bin", "pickle")


def test_a_zip_of_zeros_is_not_unpacked(draft: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d2t.npy", bytes(10_000_000))
    (draft / "model.safetensors").write_bytes(packed.getvalue())
    assert report_on(draft).exit_code() == 1


def test_names_cannot_mark_up_or_move_the_cursor(draft: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\x1b[2J\n.weight"
    header = {evil: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    (draft / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    report = report_on(draft)
    assert "<img" not in to_html(report) and "\x1b[2J" not in to_text(report)
    assert all("\n" not in line for line in (f.subject for f in report.findings) if evil not in line)


def test_a_kimi_sized_folder_takes_two_seconds(tmp_path: Path) -> None:
    from .healthy import KIMI, config, headers

    draft = config(KIMI, num_attention_heads=64, num_key_value_heads=64, intermediate_size=18432)
    size = {"BF16": 2, "I64": 8, "BOOL": 1}
    entries, at = {}, 0
    for name, (dtype, shape) in headers(draft).items():
        count = size[dtype] * shape[0] * (shape[1] if len(shape) == 2 else 1)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
        at += count
    raw = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        handle.truncate(8 + len(raw) + at)
    (tmp_path / "config.json").write_text(json.dumps(draft))
    assert at > 2 * 10**9
    started = time.process_time()
    report = report_on(tmp_path)
    assert time.process_time() - started < 2
    said(report, "not-checked", "holes")
    assert report.exit_code(strict=True) == 0


def test_paths_that_are_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--draft", str(tmp_path / "no")],
        [str(tmp_path / "no")],
        ["--facts", "x" * 5000],
        ["--draft", "a\0b"],
    ):
        assert cli.run(["doctor", *words]) == 2
        out, err = capfd.readouterr()
        assert out == "" and len(err.splitlines()) == 1


@pytest.mark.parametrize("key", ["header_text", "text"])
def test_half_a_surrogate_pair_in_a_description(key: str, visit) -> None:
    report = visit({"file": {"name": "model.safetensors", key: '{"\ud800": 1}', "data_bytes": 24}})
    assert "check-broken" not in {finding.code for finding in report.findings}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_to_a_blob_that_was_never_fetched(draft: Path, name: str) -> None:
    (draft / name).unlink(missing_ok=True)
    (draft / name).symlink_to("../../blobs/0f3c")
    report = report_on(draft)
    said(report, "artefact-broken", name, "is a link to ../../blobs/0f3c, which is not there")
    assert report.exit_code(strict=False) == 1


def test_a_config_without_any_key(draft: Path) -> None:
    (draft / "config.json").write_text("{}")
    said(report_on(draft), "artefact-broken", "config.json is an empty object")


def test_a_path_is_said_once(draft: Path) -> None:
    (draft / "config.json").write_text("")
    [told] = [f.message for f in report_on(draft).findings if f.code == "artefact-broken"]
    assert told.count("config.json") == 1
