"""EAGLE-3.1 flags and the MLA drafter: each equals a plain restatement, notices a wrong one, survives disk."""

from __future__ import annotations

import json

import pytest
import torch

from eagle3lab.core.errors import CheckpointError
from eagle3lab.drafter.attention import reference_attention, ttt_attention
from eagle3lab.drafter.checkpoint import load_drafter, read_config, save_drafter
from eagle3lab.drafter.checkpoint_files import headers_of, stored_tensors
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.layouts import optional_shapes, tensor_problems, tensor_shapes
from eagle3lab.drafter.layouts_write import write_config
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Segment, pack
from tests.drafter.restated import EPS, restate

H, V, STEPS, SIZE = 16, 23, 3, 7
MLA = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 7}
KEPT = torch.tensor([0, 1, 4, 5, 9, 10, 11, 15, 16, 20, 22])


def config(**changes) -> DraftConfig:
    values = {
        "hidden_size": H,
        "target_hidden_size": H,
        "points": [2, 15, 27],
        "target_blocks": 30,
        "target_family": "llama",
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": V,
        "draft_vocab_size": len(KEPT),
        "rms_norm_eps": EPS,
    }
    return DraftConfig(**(values | changes))


def mla_config(**changes) -> DraftConfig:
    values = {"architecture": "mla", "mla": MLA, "num_key_value_heads": 4, "head_dim": 10, "target_family": "kimi_k25"}
    return config(**(values | {"target_blocks": 61, "points": [2, 30, 58]} | changes))


def random_drafter(c: DraftConfig) -> Eagle3Drafter:
    """Every weight random, norms too: a norm of ones would hide a swapped or missing one."""
    torch.manual_seed(11)
    d2t = KEPT - torch.arange(len(KEPT)) if c.draft_vocab_size == len(KEPT) else None
    drafter = Eagle3Drafter(c, torch.randn(V, H), d2t)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.dim() == 1))
    return drafter.requires_grad_(False)


def run(drafter: Eagle3Drafter, ids: torch.Tensor, aux: torch.Tensor, attention=ttt_attention) -> list[torch.Tensor]:
    mask = torch.ones(SIZE, dtype=torch.bool)
    return drafter(pack(ids, aux, aux[:, :H], [0, SIZE], mask, [0]), STEPS, attention)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, V, (SIZE,), generator=draw), 3 * torch.randn(SIZE, 3 * H, generator=draw)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


