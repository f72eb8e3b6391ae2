"""The live probe on a real SGLang: was fc called, at what width, with the file's weights?

Three servers with the same target: EAGLE3, EAGLE, and EAGLE3 with renamed keys. All start, none logs an error, all give
the same text; the probe tells them apart. `doctor --log` and `doctor --server` look at the same servers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file, save_file

from eagle3lab.core.paths import data_folder
from eagle3lab.doctor.checks.probe import probe_lines
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.readers import server as reader
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.doctor.serverlog import read_log
from eagle3lab.steps.serve import prepare, serve
from eagle3lab.targets.engine import EngineServer, free_port, request_json
from eagle3lab.targets.launch import command, probe_arguments
from tests.engines.conftest import K
from tests.engines.runner import ROOT, environment_python

CPU = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--speculative-draft-attention-backend", "triton", "--disable-overlap-schedule", "--disable-radix-cache"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "2048", "--max-running-requests", "4"),
    *("--decode-log-interval", "1", "--skip-server-warmup"),
]
WIDTH, SECONDS = 3 * 576, 300
PROMPT = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}


@dataclass(frozen=True)
class Visit:
    """What one server said: its text and log, the doctor's reports on log and server, and `accept served` on it."""

    text: str
    log: str
    logged: Report
    asked: Report | None
    served: subprocess.CompletedProcess[str] | None

    def messages(self, code: str, severity: str) -> list[str]:
        """Messages of one check in the report on the log."""
        return [one.message for one in self.logged.findings if (one.code, one.severity) == (code, severity)]


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """Variables of a SGLang that drafts on a CPU. /health would generate a token; the test asks for one itself."""
    environment_python("sglang")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts" / "sglang_cpu"), str(ROOT)]),
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }


def look(algorithm: str, target: Path, draft: Path, place: Path, environment: Mapping[str, str], *, ask: bool) -> Visit:
    """Start a server as a user would, with the printed hook line, and look at it; `ask` it more than one prompt."""
    port = free_port()
    arguments = ["--model-path", str(target), "--host", "127.0.0.1", "--port", str(port), *CPU]
    arguments += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    arguments += ["--speculative-num-steps", str(K), "--speculative-eagle-topk", "1"]
    arguments += ["--speculative-num-draft-tokens", str(K + 1), *probe_arguments(str(draft))]
    log = place / "server.log"
    line = command(arguments, python=str(environment_python("sglang")))
    with EngineServer(line, port=port, log=log, env={**environment, "HOME": str(place)}) as server:
        print(f"SGLang {algorithm} ready after {server.wait_ready(timeout=600):.0f} s")
        text = request_json(f"{server.url}/generate", PROMPT, timeout=SECONDS)["text"]
        with pytest.MonkeyPatch.context() as patch:
            # A drafter in Triton's interpreter makes a token a second where a GPU makes a hundred.
            patch.setattr(reader, "TOKENS", 24)
            patch.setattr(reader, "GENERATE_SECONDS", SECONDS)
            asked = visit(Inputs(server=server.url, draft=str(draft), target=str(target))) if ask else None
        prompts = str(data_folder() / "prompts" / "heldout.jsonl")
        words = ["accept", "served", server.url, "--prompts", prompts, "--tokenizer", str(target), "--json"]
        words += ["--limit", "2", "--max-new-tokens", "8", "--concurrency", "2"]
        line = [sys.executable, "-m", "eagle3lab", *words]
        served = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS) if ask else None
    if kept := os.environ.get("EAGLE3LAB_KEEP_LOGS"):
        shutil.copy(log, Path(kept) / f"{place.name}.log")
    return Visit(text, log.read_text(errors="replace"), visit(Inputs(log=str(log), draft=str(draft))), asked, served)


@pytest.fixture(scope="module")
def eagle3(target_folder, drafter_folder, environment, tmp_path_factory) -> Visit:
    return look("EAGLE3", target_folder, drafter_folder, tmp_path_factory.mktemp("probe-eagle3"), environment, ask=True)


@pytest.fixture(scope="module")
def eagle(target_folder, drafter_folder, environment, tmp_path_factory) -> Visit:
    return look("EAGLE", target_folder, drafter_folder, tmp_path_factory.mktemp("probe-eagle"), environment, ask=True)


@pytest.fixture(scope="module")
def renamed(target_folder, drafter_folder, environment, tmp_path_factory) -> Visit:
    """Names as a wrapper saves them: `module.fc.weight`."""
    place = tmp_path_factory.mktemp("probe-renamed")
    draft = place / "drafter"
    draft.mkdir()
    shutil.copy(drafter_folder / "config.json", draft)
    tensors = load_file(drafter_folder / "model.safetensors")
    kept = {name if name in ("d2t", "t2d") else f"module.{name}": tensor for name, tensor in tensors.items()}
    save_file(kept, draft / "model.safetensors", metadata={"format": "pt"})
    return look("EAGLE3", target_folder, draft, place, environment, ask=False)


