"""Finding and reading fc: layouts, shards, scaled 8-bit formats, files that are not what they should be."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from fc_builders import save_fc, uniform, write_safetensors

from eagle3lab.core.errors import CheckpointError, UsageError
from eagle3lab.inspection import inspect_checkpoint
from eagle3lab.inspection.formats import bfloat16_bits, to_float32, value_table
from eagle3lab.inspection.layout import find_fc
from eagle3lab.inspection.tensorfile import open_checkpoint

SHAPE = (64, 192)


def stored(weights: np.ndarray) -> np.ndarray:
    return to_float32(bfloat16_bits(weights), "BF16")


def whole(layout) -> np.ndarray:
    return layout.region(slice(0, layout.shape[0]), slice(0, layout.shape[1]))


@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight", "draft_model.fc.weight", "module.model.fc.weight"])
def test_layout_names(tmp_path, name: str) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0), name=name)
    assert find_fc(open_checkpoint(tmp_path)).name == name


def test_a_target_head_called_fc_is_not_taken(tmp_path) -> None:
    head, fusion = bfloat16_bits(uniform((4096, 64), 1)), bfloat16_bits(uniform(SHAPE, 0))
    write_safetensors(tmp_path / "a.safetensors", {"fc.weight": head})
    with pytest.raises(CheckpointError, match="target head"):
        find_fc(open_checkpoint(tmp_path))
    write_safetensors(tmp_path / "a.safetensors", {"fc.weight": head, "draft_model.fc.weight": fusion})
    assert find_fc(open_checkpoint(tmp_path)).name == "draft_model.fc.weight"


def test_an_unnamed_fusion_matrix_is_found_by_its_shape_and_said(tmp_path) -> None:
    write_safetensors(
        tmp_path / "a.safetensors",
        {"fusion.proj": bfloat16_bits(uniform(SHAPE, 0)), "x.q_proj.weight": bfloat16_bits(uniform((64, 128), 0))},
    )
    layout = find_fc(open_checkpoint(tmp_path))
    assert layout.name == "fusion.proj" and any("by its shape" in note for note in layout.notes)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_parallel_shards_are_joined_and_told(tmp_path, axis: int, transposed: bool) -> None:
    weights = stored(uniform(SHAPE, 3))
    file_form = weights.T if transposed else weights
    for rank, part in enumerate(np.split(file_form, 4, axis=axis)):
        write_safetensors(tmp_path / f"model-rank-{rank}-part-0.safetensors", {"fc.weight": bfloat16_bits(part)})
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_aux_hidden_states": 3}')
    layout = find_fc(open_checkpoint(tmp_path))
    np.testing.assert_array_equal(whole(layout), weights)
    assert any("4 tensor-parallel shards" in note for note in layout.notes)
    found = inspect_checkpoint(tmp_path)
    for b in range(3):  # the wrong order of shards or axes would mix the blocks
        assert found.blocks[b].std == pytest.approx(weights[:, b * 64 : (b + 1) * 64].astype(float).std(), rel=1e-9)


def test_one_shard_alone_is_told(tmp_path) -> None:
    save_fc(tmp_path, uniform(SHAPE, 3)[:16])
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_aux_hidden_states": 3}')
    assert any("one tensor-parallel shard of 4 along rows" in n for n in find_fc(open_checkpoint(tmp_path)).notes)


@pytest.mark.parametrize("scales", ["tensor", "row", "tile"])
def test_scaled_float8_is_read_with_its_scale(tmp_path, scales: str) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 126, size=SHAPE, dtype=np.uint8) | (rng.integers(0, 2, size=SHAPE, dtype=np.uint8) << 7)
    factor = {"tensor": np.float32([0.25]), "row": rng.random((64, 1), dtype=np.float32) + 0.5,
              "tile": rng.random((2, 6), dtype=np.float32) + 0.5}[scales]  # fmt: skip
    write_safetensors(tmp_path / "a.safetensors", {"fc.weight": codes, "fc.weight_scale": factor})
    full = np.kron(factor, np.ones((32, 32))) if scales == "tile" else np.broadcast_to(factor, SHAPE)
    expected = value_table("F8_E4M3")[codes] * full
    layout = find_fc(open_checkpoint(tmp_path))
    np.testing.assert_allclose(whole(layout), expected, rtol=1e-6)
    found = inspect_checkpoint(tmp_path)
    assert found.pooled.std == pytest.approx(expected.std(), rel=1e-6)
    assert found.pooled.std != pytest.approx(value_table("F8_E4M3")[codes].std(), rel=1e-3)  # scale forgotten
    assert any("F8_E4M3" in line for line in found.verdict.evidence)


def test_point_names_come_from_the_checkpoint(tmp_path) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "eagle3lab": {"resid_pre": [2, 15, 27]}}))
    assert find_fc(open_checkpoint(tmp_path)).points == ["2", "15", "27"]
    assert find_fc(open_checkpoint(tmp_path), points=["a", "b", "c"]).points == ["a", "b", "c"]


@pytest.mark.parametrize("config", [{"hidden_size": 64}, {"hidden_size": 64, "num_aux_hidden_states": 3}])
@pytest.mark.parametrize("points", [["2", "15"], ["2", "15", "27", "28"], ["2", "9", "15", "21", "27", "28"]])
def test_another_number_of_points_is_refused(tmp_path, config, points) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if len(points) == 6 and "num_aux_hidden_states" not in config:  # half of an fc of six points is as wide
        assert any("shard of 2" in note for note in find_fc(open_checkpoint(tmp_path), points=points).notes)
        return
    with pytest.raises(CheckpointError, match=f"192 columns = 3 points x 64, {len(points)} are named"):
        find_fc(open_checkpoint(tmp_path), points=points)


def test_two_points_of_a_wider_target_are_cut_as_named(tmp_path) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "target_hidden_size": 96}))
    assert find_fc(open_checkpoint(tmp_path), points=["2", "15"]).widths == [96, 96]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("model.safetensors", b"", "empty"),
        ("model.safetensors", b"\0" * 64, "header of 0 bytes"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\nsize 1\n", "LFS pointer"),
        ("model.safetensors", (10**9).to_bytes(8, "little") + b"{}", "limit"),
        ("model.safetensors", (20).to_bytes(8, "little") + b"{" * 20, "JSON"),
        ("model.bin", b"PK\x03\x04", "nothing is unpickled"),
    ],
)
def test_files_that_are_no_weights_give_one_line(tmp_path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(path)
        assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [-4, 4])
def test_short_and_long_files_are_refused(tmp_path, cut: int) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"fc.weight": bfloat16_bits(uniform(SHAPE, 0))})
    path.write_bytes(path.read_bytes()[:cut] if cut < 0 else path.read_bytes() + b"abcd")
    with pytest.raises(CheckpointError, match="short by 4 bytes" if cut < 0 else "4 extra bytes"):
        inspect_checkpoint(tmp_path)


def test_a_missing_shard_is_named_and_a_stray_one_is_noted(tmp_path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"fc.weight": bfloat16_bits(uniform(SHAPE, 0))})
    index = {"weight_map": {"fc.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing \(1 tensors, first lm_head"):
        inspect_checkpoint(tmp_path)
    write_safetensors(tmp_path / "b.safetensors", {"lm_head.weight": bfloat16_bits(uniform((8, 64), 0))})
    write_safetensors(tmp_path / "c.safetensors", {"fc.weight": bfloat16_bits(uniform(SHAPE, 1))})
    found = inspect_checkpoint(tmp_path)
    assert any("c.safetensors" in note for note in found.layout.notes) and not open_checkpoint(tmp_path).repeated


@pytest.mark.parametrize("kind", ["--spectrum", "--exact"])
@pytest.mark.parametrize(
    ("made", "label"),
    [
        (lambda w: bfloat16_bits(np.where(np.arange(w.size).reshape(w.shape) == 7, np.inf, w)), "DEAD"),
        (lambda w: bfloat16_bits(w * np.float32(1e30)), "INIT-UNKNOWN"),
        (lambda w: bfloat16_bits(w * np.float32(1e-36)), "INIT-UNKNOWN"),
        (lambda w: w * np.float32(1e-30), "INIT-UNKNOWN"),
        (lambda w: w.astype(np.float64) * 1e200, "DEAD"),  # infinite in any engine
        (lambda w: bfloat16_bits(w[:1, :3]), "DEAD(low)"),
        (lambda w: bfloat16_bits(w[:2, :6]), "INIT-UNKNOWN"),  # four entries a block fit everything
        (lambda w: bfloat16_bits(np.sign(w)), "INIT-UNKNOWN"),
        (lambda w: bfloat16_bits((np.arange(w.size).reshape(w.shape) == 5).astype(np.float32)), "DEAD(mid)"),
        (lambda w: np.repeat(bfloat16_bits(w[:1]), len(w), axis=0), "INIT-UNKNOWN"),
    ],
)
def test_strange_contents_get_an_answer(tmp_path, capsys, made, label: str, kind: str) -> None:
    from eagle3lab import cli

    with np.errstate(over="ignore"):
        write_safetensors(tmp_path / "a.safetensors", {"fc.weight": made(uniform(SHAPE, 0))})
    assert cli.run(["inspect", str(tmp_path), kind, "--json", "--require", label]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["missing"] == []


def test_an_impossible_scale_is_refused(tmp_path) -> None:
    tensors = {"fc.weight": np.full(SHAPE, 40, np.uint8), "fc.weight_scale": np.ones(7, np.float32)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match="one factor, one a row"):
        inspect_checkpoint(tmp_path)


def test_wrong_words_name_the_nearest(tmp_path) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0))
    with pytest.raises(UsageError, match="kaiming-uniform"):
        inspect_checkpoint(tmp_path, init="kaiming-unifrom")
    with pytest.raises(UsageError, match="exact"):
        inspect_checkpoint(tmp_path, spectrum="exakt")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        inspect_checkpoint(tmp_path, tensor="fc.weigth")
    with pytest.raises(CheckpointError, match="192 columns and 5 points"):
        inspect_checkpoint(tmp_path, points=list("abcde"))
    with pytest.raises(UsageError, match="a name of its own"):
        inspect_checkpoint(tmp_path, points=["2", "2", "58"])


def test_the_file_part_needs_no_torch(tmp_path) -> None:
    save_fc(tmp_path, uniform(SHAPE, 0))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from eagle3lab import cli\n"
        f"rc = cli.run(['inspect', {str(tmp_path)!r}, '--spectrum', '--json', '--require', 'AT-INIT'])\n"
        "sys.exit(rc)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    value = json.loads(ran.stdout)
    assert value["verdict"]["labels"] == ["AT-INIT(kaiming-uniform)"]
    assert {"shape", "dtype", "mean", "mean_se", "std", "std_se", "blocks"} <= set(value["fc"])
    assert value["gate"]["missing"] == []


@pytest.mark.parametrize(("label", "code"), [("AT-INIT", 0), ("AT-INIT(kaiming-uniform)", 0), ("USEFUL", 1),
                                             ("AT-INIT(normal-0.02)", 1), ("USEFULL", 2)])  # fmt: skip
def test_gate(tmp_path, capsys, label: str, code: int) -> None:
    from eagle3lab import cli

    save_fc(tmp_path, uniform(SHAPE, 0))
    assert cli.run(["inspect", str(tmp_path), "--require", label]) == code
    out, err = capsys.readouterr()
    assert ("gate failed" in out) is (code == 1) and ("did you mean" in err) is (code == 2)


def test_a_dead_fc_without_a_gate_exits_0(tmp_path, capsys) -> None:
    from eagle3lab import cli

    assert cli.run(["inspect", str(save_fc(tmp_path, np.zeros(SHAPE, np.float32)))]) == 0
    assert "DEAD" in capsys.readouterr().out


def test_an_fc_of_whole_numbers_is_told_by_its_dtype(tmp_path) -> None:
    path = write_safetensors(tmp_path / "fc.safetensors", {"fc.weight": np.ones((2, 6), np.uint8)}, {"fc.weight": "I8"})
    with pytest.raises(CheckpointError, match=r"fc\.weight I8 \[2, 6\]"):
        inspect_checkpoint(path)


@pytest.mark.parametrize("points", [("4", "2", "6"), ("-2", "2", "6")])
def test_blocks_are_named_in_the_order_of_the_columns(tmp_path, points) -> None:
    with pytest.raises(UsageError, match="ascending"):
        inspect_checkpoint(save_fc(tmp_path / "c", uniform((8, 24), 0)), points=points)
