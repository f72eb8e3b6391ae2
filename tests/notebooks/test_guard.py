"""`pytest --nbmake notebooks` fails on what nbmake alone lets through. Each case is also run without the guard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from eagle3lab.core.paths import notebooks_folder

WIDGET = (
    "import ipywidgets\nfrom IPython.display import display\nout = ipywidgets.Output()\ndisplay(out)\n"
    "@out.capture()\ndef moved(change):\n    raise ValueError('no such block')\n"
    "slider = ipywidgets.IntSlider()\nslider.observe(moved, 'value')\nslider.value = 3"
)


def write(path: Path, *cells: str, metadata: dict | None = None, tags: tuple[str, ...] = ()) -> None:
    value = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        | (metadata or {}),
        "cells": [
            {
                "cell_type": "code",
                "id": f"c{number}",
                "metadata": {"tags": list(tags)} if tags and number == 0 else {},
                "source": source,
                "outputs": [],
                "execution_count": None,
            }
            for number, source in enumerate(cells)
        ],
    }
    path.write_text(json.dumps(value))


def nbmake(folder: Path, *, guard: bool) -> subprocess.CompletedProcess[str]:
    conftest = folder / "conftest.py"
    conftest.unlink(missing_ok=True)
    if guard:
        conftest.write_text((notebooks_folder() / "conftest.py").read_text())
    words = ["-m", "pytest", "--nbmake", "--rootdir", str(folder), "-p", "no:cacheprovider", "-q", str(folder)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ, timeout=600)


BAD = {
    "allows": (("1 / 0", "x = 1"), {"execution": {"allow_errors": True}}, (), "execution.allow_errors"),
    "expects": (("1 / 0",), None, ("raises-exception",), "raises-exception"),
    "skips": (("x = 1",), None, ("skip-execution",), "skip-execution"),
    "callback": ((WIDGET,), None, (), "raised ValueError: no such block"),
}
"""Name -> cells, metadata, tags of the first cell, what the guard says."""


def test_what_nbmake_lets_through_fails_here(tmp_path: Path) -> None:
    for name, (cells, metadata, tags, _) in BAD.items():
        write(tmp_path / f"{name}.ipynb", *cells, metadata=metadata, tags=tags)
    write(tmp_path / "good.ipynb", "x = 1", "assert x == 1")
    alone = nbmake(tmp_path, guard=False)
    assert alone.returncode == 0, "without the guard all of them are green:\n" + alone.stdout
    guarded = nbmake(tmp_path, guard=True)
    assert guarded.returncode == 1 and f"{len(BAD)} failed, 1 passed" in guarded.stdout
    assert [words for *_, words in BAD.values() if words not in guarded.stdout] == []


def test_a_dead_kernel_fails(tmp_path: Path) -> None:
    write(tmp_path / "dead.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert nbmake(tmp_path, guard=True).returncode == 1
