"""Launch lines with a healthy EAGLE-3 draft beside them: what is said of them."""

from __future__ import annotations

from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.readers.launch import read
from eagle3lab.doctor.run import choose_engines, diagnose

from .healthy import QWEN, served

SERVER = "python3 -m sglang.launch_server --model-path T"
EAGLE = f"{SERVER} --speculative-algorithm EAGLE --speculative-draft-model-path D"
EAGLE3 = f"{SERVER} --speculative-algorithm EAGLE3 --speculative-draft-model-path D"
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
OLD_CLASS = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "hidden_size": 4096}
OLD_DRAFT = {"draft_config": OLD_CLASS, "draft_headers": {"fc.weight": ["BF16", [4096, 8192]]}, "target": QWEN}


def facts_of(launch: str | None = None, **given: Any) -> Facts:
    """Facts of a `--launch` value, of `given` and, unless that holds one, of a healthy EAGLE-3 draft."""
    facts = Facts()
    draft = {} if "draft_config" in given else served(QWEN)
    for name, value in {**draft, **given}.items():
        if name in given or name != "launch_args":
            facts.put(name, value, "test")
    if launch is not None:
        read(launch, facts)
    choose_engines(facts, "")
    return facts


def findings(launch: str | None = None, **given: Any) -> list[Finding]:
    """Everything that is said."""
    return diagnose(facts_of(launch, **given)).findings


def told(launch: str | None = None, **given: Any) -> list[tuple[str, str]]:
    """(severity, code) of errors and warnings."""
    return [(f.severity, f.code) for f in findings(launch, **given) if f.severity in ("error", "warning")]


def unsettled(launch: str | None = None, **given: Any) -> list[str]:
    """Messages about what was given and could not be checked."""
    found = findings(launch, **given)
    return [f.message for f in found if f.code == "not-checked" and "facts are missing" not in f.message]
