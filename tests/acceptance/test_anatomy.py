"""A reply taken apart: steps, judged places, where chains end; the HTML and the controls that show it."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest
import torch

from eagle3lab.acceptance.anatomy import (
    LINE,
    OPEN,
    OUTSIDE,
    SURE,
    Step,
    entropy,
    judged,
    lost_json,
    steps_of,
    where_lost,
)
from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.core.errors import UsageError
from eagle3lab.widgets.generation import Generation, generation_widget, static_twin
from tests.acceptance.lab import LIMIT, counts_of, lab

# Prefill gives 5; two drafts kept and 8 for the refused one; none kept; the reply ends inside the last chain.
REPLY = Decoded([5, 6, 7, 8, 9, 3, 4], [2, 0, 2], [[6, 7, 1], [2, 2, 2], [3, 4, 5]], ended=True)
KNOWN = torch.tensor([token != 8 for token in range(10)])
ENTROPIES = torch.tensor([0.0, 0.1, 0.2, 0.3, 2.0, 0.1, 0.2])


def words(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_steps_and_judged_places_by_hand():
    assert steps_of(REPLY) == [Step(1, (6, 7, 1), 2, 8), Step(4, (2, 2, 2), 0, 9), Step(5, (3, 4, 5), 2, None)]
    assert list(judged(REPLY)) == [(1, True), (2, True), (3, False), (4, False), (5, True), (6, True)]


def test_steps_of_decoded_replies_spell_the_text():
    own = lab()
    replies = ChainDecoder(own.target, own.drafters["taught"], 3).run(own.prompts, max_new_tokens=LIMIT)
    for reply in replies:
        text = reply.tokens[:1]
        for step in steps_of(reply):
            assert step.place == len(text)
            text += [*step.drafts[: step.kept], *([] if step.bonus is None else [step.bonus])]
            refused = step.bonus is not None and step.kept < len(step.drafts)
            assert not refused or step.drafts[step.kept] != step.bonus, "a refused draft is not the target's token"
        assert text == reply.tokens
    counts = counts_of(replies, 3)
    assert sum(kept for reply in replies for _, kept in judged(reply)) == counts.accepted


def test_every_judged_draft_is_counted_once_and_by_the_first_sort_that_fits():
    rows = where_lost([REPLY], [ENTROPIES], KNOWN, lambda token: token == 9)
    table = {row.sort: (row.judged, row.kept, row.refused) for row in rows}
    assert table == {OUTSIDE: (1, 0, 1), LINE: (1, 1, 0), OPEN: (1, 0, 1), SURE: (3, 3, 0)}
    assert sum(row.judged for row in rows) == len(list(judged(REPLY)))
    # Wrong version: the entropy is that of the token before.
    assert where_lost([REPLY], [ENTROPIES.roll(1)], KNOWN, lambda token: token == 9) != rows
    assert lost_json(rows)[0] == {"sort": OUTSIDE, "judged": 1, "kept": 0, "refused": 1}


def test_entropy_in_nats():
    assert float(entropy(torch.zeros(4))) == pytest.approx(math.log(4))
    assert float(entropy(torch.tensor([0.0, float("-inf")]))) == 0.0


class Marks(HTMLParser):
    """Texts inside `ins`, `del` and `b`."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.open, self.found = [], {"ins": [], "del": [], "b": []}
        self.feed(code)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] in self.found:
            self.found[self.open[-1]].append(data)


def test_one_step_in_html():
    one = Generation("first", "<what?>", REPLY, words)
    marks = Marks(one.html(0)).found
    assert marks == {"ins": ["<6>", "<7>"], "del": ["<1>"], "b": ["<what?>", "<8>"]}
    assert "verify step 1 of 3: 2 of 3 drafts accepted, 3 tokens won" in one.html(0)
    assert Marks(one.html(2)).found["del"] == ["<5>"] and "2 tokens won" in one.html(2)
    with pytest.raises(UsageError, match="the steps 0 to 2"):
        one.html(3)
    twin = Marks(static_twin(one, steps=2)).found
    assert twin["del"] == ["<1>", "<2>", "<2>", "<2>"] and "1 more steps follow" in static_twin(one, steps=2)


def test_controls_walk_through_the_steps():
    pytest.importorskip("ipywidgets")
    short = Generation("second", "again", Decoded([1, 2], [0], [[3, 3, 3]]), words)
    box = generation_widget([Generation("first", "what?", REPLY, words), short])
    (which, place, back, on), text = box.children[0].children, box.children[1]
    on.click()
    on.click()
    on.click()  # there is no fourth step
    assert place.value == 2 and "verify step 3 of 3" in text.value
    which.value = 1
    assert place.max == 0 and "verify step 1 of 1" in text.value and "again" in text.value
    back.click()
    assert place.value == 0
    with pytest.raises(UsageError, match="0 replies"):
        generation_widget([Generation("empty", "p", Decoded([1]), words)])
