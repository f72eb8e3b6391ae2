"""Rows and columns, energy, differences, other matrices, vocabulary rows, quantisation signs, records."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fc_builders import float8_round_trip, normal, save_fc, start_std, uniform, write_safetensors

from eagle3lab.core.errors import CheckpointError
from eagle3lab.inspection import inspect_checkpoint
from eagle3lab.inspection.distribution import distribution, fit
from eagle3lab.inspection.energy import block_energy
from eagle3lab.inspection.families import families, normal_cdf
from eagle3lab.inspection.formats import bfloat16_bits, grid
from eagle3lab.inspection.touched import clean_split

SHAPE = (192, 576)


def test_dead_and_duplicated_rows_and_columns_are_found(tmp_path) -> None:
    w = uniform(SHAPE, 1)
    w[[5, 60]] = 0
    w[:, 100] = 0
    w[17] = w[40]
    w[:, 300] = w[:, 8]
    w[:, 12] *= 1e-5
    structure = inspect_checkpoint(save_fc(tmp_path, w)).judgement.structure
    assert structure.rows.zero == [5, 60] and structure.columns.zero == [100]
    assert structure.rows.duplicates == [[17, 40]] and structure.columns.duplicates == [[8, 300]]
    assert structure.columns.near_dead == [12] and structure.rows.constant == []
    w = uniform(SHAPE, 1)
    w[90], w[91] = 0.01, 0.01
    w[91, 300] = 0.0101  # almost constant is not constant
    assert inspect_checkpoint(save_fc(tmp_path, w)).judgement.structure.rows.constant == [90]
    clean = inspect_checkpoint(save_fc(tmp_path, uniform(SHAPE, 1))).judgement.structure
    assert not clean.lines()


def test_zero_rows_do_not_hide_that_the_rest_is_untouched(tmp_path) -> None:
    w = uniform(SHAPE, 2)
    w[[3, 4, 5]] = 0
    found = inspect_checkpoint(save_fc(tmp_path, w))
    assert found.verdict.labels == ["AT-INIT(kaiming-uniform)"]
    assert any("3 zero rows: 3, 4, 5" in line for line in found.verdict.evidence)


def test_rounded_bound_is_computed_for_each_width() -> None:
    kimi = families((7168, 21504))[0]
    assert kimi.largest(grid("BF16")) == 223 * 2**-15
    small = families((576, 1728))[0]
    assert small.largest(grid("BF16")) == 197 * 2**-13  # 223 * 2^-15 is not a rule
    for family in families((576, 1728)):
        p = family.cells(grid("BF16").edges)
        assert p.min() >= 0 and p.sum() == pytest.approx(1, abs=1e-7)
        assert np.sqrt(p @ grid("BF16").values ** 2) == pytest.approx(family.std, rel=2e-4)


def test_cdf_table_is_the_normal_distribution() -> None:
    import math

    x = np.linspace(-12, 12, 501)
    np.testing.assert_allclose(normal_cdf(x), [0.5 * math.erfc(-v / math.sqrt(2)) for v in x], atol=4e-8)


def test_blurred_uniform_has_the_moments_of_a_sum() -> None:
    family, g = families((7168, 21504))[0], grid("BF16")
    tau = 0.2266 * family.std
    p = family.cells(g.edges, tau=tau)
    second, fourth = p @ g.values**2, p @ g.values**4
    assert np.sqrt(second) == pytest.approx(np.hypot(family.std, tau), rel=1e-4)
    assert fourth / second**2 - 3 == pytest.approx(-1.2 * (family.std**2 / second) ** 2, abs=1e-3)
    assert p[np.abs(g.values) > family.largest(g)].sum() == pytest.approx(0.0521, abs=2e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fit_recovers_shrink_and_update(tmp_path, seed: int) -> None:
    s = start_std(SHAPE)
    found = inspect_checkpoint(save_fc(tmp_path, uniform(SHAPE, seed) * np.float32(0.9) + normal(SHAPE, 0.15 * s, 9)))
    result = fit(families(SHAPE)[0], distribution(found.scan))
    assert result.shrink == pytest.approx(0.9, abs=0.02) and result.tau / s == pytest.approx(0.15, abs=0.03)


def test_clean_split_divides_only_what_is_divided() -> None:
    rng = np.random.default_rng(0)
    few = np.zeros(1536, int)
    few[[3, 900, 1200]] = rng.poisson(27, 3)
    assert np.flatnonzero(clean_split(few)).tolist() == [3, 900, 1200]
    assert clean_split(rng.poisson(10, 1536)) is None  # one rate everywhere
    assert clean_split(rng.poisson(0.3, 1536)) is None  # weak, everywhere
    assert clean_split(rng.poisson(rng.gamma(0.7, 12, 1536))) is None  # rates down to zero, no gap
    most = rng.poisson(80, 1536)
    most[5:25] = 0
    assert np.flatnonzero(~clean_split(most)).tolist() == list(range(5, 25))


def test_a_weak_update_everywhere_is_not_called_partial(tmp_path) -> None:
    for share in (0.02, 0.05, 0.1):
        rng = np.random.default_rng(3)
        scale = rng.gamma(1.0, share * start_std(SHAPE), size=SHAPE[1])  # columns differ, as real gradients do
        w = uniform(SHAPE, 4) + rng.standard_normal(SHAPE) * scale
        (label,) = inspect_checkpoint(save_fc(tmp_path, w.astype(np.float32))).verdict.labels
        assert label.startswith("MOVED-FROM-INIT"), (share, label)


def test_block_energy_and_its_interval(tmp_path) -> None:
    w = uniform(SHAPE, 5)
    w[:, 192:384] *= 2
    rows = block_energy(inspect_checkpoint(save_fc(tmp_path, w)).scan)
    assert [round(r.share, 2) for r in rows] == [0.17, 0.67, 0.17]
    assert all(r.share_interval[0] < r.share < r.share_interval[1] for r in rows)
    assert rows[1].share_interval[1] - rows[1].share_interval[0] < 0.02


def test_row_bootstrap_is_wider_where_rows_differ(tmp_path) -> None:
    even, uneven = normal(SHAPE, 0.02, 1), normal(SHAPE, 0.02, 1)
    uneven[::2] *= 2
    uneven *= 0.02 / uneven.std()
    width = []
    for w in (even, uneven):
        row = block_energy(inspect_checkpoint(save_fc(tmp_path, w)).scan)[0]
        width.append(row.std_interval[1] - row.std_interval[0])
    assert width[1] > 5 * width[0]  # standard errors for independent entries would be the same


def test_difference_to_another_checkpoint(tmp_path) -> None:
    start = uniform(SHAPE, 6)
    now = start.copy()
    now[[2, 50], 384:] += 0.01
    a, b = save_fc(tmp_path / "a", now), save_fc(tmp_path / "b", start)
    found = inspect_checkpoint(a, against=b)
    rows, columns = found.delta.changed()
    assert rows == [2, 50] and columns == list(range(384, 576))
    assert [d.equal for d in found.delta.blocks[1:3]] == [1.0, 1.0] and found.delta.blocks[3].equal < 1
    high = slice(384, None)
    x, y = (bfloat16_bits(v).astype(np.uint32) << 16 for v in (now, start))
    x, y = x.view(np.float32).astype(float)[:, high], y.view(np.float32).astype(float)[:, high]
    assert found.delta.blocks[3].relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-6)
    assert found.delta.blocks[3].cosine == pytest.approx(
        (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-6
    )
    turned = inspect_checkpoint(a, against=save_fc(tmp_path / "c", start.T))
    assert turned.delta.all == found.delta.all
    with pytest.raises(CheckpointError, match="equal shapes"):
        inspect_checkpoint(a, against=save_fc(tmp_path / "d", uniform((96, 288), 0)))


def test_two_seeds_have_no_cosine(tmp_path) -> None:
    found = inspect_checkpoint(
        save_fc(tmp_path / "a", uniform(SHAPE, 0)), against=save_fc(tmp_path / "b", uniform(SHAPE, 1))
    )
    assert abs(found.delta.all.cosine) < 4 / np.sqrt(SHAPE[0] * SHAPE[1])


@pytest.mark.parametrize("kind", ["one scale", "row scale", "integer", "truncated", "clean"])
def test_quantisation_signs(tmp_path, kind: str) -> None:
    w = uniform((256, 1536), 7)
    made = {
        "one scale": lambda: float8_round_trip(w),
        "row scale": lambda: float8_round_trip(w * np.linspace(0.5, 2, 256)[:, None], per_row=True),
        "integer": lambda: np.round(w / np.abs(w).max() * 127) * np.abs(w).max() / 127,
        "truncated": lambda: (w.view(np.uint32) & np.uint32(0xFFF00000)).view(np.float32), "clean": lambda: w,
    }[kind]()  # fmt: skip
    signs = inspect_checkpoint(save_fc(tmp_path, made.astype(np.float32))).judgement.quantisation.signs
    expected = {"one scale": "float8 e4m3 with one scale", "row scale": "a scale a row", "integer": "8-bit integer",
                "truncated": "mantissa bits are zero", "clean": None}[kind]  # fmt: skip
    assert any(expected in sign for sign in signs) if expected else signs == []


def test_bfloat16_values_in_a_float32_file_are_told(tmp_path) -> None:
    w = (bfloat16_bits(uniform(SHAPE, 0)).astype(np.uint32) << 16).view(np.float32)
    write_safetensors(tmp_path / "a.safetensors", {"fc.weight": w})
    found = inspect_checkpoint(tmp_path)
    assert found.verdict.labels == ["AT-INIT(kaiming-uniform)"]
    assert any("every value is a bfloat16 number" in line for line in found.verdict.evidence)


def test_other_matrices_in_short_form(tmp_path) -> None:
    tensors = {
        "fc.weight": bfloat16_bits(normal(SHAPE, 0.021, 1)),
        "midlayer.mlp.up_proj.weight": bfloat16_bits(normal((256, 192), 0.02, 2)),
        "midlayer.mlp.down_proj.weight": bfloat16_bits(np.zeros((192, 256), np.float32)),
        "midlayer.self_attn.o_proj.weight": bfloat16_bits(uniform((192, 192), 3) * 0.97),
        "norm.weight": bfloat16_bits(np.ones(192, np.float32)),
        "midlayer.hidden_norm.weight": bfloat16_bits(np.full(192, np.nan, np.float32)),
    }
    write_safetensors(tmp_path / "a.safetensors", tensors)
    found = inspect_checkpoint(tmp_path, others=True)
    states = {m.name.split(".")[-2]: (m.state, m.family) for m in found.matrices}
    assert states["up_proj"] == ("at init", "normal-0.02")
    assert states["down_proj"] == ("dead", None) and states["hidden_norm"] == ("dead", None)
    assert states["o_proj"] == ("moved from init", "kaiming-uniform") and states["norm"] == ("at init", None)
    assert "midlayer.mlp.down_proj.weight is dead" in found.verdict.evidence


def test_vocabulary_rows_are_matched_through_d2t(tmp_path) -> None:
    rng = np.random.default_rng(8)
    head, embedding = normal((300, 192), 0.02, 1), normal((300, 192), 1.0, 2)
    kept = np.sort(rng.choice(300, 60, replace=False))
    drafter = {
        "fc.weight": bfloat16_bits(uniform(SHAPE, 0)), "lm_head.weight": bfloat16_bits(head[kept]),
        "embed_tokens.weight": bfloat16_bits(embedding), "d2t": kept - np.arange(60),
    }  # fmt: skip
    target = {"model.embed_tokens.weight": bfloat16_bits(embedding), "lm_head.weight": bfloat16_bits(head)}
    write_safetensors(tmp_path / "t" / "m.safetensors", target)
    write_safetensors(tmp_path / "d" / "m.safetensors", drafter)
    rows = {m.role: m for m in inspect_checkpoint(tmp_path / "d", target=tmp_path / "t").target_rows}
    assert rows["head"].equal == 1.0 and rows["embedding"].equal == 1.0 and abs(rows["head"].shifted) < 0.1
    for wrong, equal in ((np.zeros(60, np.int64), 0.1), (kept, None)):  # no map, and absolute ids in its place
        write_safetensors(tmp_path / "d" / "m.safetensors", drafter | {"d2t": wrong})
        match = {m.role: m for m in inspect_checkpoint(tmp_path / "d", target=tmp_path / "t").target_rows}["head"]
        assert match.problem or match.equal <= (equal or 0.1)


def test_a_recorded_start_is_a_prior_and_no_proof(tmp_path) -> None:
    heavy = uniform(SHAPE, 0) + normal(SHAPE, 3 * start_std(SHAPE), 1)
    save_fc(tmp_path, heavy)
    assert inspect_checkpoint(tmp_path).verdict.labels == ["INIT-UNKNOWN"]
    (tmp_path / "eagle3lab_training.json").write_text(json.dumps({"init": {"fc": {"family": "kaiming-uniform"}}}))
    found = inspect_checkpoint(tmp_path)
    assert found.verdict.labels[0].startswith("MOVED-FROM-INIT(3") and any(
        "record" in e or "taken from" in e for e in found.verdict.evidence
    )
    save_fc(tmp_path, normal(SHAPE, 0.02, 3))  # the record is wrong now
    found = inspect_checkpoint(tmp_path)
    assert found.verdict.labels == ["AT-INIT(normal-0.02)"]
    assert any("says kaiming-uniform, the weights fit normal-0.02" in line for line in found.verdict.evidence)


def test_the_step_0_snapshot_measures_what_the_weights_cannot_show(tmp_path) -> None:
    start = uniform(SHAPE, 0)
    save_fc(tmp_path, start + normal(SHAPE, 3 * start_std(SHAPE), 1))
    write_safetensors(tmp_path / "fc_snapshots" / "step-000000.safetensors", {"fc.weight": bfloat16_bits(start)})
    found = inspect_checkpoint(tmp_path)
    (label,) = found.verdict.labels
    assert float(label[len("MOVED-FROM-INIT(") : -1]) == pytest.approx(3.0, rel=0.02)
    assert any("size is measured against step-000000" in line for line in found.verdict.evidence)


def test_an_fc_that_equals_its_start_did_not_move(tmp_path) -> None:
    """A frozen fc of no listed family: the wrong version says MOVED-FROM-INIT(0)."""
    start = uniform(SHAPE, 0) + normal(SHAPE, 3 * start_std(SHAPE), 1)
    save_fc(tmp_path, start)
    write_safetensors(tmp_path / "fc_snapshots" / "step-000000.safetensors", {"fc.weight": bfloat16_bits(start)})
    assert inspect_checkpoint(tmp_path).verdict.labels == ["AT-INIT(step-000000.safetensors)"]
