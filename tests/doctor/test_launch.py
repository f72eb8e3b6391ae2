"""Launch lines in every spelling give the same flags."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.environment import read_env
from eagle3lab.doctor.readers.launch import engine_of, parse_args, read, speculative_config
from eagle3lab.doctor.run import choose_engines, diagnose

FLAGS = {"speculative-algorithm": ["EAGLE"], "speculative-draft-model-path": ["/d r"], "tp": ["8"]}
SPELLINGS = [
    "--speculative-algorithm EAGLE --speculative-draft-model-path '/d r' --tp 8",
    "--speculative-algorithm=EAGLE --speculative-draft-model-path='/d r' --tp=8",
    '--speculative_algorithm EAGLE --speculative_draft_model_path "/d r" --tensor_parallel_size 8',
    "--speculative-algo EAGLE --speculative-draft-model-path /d\\ r --tp-size 8",
    "--speculative-alg EAGLE --speculative-draft-model '/d r' --tp 4 --tp 8",
    "python3 -m sglang.launch_server \\\n  --speculative-algorithm EAGLE \\\n "
    "--speculative-draft-model-path '/d r' \\\n  --tp 8",
    "python3 -m sglang.launch_server \\\r\n  --speculative-algorithm EAGLE \\\r\n "
    "--speculative-draft-model-path '/d r' --tp 8\r\n",
    "# serve\nexport A=1\nCUDA_VISIBLE_DEVICES=0,1 python -m sglang.launch_server --tp 8 --speculative-algorithm EAGLE "
    "--speculative-draft-model-path '/d r' # the end",
]


def launch_facts(value: str) -> Facts:
    facts = Facts()
    read(value, facts)
    return facts


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("how", ["argument", "script"])
def test_spellings(text: str, how: str, tmp_path: Path) -> None:
    value = text
    if how == "script":
        (tmp_path / "serve.sh").write_text("#!/bin/bash\n" + text + "\n")
        value = str(tmp_path / "serve.sh")
    flags = parse_args(launch_facts(value)["launch_args"]).flags
    assert {name: flags[name] for name in FLAGS} == FLAGS


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_config_file(suffix: str, tmp_path: Path) -> None:
    config = {"speculative-algorithm": "EAGLE", "speculative_draft_model_path": "/d r", "tp": 8,
              "disable-radix-cache": True, "trust-remote-code": False,
              "return-aux-hidden-state-layer-ids": [2, 30, 58]}  # fmt: skip
    path = tmp_path / f"serve.{suffix}"
    path.write_text(json.dumps(config) if suffix == "json" else yaml.safe_dump(config))
    launch = parse_args(launch_facts(str(path))["launch_args"])
    assert {name: launch.flags[name] for name in FLAGS} == FLAGS
    assert launch.flags["return-aux-hidden-state-layer-ids"] == ["2", "30", "58"]
    assert launch.has("disable-radix-cache") and not launch.has("trust-remote-code")


def test_last_one_wins_and_is_counted() -> None:
    launch = parse_args(["--tp", "4", "--speculative-algorithm", "EAGLE", "--speculative-algorithm=EAGLE3"])
    assert launch.value("speculative-algorithm") == "EAGLE3"
    assert launch.times["speculative-algorithm"] == 2


def test_an_ambiguous_abbreviation_is_left_alone() -> None:
    assert "speculative-draft-model-path" not in parse_args(["--speculative-d", "x"]).flags


def test_environment_in_front_of_the_command() -> None:
    facts = launch_facts("SGLANG_SIMULATE_ACC_LEN=3 A='x y' python -m sglang.launch_server --tp 8")
    assert facts["env"] == {"SGLANG_SIMULATE_ACC_LEN": "3", "A": "x y"}


def test_nothing_is_expanded_or_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    facts = launch_facts(f"python -m sglang.launch_server --model-path $(touch {marker}) --x `touch {marker}` --tp 8")
    assert not marker.exists()
    assert "$(touch" in " ".join(facts["launch_args"])


def test_engines() -> None:
    assert engine_of(["--speculative-algorithm", "EAGLE3"]) == "sglang"
    assert engine_of("vllm serve T --speculative-config '{}'") == "vllm"
    assert engine_of("python -m vllm.entrypoints.openai.api_server --model T") == "vllm"
    assert engine_of(["--model", "T", "--speculative-config.method", "eagle3"]) == "vllm"
    assert engine_of("python3 -m sglang.launch_server --model-path /models/my-vllm-copy") == "sglang"


def test_speculative_config_of_vllm() -> None:
    wanted = {"method": "eagle3", "model": "d"}
    assert (
        speculative_config(parse_args('vllm serve T --speculative-config \'{"method": "eagle3", "model": "d"}\''))
        == wanted
    )
    assert speculative_config(parse_args("--speculative-config.method eagle3 --speculative-config.model=d")) == wanted
    assert speculative_config(parse_args("--speculative-config '{broken'")) == {}


def test_open_quote_is_a_finding() -> None:
    assert "open quote" in launch_facts("python -m x --a 'b --tp 8").remarks[0].message


def test_variables_that_hold_each_other_ten_times_end() -> None:
    """Ten lines would come to 10^10 characters."""
    lines = ["A=0123456789", *(f"{after}={f'${before}' * 10}" for before, after in itertools.pairwise("ABCDEFGHIJ"))]
    text = "\n".join([*lines, "python3 -m sglang.launch_server --model-path $J"])
    assert "more than 1,000,000 characters" in launch_facts(text).remarks[0].message


def test_no_flags_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="no flags"):
        launch_facts("  \n ")


def test_env_file(tmp_path: Path) -> None:
    path = tmp_path / "x.env"
    path.write_text('# c\nexport A="1"\nB = no\nSGLANG_SIMULATE_ACC_LEN=2.5\nnot a line\n')
    facts = Facts()
    read_env(str(path), facts)
    assert facts["env"] == {"A": "1", "SGLANG_SIMULATE_ACC_LEN": "2.5"}


def test_env_file_with_comments_and_one_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.env"
    path.write_text("SGLANG_SIMULATE_ACC_LEN=2.5 # why\nA='b # c'\n")
    facts = Facts()
    read_env(str(path), facts)
    assert facts["env"] == {"SGLANG_SIMULATE_ACC_LEN": "2.5", "A": "b # c"}
    path.write_text("nothing\n")
    read_env(str(path), facts)
    assert "no NAME=value line" in facts.remarks[0].message


SERVER = "python3 -m sglang.launch_server --model-path T"
SCRIPTS = [
    f"ALG=EAGLE\n{SERVER} --tp 8 --speculative-algorithm $ALG --speculative-draft-model-path '/d r'",
    f'export ALG="EAGLE"; {SERVER} --tp 8 --speculative-algorithm "${{ALG}}" --speculative-draft-model-path /d\\ r',
    f"{SERVER} --tp ${{TP:-8}} --speculative-algorithm ${{ALG-EAGLE}} --speculative-draft-model-path '/d r'",
    f"SPEC='--speculative-algorithm EAGLE --tp 8'\nSPEC+=' --x'\n{SERVER} $SPEC --speculative-draft-model-path '/d r'",
    f"A=(--tp 8 --speculative-algorithm EAGLE # why\n --speculative-draft-model-path '/d r')\n{SERVER} \"${{A[@]}}\"",
    f"{SERVER} --name a#b --speculative-algorithm EAGLE --speculative-draft-model-path '/d r' --tp 8 2>&1 | tee --tp 4",
    f"{SERVER} --tp 8 --speculative-algorithm EAGLE --speculative-draft-model-path '/d r' > log & \n curl --tp 9 x",
    f"bash -lc \"{SERVER} --tp 8 --speculative-algorithm EAGLE --speculative-draft-model-path '/d r'\"",
    f"{SERVER} --served-name <name> --tp 8 --speculative-algorithm EAGLE --speculative-draft-model-path '/d r'",
    f"{SERVER} --tp 2\n{SERVER} --tp 8 --speculative-algorithm EAGLE --speculative-draft-model-path '/d r'",
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_scripts_around_the_server(text: str) -> None:
    flags = parse_args(launch_facts(text)["launch_args"]).flags
    assert {name: flags[name] for name in FLAGS} == FLAGS


def test_a_json_list_of_words() -> None:
    words = ["python3", "-m", "sglang.launch_server", "--tp", "8"]
    assert launch_facts(f"CMD {json.dumps(words)}")["launch_args"] == words


def test_a_variable_is_gone_when_unset() -> None:
    assert not launch_facts(f"export A=1\nunset A\n{SERVER}").has("env")


def test_what_the_text_does_not_settle_is_said() -> None:
    facts = launch_facts(f"{SERVER} --speculative-algorithm $ALG")
    assert "$ALG" in facts.remarks[0].message
    assert [f for f in diagnose(facts).findings if f.code == "launch-algorithm"] == []


def test_more_than_one_server_is_said() -> None:
    facts = launch_facts(f"{SERVER} --speculative-algorithm EAGLE\n{SERVER} --speculative-algorithm EAGLE3")
    assert "1 more launch lines" in facts.remarks[0].message


def test_a_script_without_flags_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="no flags"):
        launch_facts("echo hello")


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_a_speculative_config_that_is_no_json(flag: str) -> None:
    facts = launch_facts(f'vllm serve T {flag} {{"method":"eagle3"}}')
    choose_engines(facts, "")
    assert any("is no JSON object" in f.message for f in diagnose(facts).findings if f.severity == "error")
