"""States to and from SpecForge's and speculators' forms: equal tensors, the right last state, nothing unpickled."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.capture.exchange import convert_states, states_kind
from eagle3lab.capture.final_norm import read_final_norm
from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.specforge_format import read_specforge, read_specforge_folder, specforge_path, write_specforge
from eagle3lab.capture.speculators_format import Row, read_rows, read_speculators_folder, write_rows, write_speculators
from eagle3lab.capture.store import Sample, Store, StoreWriter
from eagle3lab.core.errors import StoreError, UsageError
from eagle3lab.steps.convert import convert

H, POINTS, EPS = 16, [2, 15, 27], 1e-5
LENGTHS = (5, 9, 3)


def samples(dtype: torch.dtype = torch.bfloat16) -> list[Sample]:
    torch.manual_seed(0)
    return [
        Sample(
            number,
            torch.randint(0, 99, (size,)),
            torch.arange(size) >= size // 2,
            (7 * torch.randn(size, 3 * H)).to(dtype),
            (7 * torch.randn(size, H)).to(dtype),
        )
        for number, size in enumerate(LENGTHS)
    ]


def store(folder: Path, last: str, dtype: str = "bfloat16") -> Path:
    manifest = StatesManifest(
        target_id="toy",
        target_weight_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        template_sha256="0" * 64,
        points=POINTS,
        points_checkpoint=[1, 14, 26],
        blocks=30,
        family="llama",
        hidden_size=H,
        dtype=dtype,
        last=last,
        engine="test",
        corpus_sha256="0" * 64,
        greedy=True,
        seed=0,
        planned_shards=1,
    )
    StoreWriter(folder, manifest).write(0, samples(getattr(torch, dtype)))
    return folder


def target(folder: Path, **changes: object) -> Path:
    """A target's folder with nothing in it but what the final norm needs."""
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 30, "rms_norm_eps": EPS}
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.manual_seed(9)
    save_file(
        {"model.norm.weight": 1 + torch.randn(H), "model.embed_tokens.weight": torch.randn(4, H)},
        folder / "model.safetensors",
    )
    return folder


def same(ours: Sample, theirs: Sample, *, last: bool = True) -> bool:
    names = ("input_ids", "loss_mask", "aux") + (("last",) if last else ())
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def exact_norm(last: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = last.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def test_post_norm_store_to_specforge(tmp_path):
    moved = convert_states(store(tmp_path / "s", "post_norm"), tmp_path / "sf", "specforge")
    assert (moved.samples, moved.tokens, moved.points) == (3, sum(LENGTHS), POINTS)
    assert (tmp_path / "sf" / "rows_0-2000" / "data_2.ckpt").is_file()
    back = list(read_specforge_folder(tmp_path / "sf"))
    assert [s.sample_id for s in back] == [0, 1, 2]
    assert all(same(a, b) for a, b in zip(back, samples(), strict=True))


def test_specforge_file_is_what_its_loader_expects(tmp_path):
    """Keys, shapes and the leading 1 of SpecForge's own writer; aux and last are not swapped on disk."""
    sample = samples()[0]
    path = write_specforge(tmp_path, 2001, sample)
    assert path == tmp_path / "rows_2000-4000" / "data_2001.ckpt"
    raw = torch.load(path, weights_only=True)
    assert {key: list(value.shape) for key, value in raw.items()} == {
        "input_ids": [5],
        "loss_mask": [5],
        "aux_hidden_state": [1, 5, 3 * H],
        "hidden_state": [1, 5, H],
    }
    assert raw["loss_mask"].dtype == raw["input_ids"].dtype == torch.int64
    assert torch.equal(raw["aux_hidden_state"][0], sample.aux)


def test_specforge_numbers_not_paths_give_the_order(tmp_path):
    for number in (10, 2, 1999, 2000):
        write_specforge(tmp_path, number, samples()[0], compressed=number == 2)
    assert [s.sample_id for s in read_specforge_folder(tmp_path)] == [2, 10, 1999, 2000]
    assert sorted(p.name for p in tmp_path.rglob("*.ckpt*"))[0] == "data_10.ckpt"  # the wrong version: text order
    write_specforge(tmp_path, 2, samples()[0])
    with pytest.raises(StoreError, match="sample 2 twice"):
        list(read_specforge_folder(tmp_path))


def test_a_view_does_not_carry_its_shard(tmp_path):
    big = torch.zeros(4096, H, dtype=torch.bfloat16)
    s = samples()[0]
    path = write_specforge(tmp_path, 0, Sample(0, s.input_ids, s.loss_mask, s.aux, big[:5]))
    assert path.stat().st_size < 8192 < big.numel() * 2


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_nothing_is_unpickled(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    path = specforge_path(tmp_path, 0, compressed=bool(suffix))
    path.parent.mkdir()
    data = {"input_ids": torch.zeros(2, dtype=torch.int64), "loss_mask": Evil()}
    with gzip.open(path, "wb") if suffix else path.open("wb") as handle:
        torch.save(data, handle)
    with pytest.raises(StoreError, match=r"more than tensors.*weights_only=True"):
        read_specforge(path, 0)
    path.write_bytes(gzip.compress(pickle.dumps(Evil())) if suffix else pickle.dumps(Evil()))
    with pytest.raises(StoreError):
        read_specforge(path, 0)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("hidden_state"), "rule|tensors input_ids"),
        (lambda d: d.update(aux_hidden_state=d["aux_hidden_state"][..., :-1]), "a multiple of 16"),
        (lambda d: d.update(aux_hidden_state=d["aux_hidden_state"][:, 1:]), r"aux is \[4, 48\], needed \[5, 48\]"),
        (lambda d: d.update(input_ids=d["input_ids"].float()), "integers"),
        (lambda d: d["hidden_state"].fill_(float("nan")), "not finite at token 0"),
    ],
)
def test_broken_specforge_files(tmp_path, change, words):
    path = write_specforge(tmp_path, 0, samples()[0])
    data = torch.load(path, weights_only=True)
    change(data)
    torch.save(data, path)
    with pytest.raises(StoreError, match=words) as caught:
        read_specforge(path, 0)
    assert "\n" not in str(caught.value)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StoreError, match="truncated or not a torch file"):
        read_specforge(path, 0)


