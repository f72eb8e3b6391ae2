"""Render boundaries and the loss mask: Kimi's turns, think blocks that the prompt opened, several turns, ChatML."""

from __future__ import annotations

import pytest

from eagle3lab.core.errors import CorpusError
from eagle3lab.corpus.chat import Reasoning, Rendered, attach_reply, render_conversation, render_prompt, render_reply
from eagle3lab.targets.random_target import kimi_tokenizer

KIMI = kimi_tokenizer(4096)
THINK = Reasoning("<think>", "</think>")
HI = [{"role": "user", "content": "Hi"}]
TWO = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello <|im_end-ish> there"},
    {"role": "user", "content": "assistant: what did you say? <|im_assistant|>"},
    {"role": "assistant", "content": "Hello."},
]
USER = "<|im_user|>user<|im_middle|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"


def parts(rendered: Rendered, tokenizer=KIMI) -> list[tuple[bool, str]]:
    """The conversation as runs of (supervised, text)."""
    runs: list[tuple[bool, list[int]]] = []
    for token, flag in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        if not runs or runs[-1][0] != flag:
            runs.append((flag, []))
        runs[-1][1].append(token)
    return [(flag, tokenizer.decode(ids)) for flag, ids in runs]


def test_plain_reply_behind_an_open_think_block() -> None:
    rendered = render_reply(KIMI, HI, "Hello", turn_end="<|im_end|>", sample="s", block=THINK)
    assert parts(rendered) == [
        (False, f"{USER}Hi<|im_end|>{ASSISTANT}<think>"),
        (True, "</think>Hello<|im_end|>"),
    ]


def test_plain_reply_with_thinking_off() -> None:
    rendered = render_reply(KIMI, HI, "Hello", turn_end="<|im_end|>", sample="s", block=THINK, thinking=False)
    assert parts(rendered) == [
        (False, f"{USER}Hi<|im_end|>{ASSISTANT}<think></think>"),
        (True, "Hello<|im_end|>"),
    ]


def test_reasoning_reply() -> None:
    rendered = render_reply(KIMI, HI, "Hello", reasoning="A greeting.", turn_end="<|im_end|>", sample="s", block=THINK)
    assert parts(rendered)[1] == (True, "A greeting.</think>Hello<|im_end|>")
    closed = render_reply(
        KIMI, HI, "Hello", reasoning="Well.", turn_end="<|im_end|>", sample="s", block=THINK, thinking=False
    )
    assert parts(closed)[1] == (True, "<think>Well.</think>Hello<|im_end|>")


def test_a_cut_reply_has_no_end_token() -> None:
    rendered = render_reply(KIMI, HI, "Hel", turn_end=None, sample="s", block=THINK)
    assert parts(rendered)[1] == (True, "</think>Hel")


def test_every_turn_of_a_conversation_is_supervised() -> None:
    rendered = render_conversation(KIMI, TWO, turn_end="<|im_end|>", sample="s", thinking=False)
    assert [text for flag, text in parts(rendered) if flag] == [
        "Hello <|im_end-ish> there<|im_end|>",
        "Hello.<|im_end|>",
    ]
    open_block = render_conversation(KIMI, TWO, turn_end="<|im_end|>", sample="s")
    assert [text for flag, text in parts(open_block) if flag][1] == "</think>Hello.<|im_end|>"
    whole = KIMI.apply_chat_template(TWO, tokenize=False)
    assert "".join(text for _, text in parts(open_block)) == whole
    assert rendered.input_ids == open_block.input_ids


def test_a_mask_searched_in_text_would_be_wrong() -> None:
    """The user's message quotes the assistant's header: what follows it is not a reply."""
    import re

    whole = KIMI.apply_chat_template(TWO, tokenize=False)
    found = re.findall(r"<\|im_assistant\|>.*?<\|im_middle\|>(.*?<\|im_end\|>)", whole)
    spoken = [text for flag, text in parts(render_conversation(KIMI, TWO, turn_end="<|im_end|>", sample="s")) if flag]
    assert found != spoken


def test_a_trailing_user_turn_is_not_supervised() -> None:
    rendered = render_conversation(KIMI, [*TWO, {"role": "user", "content": "Bye"}], turn_end="<|im_end|>", sample="s")
    assert parts(rendered)[-1] == (False, f"{USER}Bye<|im_end|>")


def test_reasoning_that_the_template_drops_is_refused() -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}]
    assert "A greeting." not in KIMI.apply_chat_template(messages, tokenize=False)
    with pytest.raises(CorpusError, match="turn 2 of 2 is rendered otherwise"):
        render_conversation(KIMI, messages, turn_end="<|im_end|>", sample="s")


def test_reasoning_before_a_tool_call_is_kept_until_a_plain_reply_follows() -> None:
    call = {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [{"id": "1"}]}
    messages = [*HI, call, {"role": "tool", "content": "42"}]
    rendered = render_conversation(KIMI, messages, turn_end="<|im_end|>", sample="s")
    assert [text for flag, text in parts(rendered) if flag] == ["Look it up.</think><|im_end|>"]
    with pytest.raises(CorpusError, match="turn 2 of 4"):
        render_conversation(
            KIMI, [*messages, {"role": "assistant", "content": "42"}], turn_end="<|im_end|>", sample="s"
        )


CHATML = (
    "{% for m in messages %}<|im_user|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_user|>assistant\n{% endif %}"
)


def test_what_a_template_writes_behind_the_end_token_is_not_supervised() -> None:
    tokenizer = kimi_tokenizer(4096)
    tokenizer.chat_template = CHATML
    messages = [*HI, {"role": "assistant", "content": "Hello"}]
    rendered = render_conversation(tokenizer, messages, turn_end="<|im_end|>", sample="s")
    assert parts(rendered, tokenizer)[1:] == [(True, "Hello<|im_end|>"), (False, "\n")]


def test_nothing_to_supervise_is_an_error() -> None:
    with pytest.raises(CorpusError, match="0 supervised tokens"):
        attach_reply([1, 2], [], sample="s")
    with pytest.raises(CorpusError, match="0 supervised tokens"):
        render_reply(KIMI, HI, "", turn_end="<|im_end|>", sample="s", block=THINK)
    with pytest.raises(CorpusError, match="no assistant turn in 1 messages"):
        render_conversation(KIMI, HI, turn_end="<|im_end|>", sample="s")
    with pytest.raises(CorpusError, match="think tokens are not known"):
        render_reply(KIMI, HI, "Hello", reasoning="x", turn_end="<|im_end|>", sample="s")
    with pytest.raises(CorpusError, match="is 12 tokens"):
        render_reply(KIMI, HI, "Hello", turn_end="<|im_start|>", sample="s")


def test_a_wrong_header_supervises_nothing() -> None:
    tokenizer = kimi_tokenizer(4096)
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif %}", "someone\n{% endif %}")
    with pytest.raises(CorpusError, match="rendered otherwise"):
        render_conversation(
            tokenizer, [*HI, {"role": "assistant", "content": "Hello"}], turn_end="<|im_end|>", sample="s"
        )


def test_prompt_ids_are_the_start_of_the_sample() -> None:
    prompt = render_prompt(KIMI, HI)
    rendered = render_reply(KIMI, HI, "Hello", turn_end="<|im_end|>", sample="s", block=THINK)
    assert rendered.input_ids[: len(prompt)] == prompt
    assert rendered.loss_mask == [False] * len(prompt) + [True] * (len(rendered.input_ids) - len(prompt))
