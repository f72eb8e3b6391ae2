"""`--notebooks`: one notebook, or every notebook of a folder; and the kernels that this machine has."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import ReadError, list_folder, read_json
from eagle3lab.doctor.run import existing

NOTEBOOK_LIMIT = 64_000_000
"""Bytes of one notebook: figures are stored in it as text."""
COUNT_LIMIT = 200


def read(value: str, facts: Facts) -> None:
    """Add `notebooks` and `installed_kernels`."""
    path = existing(value, "--notebooks")
    add_folder(path, facts, flag="--notebooks")


def add_folder(path: Path, facts: Facts, *, flag: str = "") -> None:
    """Notebooks under `path` (a folder, not recursive, or one file). flag: empty when the caller need not find any."""
    try:
        entries = list_folder(path)[0] if path.is_dir() else [path]
    except ReadError as error:
        facts.broken(str(path), error.what)
        return
    files = [entry for entry in entries if entry.suffix == ".ipynb"]
    if not files and flag:
        raise UsageError(f"{flag} {path} holds no .ipynb", rule="a notebook or a folder of them", fix=f"ls {path}")
    found: dict[str, Any] = dict(facts.mapping("notebooks"))
    for entry in files[:COUNT_LIMIT]:
        try:
            parsed = read_json(entry, NOTEBOOK_LIMIT)
            _require_cells(parsed.value, entry)
        except ReadError as error:
            facts.broken(str(entry), error.what, fix=error.fix or f"write {entry.name} again")
            continue
        found[entry.name] = parsed.value
    if len(files) > COUNT_LIMIT:
        facts.could_not(f"{len(files) - COUNT_LIMIT} more notebooks", f"at most {COUNT_LIMIT} are read")
    if found:
        facts.put("notebooks", found, str(path))
        kernels = installed_kernels()
        if kernels and not facts.has("installed_kernels"):
            facts.put("installed_kernels", kernels, "kernel folders of this machine")


def _require_cells(value: Any, path: Path) -> None:
    """`ReadError` for anything that is no notebook of format 4."""
    if isinstance(value, dict) and isinstance(value.get("worksheets"), list):
        found = f"{path} is of nbformat {value.get('nbformat', 3)}, which has worksheets"
        raise ReadError(found, rule="runners read nbformat 4", fix=f"jupyter nbconvert --to notebook --inplace {path}")
    cells = value.get("cells") if isinstance(value, dict) else None
    if not isinstance(cells, list):
        raise ReadError(f"{path} has no list of cells")
    wrong = next((place for place, cell in enumerate(cells, 1) if not isinstance(cell, dict)), None)
    if wrong is not None:
        raise ReadError(f"{path}: cell {wrong} is a {type(cells[wrong - 1]).__name__}, a JSON object is needed")


def installed_kernels() -> list[str]:
    """Names of kernels in the usual folders, without importing Jupyter; `python3` when ipykernel is importable."""
    names = {"python3"} if importlib.util.find_spec("ipykernel") else set()
    for folder in _kernel_folders():
        try:
            names |= {entry.name.lower() for entry in folder.iterdir() if (entry / "kernel.json").is_file()}
        except OSError:
            continue  # not there: no kernels in it
    return sorted(names)


def _kernel_folders() -> list[Path]:
    roots = [Path(part) for part in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if part]
    if os.environ.get("JUPYTER_DATA_DIR"):
        roots.append(Path(os.environ["JUPYTER_DATA_DIR"]))
    roots += [Path.home() / ".local/share/jupyter", Path.home() / "Library/Jupyter", Path(sys.prefix) / "share/jupyter"]
    return [root / "kernels" for root in (*roots, Path("/usr/local/share/jupyter"), Path("/usr/share/jupyter"))]
