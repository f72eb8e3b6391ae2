"""The pairs of `pairs.py` for training data, runs, weight files, notebooks and servers."""

from __future__ import annotations

from typing import Any

Pair = tuple[str, dict[str, Any], dict[str, Any]]

KIMI_HEAD = ["<|im_assistant|>", "assistant", "<|im_middle|>"]
USER = ["<|im_user|>", "user", "<|im_middle|>", "Why", "?", "<|im_end|>"]
SPLIT = {"x": "a.safetensors", "y": "b.safetensors"}
FILES = {"a.safetensors": {"x": ["BF16", [3, 5]]}, "b.safetensors": {"y": ["I64", [7]]}}
STALE = {"application/vnd.jupyter.widget-state+json": {"state": {"m1": {"state": {}}}}}


def chat(*reply: str, template: str = "kimi", **more: Any) -> dict[str, Any]:
    return {"tokens": [*USER, *KIMI_HEAD, *reply, "<|im_end|>"], "template": template, **more}


def notebook(*sources: str | dict[str, Any], kernel: str | None = "python3", **metadata: Any) -> dict[str, Any]:
    spec = {"kernelspec": {"name": kernel}} if kernel else {}
    cells = [source if isinstance(source, dict) else {"source": source} for source in sources]
    return {"notebook": {"metadata": {**spec, **metadata}, "cells": cells}}


def tagged(source: str) -> dict[str, Any]:
    return {"source": source, "tags": ["parameters"]}


def ran(source: str, count: int | None, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"source": source, "execution_count": count, "outputs": list(outputs)}


def view(model: str) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {"model_id": model}}}


def saved(**more: Any) -> dict[str, Any]:
    parts = {"weights": True, "optimizer": True, "scheduler": {"last_step": 40}, "rng": True, "sampler": True}
    return {"step": 40, **parts, **more}


def curve(*losses: float, accuracy: float = 0.5, length: float = 1.9) -> dict[str, Any]:
    rows = [
        {"step": i, "loss": loss, "gradient_norm": 1.0, "accuracy_by_step": [accuracy]} for i, loss in enumerate(losses)
    ]
    return {"curve": rows, "held_out": [{"simulated_accept_length": length}]}


