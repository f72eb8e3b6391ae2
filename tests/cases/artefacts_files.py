"""Builders for logs, answers, notebooks and single weight files: the artefacts that carry no whole drafter."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def build_log(rest: dict[str, Any], folder: Path) -> list[str]:
    if not isinstance(rest.get("log"), str):
        return []
    path = folder / "server.log"
    path.write_text(rest.pop("log") + "\n", encoding="utf-8")
    return ["--log", str(path)]


def build_answer(rest: dict[str, Any], folder: Path) -> list[str]:
    if not isinstance(rest.get("meta_info"), dict):
        return []
    path = folder / "answer.json"
    path.write_text(json.dumps({"text": "...", "meta_info": rest.pop("meta_info")}), encoding="utf-8")
    return ["--acceptance", str(path)]


def build_notebook(rest: dict[str, Any], folder: Path) -> list[str]:
    """An .ipynb of nbformat 4.5; a cell without tags has no `tags` key."""
    if not isinstance(rest.get("notebook"), dict):
        return []
    given = rest.pop("notebook")
    cells = []
    for number, cell in enumerate(given["cells"]):
        metadata = {**cell.get("metadata", {}), **({"tags": cell["tags"]} if "tags" in cell else {})}
        whole = {"cell_type": cell.get("cell_type", "code"), "id": f"c{number}", "metadata": metadata}
        whole["source"] = cell["source"].splitlines(keepends=True)
        if whole["cell_type"] == "code":
            ran = {key: cell[key] for key in ("execution_count", "outputs") if key in cell}
            whole |= {"execution_count": None, "outputs": [], **ran}
        cells.append(whole)
    place = folder / "notebooks"
    place.mkdir()
    content = {"cells": cells, "metadata": given.get("metadata", {}), "nbformat": 4, "nbformat_minor": 5}
    (place / "case.ipynb").write_text(json.dumps(content), encoding="utf-8")
    return ["--notebooks", str(place)]


def build_file(rest: dict[str, Any], folder: Path) -> list[str]:
    """The bytes of one weight file; one that is described as sparse is a hole behind its first bytes."""
    if not isinstance(rest.get("file"), dict):
        return []
    given = rest.pop("file")
    path = folder / given.get("name", "model.safetensors")
    if "tensor" in given:
        path.write_bytes(one_tensor(given))
    elif "header_text" in given:
        raw = given["header_text"].encode()
        data = bytes.fromhex(given["bytes_hex"]) if "bytes_hex" in given else counted(given.get("data_bytes", 0))
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    elif "first_8_bytes_hex" in given:
        with path.open("wb") as handle:
            handle.write(bytes.fromhex(given["first_8_bytes_hex"]))
            handle.truncate(int(next(word for word in given["then"].split() if word.isdigit())))
    else:
        data = bytes.fromhex(given["bytes_hex"]) if "bytes_hex" in given else given.get("text", "").encode()
        path.write_bytes(data)
    return ["--draft", str(path)]


def one_tensor(given: dict[str, Any]) -> bytes:
    tensor = given["tensor"]
    entry = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": given["declared"]}
    header: dict[str, Any] = {"__metadata__": given["metadata"]} if "metadata" in given else {}
    raw = json.dumps({**header, tensor["name"]: entry}).encode()
    padding = given.get("header_padded_with_spaces_to", 1)
    raw += b" " * (-len(raw) % padding)
    return struct.pack("<Q", len(raw)) + raw + counted(given["data_bytes"])


def counted(size: int) -> bytes:
    """Bytes that are neither all zero nor all alike."""
    return bytes(place % 61 + 1 for place in range(size))


BUILDERS = [build_log, build_answer, build_notebook, build_file]
