"""vLLM's speculative config in each of its spellings, and what vLLM refuses or invents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.readers.launch import engine_of, parse_args, read, speculative_config
from eagle3lab.doctor.run import choose_engines, diagnose
from eagle3lab.doctor.serverlog import read_log

from . import launched
from .healthy import QWEN, served

WHOLE = {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}


def config(**more: Any) -> str:
    return f"'{json.dumps({**WHOLE, **more})}'"


def told(line: str, draft: dict[str, Any] | None = None) -> list[Finding]:
    """Errors and warnings about a launch line, with the draft of `draft` when there is one."""
    facts = Facts()
    read(line, facts)
    for name, value in (draft or {}).items():
        if name != "launch_args":
            facts.put(name, value, "test")
    choose_engines(facts, "")
    return [f for f in diagnose(facts).findings if f.severity in ("error", "warning")]


SPELLINGS = [
    f"vllm serve T -sc {config(method='eagle')}",
    f"vllm serve T -sc={config(method='eagle')}",
    "vllm serve T -sc.method eagle -sc.model D -sc.num_speculative_tokens 3",
    "vllm serve T -sc.method=eagle -sc.model=D -sc.num-speculative-tokens=3 -tp=2",
    "vllm serve T --spec-method eagle --spec-model D --spec-tokens 3",
    "vllm serve T --spec_method=eagle --spec_model=D --spec_tokens=3",
    "vllm serve T --spec-meth eagle --speculative-config.model D --speculative-config.num_speculative_tokens 3",
    """vllm serve T --spec-method eagle --speculative-config '{"model": "D", "num_speculative_tokens": 3}'""",
    "export A=1\nsleep 1\nvllm serve T --spec-method eagle --spec-model D --spec-tokens 3 &\ncurl --port 1 x",
    f"vllm serve T -tp 2 -sc {config()} -sc.method eagle -sc.model D -sc.num_speculative_tokens 3",
]


@pytest.mark.parametrize("line", SPELLINGS)
def test_every_spelling_is_read(line: str) -> None:
    launch = parse_args(line)
    assert engine_of(line) == "vllm"
    assert speculative_config(launch) == {**WHOLE, "method": "eagle"}
    draft = served(QWEN)
    assert any(f.code == "launch-algorithm" and "eagle3 is needed" in f.message for f in told(line, draft))
    right = line.replace("eagle", "eagle3").replace("eagle33", "eagle3")
    assert not [f for f in told(right, draft) if f.code.startswith("launch")]


def test_dotted_keys_replace_the_whole_config() -> None:
    line = f"vllm serve T --speculative-config {config()} --speculative-config.method eagle3"
    assert speculative_config(parse_args(line)) == {"method": "eagle3"}
    assert {f.message.split(":")[0] for f in told(line)} == {
        "method eagle3 without model", "method eagle3 without num_speculative_tokens",
    }  # fmt: skip


def test_lists_and_inner_keys() -> None:
    launch = parse_args("vllm serve T -sc.a+ 0.5,0.25 -sc.draft_load_config.load_format dummy -sc.n 1e3")
    wanted = {"a": ["0.5", "0.25"], "draft_load_config": {"load_format": "dummy"}, "n": 1000.0}
    assert speculative_config(launch) == wanted


def test_a_key_given_in_two_ways_is_refused() -> None:
    [finding] = told(f"vllm serve T --spec-tokens 5 -sc {config()}")
    assert finding.message.startswith("--spec-tokens beside num_speculative_tokens")


@pytest.mark.parametrize("text", ["null", "None", "'{}'"])
def test_no_config_is_no_broken_one(text: str) -> None:
    assert told(f"vllm serve T --speculative-config {text}") == []


INVENTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
RATES = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.2]}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"vllm serve T --speculative-config {config(**INVENTED)}", "synthetic_acceptance_length 2.5"),
        (f"vllm serve T -sc {config(**RATES)}", "synthetic_acceptance_rates [0.8, 0.5, 0.2]"),
        (
            "vllm serve T -sc.method eagle3 -sc.model D -sc.num_speculative_tokens 2 "
            "-sc.rejection_sample_method synthetic -sc.synthetic_acceptance_rates+ 0.8,0.5",
            "synthetic_acceptance_rates ['0.8', '0.5']",
        ),
    ],
)
def test_invented_acceptance_is_refused(line: str, shown: str) -> None:
    [finding] = told(line)
    assert finding.code == "env-simulated-acceptance" and finding.severity == "error"
    assert shown in finding.message and finding.evidence["refuse"] is True


@pytest.mark.parametrize("method", ["standard", "block"])
def test_real_rejection_methods_are_quiet(method: str) -> None:
    assert told(f"vllm serve T -sc {config(rejection_sample_method=method)}") == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rejection_sample_method": "synthetik"}, "rejection_sample_method is 'synthetik'"),
        ({"synthetic_acceptance_length": 2.5}, "without rejection_sample_method synthetic"),
    ],
)
def test_rejection_methods_that_vllm_refuses(more: dict[str, Any], said: str) -> None:
    [finding] = told(f"vllm serve T -sc {config(**more)}")
    assert said in finding.message and finding.severity == "error"


@pytest.mark.parametrize("name", ["model", "num_speculative_tokens"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_config_without_draft_or_steps(name: str, method: str) -> None:
    left = json.dumps({key: value for key, value in {**WHOLE, "method": method}.items() if key != name})
    [finding] = told(f"vllm serve T -sc '{left}'")
    assert f"method {method} without {name}: vLLM does not start" in finding.message


@pytest.mark.parametrize(
    "line",
    [
        """vllm serve T -sc '{"method": "mtp", "num_speculative_tokens": 1}'""",
        """vllm serve T -sc '{"method": "ngram", "num_speculative_tokens": 3}'""",
        """vllm serve T-speculator.eagle3 -sc '{"method": "eagle3", "num_speculative_tokens": 5}'""",
        "vllm serve T --spec-method eagle3 --config serve.yaml",
        "vllm serve T --spec-method eagle3 $SPEC_ARGS",
        "vllm serve T --enforce-eager --spec-method eagle3 --spec-model $DRAFT --spec-tokens $K",
    ],
)
def test_what_vllm_fills_in_or_is_out_of_sight(line: str) -> None:
    assert told(line) == []


METRICS = (
    "INFO [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted: 150 tokens, "
    "Drafted: 300 tokens, Per-position acceptance rate: 0.800, 0.500, 0.200"
)
OTHER = {"rejection_sample_method": "block", "synthetic_acceptance_length": None}


def log_of(args: dict[str, Any]) -> str:
    return f"(APIServer pid=1) INFO [api_utils.py:286] non-default args: {args}\n{METRICS}\n"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (log_of({"model": "T", "speculative_config": {**WHOLE, **INVENTED}}), "synthetic_acceptance_length 2.5"),
        (log_of({"speculative_config": {**RATES, **WHOLE}}), "synthetic_acceptance_rates [0.8, 0.5, 0.2]"),
        (f"+ vllm serve T --speculative-config {config(**INVENTED)}\n{METRICS}", "synthetic_acceptance_length 2.5"),
        (f"+ vllm serve T -sc.rejection_sample_method synthetic\n{METRICS}", "rejection_sample_method synthetic"),
    ],
)
def test_invented_acceptance_in_a_log(log: str, shown: str) -> None:
    [finding] = [f for f in diagnose(Facts({"log": log})).findings if f.severity == "error"]
    assert finding.code == "log-acceptance" and shown in finding.message and finding.evidence["refuse"] is True


@pytest.mark.parametrize("more", [{}, OTHER, {"draft_sample_method": "probabilistic"}])
def test_a_log_of_measured_acceptance(more: dict[str, Any]) -> None:
    log = log_of({"speculative_config": {**more, **WHOLE}})
    assert read_log(log).synthetic is None and read_log(log).algorithm == "eagle3"
    assert not [f for f in diagnose(Facts({"log": log})).findings if f.severity == "error"]


def test_the_method_of_a_log_with_spec_flags() -> None:
    log = log_of({"model": "T", "spec_method": "eagle", "spec_model": "D", "spec_tokens": 3})
    assert read_log(log).algorithm == "eagle"
    assert read_log(log + "speculative_config=SpeculativeConfig(method='eagle3', model='D')").algorithm == "eagle3"


def guessing(model: str, method: str | None = None) -> list[str]:
    """A launch line whose draft lies at `model`."""
    given = {"model": model, "num_speculative_tokens": 3, **({"method": method} if method else {})}
    return ["vllm", "serve", "T", "-sc", json.dumps(given)]


@pytest.mark.parametrize(
    ("model", "method", "wanted"),
    [
        ("/ckpt/eagle-drafts/qwen3-eagle3", None, ["error"]),
        ("/ckpt/EAGLE-Qwen3", None, ["error"]),
        ("/ckpt/drafts/qwen3", None, ["warning"]),
        ("/ckpt/qwen3-EAGLE3", None, []),
        ("/ckpt/eagle-drafts/qwen3", "eagle3", []),
        ("$DRAFT", None, []),
    ],
)
def test_the_method_that_a_path_stands_for(model: str, method: str | None, wanted: list[str]) -> None:
    assert [one for one, _ in launched.told(launch_args=guessing(model, method))] == wanted


@pytest.mark.parametrize(
    ("model", "method", "wanted"),
    [
        ("/d", "eagle3", [("error", "launch-algorithm")]),
        ("/d-eagle3", None, [("error", "launch-algorithm")]),
        ("/d", "eagle", []),
        ("yuhuili/EAGLE-LLaMA3", None, []),
    ],
)
def test_an_older_draft(model: str, method: str | None, wanted: list[tuple[str, str]]) -> None:
    found = launched.told(launch_args=guessing(model, method), **launched.OLD_DRAFT)
    assert [one for one in found if one[1] == "launch-algorithm"] == wanted


def test_a_class_that_contradicts_the_method() -> None:
    alone = {"draft_config": launched.OLD_CLASS, "target": QWEN}
    for asked in (guessing("/d", "eagle3"), launched.EAGLE3):
        assert ("warning", "launch-algorithm") in launched.told(launch_args=asked, **alone)
    for asked in (guessing("/d", "eagle"), launched.EAGLE):
        assert not [one for one in launched.told(launch_args=asked, **alone) if one[1] == "launch-algorithm"]


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ("--attention-backend trtllm_mla --prefill-attention-backend fa3 --decode-attention-backend fa3", False),
        ("--attention-backend trtllm_mla --prefill-attention-backend fa3", True),
        ("--attention-backend fa3 --decode-attention-backend flashmla", True),
        ("--attention-backend fa3", False),
    ],
)
def test_a_backend_that_nobody_inherits(flags: str, warned: bool) -> None:
    found = launched.told(launch_args=f"{launched.EAGLE3} {flags}")
    assert found == ([("warning", "launch-draft-attention")] if warned else [])
