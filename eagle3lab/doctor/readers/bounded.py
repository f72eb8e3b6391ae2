"""Reading files that may be hostile: size limits, no specials, strict JSON with duplicate keys and NaN told."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3lab.core.errors import Eagle3LabError

TEXT_LIMIT = 16_000_000
"""Bytes of a config, a launch script, a facts file: far above any real one."""

NODE_LIMIT = 3_000_000
DEPTH_LIMIT = 200


class ReadError(Eagle3LabError):
    """A file that cannot be read as what it should be. A finding for the doctor, never a traceback."""


@dataclass(frozen=True)
class Parsed:
    """A parsed JSON file: the value, keys written twice (dotted), and paths of NaN or infinity."""

    value: Any
    duplicates: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()


def read_bytes(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; `ReadError` otherwise (no pipe or device is opened)."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise ReadError(f"{path} has {status.st_size} bytes", rule=f"at most {limit} are read")
        with path.open("rb") as handle:
            return handle.read(limit)
    except OSError as error:
        raise ReadError(f"{path} cannot be read ({error.strerror or error})") from error


def encoding_of(raw: bytes) -> str:
    """UTF-16 when a byte-order mark says so (a log that PowerShell wrote), else UTF-8."""
    return "utf-16" if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"


def decoded(raw: bytes) -> str:
    """Text of a file that is read for its lines: what is no letter of its encoding is replaced."""
    return raw.decode(encoding_of(raw), "replace")


def read_text(path: Path, limit: int = TEXT_LIMIT) -> str:
    """The file as UTF-8 text (a byte-order mark is dropped)."""
    raw = read_bytes(path, limit)
    if encoding_of(raw) == "utf-16":
        raise ReadError(f"{path} is UTF-16, not UTF-8", rule="text files are UTF-8", fix="save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path} is not UTF-8 (byte {error.start})", rule="text files are UTF-8") from error


def parse_json(text: str, name: str) -> Parsed:
    """Parse JSON; duplicate keys and non-finite numbers are told beside the value, not hidden in it."""
    duplicates: list[str] = []
    not_finite: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                duplicates.append(key)
            if isinstance(value, float) and not math.isfinite(value):
                not_finite.append(key)
            seen[key] = value
        return seen

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ReadError(f"{name} is nested too deeply") from error
    except ValueError as error:
        raise ReadError(f"{name} is not JSON ({str(error)[:160]})") from error
    check_size(value, name)
    return Parsed(value, tuple(duplicates), tuple(not_finite))


def read_json(path: Path, limit: int = TEXT_LIMIT) -> Parsed:
    """Read and parse a JSON file; see `parse_json`."""
    return parse_json(read_text(path, limit), str(path))


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C loader need not be there
    """PyYAML's safe loader with the numbers of YAML 1.2 and JSON: 1e-06, which YAML 1.1 takes for text, is one."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, name: str, loader: type[yaml.SafeLoader] = YamlLoader) -> Any:
    """Parse YAML with the safe loader; aliases are fine, a value that unfolds beyond `NODE_LIMIT` nodes is not."""
    try:
        value = yaml.load(text, Loader=loader)
    except RecursionError as error:
        raise ReadError(f"{name} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ReadError(f"{name} is not YAML ({' '.join(str(error).split())[:160]})") from error
    check_size(value, name)
    return value


def parse_yaml_documents(text: str, name: str) -> list[Any]:
    """Every document of a YAML file (`---` between them) that is not empty; bounds as in `parse_yaml`."""
    try:
        found = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except RecursionError as error:
        raise ReadError(f"{name} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise ReadError(f"{name} is not YAML ({' '.join(str(error).split())[:160]})") from error
    check_size(found, name)
    return [document for document in found if document is not None]


def check_size(value: Any, name: str) -> None:
    """Refuse a value of more than `NODE_LIMIT` nodes or `DEPTH_LIMIT` levels (alias bombs, self-references)."""
    stack, nodes = [(value, 0)], 0
    while stack:
        item, depth = stack.pop()
        nodes += 1
        if nodes > NODE_LIMIT:
            raise ReadError(f"{name} unfolds to more than {NODE_LIMIT} values")
        if depth > DEPTH_LIMIT:
            raise ReadError(f"{name} is nested deeper than {DEPTH_LIMIT}")
        if isinstance(item, dict):
            stack.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            stack.extend((inner, depth + 1) for inner in item)


def list_folder(folder: Path, limit: int = 10_000) -> tuple[list[Path], list[Path]]:
    """(entries that lie in the folder, links that lead out of it or nowhere), sorted, not recursive."""
    root = folder.resolve()
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= limit:
                    raise ReadError(f"{folder} has more than {limit} entries")
                found.append(Path(entry.path))
    except OSError as error:
        raise ReadError(f"{folder} cannot be listed ({error.strerror})") from error
    within = {path for path in found if inside(path, root)}
    return sorted(within), sorted(set(found) - within)


def inside(path: Path, root: Path) -> bool:
    """Whether `path`, links followed, lies in `root` (a hub cache's links to `../../blobs` count as inside)."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    if real.is_relative_to(root):
        return True
    hub = root.parent.parent
    return root.parent.name == "snapshots" and real.is_relative_to(hub / "blobs")
