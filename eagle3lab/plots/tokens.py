"""Replies as coloured text: which tokens the drafter wrote and which the target had to add."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3lab.plots.style import PALETTE

ORIGINS = ("target", "draft 1", "draft 2", "draft 3", "draft 4 or later")
_FILL = ("transparent", "#CFE6F5", "#9CCBEB", "#6AB0E0", "#3F97D3")


@dataclass(frozen=True, slots=True)
class ColouredReply:
    """Tokens of one reply with where each came from.

    Attributes:
        prompt: the user's message.
        tokens: (text, origin) in order; origin 0 = the target's own (bonus) token, j >= 1 = accepted draft position j.
    """

    prompt: str
    tokens: Sequence[tuple[str, int]]

    @property
    def share_drafted(self) -> float | None:
        """Share of the reply's tokens that were drafted; None for an empty reply."""
        return sum(origin > 0 for _, origin in self.tokens) / len(self.tokens) if self.tokens else None


def coloured_html(replies: Sequence[ColouredReply]) -> str:
    """HTML of the replies. Every piece of text is escaped; depth shows as fill and as underline, not by colour alone.

    Text colours are fixed to black on light fills, so it reads the same in light and in dark pages.
    """
    legend = " ".join(_token(name, index) for index, name in enumerate(ORIGINS))
    parts = [f'<p style="margin:.3em 0">{legend}</p>']
    for reply in replies:
        share = reply.share_drafted
        told = "empty reply" if share is None else f"{share:.0%} of {len(reply.tokens)} tokens were drafted"
        body = "".join(_token(text, origin) for text, origin in reply.tokens)
        parts.append(
            f'<figure style="margin:.8em 0"><figcaption><b>{html.escape(reply.prompt)}</b> ({told})</figcaption>'
            f'<div style="white-space:pre-wrap;background:#fff;color:#111;padding:.5em;border:1px solid #999">{body}'
            "</div></figure>"
        )
    return "\n".join(parts)


def coloured_text(reply: ColouredReply) -> str:
    """The same without colour: accepted drafts stand in [brackets], one pair a run of drafts."""
    out, inside = [], False
    for text, origin in reply.tokens:
        if (origin > 0) != inside:
            out.append("[" if origin > 0 else "]")
            inside = origin > 0
        out.append(text)
    return "".join(out) + ("]" if inside else "")


def _token(text: str, origin: int) -> str:
    if origin <= 0:
        return f"<span>{html.escape(text)}</span>"
    fill = _FILL[min(origin, len(_FILL) - 1)]
    rule = "solid" if origin == 1 else "double"
    return (
        f'<span title="draft position {origin}" style="background:{fill};color:#111;'
        f'border-bottom:2px {rule} {PALETTE[0]}">{html.escape(text)}</span>'
    )
