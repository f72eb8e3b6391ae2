"""A store captured before the final norm trains like one captured after it; reading it as it stands does not."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3lab.capture.store import Sample, Store, StoreWriter
from eagle3lab.training.trainer import Trainer, TrainSettings
from tests.tiny import HIDDEN, POINTS, VOCAB, tiny_drafter, tiny_target
from tests.training import jobs


def store(folder: Path, last: str, states: torch.Tensor) -> Store:
    torch.manual_seed(1)
    ids, aux = torch.randint(0, VOCAB, (len(states),)), torch.randn(len(states), HIDDEN * len(POINTS))
    manifest = jobs.manifest(1).model_copy(update={"last": last})
    StoreWriter(folder, manifest).write(0, [Sample(0, ids, torch.arange(len(states)) > 3, aux, states)])
    return Store(folder)


def first_loss(opened: Store, target, tmp_path: Path) -> float:
    settings = TrainSettings(steps=1, ttt_steps=2, precision="fp32")
    trainer = Trainer(tiny_drafter(target), target, opened, [0], [], settings, tmp_path / "run")
    share = trainer.reader(0)
    return float(trainer.step(0, share.batch, share.bare)[0])


def test_pre_norm_store_trains_on_normed_states(tmp_path):
    target = tiny_target()
    with torch.no_grad():
        target.final_norm.weight.copy_(1 + 0.5 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4)))
        before = 3 * torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(5))
        after = target.final_norm(before)
    right = first_loss(store(tmp_path / "post", "post_norm", after), target, tmp_path)
    assert abs(first_loss(store(tmp_path / "pre", "pre_norm", before), target, tmp_path) - right) < 1e-5
    # the wrong version: states before the norm that say they are after it
    assert abs(first_loss(store(tmp_path / "lie", "post_norm", before), target, tmp_path) - right) > 1e-2
