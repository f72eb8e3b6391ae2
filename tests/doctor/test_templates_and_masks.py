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
    "chatml": "yi-34b-chat 01-ai/Yi-1.5-9B-Chat internlm2-chat-7b internlm2_5 mimo-7b-rl kimi-dev-72b qwen2.5 "
    "qwen3-instruct qwen3-thinking qwen2-vl Qwen/Qwen3-8B hermes smollm2",
    "kimi": "kimi-k2-instruct kimi-k2-thinking kimi-k2.5-vl kimi-k2.6 kimi_k2.5 kimi-linear moonshotai Kimi-K2",
    "llama3": "llama-3.2 llama-3.1-8b-instruct meta-llama/Llama-3.3-70B-Instruct llama3",
    "llama2": "llama-2 mistral devstral-small ministral-8b mistralai/Magistral-Small codestral-22b",
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


@pytest.mark.parametrize("name", ["kimi-audio-7b", "yie", "llama-30b", "deepseek-coder", "gemma-4-31b", "", None])
def test_models_of_another_template_are_no_family(name: str | None) -> None:
    assert find_template(name) is None


def test_an_unknown_name_beside_known_text() -> None:
    (fits,) = told("mask-empty", tokens=KIMI, template="my-own")
    assert fits.severity == "info" and "'my-own' is not known, judged as kimi" in fits.message
    (known,) = told("mask-empty", tokens=KIMI[:-1], template="my-own")  # its reply never ends
    (mixed,) = told("mask-empty", tokens=[*KIMI, *CHATML], template="my-own")
    assert mixed.severity == "warning"
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


@pytest.mark.parametrize(
    ("norms", "severity"),
    [
        ({"boundary": 0.0, "stale edge": 0.3}, "error"),
        ({"boundary": 0.3, "stale edge": 0.0}, "info"),
        ({"place 2": 0.0, "place 5": 0.098}, "error"),
        ({"place 2": 0.098, "place 5": 0.0}, "info"),
        ({"place 2": 0.1, "place 5": 0.1}, "info"),  # nothing tells that place 5 lies past the end
        ({"p2": 0.1, "p3": 0.1, "p4": 0.1}, "info"),
        ({"first place after the end": 0.3, "first place of the reply": 0.0}, "error"),
        ({"entry": 0.0, "exit": 0.2}, "error"),
        ({"firstBoundary": 0.0, "rightEdge": 0.2}, "error"),
        ({"first": 0.1, "edge": 0.09}, "warning"),
        ({"9" * 30: 0.0, "place 3": 0.2}, "info"),
        ({"last prompt place": 0.0, "end of the reply": 0.2}, "error"),
        ({"head": 0.1, "tail": 0.0}, "info"),
        ({"first": 0.1, "middle": 0.2}, "info"),
    ],
)
def test_edges_in_other_words(norms: dict[str, float], severity: str) -> None:
    assert [finding.severity for finding in told("mask-gradient", grad_norm_by_place=norms)] == [severity]


def test_edges_by_the_fix_and_by_the_tokens() -> None:
    (fixed,) = told("mask-gradient", grad_norm_by_place={"u": 0.0, "v": 0.1}, after_fix={"u": 0.11, "v": 0.0})
    by_place = {"p2": 0.0, "p3": 0.1, "p4": 0.1, "p5": 0.09}
    (numbered,) = told("mask-gradient", grad_norm_by_place=by_place, tokens=["P0", "P1", "P2", "A0", "A1", "E"])
    healthy = {"p2": 0.1, "p3": 0.1, "p4": 0.1, "p5": 0.0}
    (right,) = told("mask-gradient", grad_norm_by_place=healthy, tokens=["P0", "P1", "P2", "A0", "A1", "E"])
    assert [finding.severity for finding in (fixed, numbered, right)] == ["error", "error", "info"]


PHI4 = "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Hello<|im_end|>"


@pytest.mark.parametrize(
    ("more", "suggest"),
    [
        ({"template": "chatml"}, "phi4"),
        ({"template": "Qwen/Qwen3-8B"}, "phi4"),
        ({"template": "qwen", "assistant_header": "<|im_start|>assistant\n"}, "phi4"),
        ({"assistant_header": "<|im_start|>assistant"}, "phi4"),
        ({"template": "phi-4"}, None),
        ({"assistant_header": "<|im_start|>assistant<|im_sep|>"}, None),
    ],
)
def test_phi_4_is_no_chatml(more: dict[str, Any], suggest: str | None) -> None:
    (finding,) = told("mask-empty", text=PHI4, **more)
    assert finding.severity == ("error" if suggest else "info") and finding.evidence.get("suggest") == suggest
    assert suggest is None or "is found 0 times, the phi4 header 1 times" in finding.message


def test_a_header_alone_that_is_not_there() -> None:
    (finding,) = told("mask-empty", tokens=KIMI, assistant_header="<|im_start|>assistant\n")
    assert "assistant_header '<|im_start|>assistant' is found 0 times, the kimi header" in finding.message


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
        ({"prompt": [ASK], "completion": [{"role": "assistant", "content": "Hello"}]}, ""),
        ({"prompt": [ASK], "completion": "Hello"}, ""),
        ({"prompt": [ASK], "completion": []}, "no assistant turn"),
        ({"prompt": [ASK], "completion": [{"role": "assistant", "content": ""}]}, "an empty reply"),
        (
            {"prompt": "a", "reply": "<think>b</think>"},
            "warning 1 of 1 rows have a reply that thinks and answers nothing",
        ),
        ({"prompt": "a", "reply": "<think>b</think>c"}, ""),
        ({"messages": [ASK, {"role": "assistant", "content": "<think>b</think>", "tool_calls": CALL}]}, ""),
        ({"text": "".join(CHATML[:5])}, "error 1 of 1 rows have no assistant turn"),
        ({"text": "".join(CHATML)}, ""),
        ({"text": "".join([*CHATML[:8], "<think>a</think>", "<|im_end|>"])}, "thinks and answers nothing"),
        ({"text": "".join([*CHATML[:8], "<think>a", "<|im_end|>"])}, "never closes"),
        ({"text": "".join([*CHATML[:8], "<|im_end|>"])}, "an empty reply"),
        ({"text": "<|user|>\nHi<|assistant|>\n<|endoftext|>"}, "an empty reply"),
        ({"text": "<|user|>\nHi<|assistant|>\nHello<|endoftext|>"}, ""),
        ({"text": "plain"}, ""),
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


def test_plain_text_under_a_known_template(tmp_path: Path) -> None:
    turn = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}"
    config = {"chat_template": f"{{% for message in messages %}}{turn}{{% endfor %}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat, plain = json.dumps({"text": "".join(CHATML)}), json.dumps({"text": "plain"})

    def said(*rows: str) -> list[tuple[str, str]]:
        (tmp_path / "c.jsonl").write_text("\n".join(rows))
        found = visit(Inputs(corpus=str(tmp_path / "c.jsonl"), tokenizer=str(tmp_path))).findings
        return [(finding.severity, finding.message) for finding in found if finding.severity != "info"]

    assert said(plain, plain) == [("error", "2 of 2 rows have no assistant turn, first row 0")]
    assert said(chat, plain) == [("warning", "1 of 2 rows have no assistant turn, first row 1")]
    assert said(chat, chat) == []
