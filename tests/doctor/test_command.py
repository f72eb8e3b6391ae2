"""The doctor's command: flags, exit codes, the shape of its JSON, explanations, real public configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3lab import cli
from eagle3lab.doctor.catalogue import page
from eagle3lab.doctor.registry import all_checks

from .healthy import QWEN, SERVE, config, served

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT.parent / "shared" / "configs"
WARNS = {"draft_config": {"rope_parameters": {"rope_theta": 5e5}}}


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    def run(*words: str, facts: dict | None = None) -> tuple[int, str, str]:
        if facts is not None:
            (tmp_path / "facts.yaml").write_text(yaml.safe_dump(facts))
            words = (*words, "--facts", str(tmp_path / "facts.yaml"))
        code = cli.run(["doctor", *words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_json_has_the_shape_of_the_design(call) -> None:
    facts = {**served(QWEN), "launch_args": [*SERVE, "--speculative-algorithm", "EAGLE"]}
    code, out, err = call("--json", facts=facts)
    answer = json.loads(out)
    assert (code, err) == (1, "")
    assert set(answer) == {"findings", "summary"}
    assert set(answer["summary"]) == {"error", "warning", "info", "checks_run"}
    keys = {"code", "severity", "subject", "message", "actual", "rule", "fix", "evidence"}
    assert all(set(finding) == keys for finding in answer["findings"])
    order = [finding["severity"] for finding in answer["findings"]]
    assert order == sorted(order, key=["error", "warning", "info"].index) and order[0] == "error"
    assert answer["summary"]["error"] == order.count("error")


def test_strict_turns_a_warning_into_exit_1(call) -> None:
    assert call(facts=WARNS)[0] == 0
    assert call("--strict", facts=WARNS)[0] == 1
    assert call("--strict", facts={"draft_config": config(QWEN)})[0] == 0


def test_unknown_fact_is_exit_2_with_the_nearest(call) -> None:
    code, out, err = call(facts={"draft_confg": {}})
    assert (code, out) == (2, "") and "draft_config" in err and len(err.splitlines()) == 1


def test_unknown_engine_is_exit_2_with_the_nearest(call) -> None:
    code, _, err = call("--engine", "sglnag", facts=WARNS)
    assert code == 2 and "sglang" in err


def test_nothing_given_is_exit_2(call) -> None:
    assert call()[0] == 2


@pytest.mark.parametrize("flag", ["--launch", "--draft", "--engine", "--env", "--explain"])
@pytest.mark.parametrize("form", ["{} |", "{}="])
def test_an_option_with_nothing_behind_it_is_exit_2(flag: str, form: str, call) -> None:
    words = [word.strip("|") for word in form.format(flag).split(" ")]
    code, out, err = call(*words, facts=served(QWEN))
    assert (code, out) == (2, "")
    assert f"{flag} is empty" in err


def test_engine_version_decides(call) -> None:
    facts = {"target": {"blocks": 61, "family": "kimi_k25"}, "draft_config_ids": [2, 30, 58],
             "states_manifest_resid_pre": [2, 30, 58]}  # fmt: skip
    assert call("--engine", "sglang@0.5.23", facts=facts)[0] == 0
    code, out, _ = call("--engine", "sglang@0.5.11", "--json", facts=facts)
    assert code == 1 and "[3, 31, 59]" in out


def test_default_engine_shows_both(call) -> None:
    facts = {"target": {"blocks": 61, "family": "kimi_k25"}, "draft_config_ids": [1, 29, 57],
             "states_manifest_resid_pre": [2, 30, 58]}  # fmt: skip
    code, out, _ = call("--json", facts=facts)
    found = [f for f in json.loads(out)["findings"] if f["code"] == "points-differ"]
    assert code == 0 and [f["severity"] for f in found] == ["warning"] and "vllm" in found[0]["message"]


def test_explain(call) -> None:
    code, out, _ = call("--explain", "launch-algorithm")
    assert code == 0 and "rule:" in out and "EAGLE3" in out
    code, _, err = call("--explain", "launch-algoritm")
    assert code == 2 and "launch-algorithm" in err


def test_table_says_fix_and_next_step(call) -> None:
    code, out, _ = call(facts={**served(QWEN), "launch_args": [*SERVE, "--speculative-algorithm", "EAGLE"]})
    assert code == 1 and "launch-algorithm" in out and "--explain" in out and "1 error" in out


def test_bare_paths_are_told_apart(call, tmp_path: Path) -> None:
    for name, content in (("draft", config(QWEN)), ("target", {"model_type": "qwen3", "num_hidden_layers": 36})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    (tmp_path / "serve.sh").write_text("python3 -m sglang.launch_server --speculative-algorithm EAGLE "
                                       "--speculative-draft-model-path D\n")  # fmt: skip
    code, out, _ = call(*(str(tmp_path / name) for name in ("draft", "target", "serve.sh")), "--json")
    codes = {f["code"]: f["severity"] for f in json.loads(out)["findings"]}
    assert code == 1 and codes["launch-algorithm"] == "error" and "points-captured" in codes


def test_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from eagle3lab import cli; rc = cli.run(['doctor', '--explain', "
        "'vocab-offsets']); print(rc, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_catalogue_page_is_current() -> None:
    assert (ROOT / "docs" / "checks.md").read_text() == page(all_checks()), (
        "run: python -m eagle3lab.doctor.catalogue > docs/checks.md"
    )


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the folder of public configs is not beside this checkout")
@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")) or ["none"])
@pytest.mark.parametrize("how", ["flag", "bare"])
def test_public_configs_pass(name: str, how: str, call) -> None:
    flag = "--draft" if name.startswith("draft.") else "--target"
    words = [str(CONFIGS / name)] if how == "bare" else [flag, str(CONFIGS / name)]
    if how == "bare" and "modelopt" in name:
        words = ["--draft", *words]  # overrides alone do not say what they are
    code, out, _ = call(*words, "--json", "--strict")
    found = json.loads(out)["findings"]
    assert (code, [f["message"] for f in found if f["severity"] != "info"]) == (0, [])


PAIRS = [
    ("draft.assembled.kimi-k2.5-llama-reduced-vocab.json", "target.kimi-k2.5.json"),
    ("draft.assembled.kimi-k2.5-mla-full-vocab.json", "target.kimi-k2.5-nvfp4.json"),
    ("draft.torchspec.kimi_k25_eagle3_mla.json", "target.kimi-k2.6-nvfp4.json"),
    ("draft.specforge.deepseek-v3-671b-eagle3.json", "target.deepseek-v3.json"),
    ("draft.specforge.qwen3-235B-A22B-eagle3.json", "target.qwen3-235b-a22b.json"),
    ("draft.sglang-fixture.qwen3-8b-eagle3.json", "target.qwen3-8b.json"),
    ("draft.speculators-research.qwen3-8b.json", "target.qwen3-8b.json"),
]


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the folder of public configs is not beside this checkout")
@pytest.mark.parametrize(("draft", "target"), PAIRS)
@pytest.mark.parametrize("engine", ["", "sglang", "vllm"])
def test_public_pairs_pass(draft: str, target: str, engine: str, call) -> None:
    chosen = ["--engine", engine] if engine else []
    code, out, _ = call(
        "--draft", str(CONFIGS / draft), "--target", str(CONFIGS / target), *chosen, "--json", "--strict"
    )
    found = json.loads(out)["findings"]
    assert (code, [f["message"] for f in found if f["severity"] != "info"]) == (0, [])
