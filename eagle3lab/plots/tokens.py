"""Replies as coloured text: which tokens the drafter wrote, which of its drafts were refused, what the target added."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3lab.plots.style import PALETTE

ORIGINS = ("target", "draft 1", "draft 2", "draft 3", "draft 4 or later")
REFUSED = -1
"""Origin of a drafted token that the target refused: shown, and no part of the reply."""
_FILL = ("transparent", "#CFE6F5", "#9CCBEB", "#6AB0E0", "#3F97D3")


@dataclass(frozen=True, slots=True)
class ColouredReply:
    """Tokens of one reply with where each came from.

    Attributes:
        prompt: the user's message.
        tokens: (text, origin) in order; origin 0 = the target's own (bonus) token, j >= 1 = accepted draft position j,
            `REFUSED` = a draft in whose place the next token came.
        note: said after the prompt.
    """

    prompt: str
    tokens: Sequence[tuple[str, int]]
    note: str = ""

    @property
    def written(self) -> list[tuple[str, int]]:
        """The tokens of the reply itself."""
        return [(text, origin) for text, origin in self.tokens if origin != REFUSED]

    @property
    def share_drafted(self) -> float | None:
        """Share of the reply's tokens that were drafted; None for an empty reply."""
        return sum(origin > 0 for _, origin in self.written) / len(self.written) if self.written else None


def coloured_html(replies: Sequence[ColouredReply]) -> str:
    """HTML of the replies. Every piece of text is escaped; depth shows as fill and as underline, not by colour alone.

    Accepted drafts stand in `ins`, refused ones in `del`: a page that drops styles still underlines and strikes them.
    Text colours are fixed to dark on light fills, so it reads the same in light and in dark pages.
    """
    names = [*enumerate(ORIGINS), (REFUSED, "refused draft")]
    legend = " ".join(token_html(name, index) for index, name in names)
    parts = [f'<p style="margin:.3em 0">{legend}</p>']
    for reply in replies:
        share = reply.share_drafted
        told = "empty reply" if share is None else f"{share:.0%} of {len(reply.written)} tokens were drafted"
        told += f"; {html.escape(reply.note)}" if reply.note else ""
        body = "".join(token_html(text, origin) for text, origin in reply.tokens)
        parts.append(
            f'<figure style="margin:.8em 0"><figcaption><b>{html.escape(reply.prompt)}</b> ({told})</figcaption>'
            f'<div style="white-space:pre-wrap;background:#fff;color:#111;padding:.5em;border:1px solid #999">{body}'
            "</div></figure>"
        )
    return "\n".join(parts)


def coloured_text(reply: ColouredReply) -> str:
    """The same without colour: accepted drafts stand in [brackets], one pair a run of drafts."""
    out, inside = [], False
    for text, origin in reply.written:
        if (origin > 0) != inside:
            out.append("[" if origin > 0 else "]")
            inside = origin > 0
        out.append(text)
    return "".join(out) + ("]" if inside else "")


def token_html(text: str, origin: int) -> str:
    """One token, escaped, marked by its origin (`ColouredReply.tokens`)."""
    if origin == REFUSED:
        return f'<del title="refused draft" style="color:#8A1C1C;background:#F7E6E4">{_visible(text)}</del>'
    if origin <= 0:
        return f"<span>{html.escape(text)}</span>"
    fill = _FILL[min(origin, len(_FILL) - 1)]
    rule = "solid" if origin == 1 else "double"
    return (
        f'<ins title="draft position {origin}" style="background:{fill};color:#111;text-decoration:none;'
        f'border-bottom:2px {rule} {PALETTE[0]}">{html.escape(text)}</ins>'
    )


def _visible(text: str) -> str:
    """Line ends of a refused draft are shown as a sign: they must not break the reply's own lines."""
    return html.escape(text.replace("\n", "\u21b5"))
