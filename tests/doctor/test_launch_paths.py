"""What a launch line names is read too: the folder of its draft, its target, or the name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.run import Inputs, visit

from .test_layouts import draft_folder, target, without  # noqa: F401  the fixture

SGLANG = (
    "python3 -m sglang.launch_server --model-path {target} --speculative-algorithm {how} "
    "--speculative-draft-model-path {draft} --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
VLLM = "vllm serve {target} --spec-method {how} --spec-model {draft} --spec-tokens 3"
BOTH = [(SGLANG, "EAGLE", "EAGLE3"), (VLLM, "eagle", "eagle3")]


def visited(line: str, **given: str) -> list[Finding]:
    return visit(Inputs(launch=line, **given)).findings


def faults(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.severity, f.code) for f in found if f.severity != "info"]


@pytest.mark.parametrize(("line", "wrong", "right"), BOTH)
def test_folders_on_this_disk(line: str, wrong: str, right: str, tmp_path: Path, target: Path) -> None:  # noqa: F811
    draft = draft_folder(tmp_path / "draft")
    found = visited(line.format(how=wrong, draft=draft, target=target))
    assert faults(found) == [("error", "launch-algorithm")]
    assert [f.subject for f in found if f.code == "also-read"] == [str(draft), str(target)]
    assert faults(visited(line.format(how=right, draft=draft, target=target))) == []
    script = tmp_path / "serve.sh"  # a line in a file that no flag names
    script.write_text(line.format(how=wrong, draft=draft, target=target) + "\n")
    bare = visit(Inputs(paths=(str(script),))).findings
    assert [(f.code, f.message) for f in bare] == [(f.code, f.message) for f in found]


def test_what_is_given_counts_over_what_is_named(tmp_path: Path, target: Path) -> None:  # noqa: F811
    named, given = draft_folder(tmp_path / "named", without("fc.weight")), draft_folder(tmp_path / "given")
    line = SGLANG.format(how="EAGLE3", draft=named, target="T")
    assert faults(visited(line)), "fc is missing"
    found = visited(line, draft=str(given), target=str(target))
    assert faults(found) == [] and not any(f.code == "also-read" for f in found)


@pytest.mark.parametrize(("line", "wrong", "right"), BOTH)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lightseekorg/kimi-k2.5-eagle3", True),
        ("AngelSlim/Qwen3-8B_eagle3", True),
        ("nvidia/Some-Eagle-3", True),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", False),
        ("someone/eagle-3b-chat", False),
        ("/models/draft", False),
    ],
)
def test_a_name_alone_is_a_hint(line: str, wrong: str, right: str, name: str, said: bool) -> None:
    found = [f for f in visited(line.format(how=wrong, draft=name, target="T")) if f.code == "launch-algorithm"]
    assert any(f.severity == "warning" and name in f.message for f in found) == said
    found = visited(line.format(how=right, draft=name, target="T"))
    assert not [f for f in found if f.code == "launch-algorithm" and f.severity != "info"]
