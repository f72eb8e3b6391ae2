"""Chat rendering and the loss mask, from render boundaries; never from a pattern searched in text.

What the assistant wrote begins where the rendering of everything before its turn, generation prompt included, ends.
So the prefix of a conversation is rendered and compared, which is right for every template: a think block that the
generation prompt opens belongs to the prompt, and the token that closes it to the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import CorpusError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a conversation and the mask of what the assistant wrote (its end-of-turn token included)."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Tokens that open and close a reasoning model's think block (Kimi: `<think>`, `</think>`)."""

    open: str
    close: str


def render_prompt(tokenizer: Any, messages: Sequence[Message], **template: Any) -> list[int]:
    """Token ids of `messages` plus the header after which the assistant speaks. `template`: its variables."""
    return list(
        tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )["input_ids"]
    )


def attach_reply(prompt_ids: Sequence[int], reply_ids: Sequence[int], *, sample: str) -> Rendered:
    """Prompt plus the very tokens that the target generated; the mask is true on those.

    Raises:
        CorpusError: no reply token, so nothing would be supervised.
    """
    if not reply_ids:
        raise CorpusError(
            f"sample {sample} has 0 supervised tokens: its reply is empty",
            rule="a sample needs at least one reply token",
            fix="drop it, or regenerate it with eagle3lab regenerate",
        )
    return Rendered([*prompt_ids, *reply_ids], [False] * len(prompt_ids) + [True] * len(reply_ids))


def render_reply(
    tokenizer: Any,
    messages: Sequence[Message],
    reply: str,
    *,
    turn_end: str | None,
    sample: str,
    reasoning: str | None = None,
    block: Reasoning | None = None,
    **template: Any,
) -> Rendered:
    """Prompt and one reply given as text, the way a server with a reasoning parser returns it.

    Args:
        reply: what stands after the think block, or the whole reply of a model without one.
        turn_end: token that ended the turn; None when the reply was cut by a length limit.
        reasoning: what stands inside the think block.
        block: the target's think tokens. Needed for `reasoning`; without `reasoning` a block that the generation
            prompt left open is closed at once, as the target itself does for an empty thought.

    Raises:
        CorpusError: an empty reply, reasoning without `block`, or a token of `block` that the tokenizer does not have.
    """
    prompt = render_prompt(tokenizer, messages, **template)
    if not (reply or reasoning):
        return attach_reply(prompt, [], sample=sample)
    if reasoning is not None and block is None:
        raise CorpusError(
            f"sample {sample} has reasoning, but the target's think tokens are not known",
            rule="reasoning and reply are joined by the token that closes the think block",
        )
    end = [] if turn_end is None else [_token(tokenizer, turn_end)]
    if block is None:
        return attach_reply(prompt, [*_ids(tokenizer, reply), *end], sample=sample)
    is_open = prompt[-1:] == [_token(tokenizer, block.open)]
    thought = _ids(tokenizer, reasoning or "")
    if thought and not is_open:
        thought = [_token(tokenizer, block.open), *thought]
    close = [_token(tokenizer, block.close)] if is_open or thought else []
    return attach_reply(prompt, [*thought, *close, *_ids(tokenizer, reply), *end], sample=sample)


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], *, turn_end: str, sample: str, **template: Any
) -> Rendered:
    """A whole conversation with every assistant turn supervised, its end-of-turn token included.

    Text between two boundaries is tokenised by itself: a reply's tokens follow its prompt's tokens and never merge
    with them, as when the target generated it.

    Raises:
        CorpusError: no assistant turn, a turn without its end token, or a template that writes an earlier turn
            differently once a later one follows (it drops old reasoning): such a turn was never generated so, and its
            states would be wrong.
    """
    whole = _text(tokenizer, messages, **template)
    ids: list[int] = []
    mask: list[bool] = []
    end, place = _token(tokenizer, turn_end), 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _text(tokenizer, messages[:index], prompt=True, **template)
        turn = _text(tokenizer, messages[: index + 1], **template)
        if not (
            whole.startswith(turn)
            and turn.startswith(prompt)
            and _reasoning_kept(tokenizer, messages, index, **template)
        ):
            raise CorpusError(
                f"sample {sample}: turn {index + 1} of {len(messages)} is rendered otherwise than it was generated",
                rule="a turn is supervised only behind the prompt that it was generated from",
                fix="one sample for each reply: eagle3lab.corpus.chat.render_reply",
            )
        before, reply = _ids(tokenizer, whole[place : len(prompt)]), _ids(tokenizer, turn[len(prompt) :])
        if end not in reply:
            raise CorpusError(f"sample {sample}: turn {index + 1} has no {turn_end}", rule="a turn ends with its token")
        spoken = len(reply) - reply[::-1].index(end)
        ids += [*before, *reply]
        mask += [False] * len(before) + [True] * spoken + [False] * (len(reply) - spoken)
        place = len(turn)
    if not any(mask):
        raise CorpusError(
            f"sample {sample} has 0 supervised tokens: no assistant turn in {len(messages)} messages",
            rule="a sample needs at least one reply token",
        )
    rest = _ids(tokenizer, whole[place:])
    return Rendered([*ids, *rest], [*mask, *([False] * len(rest))])


def _reasoning_kept(tokenizer: Any, messages: Sequence[Message], index: int, **template: Any) -> bool:
    """Whether the reasoning of a turn, if it has any, changes the rendered conversation: else the template drops it."""
    if not messages[index].get("reasoning_content"):
        return True
    without = [dict(message) for message in messages]
    del without[index]["reasoning_content"]
    return _text(tokenizer, without, **template) != _text(tokenizer, messages, **template)


def _text(tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False, **template: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=prompt, tokenize=False, **template))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _token(tokenizer: Any, text: str) -> int:
    """Id of one token. `CorpusError` when the tokenizer splits it or does not know it."""
    ids = _ids(tokenizer, text)
    if len(ids) != 1:
        raise CorpusError(
            f"'{text}' is {len(ids)} tokens {ids} of this tokenizer", rule="turn tokens are one token each"
        )
    return ids[0]
