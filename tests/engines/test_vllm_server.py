"""A running vLLM: `doctor --server` asks it, `accept served` measures it, `doctor --log` reads what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.core.paths import data_folder
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.run import Inputs, visit
from eagle3lab.doctor.serverlog import ServerLog, read_log
from eagle3lab.targets.engine import EngineServer, free_port
from tests.engines.conftest import K
from tests.engines.runner import LOOPBACK, environment_python
from tests.engines.test_vllm import cores, openmp

LOG_SECONDS = "1"
"""Between two lines of vLLM's statistics."""
ACCEPTANCE = {"accept-report", "log-acceptance"}
"""What the doctor may rightly call an error: a drafter of a hundred steps can have no draft right in one prompt."""


@dataclass(frozen=True)
class Visit:
    """The doctor's reports on the server and on its log, what the log says, and `accept served --out`."""

    asked: Report
    logged: Report
    log: ServerLog
    served: dict[str, Any]


@pytest.fixture(scope="module")
def visited(target_folder: Path, drafter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    python, place, port = environment_python("vllm"), tmp_path_factory.mktemp("vllm-server"), free_port()
    speculation = {"method": "eagle3", "model": str(drafter_folder), "num_speculative_tokens": K}
    words = ["--model", str(target_folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    words += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "512", "--max-num-seqs", "2"]
    words += ["--speculative-config", json.dumps(speculation)]
    environment = {
        **LOOPBACK,
        "HOME": str(place),
        "LD_PRELOAD": openmp(),
        "VLLM_CPU_OMP_THREADS_BIND": cores(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOG_STATS_INTERVAL": LOG_SECONDS,
    }
    log = place / "server.log"
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words]
    with EngineServer(line, port=port, log=log, env=environment) as server:
        print(f"vLLM ready after {server.wait_ready(timeout=600):.0f} s")
        asked = visit(Inputs(server=server.url, draft=str(drafter_folder), target=str(target_folder)))
        first = visit(Inputs(server=server.url))  # a second prompt: the difference of two counters, not their sum
        served = place / "served.json"
        words = ["accept", "served", server.url, "--prompts", str(data_folder() / "prompts" / "heldout.jsonl")]
        words += ["--limit", "4", "--max-new-tokens", "16", "--concurrency", "2", "--out", str(served)]
        subprocess.run([sys.executable, "-m", "eagle3lab", *words], check=True, timeout=300)
    text = log.read_text(errors="replace")
    if kept := os.environ.get("EAGLE3LAB_KEEP_LOGS"):
        Path(kept, "vllm.log").write_text(text)
    assert [one.message for one in first.findings if one.code.startswith("accept")]
    return Visit(asked, visit(Inputs(log=str(log))), read_log(text), json.loads(served.read_text()))


def errors(report: Report) -> set[str]:
    """Codes of the errors that a report holds."""
    return {one.code for one in report.findings if one.severity == "error"}


def test_one_prompt_gives_counts(visited: Visit) -> None:
    assert errors(visited.asked) <= ACCEPTANCE
    [said] = [one for one in visited.asked.findings if one.code == "server-speculation"]
    assert "vllm runs" in said.message


def test_its_log_gives_method_and_counts(visited: Visit) -> None:
    assert (visited.log.engine, visited.log.algorithm) == ("vllm", "eagle3")
    counts = visited.log.counts
    assert counts is not None and counts.proposed == K * counts.verify_steps
    assert errors(visited.logged) <= ACCEPTANCE


def test_accept_served_reads_the_counters(visited: Visit) -> None:
    counts = visited.served["counts"]
    assert counts["proposed"] == K * counts["verify_steps"] > 0
    assert visited.served["accept_length"] == pytest.approx(1 + counts["accepted"] / counts["verify_steps"])
