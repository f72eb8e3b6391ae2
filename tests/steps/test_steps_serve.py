"""The `serve` step: what preflight refuses before a GPU is touched, and a whole visit to a stand-in server."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3lab import cli
from eagle3lab.core.errors import ProfileError, ServerError, UsageError
from eagle3lab.steps.serve import prepare, serve
from eagle3lab.targets.engine import free_port
from eagle3lab.targets.profiles import PROFILE_FOLDER

FAKE_SERVER = Path(__file__).parents[1] / "targets" / "fake_server.py"
H, V, VD = 576, 49152, 1024


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> str:
    """An EAGLE-3 drafter of SmolLM2's widths, healthy in every name and shape."""
    folder = tmp_path_factory.mktemp("drafter")
    draw = np.random.default_rng(0)
    shapes = {"fc": (H, 3 * H), "lm_head": (VD, H), "midlayer.self_attn.o_proj": (H, H)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (rows, 2 * H) for name, rows in (("q", H), ("k", 192), ("v", 192))}
    shapes |= {f"midlayer.mlp.{name}_proj": (1536, H) for name in ("gate", "up")} | {
        "midlayer.mlp.down_proj": (H, 1536)
    }
    tensors = {f"{name}.weight": draw.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()}
    for norm in (
        "norm",
        *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    ):
        tensors[f"{norm}.weight"] = np.ones(H, np.float16)
    tensors["d2t"] = np.arange(VD, dtype=np.int64)
    tensors["t2d"] = np.isin(np.arange(V), 2 * np.arange(VD))
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": 1536,
        "num_hidden_layers": 1, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": V,
        "draft_vocab_size": VD, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_dry_run_line_can_be_pasted() -> None:
    launch = prepare(profile="kimi-k2.5", gpu_memory="96GiB")
    *notes, line = launch.as_text().splitlines()
    assert all(note.startswith("# ") for note in notes)
    assert shlex.split(line) == launch.command == shlex.split(launch.as_json()["command"])
    assert "--mem-fraction-static 0.833" in line and "--tp-size 8" in line
    assert any("trust_remote_code" in note for note in notes)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "eagle"])
def test_plain_eagle_with_an_eagle3_drafter_is_refused(drafter: str, algorithm: str) -> None:
    with pytest.raises(ServerError, match="EAGLE3") as error:
        prepare(profile="smollm2", draft=drafter, algorithm=algorithm)
    assert "\n" not in str(error.value)


def test_the_last_flag_counts(drafter: str) -> None:
    with pytest.raises(ServerError, match="EAGLE3"):
        prepare(profile="smollm2", draft=drafter, extra=["--speculative-algorithm", "EAGLE"])
    line = prepare(profile="smollm2", draft=drafter, algorithm="EAGLE", extra=["--speculative-algorithm", "EAGLE3"])
    assert line.promised["speculative_algorithm"] == "EAGLE3"


def test_eagle3_with_the_same_drafter_passes(drafter: str) -> None:
    launch = prepare(profile="smollm2", draft=drafter)
    assert launch.promised["speculative_draft_model_path"] == drafter


def test_a_drafter_that_is_not_here_is_judged_by_name() -> None:
    with pytest.raises(ServerError, match="NEXTN"):
        prepare(profile="kimi-k2.5", draft="someone/kimi-k25-eagle3", algorithm="NEXTN")
    assert prepare(profile="kimi-k2.5", draft="someone/kimi-k25-eagle3").promised["speculative_algorithm"] == "EAGLE3"


def test_simulated_acceptance_in_the_environment_is_seen(drafter: str, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.0")
    try:
        notes = prepare(profile="smollm2", draft=drafter).notes
    except ServerError as error:
        notes = [str(error)]
    assert any("SGLANG_SIMULATE_ACC_LEN" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"gpu_memory": "64GiB"}, ServerError, "12.0 GiB lack"),
        ({"gpu_memory": "80GiB", "context": 200_000}, ServerError, "does not fit"),
        ({"gpus": 7, "gpu_memory": "192GiB"}, ServerError, "7 GPUs"),
        ({"gpus": 0}, UsageError, "--gpus 0"),
        ({"context": 0}, UsageError, "--context 0"),
        ({"steps": -1, "draft": "D"}, UsageError, "--steps -1"),
        ({"steps": 3}, UsageError, "--steps 3 without --draft"),
        ({"port": 70_000}, UsageError, "--port 70000"),
        ({"model_path": ""}, UsageError, "--model-path is empty"),
        ({"profile": "nope"}, ProfileError, "nope"),
        ({"extra": ["--no-such-option"]}, UsageError, "--no-such-option"),
        ({"python": "/no/such/python"}, UsageError, "/no/such/python"),
    ],
)
def test_refused_before_anything_starts(arguments: dict, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        prepare(**{"profile": "kimi-k2.5", **arguments})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("points = [2, 30, 58]", "points = [58, 30, 2]", r"model\.points: .*not ascending"),
        ("points = [2, 30, 58]", "points = [2, 30, 62]", r"model\.points: .*out of range"),
        ('family = "kimi_k25"', 'family = "kimi_k2.5"', r"model\.family: .*did you mean"),
        ("gpus = 8", 'gpus = "8"', "plan: .*gpus is '8'"),
        ("tensor_parallel = 8", "tensor_parallel = 0", "serve: .*tensor_parallel is 0"),
    ],
)
def test_a_profile_of_no_target_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (PROFILE_FOLDER / "kimi-k2.5.toml").read_text()
    assert old in text
    (tmp_path / "p.toml").write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=named):
        prepare(profile=str(tmp_path / "p.toml"))


