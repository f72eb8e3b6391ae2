"""Bare paths: which flag each would have been given with. Names and the first bytes decide, nothing is executed."""

from __future__ import annotations

from pathlib import Path

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.readers.bounded import ReadError, list_folder, read_json

_ACCEPTANCE = frozenset(
    {"accept_length", "counts", "meta_info", "choices", "internal_states", "num_spec_steps", "acceptance_histogram"}
    | {"spec_decode_num_drafts", "spec_accept_length", "spec_verify_ct"}
)
"""Keys of what servers and benchmarks save; a few of each form are enough."""
_SUFFIXES = {".safetensors": "draft", ".ipynb": "notebooks", ".log": "log", ".sh": "launch", ".env": "env"}


def kind_of(path: Path) -> str:
    """Which flag the path would have been given with; a `UsageError` when nothing fits."""
    kind = _folder_kind(path) if path.is_dir() else _file_kind(path)
    if kind is None:
        raise UsageError(
            f"{path} is of no kind that is known",
            rule="a draft, target, states, run or notebooks folder, or a file of one of them",
            fix=f"name its kind: eagle3lab doctor --draft {path}",
        )
    return kind


def _folder_kind(folder: Path) -> str | None:
    try:
        names = {entry.name for entry in list_folder(folder)[0]}
    except ReadError as error:
        raise UsageError(error.what, rule=error.rule) from error
    if "status.json" in names and "manifest.json" in names:
        return "run"
    if "manifest.json" in names and any(name.startswith("states-") for name in names):
        return "states"
    if "config.json" in names:
        return _config_kind(folder / "config.json")
    if any(name.endswith(".safetensors") for name in names):
        return "draft"
    if any(name.endswith(".ipynb") for name in names):
        return "notebooks"
    return "states" if "manifest.json" in names else None


def _file_kind(path: Path) -> str | None:
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if path.name == "config.json":
        return _config_kind(path)
    if path.suffix in (".json", ".yaml", ".yml"):
        return "facts" if path.suffix != ".json" else _json_kind(path)
    return {".jsonl": "corpus", ".txt": "log"}.get(path.suffix)


def _json_kind(path: Path) -> str:
    try:
        value = read_json(path).value
    except ReadError:
        return "draft"  # its reader tells what is wrong with the file
    first = value[0] if isinstance(value, list) and value else value
    keys = set(first) if isinstance(first, dict) else set()
    if {"model_type", "architectures"} & keys:
        return _config_kind(path)
    metrics = any(str(key).startswith(("vllm:spec_", "sglang:spec_")) for key in {*keys, _metric_name(first)})
    return "acceptance" if metrics or _ACCEPTANCE & keys else "facts"


def _metric_name(value: object) -> str:
    """The name of a metric that was saved as an object, else an empty text."""
    return str(value.get("name", "")) if isinstance(value, dict) else ""


def _config_kind(config: Path) -> str:
    """A drafter names itself by class, format, ids or a single layer; anything else is a target."""
    try:
        value = read_json(config).value
    except ReadError:
        return "draft"
    if not isinstance(value, dict):
        return "draft"
    signs = {"speculators_model_type", "eagle_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"}
    named = "eagle" in str(value.get("architectures", "")).lower()
    return "draft" if signs & value.keys() or named or value.get("num_hidden_layers") == 1 else "target"
