"""A loss over a part of the head's rows: which rows, that its gradient is that of the smaller vocabulary, that the
numbers shown are over all rows, and that resume and ranks see the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3lab.training.conventions import labelled
from eagle3lab.training.head_rows import HeadRows, places
from eagle3lab.training.loss import reference_loss
from tests.training import jobs

SOME = {"head_rows": 30, "log_every": 2}


@pytest.fixture(scope="module")
def straight(states, tmp_path_factory):
    return jobs.trained(states, tmp_path_factory.mktemp("straight"), **SOME)


def chooser(size: int, vocabulary: int = 2000) -> HeadRows:
    """Token 2i is draft token i, odd tokens are out of the vocabulary; the higher the id the more frequent."""
    lookup = torch.where(torch.arange(2 * vocabulary) % 2 == 0, torch.arange(2 * vocabulary) // 2, -1)
    return HeadRows(torch.arange(vocabulary), lookup, size, seed=3, stop=10)


def test_frequent_ones_the_texts_own_and_drawn_ones() -> None:
    text = torch.tensor([0, 2, 2, 46, 47, 3999])
    rows = chooser(512)(5, text)
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) == 512
    assert set(range(2000 - 341, 2000)) <= set(rows.tolist()), "two thirds are the most frequent"
    assert {0, 1, 23} <= set(rows.tolist()), "whatever stands in the text"
    drawn = set(rows.tolist()) - set(range(2000 - 341, 2000)) - {0, 1, 23}
    assert len(drawn) == 512 - 341 - 3
    assert torch.equal(rows, chooser(512)(5, text)) and not torch.equal(rows, chooser(512)(6, text))


def test_a_text_with_more_tokens_than_rows_keeps_all_of_them() -> None:
    rows = chooser(256)(0, torch.arange(0, 800, 2))
    assert set(range(400)) <= set(rows.tolist()) and len(rows) % 128 == 0
    assert len(rows) >= 400 + 170 + 32, "its own, the frequent and an eighth of 256 drawn"
    assert len(chooser(256, 300)(0, torch.arange(0, 600, 2))) == 300, "never more than there are"


def test_the_last_steps_run_over_all_rows(states: Path, tmp_path: Path) -> None:
    assert chooser(512)(9, torch.tensor([0])) is not None and chooser(512)(10, torch.tensor([0])) is None
    made = jobs.trainer(states, tmp_path, **SOME, full_head_share=0.25)
    assert [made.reader(step).rows is None for step in range(12)] == [False] * 9 + [True] * 3


def test_places() -> None:
    rows = torch.tensor([2, 5, 9])
    assert places(rows, torch.tensor([[5, -1], [9, 10], [2, 0]])).tolist() == [[1, -1], [2, -1], [0, -1]]


def test_gradients_are_those_of_the_smaller_vocabulary(states: Path, tmp_path: Path) -> None:
    made = jobs.trainer(states, tmp_path, **SOME)
    share = made.reader(0)
    assert share.rows is not None and 40 < len(share.rows) < 60
    made.step(0, share.batch, share.bare, share.rows)
    ours = {name: p.grad.clone() for name, p in made.drafter.named_parameters()}
    plain = jobs.trainer(states, tmp_path, **SOME)
    hidden, head = plain.drafter(share.batch, 3), plain.drafter.lm_head.weight

    def gradients(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        plain.drafter.zero_grad()
        supervision = labelled("served", share.bare, places(rows, plain.choice(share.batch)))
        loss = reference_loss(hidden, head[rows], plain.teacher_head[rows], share.batch.last, supervision)
        loss.backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(plain.drafter.parameters(), plain.settings.clip)
        return {name: p.grad.clone() for name, p in plain.drafter.named_parameters()}

    def apart(theirs: dict[str, torch.Tensor]) -> float:
        return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in ours)

    assert apart(gradients(share.rows)) < 1e-5
    assert apart(gradients(torch.arange(60))) > 1e-3, "another choice of rows is another gradient"
    untouched = torch.ones(60, dtype=torch.bool)
    untouched[share.rows] = False
    assert ours["lm_head.weight"][untouched].abs().sum() == 0 < int(untouched.sum())


def test_a_step_leaves_nothing_in_the_next_ones_gradient(states: Path, tmp_path: Path) -> None:
    made = jobs.trainer(states, tmp_path, **SOME, full_head_share=0.5)
    head, before = made.drafter.lm_head.weight, torch.zeros(60, dtype=torch.bool)
    for step in range(3):
        share = made.reader(step)
        made.step(step, share.batch, share.bare, share.rows)
        without = torch.ones(60, dtype=torch.bool)
        without[share.rows] = False
        assert head.grad[without].abs().sum() == 0 < head.grad[share.rows].abs().sum()
        assert step == 0 or before[without].any(), "rows of the step before are among those that must be cleared"
        before = ~without
    share = made.reader(11)
    made.step(11, share.batch, share.bare, share.rows)
    assert share.rows is None and head.grad.abs().sum(1).count_nonzero() == 60


def test_what_is_shown_is_over_all_rows(states: Path, straight: dict, tmp_path: Path) -> None:
    """The first step of both starts from the same weights."""
    some, every = ({**SOME, "head_rows": n, "log_every": 1, "steps": 1} for n in (30, 0))
    one, other = (jobs.trained(states, tmp_path / str(n), **kind) for n, kind in enumerate((some, every)))
    for name in ("loss", "loss_by_step", "hits", "counted", "expected_acceptance_by_step"):
        assert one["history"][0][name] == pytest.approx(other["history"][0][name], rel=1e-6), name
    assert one["history"][0]["gradient_norm"] != pytest.approx(other["history"][0]["gradient_norm"], rel=1e-3)
    assert [row["step"] for row in straight["history"]] == [2, 4, 6, 8, 10, 12]
    assert all(row["loss"] > 0 and None not in row["accuracy_by_step"] for row in straight["history"])


def test_rows_shown_more_often_change_nothing(states: Path, straight: dict, tmp_path: Path) -> None:
    often = jobs.trained(states, tmp_path, **(SOME | {"log_every": 1}))
    for row, same in zip(straight["history"], often["history"][1::2], strict=True):
        assert row["loss"] == same["loss"] and row["hits"] == same["hits"]
    assert often["held_out"] == straight["held_out"]


def test_killed_and_resumed(states: Path, straight: dict, tmp_path: Path) -> None:
    jobs.trained(states, tmp_path, kill_at=7, **SOME)
    assert jobs.trained(states, tmp_path, **SOME) == straight


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_choose_the_same_rows(states: Path, straight: dict, tmp_path: Path, shards: int) -> None:
    together = jobs.trained(states, tmp_path, ranks=2, shards=shards, **SOME)
    for one, other in zip(together["history"], straight["history"], strict=True):
        assert one["counted"] == other["counted"]
        for name in ("loss", "gradient_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), (one["step"], name)


def _own_rows(states: Path, folder: Path) -> None:
    """Job: every rank takes the rows of its own samples' text."""
    made = jobs.trainer(states, folder, **SOME)
    original = made.reader.head_rows
    made.reader.head_rows = lambda step, ids: original(step, ids[: len(ids) // 2] if made.world.rank else ids)
    result = made.run()
    if made.world.leader:
        (folder / "result.json").write_text(json.dumps(jobs._rows(result)))
    made.world.leave()


def test_rows_of_a_ranks_own_are_caught(states: Path, straight: dict, tmp_path: Path) -> None:
    assert jobs.launch(_own_rows, states, tmp_path, ranks=2) == [0, 0]
    wrong = json.loads((tmp_path / "result.json").read_text())
    pairs = zip(wrong["history"], straight["history"], strict=True)
    assert any(one["loss"] != pytest.approx(other["loss"], rel=1e-5) for one, other in pairs)