PAIRS: dict[str, Pair] = {
    "mask-empty": ("", chat("Because", ".", template="llama3"), chat("Because", ".")),
    "mask-offsets": ("", {"text": "hi", "tokenizer": "slow, no offsets"}, {"text": "hi", "tokenizer": "fast"}),
    "mask-share": ("", {"samples_supervised_tokens": [5, 0, 9]}, {"samples_supervised_tokens": [5, 1, 9]}),
    "mask-shift": (
        "",
        {"tokens": ["P0", "A0", "A1", "A2", "P1"], "loss_mask": [0, 1, 1, 1, 0]},
        {"tokens": ["P0", "A0", "A1", "A2", "P1"], "loss_mask": [1, 1, 1, 0, 0], "ids": [5, 6, 7, 8, 9]},
    ),
    "mask-gradient": (
        "",
        {"grad_norm_by_place": {"start of the reply": 0.0, "place after the end": 0.2}},
        {"grad_norm_by_place": {"start of the reply": 0.2, "place after the end": 0.0}},
    ),
    "corpus-rows": (
        "",
        {"corpus": {"samples": 4, "no_reply_count": 1, "no_reply": [2], "broken_lines": []}},
        {"corpus": {"samples": 4, "no_reply_count": 0, "no_reply": [], "broken_lines": []}},
    ),
    "corpus-template": (
        "",
        {"corpus": {"samples": 4, "templates": {"llama3": 4}, "tokenizer": {"template": "chatml", "fast": True}}},
        {"corpus": {"samples": 4, "templates": {"chatml": 4}, "tokenizer": {"template": "chatml", "fast": True}}},
    ),
    "resume-complete": ("", {"run": saved(rng=False)}, {"run": saved()}),
    "resume-learning-rate": (
        "",
        {"run": saved(), "log_lr": [[30, 4e-5], [40, 3.9e-5], [41, 2e-4]]},
        {"run": saved(), "log_lr": [[30, 4e-5], [40, 3.9e-5], [41, 3.89e-5]]},
    ),
    "resume-settings": (
        "",
        {"run": saved(points=[2, 30, 58]), "resume_with": {"points": [1, 29, 57]}},
        {"run": saved(points=[2, 30, 58]), "resume_with": {"points": [2, 30, 58]}},
    ),
    "resume-losses": (
        "",
        {"losses_straight": [3.0, 2.5, 2.2], "losses_resumed": [3.0, 2.5, 2.3]},
        {"losses_straight": [3.0, 2.5, 2.2], "losses_resumed": [3.0, 2.5]},
    ),
    "loss-average": (
        "",
        {"loss_over_all_positions": 2.0, "loss_over_masked_positions": 4.0},
        {"loss_over_all_positions": 2.0, "loss_over_masked_positions": 2.0},
    ),
    "run-status": (
        "",
        {"status": {"notebooks": {"03": {"status": "dead", "failing_cell": 2, "cells": 9}}}},
        {"status": {"notebooks": {"03": {"status": "ok"}}, "steps": {"train": {"status": "running"}}}},
    ),
    "run-curve": ("", curve(*[9.0] * 12), curve(*[9.0 - 0.1 * i for i in range(12)])),
    "run-fc": (
        "",
        {"fc_trajectory": [{"step": "0", "std": 0.02, "moved": 0.0}, {"step": "9", "std": 0.02, "moved": 0.0}]},
        {"fc_trajectory": [{"step": "0", "std": 0.02, "moved": 0.0}, {"step": "9", "std": 0.02, "moved": 0.04}]},
    ),
    "file-header-plan": (
        "",
        {"plan": {"tensors": 2_000_000, "header_bytes_per_tensor": 51.0}},
        {"plan": {"tensors": 2_000_000, "header_bytes_per_tensor": 40.0}},
    ),
    "file-is-weights": (
        "",
        {"file": {"tensor": {"name": "w", "dtype": "BF16", "shape": [3]}, "data_bytes": 6, "declared": [0, 8]}},
        {"file": {"tensor": {"name": "w", "dtype": "BF16", "shape": [3]}, "data_bytes": 6, "declared": [0, 6]}},
    ),
    "file-index": (
        "",
        {"index": {"weight_map": SPLIT}, "files": {**FILES, "b.safetensors": {}}},
        {"index": {"weight_map": SPLIT, "metadata": {"total_size": 86}}, "files": FILES},
    ),
    "file-values": (
        "",
        {"tensor": {"dtype": "F16", "shape": [2], "bytes_hex": "003c007c"}},
        {"tensor": {"dtype": "F16", "shape": [2], "bytes_hex": "003cff7b"}},
    ),
    "file-memory-order": (
        "",
        {"a": "arange(6) as int64, shape [2, 3]", "save": "np.swapaxes(a, 0, 1)"},
        {"a": "arange(6) as int64, shape [2, 3]", "save": "a[:1]"},
    ),
    "notebook-parameters": (
        "",
        {**notebook(tagged("epochs: int = 2")), "parameters": {"epoch": 3}},
        {**notebook(tagged("epochs: int = 2")), "parameters": {"epochs": 3}},
    ),
    "notebook-kernel": (
        "",
        {**notebook("1", kernel="conda-env-lab-py"), "installed_kernels": ["python3"]},
        {**notebook("1", kernel="conda-env-lab-py"), "installed_kernels": ["python3", "conda-env-lab-py"]},
    ),
    "notebook-limits": (
        "",
        {**notebook("1", execution={"timeout": 900}), "limit_s": 30},
        {**notebook("1", execution={"timeout": 30}), "limit_s": 30},
    ),
    "notebook-ran": ("", notebook(ran("1", 1), ran("2", None)), notebook(ran("1", 1), ran(" ", None))),
    "notebook-widgets": (
        "",
        notebook(ran("w", 1, view("m2")), widgets=STALE),
        notebook(ran("w", 1, view("m1")), widgets=STALE),
    ),
    "server-speculation": (
        "",
        {"server": {"engine": "sglang", "algorithm": None, "url": "http://127.0.0.1:1"}},
        {"server": {"engine": "sglang", "algorithm": "EAGLE3", "url": "http://127.0.0.1:1"}},
    ),
}
