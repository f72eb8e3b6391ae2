"""A log beside a launch line, what its loader drops, and acceptance that it says is simulated."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3lab.doctor.serverlog import read_log

from .launched import EAGLE, EAGLE3, SERVER, findings

CAPTURE = (
    f"{SERVER} --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --disable-radix-cache "
    "--chunked-prefill-size -1"
)
GEMMA = {"draft_config": {"architectures": ["Gemma4AssistantForCausalLM"]}}
LLAMA = {"draft_config": {"architectures": ["LlamaForCausalLMEagle"]}}


def log_of(algorithm: str | None) -> str:
    return f"server_args={{'model_path': 'T', 'speculative_algorithm': {algorithm!r}, 'port': 1}}\n"


def told(code: str, **given: Any) -> list[tuple[str, str]]:
    found = findings(**{"draft_config": {}, **given})
    return [(f.severity, f.message) for f in found if f.code == code and f.severity != "info"]


@pytest.mark.parametrize(
    ("launch", "printed", "more"),
    [
        (EAGLE.replace("EAGLE", "NEXTN"), "EAGLE", {}),
        (EAGLE.replace("EAGLE", "nextn"), "EAGLE", {}),
        (EAGLE, "FROZEN_KV_MTP", GEMMA),
        (EAGLE.replace("EAGLE", "NEXTN"), "FROZEN_KV_MTP", GEMMA),
        (EAGLE3, "EAGLE3", {}),
        (EAGLE.replace("EAGLE", "$ALGO"), "EAGLE3", {}),
        (CAPTURE, None, {}),
        (CAPTURE, "EAGLE3", {}),
        (SERVER, None, {}),
        ([*SERVER.split(), "--speculative-num-steps", "3"], None, {}),
    ],
)
def test_logs_that_fit_the_launch_line(launch: Any, printed: str | None, more: dict[str, Any]) -> None:
    assert told("log-algorithm", launch_args=launch, log=log_of(printed), **more) == []


def test_a_plain_server_of_vllm() -> None:
    log = "INFO engine config: model='T', speculative_config=None, tokenizer='T'"
    assert read_log(log).off
    assert told("log-algorithm", launch_args="vllm serve T --max-model-len 128k", log=log) == []
    line = "vllm serve T --spec-method eagle3 --spec-model D --spec-tokens 3"
    assert told("log-algorithm", launch_args=line, log=log) == [("warning", "the log says that speculation is off")]


@pytest.mark.parametrize(
    ("launch", "printed", "more"),
    [
        (EAGLE3, "EAGLE", {}),
        (EAGLE, "EAGLE3", {}),
        (EAGLE, "FROZEN_KV_MTP", LLAMA),
        (EAGLE3, "FROZEN_KV_MTP", GEMMA),
        (EAGLE.replace("EAGLE", "NEXTN"), "NGRAM", {}),
    ],
)
def test_logs_of_another_server(launch: str, printed: str, more: dict[str, Any]) -> None:
    [(severity, message)] = told("log-algorithm", launch_args=launch, log=log_of(printed), **more)
    assert severity == "error" and message.endswith(f"the log says {printed}")


@pytest.mark.parametrize("given", [{"launch_args": EAGLE3}, {}])
def test_speculation_that_was_asked_for_and_is_off(given: dict[str, Any]) -> None:
    [(severity, _)] = told("log-algorithm", log=log_of(None), **given)
    assert severity == "warning"


def test_a_log_of_a_capture_by_itself() -> None:
    log = log_of(None).replace("'port'", "'enable_return_aux_hidden_states': True, 'port'")
    assert told("log-algorithm", log=log) == []
    assert "--enable-return-aux-hidden-states" not in read_log(log.replace("True", "False")).launch


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("Eagle3 MLA: skipping unexpected weight model.layers.0.q_a_proj.weight", ["model.layers.0.q_a_proj.weight"]),
        ("Unexpected keys: ['module.fc.weight', 'module.norm.weight']", ["module.fc.weight", "module.norm.weight"]),
        ('Unexpected key(s) in state_dict: "a.fc.weight", "b.norm". ', ["a.fc.weight", "b.norm"]),
        ("unexpected keys in the checkpoint: {'draft.fc.weight'}", ["draft.fc.weight"]),
        ("Skipping parameter model.fc.weight - not found in model", ["model.fc.weight"]),
        ("DSpark V4 draft: unexpected weight 'a.b' -> 'c.d'", ["a.b"]),
        ("Unused weights: midlayer.fc.weight", ["midlayer.fc.weight"]),
        ("Parameter model.fc.weight not found in params_dict", ["model.fc.weight"]),
        ("Skipping weights update from host.com", []),
        ("Unexpected keys: []", []),
        ("Unexpected keys in model.safetensors: []", []),
        ("Skipping weight layers.0.self_attn.rotary_emb.inv_freq", []),
        ("Skipping parameter checks in release 0.5.23", []),
        ("Unused parameters: 0.5 GB", []),
    ],
)
def test_names_that_the_loader_drops(line: str, names: list[str]) -> None:
    assert list(read_log(f"[2026-01-01 TP0] {line}").dropped) == names
    assert [severity for severity, _ in told("log-weights", log=f"[t] {line}")] == ["error"][: len(names)]


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ('declare -x SGL_SIMULATE_ACC_LEN="3.0"', "error"),
        ("+ SGL_SIMULATE_ACC_LEN=3 python3 -m sglang.launch_server", "error"),
        ("SGLANG_SIMULATE_ACC_LEN=.5", "error"),
        ("UserWarning: Environment variable SGL_SIMULATE_ACC_LEN is deprecated, please use SGLANG_...", "warning"),
        ("SGL_SIMULATE_ACC_LEN=-1", None),
        ("UserWarning: Environment variable SGL_ENABLE_JIT is deprecated, please use SGLANG_ENABLE_JIT", None),
    ],
)
def test_simulated_acceptance_under_its_older_name(line: str, severity: str | None) -> None:
    log = f"{line}\nDecode batch, accept len: 3.00, accept rate: 0.67\n"
    assert [one for one, _ in told("log-acceptance", log=log)] == ([severity] if severity else [])
