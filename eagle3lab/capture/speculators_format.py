"""speculators' hidden states: one safetensors file a sample, and the prepared dataset that holds ids and mask.

    <root>/hidden_states/hs_<i>.safetensors       i = row of the prepared dataset
        token_ids [T] int64 · hidden_states [T, P+1, H]

Slices 0..P-1 are the points, ascending; slice P is the last state *before* the final norm. Its trainer compares
token_ids with the row's input_ids and drops the sample, with a warning, when they differ. The dataset is a saved
`datasets.Dataset` with columns input_ids, loss_mask, seq_len in torch format, in `<root>` itself.

`datasets` is not needed here. Without it the rows are written as `prepared.jsonl`, one object a line with the same
three columns, and `PREPARE` turns that into the dataset where speculators is installed. (Its own prepare_data.py reads
such rows as well but shuffles them, and `i` would then name another row.)
Source: speculators c05b95b, train/data.py and data_generation/offline.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lab.capture.shards import Sample, check_sample
from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import atomic_write, write_text

STATES = "hidden_states"
ROWS = "prepared.jsonl"
PREPARE = (
    "python -c \"from datasets import load_dataset as l; l('json', data_files='prepared.jsonl', split='train')"
    ".with_format('torch').save_to_disk('.')\""
)
"""Run in the exported folder: the dataset that speculators' trainer loads."""
_NAME = re.compile(r"^hs_(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the prepared dataset: T ids, and 1 where a token is a response token."""

    input_ids: list[int]
    loss_mask: list[int]


def speculators_files(root: Path) -> dict[int, Path]:
    """Row number -> file, in numeric order; `root` or its `hidden_states` holds them.

    Raises:
        StoreError: none, or a `.lock` beside one: its writer has not finished.
    """
    folder = root / STATES if (root / STATES).is_dir() else root
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.match(path.name))}
    if not found:
        raise StoreError(f"no hs_<i>.safetensors in {folder}", rule="speculators writes one a row")
    for path in found.values():
        if path.with_name(path.name + ".lock").exists():
            raise StoreError(f"{path} is being written", rule="a .lock stands beside it", fix="wait, or delete both")
    return dict(sorted(found.items()))


def write_speculators(root: Path, index: int, sample: Sample) -> Path:
    """Write the states of row `index`, whole or not at all.

    Args:
        sample: `last` before the final norm.
    """
    tokens, hidden = sample.last.shape
    points = sample.aux.view(tokens, -1, hidden)
    states = torch.cat([points, sample.last[:, None].to(points.dtype)], 1).contiguous()
    path = root / STATES / f"hs_{index}.safetensors"
    tensors = {"token_ids": sample.input_ids.to(torch.int64).clone(), "hidden_states": states}
    atomic_write(path, lambda temporary: save_file(tensors, temporary))
    return path


def write_rows(root: Path, rows: Sequence[Row]) -> str:
    """Write the prepared dataset: with `datasets` where it is installed, as `prepared.jsonl` otherwise.

    Returns:
        what was written, for a note.
    """
    columns = [_columns(row) for row in rows]
    write_text(root / ROWS, "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in columns))
    if importlib.util.find_spec("datasets") is None:
        return f"`datasets` is not installed: rows are in {ROWS}; in that folder run: {PREPARE}"
    import datasets

    datasets.Dataset.from_list(columns).with_format("torch").save_to_disk(str(root))
    return f"rows are a saved dataset, and {ROWS}"


def read_rows(root: Path) -> list[Row]:
    """Rows of the prepared dataset, from `prepared.jsonl` or with `datasets`.

    Raises:
        StoreError: neither is there, or a line that is not a row.
    """
    path = root / ROWS
    if path.is_file():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read ({error})", rule="UTF-8, one JSON object a line") from error
        return [_row(f"{path}:{number}", line) for number, line in enumerate(lines, 1)]
    if (root / "dataset_info.json").is_file():
        if importlib.util.find_spec("datasets") is None:
            raise StoreError(
                f"{root} is a saved dataset", rule="it is read with `datasets`", fix="pip install datasets"
            )
        import datasets

        table = datasets.load_from_disk(str(root)).with_format(None)
        return [Row(list(row["input_ids"]), list(row["loss_mask"])) for row in table]
    raise StoreError(f"{root} has no {ROWS} and no saved dataset", rule="the loss mask stands there, not in hs_<i>")


def read_speculators(path: Path, index: int, row: Row) -> Sample:
    """Read the states of one row; `last` of the sample is before the final norm.

    Raises:
        StoreError: tensors that are missing or misshapen, or ids that are not the row's (speculators' trainer would
            drop the sample).
    """
    try:
        data = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read ({error})", fix="delete it and write it again") from error
    if missing := {"token_ids", "hidden_states"} - data.keys():
        raise StoreError(f"{path} has no {', '.join(sorted(missing))}", rule="token_ids and hidden_states")
    states, ids = data["hidden_states"], data["token_ids"]
    shaped = states.dim() == 3 and states.shape[1] >= 2 and ids.dim() == 1
    if not shaped or not states.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
        raise StoreError(
            f"{path}: hidden_states {states.dtype} {list(states.shape)}, token_ids {ids.dtype} {list(ids.shape)}",
            rule="floating point [T, points + 1, H] and integers [T]",
        )
    _same_ids(path, ids, row)
    sample = Sample(
        index,
        ids.to(torch.int64),
        torch.tensor(row.loss_mask, dtype=torch.bool),
        states[:, :-1].flatten(1),
        states[:, -1],
    )
    check_sample(sample, points=states.shape[1] - 1, hidden_size=states.shape[2])
    return sample


def read_speculators_folder(root: Path) -> Iterator[Sample]:
    """All samples of a folder that holds both the dataset and its states, by row."""
    rows = read_rows(root)
    for number, path in speculators_files(root).items():
        if number >= len(rows):
            raise StoreError(f"{path} is of row {number}", rule=f"the prepared dataset has {len(rows)} rows")
        yield read_speculators(path, number, rows[number])


def missing_rows(root: Path) -> tuple[list[int], int]:
    """(rows of the prepared dataset without states, how many rows it has): the trainer generates or skips those."""
    rows, files = len(read_rows(root)), speculators_files(root)
    return [number for number in range(rows) if number not in files], rows


def _same_ids(path: Path, ids: Tensor, row: Row) -> None:
    found = ids.tolist()
    if found == row.input_ids:
        return
    shared = min(len(found), len(row.input_ids))
    where = next((i for i in range(shared) if found[i] != row.input_ids[i]), shared)
    raise StoreError(
        f"{path}: token {where} differs from the prepared dataset ({len(found)} and {len(row.input_ids)} tokens)",
        rule="speculators drops such a sample with a warning only",
        fix="prepare the dataset again without shuffling",
    )


def _columns(row: Row) -> dict[str, Any]:
    return {"input_ids": row.input_ids, "loss_mask": row.loss_mask, "seq_len": len(row.input_ids)}


def _row(where: str, line: str) -> Row:
    def numbers(value: Any) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(item) is int for item in value)

    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON ({error})", rule="one object a line") from error
    ids, mask = (data.get(key) if isinstance(data, dict) else None for key in ("input_ids", "loss_mask"))
    if not (numbers(ids) and numbers(mask) and len(ids) == len(mask)):
        raise StoreError(f"{where} is not a row", rule="input_ids and loss_mask, whole numbers, equally many")
    return Row(ids, mask)