def test_pre_norm_store_to_speculators(tmp_path):
    moved = convert_states(store(tmp_path / "s", "pre_norm"), tmp_path / "sp", "speculators")
    assert moved.points == POINTS
    raw = load_file(tmp_path / "sp" / "hidden_states" / "hs_1.safetensors")
    sample = samples()[1]
    assert list(raw["hidden_states"].shape) == [9, 4, H]
    # the reader of speculators: aux = [:, :-1].flatten(1), last = [:, -1]
    assert torch.equal(raw["hidden_states"][:, :-1].flatten(1), sample.aux)
    assert torch.equal(raw["hidden_states"][:, -1], sample.last)
    wrong = raw["hidden_states"].transpose(1, 2)[:, :, :-1].flatten(1)  # axes not moved back
    assert not torch.equal(wrong, sample.aux)
    rows = [json.loads(line) for line in (tmp_path / "sp" / "prepared.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.int().tolist(),
        "seq_len": 9,
    }
    assert all(same(a, b) for a, b in zip(read_speculators_folder(tmp_path / "sp"), samples(), strict=True))


def test_post_norm_to_speculators_is_refused_with_the_command(tmp_path):
    source = store(tmp_path / "s", "post_norm")
    with pytest.raises(StoreError) as caught:
        convert(source, tmp_path / "sp", to="speculators")
    text = str(caught.value)
    assert "after the target's final norm" in text and "a norm cannot be undone" in text
    assert text.endswith("eagle3lab capture --replies FILE --out FOLDER --last pre") and "\n" not in text
    assert not (tmp_path / "sp").exists()
    convert_states(source, tmp_path / "sf", "specforge")
    with pytest.raises(StoreError, match="cannot be undone"):
        convert_states(tmp_path / "sf", tmp_path / "sp", "speculators")


def test_pre_to_post_is_the_norm_once_and_one_rounding(tmp_path):
    source, norm = store(tmp_path / "s", "pre_norm"), target(tmp_path / "t")
    with pytest.raises(StoreError, match="add --target DIR"):
        convert_states(source, tmp_path / "sf", "specforge")
    convert_states(source, tmp_path / "sf", "specforge", target=norm)
    weight = load_file(norm / "model.safetensors")["model.norm.weight"]
    for ours, pre in zip(read_specforge_folder(tmp_path / "sf"), samples(), strict=True):
        assert same(ours, pre, last=False) and ours.last.dtype == torch.bfloat16
        exact = exact_norm(pre.last, weight)
        half_step = exact.abs() * 2**-8 * 1.001  # half a bf16 step at most, and float32's own error
        assert bool(((ours.last.double() - exact).abs() <= half_step).all())
        for wrong in (pre.last, exact_norm(exact, weight)):  # not applied, applied twice
            assert bool(((wrong.double() - exact).abs() > half_step).any())


def test_speculators_folder_to_specforge(tmp_path):
    """The whole way round, through the other trainer's form; the sidecar keeps what its files cannot say."""
    norm = target(tmp_path / "t")
    convert_states(store(tmp_path / "s", "pre_norm"), tmp_path / "sp", "speculators")
    moved = convert_states(tmp_path / "sp", tmp_path / "sf", "specforge", target=norm)
    direct = tmp_path / "direct"
    convert_states(tmp_path / "s", direct, "specforge", target=norm)
    assert moved.points == POINTS
    pairs = zip(read_specforge_folder(tmp_path / "sf"), read_specforge_folder(direct), strict=True)
    assert all(same(a, b) for a, b in pairs)
    assert json.loads((tmp_path / "sf" / "eagle3lab_states.json").read_text())["last"] == "post_norm"
    assert states_kind(tmp_path / "sp") == "speculators" and states_kind(tmp_path / "sf") == "specforge"
    assert Store(tmp_path / "s").manifest.last == "pre_norm"


def test_rows_without_states_are_told(tmp_path):
    convert_states(store(tmp_path / "s", "pre_norm"), tmp_path / "sp", "speculators")
    whole = convert_states(tmp_path / "sp", tmp_path / "whole", "specforge", target=target(tmp_path / "t"))
    assert not any("no states" in note for note in whole.notes)
    (tmp_path / "sp" / "hidden_states" / "hs_1.safetensors").unlink()
    moved = convert_states(tmp_path / "sp", tmp_path / "sf", "specforge", target=tmp_path / "t")
    assert f"1 of {whole.samples} rows have no states and are left out, the first is 1" in moved.notes


@pytest.mark.parametrize("option", [{"verifier": "V"}, {"family": "llama"}, {"blocks": 3}, {"target": Path("nowhere")}])
def test_options_that_no_states_need_are_refused(tmp_path, option):
    source = store(tmp_path / "s", "post_norm")
    with pytest.raises(UsageError, match=f"--{next(iter(option))}"):
        convert(source, tmp_path / "sf", to="specforge", **option)
    assert not (tmp_path / "sf").exists()


def test_final_norm_of_unknown_kind_is_refused(tmp_path):
    with pytest.raises(StoreError, match="'gemma3' is not known to be"):
        read_final_norm(target(tmp_path / "g", model_type="gemma3"))
    with pytest.raises(StoreError, match="rms_norm_eps is None"):
        read_final_norm(target(tmp_path / "e", rms_norm_eps=None))
    with pytest.raises(StoreError, match="16 wide"):
        read_final_norm(target(tmp_path / "w"))(torch.zeros(2, H + 1))


def test_broken_speculators_folders(tmp_path):
    sample = samples()[0]
    with pytest.raises(StoreError, match=r"no hs_<i>.safetensors"):
        (tmp_path / "hidden_states").mkdir()
        list(read_speculators_folder_with_rows(tmp_path, []))
    path = write_speculators(tmp_path, 0, sample)
    with pytest.raises(StoreError, match="the prepared dataset has 0 rows"):
        list(read_speculators_folder_with_rows(tmp_path, []))
    other = [*sample.input_ids.tolist()[:-1], 98]
    other[-1] = (int(sample.input_ids[-1]) + 1) % 99
    with pytest.raises(StoreError, match=r"token 4 differs .*drops such a sample"):
        list(read_speculators_folder_with_rows(tmp_path, [Row(other, [1] * 5)]))
    path.with_name(path.name + ".lock").touch()
    with pytest.raises(StoreError, match="is being written"):
        list(read_speculators_folder_with_rows(tmp_path, [Row(sample.input_ids.tolist(), [1] * 5)]))
    (tmp_path / "prepared.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [1]}\n')
    with pytest.raises(StoreError, match=r"prepared.jsonl:1 is not a row"):
        read_rows(tmp_path)


def read_speculators_folder_with_rows(root: Path, rows: list[Row]):
    write_rows(root, rows)
    return read_speculators_folder(root)


def test_only_the_two_trainers_take_states(tmp_path):
    source = store(tmp_path / "s", "pre_norm")
    with pytest.raises(StoreError, match="not converted to 'vllm'"):
        convert(source, tmp_path / "x", to="vllm")
    convert_states(source, tmp_path / "sp", "speculators")
    with pytest.raises(StoreError, match="already"):
        convert_states(tmp_path / "sp", tmp_path / "y", "speculators")


def test_bytes_that_the_unpickler_stumbles_over_are_one_line(tmp_path):
    """The restricted unpickler checks little itself: damage ends in KeyError, IndexError and others."""
    path = write_specforge(tmp_path, 0, samples()[0])
    data, draw = path.read_bytes(), random.Random(1)
    for _ in range(120):
        damaged = bytearray(data)
        for _ in range(8):
            damaged[draw.randrange(1500)] = draw.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(StoreError):
            read_specforge(path, 0)


@pytest.mark.parametrize("change", [{"hidden_states": torch.int32}, {"token_ids": torch.float32}])
def test_speculators_tensors_of_another_dtype(tmp_path, change):
    path = write_speculators(tmp_path, 0, samples()[0])
    tensors = load_file(path)
    save_file({name: tensor.to(change.get(name, tensor.dtype)) for name, tensor in tensors.items()}, path)
    with pytest.raises(StoreError, match="floating point"):
        list(read_speculators_folder_with_rows(tmp_path, [Row(samples()[0].input_ids.tolist(), [1] * 5)]))


@pytest.mark.parametrize("data", [b"\xff", b"[" * 100_000])
def test_rows_that_cannot_be_read(tmp_path, data):
    (tmp_path / "prepared.jsonl").write_bytes(data)
    with pytest.raises(StoreError, match=r"prepared\.jsonl"):
        read_rows(tmp_path)
