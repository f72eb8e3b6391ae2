"""Runs a script inside an engine's own environment, and leaves no process behind whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.targets import guard

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def environment_python(name: str) -> Path:
    """Interpreter of .venvs/NAME (VENVS moves it); skips the test where the engine is not installed."""
    python = ROOT / os.environ.get("VENVS", ".venvs") / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed: scripts/install_{name}.sh (make test-engines does)")
    return python


def run_engine(
    name: str, request: dict[str, Any], folder: Path, *, limit: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write `request.json`, run `NAME_decode.py` on it in the engine's environment, return its `answer.json`.

    The engine's processes run below the package's guard: they end when the script ends, when `limit` seconds have
    passed, and when this process dies.

    Raises:
        AssertionError: the engine failed or took too long; the message holds the end of its log.
    """
    python = environment_python(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name(f"{name}_decode.py")
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "OMP_NUM_THREADS") if key in os.environ}
    values = kept | LOOPBACK | {"HOME": str(folder), "TMPDIR": str(folder)} | (environment or {})
    stop, hold = os.pipe()
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                guard.__file__,
                str(stop),
                str(GRACE_SECONDS),
                "--",
                str(python),
                str(script),
                str(folder),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=values,
            pass_fds=(stop,),
        )
        os.close(stop)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            os.close(hold)  # end of file tells the guard to stop everything
            process.wait(3 * GRACE_SECONDS)
    answer = folder / "answer.json"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    # An engine may kill its own process tree on the way out, so the answer counts, not the exit code.
    assert answer.exists(), f"{name} gave no answer (exit {code}, None = over {limit:.0f} s):\n{tail}"
    return json.loads(answer.read_text())
