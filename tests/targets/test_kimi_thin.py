"""The true architecture with thin insides: its shape, its states in one process, and the same states over ranks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3lab import points
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.capture.transformers_engine import capture
from eagle3lab.core.errors import FetchError, UsageError
from eagle3lab.targets import ranks
from eagle3lab.targets.config import read_config
from eagle3lab.targets.fetch import TARGET_MANIFEST, damaged
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.plan import GIB
from eagle3lab.targets.profiles import load_profile
from eagle3lab.targets.random_target import build_random_target, kimi_tokenizer
from eagle3lab.targets.shapes import target_shape
from tests.targets.rank_worker import IDS, POINTS, kimi_manifest, samples

FULL = os.environ.get("EAGLE3LAB_FULL") == "1"
RANKS = 8 if FULL else 2
PROFILE = load_profile("kimi-thin")
BUILD = (
    "import sys, pathlib\n"
    "from eagle3lab.targets.profiles import load_profile\n"
    "from eagle3lab.targets.random_target import build_random_target\n"
    "build_random_target(load_profile('kimi-thin'), pathlib.Path(sys.argv[1]))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, built in a process of its own: its memory is measured."""
    path = tmp_path_factory.mktemp("kimi-thin")
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", BUILD, str(path)], check=True)
    built, peak = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"kimi-thin built in {built:.1f} s, peak {peak / GIB:.2f} GiB")
    assert peak < 8 * GIB
    if FULL:
        assert built < 60
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, dtype="float32")


def test_it_has_the_true_shape(folder: Path, target: Target) -> None:
    assert (target.blocks, target.hidden_size, target.vocab_size) == (61, 7168, 320)
    assert type(target.model).__name__ == "Kimi_K25ForConditionalGeneration"
    first, second = target.layers[0], target.layers[1]
    assert hasattr(first.self_attn, "kv_a_proj_with_mqa"), "no MLA"
    assert not hasattr(first.mlp, "experts")
    assert second.mlp.experts.num_experts == 2
    assert second.mlp.shared_experts is not None
    assert PROFILE.model.points == points.default_points(61) == POINTS
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size < 0.65e9
    counted = target_shape(PROFILE.config or {}).stored_bytes
    assert abs(counted - size) < 0.02 * size  # the plan counts the text model, the file has a thin vision tower too


def test_names_and_config_are_those_of_the_public_checkpoint(folder: Path) -> None:
    config = read_config(folder)
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert points.family_of(config) == "kimi_k25"
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    for name in (
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.60.self_attn.kv_b_proj.weight",
        "language_model.model.layers.1.mlp.experts.1.gate_proj.weight",
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
        "language_model.lm_head.weight",
    ):
        assert name in names


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    facts = json.loads((folder / TARGET_MANIFEST).read_text())
    assert damaged(folder, lambda _: None) is None
    small = {"num_hidden_layers": 2, "hidden_size": 64}
    hashes = []
    for place, seed in enumerate([1, 1, 2]):
        made = PROFILE.model_copy(
            update={
                "config": {**(PROFILE.config or {}), **small},
                "source": PROFILE.source.model_copy(update={"seed": seed}),
            }
        )
        path = tmp_path / str(place)
        path.mkdir()
        build_random_target(made, path, lambda _: None)
        hashes.append(json.loads((path / TARGET_MANIFEST).read_text())["weight_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]
    assert facts["weight_sha256"] not in hashes


def test_states_are_21504_wide_and_stored_in_bf16(target: Target, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "states", kimi_manifest())
    capture(target, samples(), writer, [[0], [1]])
    store = Store(tmp_path / "states", points=POINTS)
    assert store[0].aux.shape == (12, 21_504)
    assert store[0].aux.dtype == torch.bfloat16
    _, states = target.states(torch.tensor([IDS[0]]), points=POINTS)
    assert torch.equal(store[0].aux, torch.cat(states, -1)[0].bfloat16())


def test_points_are_hidden_states_of_transformers_and_differ(target: Target) -> None:
    with torch.inference_mode():
        hidden = target.model(input_ids=torch.tensor([IDS[0]]), output_hidden_states=True).hidden_states
    _, states = target.states(torch.tensor([IDS[0]]), points=POINTS)
    for place, point in enumerate(POINTS):
        assert torch.allclose(states[place], hidden[point], atol=1e-5)
        for neighbour in (point - 1, point + 1):
            assert (states[place] - hidden[neighbour]).abs().max() > 1e-2


def test_kimi_chat_turns(folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert len(tokenizer) <= PROFILE.model.vocab_size
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert tokenizer.get_vocab() == kimi_tokenizer(4096).get_vocab()
    odd = "naïve 中文 \t 🙂"
    assert tokenizer.decode(tokenizer(odd, add_special_tokens=False)["input_ids"]) == odd


@pytest.mark.slow
def test_over_ranks_as_in_one_process(folder: Path, target: Target, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    worker = str(root / "tests/targets/rank_worker.py")
    subprocess.run([*command, worker, str(folder), str(tmp_path)], check=True, env=environment)
    facts = json.loads((tmp_path / "ranks.json").read_text())
    last, states = target.states(torch.tensor([IDS[0]]), points=POINTS)
    alone = torch.stack([last, *states])
    split = load_file(tmp_path / "ranks.safetensors")["states"]
    for place, name in enumerate(["last", *POINTS]):
        worst, largest = float((split[place] - alone[place]).abs().max()), float(alone[place].abs().max())
        print(f"{RANKS} ranks against one process, {name}: {worst:.1e}, largest state {largest:.1f}")
        assert worst < 1e-5
    neighbours = target.states(torch.tensor([IDS[0]]), points=[point + 1 for point in POINTS])[1]
    assert min(float((split[i + 1] - neighbours[i]).abs().max()) for i in range(3)) > 1e-2
    assert facts["spread"] == 0.0, "ranks disagree about the residual stream"
    assert facts["writes"] == [2, *([0] * (RANKS - 1))], "written by another rank than 0, or more than once"
    assert len(Store(tmp_path / "states", points=POINTS, verify=True)) == 2
    shares = facts["shares"]
    assert [share["rank"] for share in shares] == list(range(RANKS))
    whole = sum(parameter.numel() for parameter in target.model.parameters())
    assert whole / RANKS < shares[0]["parameters"] < whole
    assert len({share["parameters"] for share in shares}) == 1
    assert shares[0]["bytes"] == 4 * shares[0]["parameters"]


def test_one_process_is_a_table_of_one(target: Target) -> None:
    (share,) = ranks.rank_table(target)
    assert (share.rank, share.device) == (0, "cpu")
    assert share.parameters == sum(parameter.numel() for parameter in target.model.parameters())


def test_widths_that_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.check_widths({"moe_intermediate_size": 64}, 8)
    with pytest.raises(FetchError, match=r"64 over 16 ranks is 4 columns a rank.*nproc-per-node 8"):
        ranks.check_widths({"moe_intermediate_size": 64}, 16)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        ranks.join()