@pytest.fixture
def fake_sglang(tmp_path, monkeypatch) -> Path:
    """A package `sglang` whose `launch_server` is the stand-in and whose parser takes everything."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("__version__ = '0.0'\n")
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE_SERVER.read_text())
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text("def prepare_server_args(argv): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("FAKE_DELAY", "0.3")
    return tmp_path


def left_over(folder: Path) -> list[str]:
    return [pid for pid in (folder / "pids").read_text().split() if Path(f"/proc/{pid}").exists()]


def test_probe_starts_checks_and_stops(fake_sglang: Path) -> None:
    lines: list[str] = []
    launch = prepare(profile="smollm2", port=free_port(), python=sys.executable)
    assert serve(launch, probe=True, log=fake_sglang / "log", ready_seconds=20, note=lines.append) == 0
    assert any("2 settings compared" in line for line in lines) and "Paris" in lines[-1]
    assert left_over(fake_sglang) == []


@pytest.mark.parametrize(
    ("fc", "code", "told"),
    [
        ({"called": True, "width": 3 * H, "dtype": "float16"}, 0, "info: fc input 1728, float16 (rank 0)"),
        ({"called": False}, 1, "error: fc never called"),
        (None, 1, "could not check the drafter because the probe's hook did not report"),
    ],
    ids=["called", "never called", "silent"],
)
def test_probe_tells_of_the_drafter(fake_sglang: Path, drafter: str, monkeypatch, fc, code: int, told: str) -> None:
    lines: list[str] = []
    log = fake_sglang / "log"
    log.write_text(
        'eagle3lab probe: {"part": "draft", "rank": 0, "fc": {"called": true, "width": 7}}\n'
    )  # earlier start
    monkeypatch.setenv(
        "FAKE_LINE", "eagle3lab probe: " + json.dumps({"part": "draft", "rank": 0, "fc": fc}) if fc else ""
    )
    launch = prepare(profile="smollm2", draft=drafter, port=free_port(), python=sys.executable, probe=True)
    hook = json.loads(launch.arguments[launch.arguments.index("--forward-hooks") + 1])
    assert hook[0]["config"] == {"draft": drafter} and "--forward-hooks" in launch.as_text()
    assert serve(launch, probe=True, log=log, ready_seconds=20, note=lines.append) == code
    assert any(line.startswith(told) for line in lines), lines
    assert left_over(fake_sglang) == []


def test_a_server_that_runs_something_else_is_stopped(fake_sglang: Path, drafter: str, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ALGORITHM", "EAGLE")
    launch = prepare(profile="smollm2", draft=drafter, port=free_port(), python=sys.executable)
    with pytest.raises(ServerError, match="speculative_algorithm is 'EAGLE', asked 'EAGLE3'"):
        serve(launch, probe=True, log=fake_sglang / "log", ready_seconds=20, note=lambda line: None)
    assert left_over(fake_sglang) == []


def test_command_line(fake_sglang: Path, capfd) -> None:
    words = ["serve", "--profile", "smollm2", "--python", sys.executable, "--port", str(free_port())]
    assert cli.run([*words, "--dry-run", "--json"]) == 0
    assert "sglang.launch_server" in json.loads(capfd.readouterr().out)["command"]
    assert cli.run([*words, "--probe", "--log", str(fake_sglang / "log"), "--", "--dtype", "float32"]) == 0
    assert "one token" in capfd.readouterr().err and left_over(fake_sglang) == []
    assert cli.run([*words, "--dry-run", "--", "--dtyp", "float32", "--nope"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
