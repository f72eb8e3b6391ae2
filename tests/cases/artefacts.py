"""Turn the `input` of a case into files and command-line words. What has no artefact stays a fact for `--facts`.

A builder takes the inputs that it can write out of `rest` and returns the words that point the doctor at them. What a
case leaves open (`draft_headers`) is finite, non-constant and consistent: normal(0, 0.02), a valid vocabulary map.
"""

from __future__ import annotations

import json
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from . import artefacts_files

BIG = 4_000_000
"""Bytes above which a tensor is a hole in a sparse file instead of written values."""
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
TARGET_KEYS = {
    "blocks": "num_hidden_layers",
    "family": "model_type",
    **{
        k: k
        for k in ("hidden_size", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps")
    },
}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes | None]]) -> None:
    """Write {name: (dtype, shape, bytes or None for a hole)} as a safetensors file."""
    header, offset = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        size = SIZES[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        start = handle.tell()
        for name, (_, _, data) in tensors.items():
            if data is not None:
                handle.seek(start + header[name]["data_offsets"][0])
                handle.write(data)
        handle.truncate(start + offset)


def as_bytes(dtype: str, values: np.ndarray) -> bytes:
    """Values in the given dtype; BF16 by rounding to nearest even."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype(
        {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1"}[dtype]
    ).tobytes()


def kept_ids(count: int, vocab: int) -> np.ndarray:
    """A valid choice of `count` target ids: evenly spread, ascending."""
    return (np.arange(count) * max(vocab // max(count, 1), 1)) % max(vocab, 1)


def header_contents(headers: dict[str, Any]) -> dict[str, tuple[str, list[int], bytes | None]]:
    """Contents for `draft_headers`: random weights, and a d2t and t2d that agree with each other."""
    rng = np.random.default_rng(7)
    size = {name.rsplit(".", 1)[-1]: entry[1][0] for name, entry in headers.items() if name.endswith(("d2t", "t2d"))}
    count, vocab = size.get("d2t", 0), size.get("t2d", 0)
    kept = kept_ids(count, vocab) if count and vocab else np.arange(count)
    found: dict[str, tuple[str, list[int], bytes | None]] = {}
    for name, (dtype, shape) in headers.items():
        data: bytes | None = None
        if name.endswith("d2t"):
            data = as_bytes(dtype, kept - np.arange(count))
        elif name.endswith("t2d"):
            data = as_bytes(dtype, np.isin(np.arange(shape[0]), kept))
        elif SIZES[dtype] * np.prod(shape) <= BIG:
            data = as_bytes(dtype, rng.normal(0, 0.02, shape))
        found[name] = (dtype, shape, data)
    return found


def build_launch(rest: dict[str, Any], folder: Path) -> list[str]:
    if not isinstance(rest.get("launch_args"), list):
        return []
    words = [shlex.quote(str(word)) for word in rest.pop("launch_args")]
    script = folder / "serve.sh"
    script.write_text(
        "#!/bin/sh\n# how it is served\npython3 -m sglang.launch_server \\\n  " + " \\\n  ".join(words) + "\n"
    )
    return ["--launch", str(script)]


def build_env(rest: dict[str, Any], folder: Path) -> list[str]:
    if "env" not in rest:
        return []
    path = folder / "environment.env"
    path.write_text("".join(f"{name}={value}\n" for name, value in rest.pop("env").items()))
    return ["--env", str(path)]


def build_target(rest: dict[str, Any], folder: Path) -> list[str]:
    config = rest.pop("target_config", None)
    if config is None and isinstance(rest.get("target"), dict):
        given = {k: v for k, v in rest.pop("target").items() if k in TARGET_KEYS}
        config = {TARGET_KEYS[key]: value for key, value in given.items()}
    matrix = rest.pop("target_embed_tokens", None)
    if config is None and matrix is None:
        return []
    place = folder / "target"
    place.mkdir()
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    if matrix is not None:
        write_safetensors(place / "model.safetensors", {"model.embed_tokens.weight": dense(matrix)})
    return ["--target", str(place)]


def dense(matrix: dict[str, Any]) -> tuple[str, list[int], bytes]:
    """{dtype, values} as file contents."""
    values = np.array(matrix["values"], dtype=np.float64)
    return matrix["dtype"], list(values.shape), as_bytes(matrix["dtype"], values.astype(np.float32))


def vocabulary_contents(rest: dict[str, Any]) -> dict[str, tuple[str, list[int], bytes | None]]:
    """d2t, t2d and lm_head from `d2t`, `t2d`, `t2d_true_ids` or `tensors` with its recipe (even ids kept)."""
    found: dict[str, tuple[str, list[int], bytes | None]] = {}
    if isinstance(rest.get("d2t"), list):
        d2t = np.array(rest.pop("d2t"))
        found["d2t"] = ("I64", list(d2t.shape), as_bytes("I64", d2t))
    if isinstance(rest.get("t2d"), list):
        t2d = np.array(rest.pop("t2d"))
        found["t2d"] = ("BOOL", list(t2d.shape), as_bytes("BOOL", t2d))
    if "t2d_true_ids" in rest and "vocab_size" in (rest.get("draft_config") or {}):
        length = rest["draft_config"]["vocab_size"]
        marks = np.isin(np.arange(length), rest.pop("t2d_true_ids"))
        found["t2d"] = ("BOOL", [length], as_bytes("BOOL", marks))
    for name, entry in (rest.pop("tensors", None) or {}).items():
        dtype, shape = entry["dtype"], entry["shape"]
        if name == "d2t":
            values: np.ndarray = np.arange(shape[0])  # kept ids are 2i, so the offset is 2i - i
        elif name == "t2d":
            kept = np.arange(entry.get("true_count", (shape[0] + 1) // 2))
            values = np.isin(np.arange(shape[0]), 2 * kept)
        else:
            values = np.random.default_rng(7).normal(0, 0.02, shape)
        found[name] = (dtype, shape, as_bytes(dtype, values))
    return found


def build_draft(rest: dict[str, Any], folder: Path) -> list[str]:
    owned = {"draft_config", "draft_headers", "d2t", "t2d_true_ids", "tensors"}
    if not owned & rest.keys() and not isinstance(rest.get("draft_embed_tokens"), dict):
        return []
    place = folder / "draft"
    place.mkdir()
    tensors = header_contents(rest.pop("draft_headers", None) or {}) | vocabulary_contents(rest)
    if isinstance(rest.get("draft_embed_tokens"), dict):
        tensors["embed_tokens.weight"] = dense(rest.pop("draft_embed_tokens"))
    if tensors:
        write_safetensors(place / "model.safetensors", tensors)
        for name in ("d2t", "t2d"):  # null: not in the file, which the file now says
            if name in rest and rest[name] is None:
                del rest[name]
    if "draft_config" in rest:
        (place / "config.json").write_text(json.dumps(rest.pop("draft_config")))
    for name, values in (rest.pop("side_files", None) or {}).items():
        with (place / name).open("wb") as handle:
            np.save(handle, np.array(values))
    return ["--draft", str(place)]


Builder = Callable[[dict[str, Any], Path], list[str]]
BUILDERS: list[Builder] = [build_launch, build_env, build_target, build_draft, *artefacts_files.BUILDERS]
"""Builders in order; each takes what it can write and leaves the rest."""


def build(case_input: dict[str, Any], folder: Path) -> list[str]:
    """Words for `eagle3lab doctor` that hold the whole input: files first, `--facts` for what remains."""
    rest = json.loads(json.dumps(case_input))  # a builder may take things out
    words: list[str] = []
    for builder in BUILDERS:
        words += builder(rest, folder)
    if rest or not words:
        path = folder / "facts.yaml"
        path.write_text(yaml.safe_dump(rest, allow_unicode=True))
        words += ["--facts", str(path)]
    return words


def build_facts(case_input: dict[str, Any], folder: Path) -> list[str]:
    """The same input as facts alone."""
    path = folder / "facts.yaml"
    path.write_text(yaml.safe_dump(case_input, allow_unicode=True))
    return ["--facts", str(path)]
