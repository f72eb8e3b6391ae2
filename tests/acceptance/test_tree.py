"""Trees: shapes, masks, the walk, and text that is the target's own for every shape, batch and end of a reply."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.acceptance.chain import ChainDecoder
from eagle3lab.acceptance.tree import DynamicTree, StaticTree, Tree, tree_mask
from eagle3lab.acceptance.tree_decode import TreeDecoder
from eagle3lab.acceptance.tree_replay import best_tree, rank_tables, tree_walks
from eagle3lab.core.errors import UsageError
from tests.acceptance.lab import LIMIT, counts_of, lab, states_of

SHAPES = {
    "static": StaticTree.branching([3, 2, 1]),
    "uneven": StaticTree([(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1)]),
    "dynamic": DynamicTree(3, 3, 8),
    "deep": DynamicTree(5, 2, 12),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch", [1, 32])
def test_greedy_text_is_that_of_plain_decoding(shape, batch):
    own = lab()
    some = slice(0, 6 if batch == 1 else 40)
    replies = TreeDecoder(own.target, own.drafters["taught"], shape).run(
        own.prompts[some], max_new_tokens=LIMIT, batch=batch
    )
    assert [reply.tokens for reply in replies] == own.plain[some]
    counts = counts_of(replies, shape.steps)
    assert counts.proposed == shape.nodes * counts.verify_steps
    assert counts.accepted > 0 and counts.histogram[0] > 0


def test_a_tree_of_one_branch_is_the_chain():
    own = lab()
    chain = ChainDecoder(own.target, own.drafters["taught"], 3).run(own.prompts, max_new_tokens=LIMIT)
    for shape in (StaticTree.branching([1, 1, 1]), DynamicTree(3, 1, 3)):
        tree = TreeDecoder(own.target, own.drafters["taught"], shape).run(own.prompts, max_new_tokens=LIMIT)
        assert [(r.tokens, r.accepted, r.drafts) for r in tree] == [(r.tokens, r.accepted, r.drafts) for r in chain]


def test_more_branches_keep_more():
    own = lab()
    lengths = [
        counts_of(
            TreeDecoder(own.target, own.drafters["taught"], shape).run(own.prompts, max_new_tokens=LIMIT), 3
        ).accept_length
        for shape in (StaticTree.branching([1, 1, 1]), StaticTree.branching([3, 2, 2]))
    ]
    assert lengths[1] > lengths[0]


@pytest.mark.parametrize("fault", ["no move", "sees siblings", "position is slot"])
def test_wrong_trees_change_the_text(fault, monkeypatch):
    """Wrong versions: the kept branch stays where it was; nodes see each other; rotary positions count nodes."""
    own = lab()

    class Faulty(TreeDecoder):
        def _move(self, cache, length, kept):
            if fault != "no move":
                super()._move(cache, length, kept)

        def _read(self, cache, ids, start, rows=None, positions=None, mask=None):
            return super()._read(cache, ids, start, rows, None if fault == "position is slot" else positions, mask)

    if fault == "sees siblings":
        causal = lambda self: torch.ones(len(self.tokens), *[self.tokens.shape[1] + 1] * 2).bool().tril()  # noqa: E731
        monkeypatch.setattr(Tree, "ancestors", causal)
    replies = Faulty(own.target, own.drafters["taught"], SHAPES["static"]).run(own.prompts, max_new_tokens=LIMIT)
    assert [reply.tokens for reply in replies] != own.plain


def test_end_token_limit_and_context_inside_a_branch(monkeypatch):
    own = lab()
    decoder = TreeDecoder(own.target, own.drafters["taught"], SHAPES["dynamic"])
    for limit in (1, 2, 3, 4):
        replies = decoder.run(own.prompts, max_new_tokens=limit)
        assert [r.tokens for r in replies] == [text[:limit] for text in own.plain]
    monkeypatch.setattr(own.target, "context", 20)
    replies = decoder.run(own.prompts, max_new_tokens=LIMIT)
    assert [r.tokens for r in replies] == [t[: 20 - len(p)] for p, t in zip(own.prompts, own.plain, strict=True)]
    assert any(reply.ended and reply.accepted[-1] > 0 for reply in replies), "some reply ends with a kept draft"


def test_ancestors_and_follow():
    #      0
    #    1   2
    #    3   4 5
    tree = Tree(torch.tensor([[7, 8, 9, 7, 8]]), torch.tensor([[0, 0, 1, 2, 2]]), torch.tensor([[1, 1, 2, 2, 2]]))
    seen = tree.ancestors()[0].long().tolist()
    assert seen[0] == [1, 0, 0, 0, 0, 0] and seen[3] == [1, 1, 0, 1, 0, 0] and seen[5] == [1, 0, 1, 0, 0, 1]
    choice = torch.tensor([[8, 9, 8, 0, 0, 3]])  # root chooses node 2, node 2 chooses place 5
    places, kept = tree.follow(choice, 3)
    assert places.tolist() == [[0, 2, 5, 0]] and kept.tolist() == [2]
    # The same token under another parent is no match: place 4 has token 7, its parent is 2 and not 1.
    assert tree.follow(torch.tensor([[7, 8, 0, 0, 0, 0]]), 3)[1].tolist() == [1]


def test_mask_sees_text_and_own_branch_only():
    seen = torch.tensor([[[True, False], [True, True]]]).expand(2, -1, -1)
    mask = tree_mask(torch.tensor([2, 4]), seen)
    assert mask.shape == (2, 1, 2, 6)
    assert mask[0, 0].long().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert mask[1, 0].long().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


def test_dynamic_tree_keeps_the_best_nodes_and_their_parents():
    shape = DynamicTree(2, 2, 4)
    assert shape.prune(torch.tensor([[-0.1, -2.0, -0.2, -0.3, -3.0, -4.0]])).tolist() == [[0, 1, 2, 3]]
    # A certain child ties with its parent: the parent must stay.
    assert shape.prune(torch.tensor([[-1.0, 0.0, 0.0, -9.0, -9.0, -9.0]])).tolist()[0][:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticTree([(0, 1)]), r"tree node \(0, 1\)"),
        (lambda: StaticTree([]), "without nodes"),
        (lambda: StaticTree.branching([2, 0]), r"tree \[2, 0\]"),
        (lambda: DynamicTree(3, 2, 2), "2 nodes"),
        (lambda: DynamicTree(3, 2, 99), "= 10"),
    ],
)
def test_impossible_shapes_are_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_rank_tables_replay_static_trees_exactly_as_decoding_counts_them():
    own = lab()
    drafter = own.drafters["taught"]
    tables = rank_tables(drafter, states_of(own.target, own.prompts, own.plain), 3, 3)
    for name in ("static", "uneven"):
        decoded = TreeDecoder(own.target, drafter, SHAPES[name]).run(own.prompts, max_new_tokens=LIMIT)
        assert [w.accepted for w in tree_walks(tables, SHAPES[name])] == [r.accepted for r in decoded]
    # The wrong version: ranks one slot late.
    late = [table.roll(1, 1) for table in tables]
    assert [w.accepted for w in tree_walks(late, SHAPES["static"])] != [r.accepted for r in decoded]


def test_best_tree_takes_the_paths_that_the_text_goes_through():
    # Ranks of two draft steps at six slots; 2 = not among the top 2.
    table = torch.tensor([[0, 0, 0, 1, 2, 2], [1, 1, 0, 0, 2, 2]])
    assert best_tree([table], 2, 3).paths == [(0,), (1,), (0, 1)]
    assert best_tree([table], 2, 1).paths == [(0,)]
    assert [w.accepted for w in tree_walks([table], StaticTree([(0,), (0, 1)]))] == [[2, 0]]
