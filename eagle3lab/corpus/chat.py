"""Chat rendering and the loss mask, from render boundaries; never from a pattern searched in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import CorpusError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a conversation and the mask of what the assistant wrote (its end-of-turn token included)."""

    input_ids: list[int]
    loss_mask: list[bool]


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` plus the header after which the assistant speaks."""
    return list(
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
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
