"""Draft and target folders: config.json, safetensors headers, the small vocabulary tensors. Weights stay on disk.

A drafter folder becomes `draft_config`, `draft_headers`, `d2t`, `t2d`, `side_files` and `draft_embed_tokens`; a
target becomes `target_config` and `target_embed_tokens`. Of big matrices the facts hold dtype and shape, and
`Facts.tensors` where they lie, to be mapped by the check that needs rows of them.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError
from eagle3lab.core.safetensors_header import Header, HeaderError, map_tensor, written_share
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, inside, list_folder, read_bytes, read_json
from eagle3lab.doctor.readers.weightfiles import add_index, read_headers
from eagle3lab.doctor.run import existing
from eagle3lab.doctor.views import id_list, mapping
from eagle3lab.inspection.record import RECORD

MAP_LIMIT = 4_000_000
"""Elements of a vocabulary map that are read: 20 times the largest vocabulary in use."""
MAP_FILE = re.compile(r"d2t|t2d|vocab_?map|token_?map|hot_token", re.IGNORECASE)
MAP_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".bin", ".pkl", ".json", ".txt")
"""Files that trainers write a map to; a .safetensors file is read by every loader, so its tensors count as weights."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = "model.safetensors.index.json"


def read_draft(value: str, facts: Facts) -> None:
    """`--draft`: a folder, a config.json or a safetensors file."""
    path = existing(value, "--draft")
    config, headers, folder = _open(path, "draft", facts)
    if config is not None:
        facts.put("draft_config", config, str(path))
    _trained_points(folder / RECORD, facts)
    if not headers:
        if path.is_dir() and not any(path.glob("*.safetensors")):  # one that is broken is told by `file-is-weights`
            facts.could_not("the draft's weights", f"there is no safetensors file in {path}")
        return
    facts.put("draft_headers", {k: v for h in headers for k, v in h.as_facts().items()}, str(path))
    facts.draft_files = headers
    _maps(headers, facts)
    _side_files(folder, facts)
    _matrix(headers, "embed_tokens.weight", "draft_embed_tokens", facts)
    _locate(headers, "lm_head.weight", "draft_lm_head", facts)


def _trained_points(path: Path, facts: Facts) -> None:
    """The points of the states that the lab trained this drafter on, from its record; states that are given count."""
    if facts.has("states_manifest_resid_pre") or not path.is_file():
        return
    try:
        points = id_list(mapping(read_json(path).value).get("states_points"))
    except ReadError as error:
        facts.broken(str(path), error.what, fix="remove it, or train again")
        return
    if points:
        facts.put("states_manifest_resid_pre", points, str(path))


def read_target(value: str, facts: Facts) -> None:
    """`--target`: a folder or a config.json. Of the weights only the embedding's header is looked up."""
    path = existing(value, "--target")
    config, headers, _ = _open(path, "target", facts, only=("embed_tokens.weight", "lm_head.weight"))
    if config is not None:
        facts.put("target_config", config, str(path))
    if headers:
        _matrix(headers, "embed_tokens.weight", "target_embed_tokens", facts)
        tied = bool(config and config.get("tie_word_embeddings"))
        _locate(headers, "embed_tokens.weight" if tied else "lm_head.weight", "target_lm_head", facts)
    if config is None and not headers:
        facts.could_not("the target", f"{path} holds neither config.json nor safetensors")


def _open(
    path: Path, what: str, facts: Facts, only: tuple[str, ...] = ()
) -> tuple[dict[str, Any] | None, list[Header], Path]:
    """(config.json or None, headers of the weight files, the folder that they lie in)."""
    if path.is_dir():
        try:
            entries, outside = list_folder(path)
        except ReadError as error:
            facts.broken(str(path), error.what)
            return None, [], path
        for entry in outside:
            wanted = entry.suffix == ".safetensors" or entry.name == "config.json"
            if wanted and entry.is_symlink() and not entry.exists():
                facts.broken(str(entry), f"is a link to {entry.readlink()}, which is not there", fix="fetch it again")
            else:
                facts.could_not(str(entry), "it is a link that leads out of the folder or nowhere")
        config_file = next((entry for entry in entries if entry.name == "config.json"), None)
        files = _weight_files(path, entries, only, facts)
        if not only:
            add_index(path, entries, facts)
        pickles = [entry.name for entry in entries if entry.suffix in PICKLES]
        if pickles and not files:
            why = f"{pickles[0]} is a pickle, which could run code and is never opened"
            facts.could_not(f"the {what}'s weights", why, fix="convert it to safetensors where it was trained")
    elif path.suffix == ".safetensors":
        config_file, files = None, [path]
    elif path.suffix == ".json":
        config_file, files = path, []
    else:
        rule = "a folder, a config.json or a .safetensors file"
        raise UsageError(f"--{what} {path} is neither", rule=rule, fix=f"give --{what} the checkpoint's folder")
    config = _config(config_file, facts) if config_file else None
    beside = path / "hf_quant_config.json"
    if config is not None and not only and path.is_dir() and beside in entries:
        _add_quantisation(config, beside, facts)
    return config, read_headers(files, facts), path if path.is_dir() else path.parent


