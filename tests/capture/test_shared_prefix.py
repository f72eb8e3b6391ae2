"""What all conversations begin with is read once a batch, and the states are those of reading each one whole."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.capture import transformers_engine
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.capture.transformers_engine import capture, capture_batch, capture_in_memory
from eagle3lab.corpus.chat import Rendered
from tests.capture.capturing import conversations, manifest, split
from tests.tiny import HIDDEN, POINTS, tiny_target

PREFIX = [9, 8, 7, 6, 5]


def prefixed() -> list[Rendered]:
    return [
        Rendered([*PREFIX, *sample.input_ids], [False] * len(PREFIX) + sample.loss_mask)
        for sample in conversations(count=12)
    ]


def difference(found, expected) -> float:
    """Largest difference of states, relative to their size; tokens and masks must be equal."""
    worst = 0.0
    for member, sample in expected.items():
        other = found[member]
        assert torch.equal(other.input_ids, sample.input_ids) and torch.equal(other.loss_mask, sample.loss_mask)
        assert other.aux.shape == (len(sample.input_ids), len(POINTS) * HIDDEN)
        for a, b in ((other.aux, sample.aux), (other.last, sample.last)):
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


@pytest.mark.parametrize("pre_norm", [False, True])
def test_states_are_those_of_whole_rows(pre_norm):
    target, samples = tiny_target(), prefixed()
    members = list(range(len(samples)))

    def captured(batch, shared=0):
        return capture_batch(target, samples, batch, POINTS, pre_norm=pre_norm, shared=shared)

    alone = {m: captured([m])[m] for m in members}
    assert difference(captured(members, shared=len(PREFIX)), alone) < 1e-5
    # wrong: the first row's next token taken for everyone's
    assert difference(captured(members, shared=len(PREFIX) + 1), alone) > 1e-2


def test_in_memory_in_the_order_of_the_samples():
    target, samples = tiny_target(), prefixed()
    found = capture_in_memory(target, samples, POINTS)
    assert [sample.sample_id for sample in found] == list(range(len(samples)))
    alone = {m: capture_batch(target, samples, [m], POINTS)[m] for m in range(len(samples))}
    assert difference(dict(enumerate(found)), alone) < 1e-5


def test_capture_reads_the_prefix_once_a_batch(tmp_path, monkeypatch):
    target, samples, read = tiny_target(), prefixed(), []
    states = target.states
    monkeypatch.setattr(target, "states", lambda ids, *a, **named: read.append(ids.numel()) or states(ids, *a, **named))
    stored, tokens = {}, {}
    for name in ("once", "every row"):
        if name == "every row":
            monkeypatch.setattr(transformers_engine, "prefix_length", lambda _: 0)
        writer = StoreWriter(tmp_path / name, manifest(planned_shards=len(split(samples))))
        capture(target, samples, writer, split(samples), batch_tokens=200)
        stored[name], tokens[name] = Store(tmp_path / name), sum(read)
        read.clear()
    assert tokens["once"] <= tokens["every row"] - 4 * len(PREFIX)
    for number in range(len(samples)):
        once, whole = (stored[name][number] for name in stored)
        assert torch.equal(once.input_ids, whole.input_ids)
        assert torch.allclose(once.aux.float(), whole.aux.float(), atol=0.05, rtol=0.02)  # stored as bf16
