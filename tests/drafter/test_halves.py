"""The embedding half of q, k and v, projected once a token: the same numbers and gradients as u projected whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle3lab.drafter.attention import ttt_attention
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed, Segment, pack, rows_ahead
from tests.drafter.test_checkpoint_peers import mla_draft
from tests.tiny import tiny_config

STEPS = 4


def whole(drafter: Eagle3Drafter, batch: Packed) -> list[Tensor]:
    """`Eagle3Drafter.forward` as the module docstring writes it: u of every slot at every step, projected whole."""
    layer, state, active = drafter.midlayer, drafter.fuse(batch.aux), batch.active
    outputs, later = [], []
    for step in range(STEPS):
        rows = slice(None) if step == 0 else active
        angles = drafter.angles((batch.positions() + step)[rows])
        u, residual = layer.inputs(drafter.embed(batch.shifted(batch.input_ids, step + 1)[rows]), state)
        pair = layer.self_attn.key_value(u, *angles)
        if step == 0:
            first, u, residual, angles = pair, u[active], residual[active], tuple(x[active] for x in angles)
        else:
            later.append(pair)
        query = layer.self_attn.query(u, *angles)
        mixed = ttt_attention(query, *first, later, batch.segments, layer.self_attn.scale)
        state = layer.finish(residual, mixed.flatten(1))
        outputs.append(drafter.norm(state))
    return outputs


def gradients(outputs: list[Tensor], drafter: Eagle3Drafter) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sum((o * torch.randn(o.shape, generator=generator)).sum() for o in outputs).backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return found


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def drafter_and_batch(kind: str) -> tuple[Eagle3Drafter, Packed]:
    torch.manual_seed(0)
    config = mla_draft() if kind == "mla" else tiny_config()
    size, vocabulary = config.hidden_size, config.vocab_size
    drafter = Eagle3Drafter(
        config, torch.randn(vocabulary, size), torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    )
    lengths = [9, 3, 14]  # the second is shorter than K: most of its slots look past its end
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    mask = torch.cat([torch.arange(n) >= n // 3 for n in lengths])
    aux, last = torch.randn(sum(lengths), config.fc_in), torch.randn(sum(lengths), size)
    return drafter, pack(torch.randint(0, vocabulary, (sum(lengths),)), aux, last, offsets, mask)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_states_and_gradients_are_those_of_the_whole_product(kind: str) -> None:
    drafter, batch = drafter_and_batch(kind)
    ours, plain = drafter(batch, STEPS), whole(drafter, batch)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    wanted = gradients(plain, drafter)
    assert off(gradients(ours, drafter), wanted) < 1e-5
    # the wrong version: the token one further
    ids = batch.shifted(batch.input_ids, 1)
    wrong = gradients(drafter(replace(batch, input_ids=ids), STEPS), drafter)
    assert off(wrong, wanted) > 1e-2


def test_rows_ahead_stay_in_their_sample() -> None:
    segments = (Segment(0, 1, 4, 0), Segment(4, 6, 6, 3), Segment(6, 6, 8, 3))
    rows = torch.arange(5.0, dtype=torch.float64)[:, None].requires_grad_()
    assert rows_ahead(rows, segments, 1).squeeze().tolist() == [1, 2, 2, 4, 4]
    assert rows_ahead(rows, segments, 7).squeeze().tolist() == [2, 2, 2, 4, 4]
    for by in (0, 1, 2, 7):
        assert torch.autograd.gradcheck(lambda x, by=by: rows_ahead(x, segments, by), (rows,))