def _config(path: Path, facts: Facts) -> dict[str, Any] | None:
    try:
        parsed = read_json(path)
        marked = read_bytes(path).startswith(BOM_UTF8)
    except ReadError as error:
        facts.broken(str(path), error.what, fix="write a valid config.json")
        return None
    if marked:
        fix = "save it as UTF-8 without a byte-order mark"
        facts.broken(str(path), "begins with a byte-order mark: transformers refuses it as no valid JSON", fix=fix)
    if not isinstance(parsed.value, dict):
        facts.broken(str(path), f"holds a {type(parsed.value).__name__}, a JSON object is needed")
        return None
    if not parsed.value:
        facts.broken(
            str(path), f"{path} is an empty object", fix="write the config.json that the weights were saved with"
        )
    if parsed.duplicates:
        facts.broken(str(path), f"keys stand twice: {', '.join(parsed.duplicates[:5])}", fix="keep one of each")
    if parsed.not_finite:
        facts.broken(str(path), f"NaN or infinity at {', '.join(parsed.not_finite[:5])}, which is not JSON")
    return parsed.value


def _add_quantisation(config: dict[str, Any], path: Path, facts: Facts) -> None:
    """Read ModelOpt's own file where both engines do: when config.json declares no quantisation."""
    if config.get("quantization_config") is not None:
        return
    try:
        value = read_json(path).value
    except ReadError as error:
        facts.broken(str(path), error.what)
        return
    if isinstance(value, dict):
        config["quantization_config"] = value


def _weight_files(folder: Path, entries: list[Path], only: tuple[str, ...], facts: Facts) -> list[Path]:
    """Safetensors files that a loader would open: the shards of the index, else all; `only`: those with that tensor."""
    files = [entry for entry in entries if entry.suffix == ".safetensors"]
    index = next((entry for entry in entries if entry.name.endswith(".safetensors.index.json")), None)
    if index is None:
        return files
    try:
        weight_map = read_json(index).value
        weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
        if not isinstance(weight_map, dict):
            raise ReadError(f"{index} has no weight_map")
    except ReadError as error:
        facts.broken(str(index), error.what)
        return files
    named = {str(v) for k, v in weight_map.items() if not only or str(k).endswith(only)}
    return [entry for entry in files if entry.name in named and inside(entry, folder.resolve())]


def _find(headers: list[Header], wanted: str) -> tuple[Header, str] | None:
    for header in headers:
        for name in header.tensors:
            if name == wanted or name.endswith("." + wanted):
                return header, name
    return None


def _maps(headers: list[Header], facts: Facts) -> None:
    """Read d2t and t2d (small always); a file that is mostly holes has no contents to judge."""
    for fact in ("d2t", "t2d"):
        place = _find(headers, fact)
        if place is None:
            continue
        header, name = place
        entry = header.tensors[name]
        if entry.count > MAP_LIMIT or len(entry.shape) != 1:
            facts.could_not(f"the contents of {name}", f"its shape is {list(entry.shape)}, one dimension is needed")
            continue
        try:
            values = np.asarray(map_tensor(header, name))
        except HeaderError as error:
            facts.could_not(f"the contents of {name}", error.what)
            continue
        if not values.any() and written_share(header.path) < 0.5:
            facts.could_not(f"the contents of {name}", f"{header.path.name} has holes: its bytes were never written")
            continue
        if entry.dtype in ("F16", "F32", "F64", "BF16"):
            facts.could_not(f"the contents of {name}", f"its dtype is {entry.dtype}, whole numbers are needed")
            continue
        facts.put(fact, values.tolist(), f"{header.path}:{name}")


def _side_files(folder: Path, facts: Facts) -> None:
    """Vocabulary maps beside the weights (d2t.npy, vocab_mapping.pt): only that they are there, and their length."""
    found: dict[str, Any] = {}
    try:
        entries, _ = list_folder(folder)
    except ReadError:
        return  # a single file was given, in a folder of its own size
    for path in entries:
        if MAP_FILE.search(path.name) and path.suffix in MAP_SUFFIXES and path.is_file():
            found[path.name] = _npy_length(path) if path.suffix == ".npy" else None
    if found:
        facts.put("side_files", found, str(folder))


def _npy_length(path: Path) -> int | None:
    """Length of a one-dimensional .npy file, None when it cannot be told.

    The header (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) is searched, never evaluated.
    """
    try:
        with path.open("rb") as handle:
            head = handle.read(256)
    except OSError:
        return None
    found = re.search(rb"'shape': \((\d{1,12}),\)", head)
    return int(found.group(1)) if head.startswith(b"\x93NUMPY") and found else None


def _locate(headers: list[Header], wanted: str, key: str, facts: Facts) -> None:
    """Remember where a big matrix lies, for a check that compares rows of it."""
    if (place := _find(headers, wanted)) is not None:
        facts.tensors[key] = place


def _matrix(headers: list[Header], wanted: str, fact: str, facts: Facts) -> None:
    place = _find(headers, wanted)
    if place is None:
        return
    header, name = place
    entry = header.tensors[name]
    facts.put(fact, {"dtype": entry.dtype, "shape": list(entry.shape)}, f"{header.path}:{name}")
    facts.tensors[fact] = (header, name)
