"""Rows of a corpus that a trainer reads wrongly, each beside one that only looks odd; files in another encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.readers import log
from eagle3lab.doctor.readers.corpus import summary
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.doctor.templates import has_delimiters

from .conftest import serious


def told(place: Path, *rows: Any) -> list[str]:
    path = place / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = visit(Inputs(corpus=str(path)))
    return [f"{f.severity} {f.message}" for f in report.findings if f.severity != "info"]


def ready(**lists: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], **lists}


def says(reply: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": reply}]}


FAULTS: dict[str, tuple[Any, str]] = {
    "a text": (ready(input_ids=[1, "2", 3]), "error 1 of 2 rows have something else than token ids"),
    "a negative id": (ready(input_ids=[1, -2, 3]), "error 1 of 2 rows have something else than token ids"),
    "half an id": (ready(input_ids=[1, 2.5, 3]), "error 1 of 2 rows have something else than token ids"),
    "null in the mask": (ready(loss_mask=[0, None, 1]), "error 1 of 2 rows have something else than token ids"),
    "a mark of 2": (ready(loss_mask=[0, 2, 1]), "error 1 of 2 rows have something else than token ids"),
    "another ignored label": (
        {"input_ids": [1, 2, 3], "labels": [-1, 2, 3]},
        "error 1 of 2 rows have something else than token ids",
    ),
    "mask and labels": (ready(labels=[-100, -100, 3]), "warning 1 of 2 rows have a loss_mask and labels that"),
    "two turns in one": (
        says("ok<|im_end|>\n<|im_start|>assistant\nmore"),
        "warning 1 of 2 rows have a chat template's own delimiters inside a reply",
    ),
    "its own end": (says("Hello<|eot_id|>"), "warning 1 of 2 rows have a chat template's own delimiters"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_row(tmp_path: Path, name: str) -> None:
    row, message = FAULTS[name]
    assert any(one.startswith(message) for one in told(tmp_path, row, says("Hello"))), told(
        tmp_path, row, says("Hello")
    )


@pytest.mark.parametrize(
    "row",
    [
        ready(loss_mask=[False, True, 1.0]),
        ready(loss_mask=[0, 0.5, 1]),  # weights of a loss
        ready(labels=[-100, 2, 3]),
        {"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]},
        says("In HTML, <s>old</s> strikes a word out."),
        says("`<|im_start|>` opens a turn of ChatML."),
        says("ASSISTANT: is what some templates write."),
    ],
)
def test_a_row_that_is_right(tmp_path: Path, row: Any) -> None:
    assert told(tmp_path, row) == []


def test_delimiters_at_an_end() -> None:
    assert has_delimiters("Hello</s>\n") and has_delimiters("Hi<end_of_turn>")
    assert not has_delimiters("Hello") and not has_delimiters("")


def test_a_negative_count_is_no_supervised_token() -> None:
    assert serious({"samples_supervised_tokens": [5, -3, 2]}) == [
        ("error", "a sample has -3 supervised tokens: a count is not negative")
    ]
    assert serious({"samples_supervised_tokens": [5, 3]}) == []


def test_an_id_that_the_tokenizer_has_not(visit: Any) -> None:
    corpus = {**summary([ready()]), "tokenizer": {"template": "chatml"}}
    beyond = {"row": 7, "id": 60_000, "size": 49_152}
    found = [
        f.message for f in visit({"corpus": {**corpus, "beyond_vocabulary": beyond}}).findings if f.severity == "error"
    ]
    assert found == ["row 7 holds token 60000, the tokenizer has 49152"]
    assert serious({"corpus": corpus}) == []


def test_ids_are_held_against_the_tokenizer() -> None:
    from eagle3lab.doctor.facts import Facts
    from eagle3lab.doctor.readers.corpus import _beyond_vocabulary

    facts = Facts()
    _beyond_vocabulary([ready(), ready(input_ids=[1, 9])], 10, facts)
    assert not facts.has("corpus")
    _beyond_vocabulary([ready(), ready(input_ids=[1, 10])], 10, facts)
    assert facts["corpus"] == {"beyond_vocabulary": {"row": 1, "id": 10, "size": 10}}


LINE = "Decode batch, #running-req: 1, accept len: 1.00, accept rate: 0.00\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_log_of_another_encoding(tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PowerShell writes UTF-16 with a byte-order mark; the end of a long log is read in the same order."""
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    path = tmp_path / "server.log"
    for lines, limit in ((3, log.TEXT_LIMIT), (101, 4001)):
        path.write_bytes((mark + LINE * lines).encode(encoding))
        monkeypatch.setattr(log, "TEXT_LIMIT", limit)
        monkeypatch.setattr(log, "HEAD", 2000)
        found = visit(Inputs(log=str(path))).findings
        assert any("accept length is exactly 1.00" in f.message for f in found), [f.message for f in found]
        read = next(f.evidence["lines"] for f in found if f.code == "log-acceptance")
        assert read >= (3 if lines == 3 else 20)


def test_a_corpus_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(says("Hello")) + "\n", encoding="utf-16")
    [finding] = [f for f in visit(Inputs(corpus=str(path))).findings if f.severity == "error"]
    assert "is UTF-16" in finding.message and finding.fix == "save it as UTF-8"
