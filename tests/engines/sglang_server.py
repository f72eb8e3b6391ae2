"""A real SGLang server on a CPU, started as users start it, with the capture hook."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.plan import HOOK_FILE
from eagle3lab.capture.served import capture_served, head_weight
from eagle3lab.capture.store import StoreWriter
from eagle3lab.corpus.chat import Rendered
from eagle3lab.steps.serve import importable
from eagle3lab.targets.engine import EngineServer, free_port, request_json
from eagle3lab.targets.launch import capture_arguments, check_arguments, command
from tests.engines.runner import ROOT, environment_python

CPU = (
    *("--device", "cpu", "--dtype", "float32", "--disable-overlap-schedule", "--skip-server-warmup"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "4096", "--max-running-requests", "4"),
)


def capture_through_server(
    folder: Path,
    manifest: StatesManifest,
    samples: Sequence[Rendered],
    shards: Sequence[Sequence[int]],
    place: Path,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    ready: str = "/health",
) -> tuple[Path, dict[int, float]]:
    """Serve the target in `folder`, capture `samples`, stop the server.

    Args:
        options: more launch options. environment: more variables. ready: path that answers when the server is up.

    Returns:
        The folder of states, and each shard's next-token agreement.
    """
    python, exchange, port = environment_python("sglang"), place / "exchange", free_port()
    arguments = ["--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port), *CPU, *options]
    arguments += capture_arguments(
        manifest.points_checkpoint, {"exchange": str(exchange)}, logits_processor="*logits_processor"
    )
    check_arguments(arguments)
    paths = [str(ROOT / "scripts" / "sglang_cpu"), *importable().values()]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "HOME": str(place), **(environment or {})}
    line = command(arguments, python=str(python))
    with EngineServer(line, port=port, log=place / "log.txt", env=variables) as server:
        print(f"SGLang ready after {server.wait_ready(timeout=600, path=ready):.0f} s")
        report = request_json(f"{server.url}/server_info")
        assert report["return_aux_hidden_state_layer_ids"] == manifest.points_checkpoint
        assert (exchange / HOOK_FILE).is_file()
        rates = capture_served(
            samples,
            StoreWriter(place / "states", manifest),
            shards,
            server=server.url,
            exchange=exchange,
            concurrency=4,
            head=head_weight(folder).float(),
            receipt_seconds=60,
        )
    return place / "states", rates


def row_error(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """[T] length of the difference over length of the row."""
    return torch.linalg.vector_norm(theirs - ours, dim=-1) / torch.linalg.vector_norm(ours, dim=-1)