VARIANTS = {
    "plain": ({}, ["pairs"]),
    "fc_norm": ({"fc_norm": True}, ["no fc_norm", "fc_norm of another point"]),
    "norm_before_fc": ({"norm_before_fc": True}, ["no input_norm"]),
    "both norms before fc": ({"fc_norm": True, "norm_before_fc": True}, ["narrow norm first", "no fc_norm"]),
    "norm_before_residual": ({"norm_before_residual": True}, ["un-normed residual"]),
    "norm_output": ({"norm_output": True}, ["pre-norm fed back"]),
    "eagle 3.1": ({"fc_norm": True, "norm_output": True}, ["pre-norm fed back", "no fc_norm"]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_variants_equal_their_restatement(name):
    flags, wrongs = VARIANTS[name]
    drafter, (ids, aux) = random_drafter(config(**flags)), inputs()
    ours = run(drafter, ids, aux)
    weights = drafter.state_dict()
    assert distance(ours, restate(weights, drafter.config, drafter.embedding, ids, aux, STEPS)) < 2e-4
    for wrong in wrongs:
        assert distance(ours, restate(weights, drafter.config, drafter.embedding, ids, aux, STEPS, wrong)) > 0.02, wrong


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": V}])
def test_mla_equals_its_restatement(flags):
    drafter, (ids, aux) = random_drafter(mla_config(**flags)), inputs()
    ours = run(drafter, ids, aux)
    weights = drafter.state_dict()
    assert drafter.lm_head(ours[0]).shape == (SIZE, drafter.config.draft_vocab_size)
    assert distance(ours, restate(weights, drafter.config, drafter.embedding, ids, aux, STEPS)) < 2e-4
    for wrong in ("half-split", "no kv norm"):
        assert distance(ours, restate(weights, drafter.config, drafter.embedding, ids, aux, STEPS, wrong)) > 0.02, wrong


def test_values_narrower_than_keys_have_exact_gradients():
    """The kernels want one width; padding must change neither the output nor any gradient."""
    torch.manual_seed(0)
    segments = (Segment(0, 2, 9, 0), Segment(9, 9, 14, 7))
    shapes = [(12, 4, 10), (14, 4, 10), (14, 4, 7), (12, 4, 10), (12, 4, 7)]
    results = []
    for attention in (ttt_attention, reference_attention):
        torch.manual_seed(1)
        q, k, v, lk, lv = (torch.randn(shape, requires_grad=True) for shape in shapes)
        output = attention(q, k, v, [(lk, lv)], segments, 0.3)
        torch.manual_seed(2)
        (output * torch.randn(12, 4, 7)).sum().backward()
        results.append([output.detach(), *(x.grad for x in (q, k, v, lk, lv))])
    for ours, plain in zip(*results, strict=True):
        assert ours.shape == plain.shape and float((ours - plain).abs().max()) < 1e-5
    shifted = results[1][0].roll(1, -1)  # a wrong version: values cut at the other end
    assert float((results[0][0] - shifted).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("make", "flags", "layouts"),
    [
        (config, {}, ("sglang", "vllm", "speculators", "specforge")),
        (config, {"fc_norm": True}, ("sglang", "vllm", "speculators", "specforge")),
        (config, {"norm_before_fc": True}, ("sglang", "vllm", "speculators")),
        (config, {"norm_output": True}, ("sglang", "vllm", "speculators")),
        (config, {"norm_before_residual": True}, ("vllm", "speculators")),
        (config, {"draft_vocab_size": V}, ("sglang", "vllm", "speculators", "specforge")),
        (mla_config, {}, ("sglang", "vllm")),
        (mla_config, {"draft_vocab_size": V, "fc_norm": True, "norm_output": True}, ("sglang", "vllm")),
    ],
)
def test_round_trip_on_disk(tmp_path, make, flags, layouts):
    drafter, (ids, aux) = random_drafter(make(**flags)), inputs()
    before = run(drafter, ids, aux)
    for layout in ("sglang", "vllm", "speculators", "specforge"):
        folder = tmp_path / layout
        if layout not in layouts:
            with pytest.raises(CheckpointError, match=f"cannot be written for {layout}"):
                save_drafter(drafter, folder, dtype=torch.float32, record={}, layout=layout)
            assert not folder.exists()
            continue
        save_drafter(drafter, folder, dtype=torch.float32, record={}, layout=layout)
        assert read_config(folder) == drafter.config
        again = load_drafter(folder, drafter.embedding)
        assert all(torch.equal(a, b) for a, b in zip(before, run(again, ids, aux), strict=True))
        assert torch.equal(again.kept_ids, drafter.kept_ids)


def test_saving_for_both_engines_warns_of_what_sglang_ignores(tmp_path):
    drafter = random_drafter(config(norm_before_residual=True))
    with pytest.warns(UserWarning, match="SGLang never reads norm_before_residual"):
        save_drafter(drafter, tmp_path / "d", record={})
    assert read_config(tmp_path / "d").norm_before_residual is True
    assert json.loads((tmp_path / "d" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_strict_loading(tmp_path):
    """What SGLang would drop or leave random is an error here; so is a target of another size."""
    drafter = random_drafter(config())
    save_drafter(drafter, tmp_path / "d", dtype=torch.float32, record={})
    with pytest.raises(CheckpointError, match="target of vocabulary 23 and width 16"):
        load_drafter(tmp_path / "d", torch.randn(V + 1, H))
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fc_norm": True}))
    with pytest.raises(CheckpointError, match=r"fc_norm.0.weight missing .*random"):
        load_drafter(tmp_path / "d", drafter.embedding)


KIMI = {
    "fc.weight": ("BF16", [7168, 21504]),
    "midlayer.input_layernorm.weight": ("BF16", [7168]),
    "midlayer.hidden_norm.weight": ("BF16", [7168]),
    "midlayer.post_attention_layernorm.weight": ("BF16", [7168]),
    "midlayer.self_attn.q_proj.weight": ("BF16", [8192, 14336]),
    "midlayer.self_attn.k_proj.weight": ("BF16", [8192, 14336]),
    "midlayer.self_attn.v_proj.weight": ("BF16", [8192, 14336]),
    "midlayer.self_attn.o_proj.weight": ("BF16", [7168, 8192]),
    "midlayer.mlp.gate_proj.weight": ("BF16", [18432, 7168]),
    "midlayer.mlp.up_proj.weight": ("BF16", [18432, 7168]),
    "midlayer.mlp.down_proj.weight": ("BF16", [7168, 18432]),
    "norm.weight": ("BF16", [7168]),
    "lm_head.weight": ("BF16", [32000, 7168]),
    "d2t": ("I64", [32000]),
    "t2d": ("BOOL", [163840]),
}
"""Names, dtypes and shapes of a Llama drafter for Kimi-K2.5, as SGLang reads them."""


def kimi_config(**changes) -> DraftConfig:
    values = {
        "hidden_size": 7168,
        "target_hidden_size": 7168,
        "points": [2, 30, 58],
        "target_blocks": 61,
        "target_family": "kimi_k25",
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "vocab_size": 163840,
        "draft_vocab_size": 32000,
    }
    return DraftConfig(**(values | changes))


def test_kimi_shaped_names_shapes_dtypes_without_memory():
    c = kimi_config()
    with torch.device("meta"):
        drafter = Eagle3Drafter(c, torch.empty(163840, 7168), torch.zeros(32000, dtype=torch.int64)).bfloat16()
    words = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    state = drafter.state_dict()
    assert {name: (words[t.dtype], list(t.shape)) for name, t in state.items()} == KIMI
    assert sum(t.numel() for name, t in state.items() if KIMI[name][0] == "BF16") == 1_190_948_864
    assert {n: list(s) for n, s in (optional_shapes(c) | tensor_shapes(c)).items() if n in KIMI} == {
        name: shape for name, (_, shape) in KIMI.items()
    }
    ids = write_config(c, "sglang", dtype="bfloat16")
    assert ids["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert ids["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]


def test_kimi_shaped_file_is_accepted_by_its_header(tmp_path):
    """A sparse file: 2.4 GB by its header, a few kilobytes on the disk."""
    sizes = {"BF16": 2, "I64": 8, "BOOL": 1}
    entries, begin = {}, 0
    for name, (dtype, shape) in KIMI.items():
        end = begin + sizes[dtype] * torch.Size(shape).numel()
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as handle:
        handle.write(len(raw).to_bytes(8, "little") + raw)
        handle.truncate(8 + len(raw) + begin)
    assert tensor_problems(kimi_config(), headers_of(stored_tensors(tmp_path))) == []
    # wrong versions: another MLP width, a head over the whole vocabulary
    assert len(tensor_problems(kimi_config(intermediate_size=12288), headers_of(stored_tensors(tmp_path)))) == 3
    full = tensor_problems(kimi_config(draft_vocab_size=163840), headers_of(stored_tensors(tmp_path)))
    assert any("lm_head.weight [32000, 7168] instead of [163840, 7168]" in line for line in full)
