"""Chat templates by their many names, replies that end in several ways, and masks that only look wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import Inputs, diagnose, visit
from eagle3lab.doctor.templates import find_template

KU = ["<|im_user|>", "user", "<|im_middle|>", "Hi", "<|im_end|>"]
KA = ["<|im_assistant|>", "assistant", "<|im_middle|>"]
KIMI = [*KU, *KA, "Hello", "<|im_end|>"]
KIMI_HEADER = "<|im_assistant|>assistant<|im_middle|>"
CHATML = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "<|im_start|>", "assistant", "\n", "Hello", "<|im_end|>"]
HARMONY_USER = ["<|start|>", "user", "<|message|>", "Hi", "<|end|>"]
HARMONY = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
LLAMA = ["<|start_header_id|>", "assistant", "<|end_header_id|>"]
IPYTHON = ["<|start_header_id|>", "ipython", "<|end_header_id|>", "42", "degrees", "<|eot_id|>"]
SERVED = {"policy": "end token is not supervised"}


def told(code: str, **facts: Any) -> list[Finding]:
    return [finding for finding in diagnose(Facts(facts)).findings if finding.code == code]


def supervised(**facts: Any) -> Any:
    (finding,) = told("mask-empty", **facts)
    assert finding.severity == "info", finding.message
    return finding.evidence["supervised"]


@pytest.mark.parametrize("template", ["my-own", None])
def test_a_given_header_brings_its_own_end(template: str | None) -> None:
    more = {"template": template, "assistant_header": KIMI_HEADER}
    assert supervised(tokens=[*KU, *KA, "Hello", "<|im_end|>", *KU, *KA, "Yo", "<|im_end|>"], **more) == 4
    (empty,) = told("mask-empty", tokens=[*KU, *KA, "<|im_end|>"], **more)
    assert empty.severity == "warning" and "reply is empty" in empty.message


def test_a_header_alone_is_enough() -> None:
    assert supervised(tokens=[*KIMI, *KIMI], assistant_header=KIMI_HEADER) == 4
    assert supervised(tokens=[*CHATML, *CHATML], assistant_header="<|im_start|>assistant\n") == 4


FAMILIES = {
    "chatml": "qwen2.5 qwen3-instruct qwen3-thinking qwen2-vl Qwen/Qwen3-8B hermes smollm2",
    "kimi": "kimi-k2-instruct kimi-k2-thinking kimi-k2.5-vl kimi-k2.6 kimi_k2.5 kimi-linear moonshotai Kimi-K2",
    "llama3": "llama-3.2 llama-3.1-8b-instruct meta-llama/Llama-3.3-70B-Instruct llama3",
    "llama2": "llama-2 mistral",
    "deepseek": "deepseek deepseek-v3.1 deepseek-v32 deepseek_v3 deepseek-r1",
    "gpt-oss": "gpt-oss-20b gpt_oss harmony",
    "gemma": "gemma3 gemma-2-9b-it",
    "phi": "phi3 phi-4-mini-instruct",
    "phi4": "phi4 microsoft/phi-4",
    "glm": "glm glm-4.5 chatglm4",
}
NAMES = [(name, family) for family, names in FAMILIES.items() for name in names.split()]


@pytest.mark.parametrize(("name", "family"), NAMES)
def test_names_of_a_family(name: str, family: str) -> None:
    for tokens, own in ((KIMI, "kimi"), (CHATML, "chatml")):
        if family == own:
            assert supervised(tokens=tokens, template=name) == 2
        else:
            (finding,) = told("mask-empty", tokens=tokens, template=name)
            assert finding.severity == "error" and finding.evidence["suggest"] == own


@pytest.mark.parametrize("name", ["kimi-dev-72b", "llama-30b", "deepseek-coder", "gemma-4-31b", "", None])
def test_models_of_another_template_are_no_family(name: str | None) -> None:
    assert find_template(name) is None


def test_an_unknown_name_beside_known_text() -> None:
    (known,) = told("mask-empty", tokens=KIMI, template="my-own")
    (unknown,) = told("mask-empty", tokens=["Q: ", "Hi", "A: ", "Yo"], template="my-own")
    (unnamed,) = told("mask-empty", tokens=KIMI, template=None)
    assert (known.severity, unknown.severity, unnamed.severity) == ("warning", "info", "info")


@pytest.mark.parametrize(
    ("template", "tokens", "count"),
    [
        (
            "gpt-oss",
            [*HARMONY_USER, *HARMONY, "Hello", "<|end|>", *HARMONY_USER, *HARMONY, "Ciao", "<|return|>"],
            4,
        ),
        ("gpt-oss", [*HARMONY_USER, *HARMONY, "Hello", "<|return|>"], 2),
        (
            "llama3",
            [*LLAMA, "<|python_tag|>", "call()", "<|eom_id|>", *IPYTHON, *LLAMA, "Done", "<|eot_id|>"],
            5,
        ),
        ("llama3", [*LLAMA, "Done", "<|eot_id|>"], 2),
        ("kimi", [*KU, *KA, "Hello", *KU, *KA, "Yo", "<|im_end|>"], 3),
        ("kimi", [*KU, *KA, "Hello", "there"], 2),
        ("glm", ["<|user|>", "Hi", "<|assistant|>", "Yo", "<|user|>", "Bye", "<|assistant|>", "Ciao"], 2),
    ],
)
def test_a_reply_ends_at_any_end_and_before_any_turn(template: str, tokens: list[str], count: int) -> None:
    assert supervised(tokens=tokens, template=template) == count


def shift(tokens: str, mask: str, **more: Any) -> list[str]:
    found = told("mask-shift", tokens=tokens.split(), loss_mask=[int(mark) for mark in mask], **more)
    return [f"{finding.severity} {finding.message}" for finding in found if finding.severity != "info"]


@pytest.mark.parametrize(
    ("tokens", "mask", "more"),
    [
        ("P0 P1 P2 A0 A1 A2 E", "0011000", SERVED),
        ("P0 P1 P2 A0 A1 A2 E", "0011000", {}),
        ("P0 P1 P2 A0 A1 A2 E", "0011100", SERVED),
        (" ".join([*KU, *KA, "Hello", "there", "you", "<|im_end|>"]), "000000011000", {**SERVED, "template": "kimi"}),
        ("P0 P1 P2 A0 A1 A2 E", "0011110", {}),
        ("P0 A0 A1 E P1 P2 A2 A3 E", "000001100", {}),
        ("P0 P1 A0 A1 A2 A3 A4 E", "00001100", {}),
        ("t0 t1 t2 t3 t4 t5 t6 t7", "00111000", {"rule": "as B23-a, mask moved one to the left"}),
        ("A0 A1 A2 E", "1100", {}),
    ],
)
def test_masks_that_only_look_late(tokens: str, mask: str, more: dict[str, Any]) -> None:
    assert shift(tokens, mask, **more) == []


@pytest.mark.parametrize(
    ("tokens", "mask", "more"),
    [
        ("P0 P1 P2 A0 A1 A2 E", "0001110", SERVED),
        ("P0 P1 P2 A0 A1 E", "000111", {}),
        ("P0 P1 A0 E", "0011", {}),
        (" ".join([*KU, *KA, "Hello", "there", "you", "<|im_end|>"]), "000000001110", {**SERVED, "template": "kimi"}),
        (
            "t0 t1 t2 t3 t4 t5 t6 t7",
            "00111000",
            {"rule": "inputs and teacher are moved one to the left, the mask is not"},
        ),
    ],
)
def test_masks_that_are_late(tokens: str, mask: str, more: dict[str, Any]) -> None:
    (message,) = shift(tokens, mask, **more)
    assert message.startswith("error mask is one place late")


@pytest.mark.parametrize(
    ("tokens", "mask", "words"),
    [
        ("P0 P1 P2 A0 A1 E", "101100", "1 places predict them, the first predicts token 2"),
        ("P0 P1 P2 P3 A0 A1 E", "1101100", "2 places predict them, the first predicts token 2"),
        ("P0 P1 P2 A0 A1 E", "111111", "prompt tokens supervised"),
        ("t0 t1 t2 t3", "1111", "all 4 places are supervised: prompt tokens too"),
        ("P0 P1 P2 A0 A1 E", "001111", "goes past the reply: place 5"),
        ("P0 P1 P2 A0 A1 A2 A3 A4 E", "001010010", "2 tokens of a reply are never predicted, the first is token 5"),
    ],
)
def test_masks_with_too_much_or_gaps(tokens: str, mask: str, words: str) -> None:
    (message,) = shift(tokens, mask)
    assert message.startswith("warning") and words in message


WITHOUT_OFFSETS = [
    "tiktoken",
    "Kimi TikTokenTokenizer",
    "is_fast: false",
    "cannot return offsets",
    "offsets not available",
    "offsets: none",
    "without offset_mapping",
    "return_offsets_mapping raises NotImplementedError",
    "no fast tokenizer",
    "without a fast version",
    "slow",
    {"offset_mapping": None},
    {"is_fast": False},
    {"tokenizer_class": "TikTokenTokenizer"},
]
WITH_OFFSETS = [
    "fast",
    "not slow",
    "is_fast: true, add_bos_token: false",
    "fast tokenizer with offset_mapping",
    "Kimi tiktoken, converted, offsets: yes",
    "one token per list entry",
    {"is_fast": True, "name": "TikTokenTokenizer"},
    {"is_fast": None},
    {"name": "Qwen2TokenizerFast", "offset_mapping": True},
]


@pytest.mark.parametrize("tokenizer", WITHOUT_OFFSETS)
def test_tokenizers_without_offsets(tokenizer: Any) -> None:
    assert [finding.severity for finding in told("mask-offsets", text="Hi", tokenizer=tokenizer)] == ["error"]


@pytest.mark.parametrize("tokenizer", WITH_OFFSETS)
def test_tokenizers_with_offsets(tokenizer: Any) -> None:
    assert told("mask-offsets", text="Hi", tokenizer=tokenizer) == []


@pytest.mark.parametrize(
    ("first", "edge", "severity"),
    [(1e-9, 0.09, "error"), (0.0, 0.09, "error"), (0.1, 0.09, "warning"), (0.0, 0.0, "warning"), (0.1, 1e-9, "info")],
)
def test_gradients_are_compared(first: float, edge: float, severity: str) -> None:
    norms = {"first boundary": first, "stale right edge": edge}
    assert [finding.severity for finding in told("mask-gradient", grad_norm_by_place=norms)] == [severity]


def corpus(path: Path, text: str) -> str:
    path.write_text(text)
    found = visit(Inputs(corpus=str(path))).findings
    return " | ".join(f"{finding.severity} {finding.message}" for finding in found if finding.severity != "info")


ASK = {"role": "user", "content": "Hi"}
CALL = [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": CALL}]}, ""),
        ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": []}]}, "an empty reply"),
        ({"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}]}, ""),
        ({"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": ""}]}]}, "an empty reply"),
        ({"prompt": "a", "reply": "b"}, ""),
        ({"prompt": "a", "reply": None}, "an empty reply"),
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}, "1 of 1 samples have no supervised token"),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, ""),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, "a loss_mask or labels of another length than input_ids"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, ""),
        ({"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]}, ""),
    ],
)
def test_rows_of_a_corpus(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    said = corpus(tmp_path / "c.jsonl", json.dumps(row))
    assert words in said if words else said == ""


def test_a_json_array_is_its_rows(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "reply": "b"}, {"prompt": "a"}
    assert corpus(tmp_path / "c.json", json.dumps([good, good], indent=2)) == ""
    assert "1 of 2 rows have no assistant turn, first row 1" in corpus(tmp_path / "c.json", json.dumps([good, bad]))
    assert "no row" in corpus(tmp_path / "c.json", "[]")
    assert "1 lines are not JSON objects" in corpus(tmp_path / "c.json", json.dumps([good, 3]))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_longer_than_a_visit_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    monkeypatch.setattr("eagle3lab.doctor.readers.corpus.TEXT_LIMIT", 1000)
    good, bad = {"prompt": "a", "reply": "b" * 50}, {"prompt": "a", "answer": "c" * 50}
    assert corpus(tmp_path / "c.json", json.dumps([good] * 40, indent=indent)) == ""
    assert "rows have no assistant turn" in corpus(tmp_path / "c.json", json.dumps([bad] * 40, indent=indent))
    lines = "\n".join(json.dumps([good]) for _ in range(40))
    assert "lines are not JSON objects" in corpus(tmp_path / "c.jsonl", lines)
