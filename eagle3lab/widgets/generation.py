"""Step through one generation by hand: what was drafted, what was kept, what the target added, verify step by step.

`Generation.html(place)` is a pure function and is what the tests call; `generation_widget` only wires controls to it.
`static_twin` is the same as one table, for viewers that run no widgets.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3lab.acceptance.anatomy import Step, steps_of
from eagle3lab.acceptance.chain import Decoded
from eagle3lab.core.errors import UsageError
from eagle3lab.plots.tokens import REFUSED, token_html

if TYPE_CHECKING:
    from ipywidgets import VBox

TWIN_STEPS = 12
"""Verify steps that the static twin shows."""
_BOX = '<div style="white-space:pre-wrap;background:#fff;color:#111;padding:.5em;border:1px solid #999">{}</div>'


@dataclass(frozen=True, slots=True)
class Generation:
    """One reply. `decode(tokens)` turns ids into text.

    Attributes:
        title: what a person picks it by. prompt: the user's message.
    """

    title: str
    prompt: str
    reply: Decoded
    decode: Callable[[list[int]], str]

    @property
    def steps(self) -> list[Step]:
        """Its verify steps."""
        return steps_of(self.reply)

    def html(self, place: int) -> str:
        """The text before verify step `place` (from 0), and what that step did.

        Raises:
            UsageError: there is no such step.
        """
        steps = self.steps
        if not 0 <= place < len(steps):
            raise UsageError(f"step {place}", rule=f"this reply has the steps 0 to {len(steps) - 1}")
        step = steps[place]
        before = html.escape(self.decode(self.reply.tokens[: step.place]))
        body = f"<span>{before}</span>{self.drafted(step)}{self.bonus(step)}"
        told = (
            f"<p><b>{html.escape(self.prompt)}</b><br>verify step {place + 1} of {len(steps)}: "
            f"{step.kept} of {len(step.drafts)} drafts accepted, {step.kept + (step.bonus is not None)} tokens won</p>"
        )
        return told + _BOX.format(body)

    def drafted(self, step: Step) -> str:
        """HTML of the drafts: accepted ones marked by position, the rest struck through."""
        texts = [self.decode([token]) for token in step.drafts]
        return "".join(
            token_html(text, number if number <= step.kept else REFUSED) for number, text in enumerate(texts, 1)
        )

    def bonus(self, step: Step) -> str:
        """HTML of the target's own token."""
        return "" if step.bonus is None else f"<b>{html.escape(self.decode([step.bonus]))}</b>"


_TEXT = '<td style="text-align:left">'  # JupyterLab sets every cell to the right, as numbers stand


def static_twin(generation: Generation, steps: int = TWIN_STEPS) -> str:
    """HTML table of the first verify steps."""
    every = generation.steps
    first = html.escape(generation.decode(generation.reply.tokens[:1]))
    rows = [
        f"<tr><td>{number}</td>{_TEXT}{generation.drafted(step)}</td><td>{step.kept}</td>"
        f"{_TEXT}{generation.bonus(step)}</td></tr>"
        for number, step in enumerate(every[:steps], 1)
    ]
    left = len(every) - len(rows)
    more = f"<p>{left} more steps follow.</p>" if left > 0 else ""
    return (
        f"<p><b>{html.escape(generation.prompt)}</b> The first token, from reading the prompt: <b>{first}</b></p>"
        "<table><thead><tr><th>verify step</th><th>drafted (refused ones struck through)</th><th>accepted</th>"
        f"<th>the target's own token</th></tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"
    )


def generation_widget(generations: Sequence[Generation]) -> VBox:
    """Controls above the text: which reply, which verify step, one back and one on.

    Raises:
        UsageError: no reply with a verify step.
    """
    import ipywidgets as w

    shown = [one for one in generations if one.steps]
    if not shown:
        raise UsageError("0 replies with a verify step", rule="at least one to step through")
    which = w.Dropdown(options=[(one.title, number) for number, one in enumerate(shown)], value=0, description="reply")
    place = w.IntSlider(value=0, min=0, max=len(shown[0].steps) - 1, description="step", readout=False)
    back, on = w.Button(description="back", icon="arrow-left"), w.Button(description="on", icon="arrow-right")
    text = w.HTML(value=shown[0].html(0))

    def draw(*_: object) -> None:
        text.value = shown[which.value].html(place.value)

    def pick(*_: object) -> None:
        place.value = 0  # before the new limit: a value above it would be refused
        place.max = len(shown[which.value].steps) - 1
        draw()

    def move(by: int) -> Callable[[object], None]:
        def go(_: object) -> None:
            place.value = min(max(place.value + by, 0), place.max)

        return go

    which.observe(pick, "value")
    place.observe(draw, "value")
    back.on_click(move(-1))
    on.on_click(move(1))
    return w.VBox([w.HBox([which, place, back, on]), text])