def test_eagle3_calls_fc_with_the_files_weights(eagle3: Visit) -> None:
    [said] = eagle3.messages("probe-fc", "info")
    assert said.startswith(f"fc input {WIDTH} = 3 x 576, float32")
    assert eagle3.messages("probe-weights", "info") == ["fc, lm_head, d2t equal the file (rank 0)"]
    assert eagle3.messages("probe-fc", "error") == eagle3.messages("probe-weights", "error") == []
    [target] = probe_lines(eagle3.log, "target")
    assert [state["width"] for state in target["aux"]] == [576, 576, 576]
    assert target["captures"] == [2, 15, 27]


def test_eagle_never_calls_fc(eagle: Visit) -> None:
    [said] = eagle.messages("probe-fc", "error")
    assert "fc never called: it got 576 numbers a token, fc reads 1728; the target recorded no states" in said
    head = eagle.messages("probe-weights", "error")
    assert len(head) == 1 and "the drafter's head is the target's, [49152, 576]" in head[0]


def test_renamed_keys_load_something_else(renamed: Visit) -> None:
    wrong = renamed.messages("probe-weights", "error")
    assert [message.split()[1] for message in wrong] == ["fc", "lm_head"]
    assert all("does not know the name module." in message for message in wrong)
    assert renamed.messages("probe-fc", "info"), "fc is called all the same"


def test_nothing_else_tells_them_apart(eagle3: Visit, eagle: Visit, renamed: Visit) -> None:
    """The text is the target's in all three, and but for settings and the probe no line speaks of fc, heads or keys."""
    assert eagle3.text == eagle.text == renamed.text
    known = re.compile(r"server_args=|eagle3lab[ -]probe")
    spoken = re.compile(r"\bfc\b|lm_head|module\.\w|(?:unexpected|missing|unused) (?:key|weight)|not initialized from")
    for visited in (eagle, renamed):
        lines = [line for line in visited.log.splitlines() if not known.search(line)]
        assert [line for line in lines if spoken.search(line)] == []


def test_the_log_says_it_too(eagle3: Visit, eagle: Visit) -> None:
    """`doctor --log --draft` without the probe's lines: the algorithm in force, and acceptance near 1.00."""
    assert eagle3.messages("log-algorithm", "info") == ["algorithm in force: EAGLE3"]
    assert eagle3.messages("log-algorithm", "error") == []
    [said] = eagle.messages("log-algorithm", "error")
    assert "EAGLE" in said
    low = eagle.messages("log-acceptance", "error") + eagle.messages("log-acceptance", "warning")
    assert len(low) == 1 and ("exactly 1.00" in low[0] or "barely above 1.00" in low[0])
    right, wrong = (fmean(one.accept_length for one in read_log(visited.log).gauges) for visited in (eagle3, eagle))
    print(f"mean accept length in the log: EAGLE3 {right:.2f}, EAGLE {wrong:.2f}")
    assert right > wrong


def test_a_running_server_is_asked(eagle3: Visit, eagle: Visit) -> None:
    """`doctor --server URL`: what it runs, and a verdict from one prompt."""
    assert eagle3.asked is not None and eagle.asked is not None
    # A drafter of a hundred steps may have no draft right in one prompt, and the doctor says so.
    assert {one.code for one in eagle3.asked.findings if one.severity == "error"} <= {"accept-answer"}
    assert "accept-answer" in {one.code for one in eagle3.asked.findings}
    assert "launch-algorithm" in {one.code for one in eagle.asked.findings if one.severity == "error"}


def test_accept_served_reads_the_counts_and_refuses_another_algorithm(eagle3: Visit, eagle: Visit) -> None:
    assert eagle3.served is not None and eagle.served is not None
    assert eagle3.served.returncode == 0, eagle3.served.stderr
    counts = json.loads(eagle3.served.stdout)["counts"]
    assert counts["proposed"] == K * counts["verify_steps"] > 0
    assert eagle.served.returncode == 2
    assert "EAGLE" in eagle.served.stderr


def test_serve_probe(target_folder, drafter_folder, environment, tmp_path, monkeypatch) -> None:
    """The command itself, with a drafter that is right."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    launch = prepare(
        profile="smollm2",
        model_path=str(target_folder),
        draft=str(drafter_folder),
        port=free_port(),
        python=str(environment_python("sglang")),
        probe=True,
        extra=CPU,
    )
    lines: list[str] = []
    assert serve(launch, probe=True, log=tmp_path / "log", ready_seconds=600, note=lines.append) == 0
    told = [line for line in lines if "fc" in line]
    assert told[0].startswith(f"info: fc input {WIDTH} = 3 x 576"), json.dumps(lines)
    assert told[1] == "info: weights: fc, lm_head, d2t equal the file (rank 0)"
