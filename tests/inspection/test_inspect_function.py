"""What captured states decide: a hand-made drafter that reads its token from one point, and broken copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from eagle3lab.capture.manifest import StatesManifest  # noqa: E402
from eagle3lab.capture.store import Sample, Store, StoreWriter  # noqa: E402
from eagle3lab.core.errors import StoreError  # noqa: E402
from eagle3lab.drafter.checkpoint import save_drafter  # noqa: E402
from eagle3lab.drafter.model import Eagle3Drafter  # noqa: E402
from eagle3lab.inspection import Inspection, inspect_checkpoint  # noqa: E402
from eagle3lab.inspection.functional import change_block, pick, reordered  # noqa: E402
from eagle3lab.inspection.geometry import geometry, principal_directions  # noqa: E402
from tests.tiny import BLOCKS, HIDDEN, POINTS, tiny_config  # noqa: E402

SAMPLES, TOKENS, PROMPT = 8, 60, 10
READ = 1
"""The point (of three) whose states carry the token that will be drafted."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target of 32 tokens with orthonormal embeddings, and states whose middle point tells the token after the next.

    A fifth of the tokens is told wrongly, so that acceptance varies between prompts.
    """
    folder = tmp_path_factory.mktemp("function")
    generator = torch.Generator().manual_seed(0)
    embedding = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    (folder / "target").mkdir()
    save_file({"model.embed_tokens.weight": embedding.contiguous()}, folder / "target" / "model.safetensors")
    (folder / "target" / "config.json").write_text(f'{{"model_type": "llama", "num_hidden_layers": {BLOCKS}}}')
    manifest = StatesManifest(
        target_id="tiny", target_weight_sha256="a" * 64, tokenizer_sha256="b" * 64, template_sha256="c" * 64,
        points=POINTS, points_checkpoint=[p - 1 for p in POINTS], blocks=BLOCKS, family="llama", hidden_size=HIDDEN,
        last="post_norm", engine="transformers", corpus_sha256="d" * 64, greedy=True, seed=0, planned_shards=1,
    )  # fmt: skip
    samples = []
    for index in range(SAMPLES):
        ids = torch.randint(0, HIDDEN, (TOKENS,), generator=generator)
        told = torch.cat([ids[2:], ids[:2]])
        wrong = torch.rand(TOKENS, generator=generator) < 0.2
        told = torch.where(wrong, torch.randint(0, HIDDEN, (TOKENS,), generator=generator), told)
        aux = torch.randn(TOKENS, 3 * HIDDEN, generator=generator) * 0.02
        aux[:, READ * HIDDEN : (READ + 1) * HIDDEN] += embedding[told]
        aux[:, 2 * HIDDEN :] *= 40  # a loud point that says nothing
        last = torch.randn(TOKENS, HIDDEN, generator=generator)
        samples.append(Sample(index, ids, torch.arange(TOKENS) >= PROMPT, aux.bfloat16(), last.bfloat16()))
    StoreWriter(folder / "states", manifest).write(0, samples)
    return folder


def drafter(place: Path, folder: Path, fc: torch.Tensor, *, deaf: bool = False) -> Path:
    """A drafter whose layer passes the state on, and whose head names the nearest embedding."""
    from safetensors.torch import load_file

    embedding = load_file(place / "target" / "model.safetensors")["model.embed_tokens.weight"]
    made = Eagle3Drafter(tiny_config(HIDDEN, vocab_size=HIDDEN), embedding, torch.zeros(HIDDEN, dtype=torch.int64))
    with torch.no_grad():
        made.fc.weight.copy_(fc)
        made.midlayer.self_attn.o_proj.weight.zero_()
        made.midlayer.mlp.down_proj.weight.zero_()
        made.lm_head.weight.copy_(embedding)
        if deaf:
            made.norm.weight.zero_()
    save_drafter(made, folder, record={"init": {"fc": {"family": "kaiming-uniform"}}})
    return folder


def reading(point: int) -> torch.Tensor:
    """fc that reads one point and a little of everything else."""
    fc = torch.randn(HIDDEN, 3 * HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.002
    fc[:, point * HIDDEN : (point + 1) * HIDDEN] += torch.eye(HIDDEN)
    return fc


def look(place: Path, folder: Path) -> Inspection:
    return inspect_checkpoint(folder, states=place / "states", target=place / "target")


def test_a_useful_fc_is_called_useful_and_its_point_is_named(place: Path, tmp_path: Path) -> None:
    found = look(place, drafter(place, tmp_path, reading(READ)))
    assert "USEFUL" in found.verdict.labels
    by_name = {entry.name: entry for entry in found.function.ablations}
    assert found.function.accept_length == pytest.approx(1.8, abs=0.1)
    for change in ("zero", "mean", "shuffle"):
        assert by_name[f"{change} {POINTS[READ]}"].hurts
        assert not by_name[f"{change} {POINTS[0]}"].hurts and not by_name[f"{change} {POINTS[2]}"].hurts
    assert by_name["fresh fc"].hurts and by_name["zero fc"].hurts
    assert any("none of the 5 other orders" in line for line in found.verdict.evidence)
    assert found.to_json()["function"]["geometry"]["points"][READ]["energy"] > 0.5


def test_swapped_blocks_keep_the_weight_verdict_and_the_states_name_the_order(place: Path, tmp_path: Path) -> None:
    swapped = look(place, drafter(place, tmp_path, reading(0)))
    straight = inspect_checkpoint(tmp_path)
    assert "USEFUL" not in swapped.verdict.labels
    assert swapped.verdict.labels == straight.verdict.labels
    (line,) = [entry for entry in swapped.verdict.evidence if entry.startswith("block order")]
    fits = [entry.name for entry in swapped.function.orders if entry.interval[0] > 0]
    # Blocks 0 and 1 change places; where block 2 lies does not matter to a point that says nothing.
    assert f"{POINTS[1]} {POINTS[0]} {POINTS[2]}" in fits and "better than the stored one" in line
    assert f"{POINTS[0]} {POINTS[2]} {POINTS[1]}" not in fits


def test_an_fc_without_effect_is_dead_although_its_weights_live(place: Path, tmp_path: Path) -> None:
    found = look(place, drafter(place, tmp_path, reading(READ), deaf=True))
    assert "DEAD" in found.verdict.labels and "USEFUL" not in found.verdict.labels
    assert "DEAD" not in inspect_checkpoint(tmp_path).verdict.labels


def test_an_untrained_fc_is_not_useful(place: Path, tmp_path: Path) -> None:
    fresh = torch.nn.init.kaiming_uniform_(torch.empty(HIDDEN, 3 * HIDDEN), a=5**0.5)
    assert "USEFUL" not in look(place, drafter(place, tmp_path, fresh)).verdict.labels


def test_without_a_target_only_geometry_is_measured(place: Path, tmp_path: Path) -> None:
    found = inspect_checkpoint(drafter(place, tmp_path, reading(READ)), states=place / "states")
    assert found.function.accept_length is None and "USEFUL" not in found.verdict.labels
    assert any("acceptance not measured" in line for line in found.verdict.evidence)


def test_states_of_another_width_are_refused(place: Path, tmp_path: Path) -> None:
    save_file({"fc.weight": torch.randn(16, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(StoreError, match="96 numbers a token, fc reads 48"):
        inspect_checkpoint(tmp_path, states=place / "states")


def test_geometry_by_hand() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, aux = torch.randn(8, 12, generator=generator), torch.randn(50, 12, generator=generator)
    aux[:, 8:] *= 100
    found = geometry(weight, aux, ["a", "b", "c"])
    parts = [aux[:, i : i + 4] @ weight[:, i : i + 4].T for i in (0, 4, 8)]
    energy = torch.stack([p.square().sum() for p in parts])
    for i, point in enumerate(found.points):
        assert point.energy == pytest.approx(float(energy[i] / energy.sum()), rel=1e-5)
    assert found.points[2].energy > 0.99  # equal weights, unequal states: norms of weights alone would say a third each
    assert found.gain == pytest.approx(float((sum(parts).square().sum() / aux.square().sum()).sqrt()), rel=1e-5)


@pytest.mark.parametrize("tokens", [20, 200])
def test_principal_directions_are_those_of_the_covariance(tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(tokens, 40, generator=generator) * torch.linspace(5, 0.1, 40) + 3
    found = principal_directions(states, 4)
    _, _, v = torch.linalg.svd(states - states.mean(0), full_matrices=False)
    assert torch.allclose(found @ found.T, v[:4].T @ v[:4], atol=1e-4)


def test_changes_touch_one_block_only(place: Path) -> None:
    samples = pick(Store(place / "states"), 100)
    assert len(samples) >= 2
    changed = change_block(samples, 1, 3, torch.zeros_like)
    for before, after in zip(samples, changed, strict=True):
        assert torch.equal(before.aux[:, :HIDDEN], after.aux[:, :HIDDEN])
        assert torch.equal(before.aux[:, 2 * HIDDEN :], after.aux[:, 2 * HIDDEN :])
        assert not after.aux[:, HIDDEN : 2 * HIDDEN].any() and before.aux[:, HIDDEN : 2 * HIDDEN].any()
    fc = torch.arange(6.0).reshape(1, 6)
    assert reordered(fc, (2, 0, 1), 3).tolist() == [[4, 5, 0, 1, 2, 3]]
