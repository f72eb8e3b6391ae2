"""What notebook 05 shows, from a real measurement of a small target: tables, coloured text, comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.corpus.prompts import Prompt
from eagle3lab.steps import accept, accept_look, figures
from tests.acceptance.lab import LIMIT, lab

K = 3


class Words:
    """Token 2 is a line end, every other one its number."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("\n" if token == 2 else f" {token}" for token in tokens)


@pytest.fixture(scope="module")
def found() -> accept.AcceptSummary:
    own = lab()
    prompts = [Prompt(str(i), "even" if i % 2 == 0 else "odd", f"prompt | {i}") for i in range(20)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own.target, "tokenizer", Words())
        ids = {prompt.prompt: tokens for prompt, tokens in zip(prompts, own.prompts, strict=False)}
        patched.setattr(accept, "render_prompt", lambda _, messages: ids[messages[0]["content"]])
        drafter = own.drafters["taught"]
        written, timing = accept.decode_sets(own.target, drafter, {"own": prompts}, k=K, max_new_tokens=LIMIT)
        result = accept.measure_set(
            own.target, drafter, "own", prompts, written["own"], k=K, max_new_tokens=LIMIT, control_prompts=12, seed=0,
            rival=own.drafters["fresh"],
        )  # fmt: skip
    return accept.AcceptSummary({"own": result}, K, Path("drafter"), timing, {}, Words().decode)


def test_counts_are_those_of_decoding_and_the_text_is_the_targets(found: accept.AcceptSummary) -> None:
    own, metrics = lab(), found.sets["own"].metrics
    replies = ChainDecoder(own.target, own.drafters["taught"], K).run(own.prompts[:20], max_new_tokens=LIMIT, batch=1)
    assert metrics["counts"]["accepted"] == sum(sum(reply.accepted) for reply in replies)
    assert metrics["lossless"] and [r.tokens for r in found.sets["own"].replies] == own.plain[:20]


def test_comparisons_are_paired_and_have_the_sign_of_this_drafter_less_the_other(found: accept.AcceptSummary) -> None:
    compared = found.sets["own"].metrics["compared"]
    assert set(compared) == {"lookup", "fc_zeroed", "fc_points_shuffled", "untrained", "other"}
    for name in ("untrained", "other"):
        assert compared[name]["prompts"] == 12 and compared[name]["interval"][0] > 0, (
            "a taught drafter beats a fresh one"
        )
    table = accept_look.comparison_table(found)
    assert "| own | the run's own drafter | 12 |" in table and "| own | n-gram look-up | 20 |" in table


def test_refusals_add_up_to_those_of_the_replayed_prompts(found: accept.AcceptSummary) -> None:
    result = found.sets["own"]
    counts = [reply.counts("", K) for reply in result.replies[:12]]
    lost = result.metrics["lost"]
    assert sum(row["kept"] for row in lost) == sum(one.accepted for one in counts)
    outside = next(row for row in lost if row["sort"] == "not in the draft vocabulary")
    assert outside["kept"] == 0 < outside["judged"], "what the vocabulary does not hold is never kept"
    missing = [i for i in range(97) if not bool(lab().drafters["taught"].t2d[i])]
    assert outside["judged"] <= sum(token in missing for reply in result.replies[:12] for token in reply.tokens)
    assert accept_look.lost_table(found).count("| own |") == 4


def test_kinds_and_ends_of_the_ranking(found: accept.AcceptSummary) -> None:
    kinds = accept_look.kinds_table(found)
    assert "| own | even | 10 |" in kinds and "| own | odd | 10 |" in kinds
    lengths = [float(line.split(" | ")[1]) for line in accept_look.prompts_table(found).splitlines()[2:]]
    assert len(lengths) == 6 and lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert "prompt \\| " in accept_look.prompts_table(found), "a pipe does not break the table"


def test_coloured_text_is_the_reply_and_shows_what_was_refused(found: accept.AcceptSummary) -> None:
    result = found.sets["own"]
    for index, reply in enumerate(result.replies):
        shown = figures.coloured_reply(found, result, index)
        assert "".join(text for text, _ in shown.written) == Words().decode(reply.tokens)
        assert sum(origin > 0 for _, origin in shown.tokens) == sum(reply.accepted)
    html = figures.coloured(found)
    assert "worst of own" in html and "best of own" in html and "<del" in html and "<ins" in html


def test_accept_length_and_its_interval_come_first(found: accept.AcceptSummary) -> None:
    low, high = found.sets["own"].metrics["accept_length_interval"]
    assert f"[{low:.2f}, {high:.2f}]" in accept_look.headline(found).splitlines()[0]


def test_entropy_belongs_to_the_token_it_chose() -> None:
    """The wrong version is one slot off: it takes the state that has read the token already."""
    own = lab()
    prompt, reply = own.prompts[0], own.plain[0]
    sample = accept.capture_replies(own.target, [prompt], [reply], own.drafters["taught"].config.points)[0]
    right = own.target.logits(sample.last[len(prompt) - 1 : -1]).argmax(-1)
    assert right.tolist() == reply
    assert not torch.equal(own.target.logits(sample.last[len(prompt) :]).argmax(-1), right)
