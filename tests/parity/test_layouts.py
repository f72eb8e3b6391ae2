"""What we write is what the trainers themselves read: drafters and states through their own classes, in their own
environments. No target is needed; the drafters and states are small and random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.capture.exchange import convert_states
from eagle3lab.drafter.checkpoint import save_drafter
from tests.capture.test_formats import LENGTHS, samples, store, target
from tests.drafter.test_checkpoint_variants import V, config, inputs, random_drafter, run
from tests.parity.conftest import run_peer

LAYOUTS = {
    "speculators": [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"draft_vocab_size": V},
    ],
    "specforge": [{}, {"fc_norm": True}, {"draft_vocab_size": V}],
}


def read_by(peer: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run `peers/PEER_reads.py` on a folder."""
    run_peer(peer, "reads", folder)
    return load_file(folder / "outputs.safetensors")


@pytest.mark.parametrize(("peer", "flags"), [(peer, flags) for peer, several in LAYOUTS.items() for flags in several])
def test_trainers_read_what_we_write(tmp_path, peer, flags):
    drafter, (ids, aux) = random_drafter(config(**flags)), inputs()
    save_drafter(drafter, tmp_path / "drafter", dtype=torch.float32, record={}, layout=peer)
    save_file(
        {"ids": ids, "aux": aux, "embedding": drafter.embedding, "lengths": torch.tensor(LENGTHS)},
        tmp_path / "inputs.safetensors",
    )
    source = store(tmp_path / "source", "pre_norm")
    norm = target(tmp_path / "target") if peer == "specforge" else None
    convert_states(source, tmp_path / "states", peer, target=norm)
    found = read_by(peer, tmp_path)

    steps = [drafter.lm_head(hidden) for hidden in run(drafter, ids, aux)]
    for step in range(sum(name.startswith("logits_") for name in found)):
        assert float((found[f"logits_{step}"] - steps[step]).abs().max()) < 1e-4, step
    # a wrong version: the blocks of fc in another order
    drafter.fc.weight.copy_(drafter.fc.weight.roll(config().hidden_size, 1))
    moved = drafter.lm_head(run(drafter, ids, aux)[0])
    assert float((found["logits_0"] - moved).abs().max()) > 0.05

    sample = samples()[1]
    assert torch.equal(found["row_input_ids"], sample.input_ids)
    if peer == "speculators":
        assert torch.equal(found["row_hidden_states"], sample.aux)
        assert torch.equal(found["row_verifier_last_hidden_states"], sample.last)
        assert torch.equal(found["row_loss_mask"].bool(), sample.loss_mask)
    else:
        assert torch.equal(found["row_aux_hidden_state"][0], sample.aux)
        assert not torch.equal(found["row_hidden_state"][0], sample.last)  # normed on the way
