"""Folder order is data order: a folder imports only from those above it. No file over 500 lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from eagle3lab.core.paths import repository

PACKAGE = repository() / "eagle3lab"

ORDER = (
    "core",
    "points",
    "targets",
    "corpus",
    "capture",
    "drafter",
    "acceptance",
    "inspection",
    "training",
    "doctor",
    "plots",
    "widgets",
    "runs",
    "steps",
    "cli",
)
"""Places of the package; each imports itself and those before it. `cli` stands for cli*.py and __main__."""

MOST_LINES = 500


def place_of(path: Path, package: Path = PACKAGE) -> str:
    """`drafter` for eagle3lab/drafter/model.py; "" for the package's own __init__.py."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "cli" if first.startswith("cli") or first == "__main__" else first.removeprefix("__init__")


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of this package, also inside functions and `if TYPE_CHECKING`."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from eagle3lab import points` names a module too
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "eagle3lab" else []
            found += [(node.lineno, name) for name in names or [node.module]]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "a relative import"))
    return [(line, name) for line, name in found if name.split(".")[0] == "eagle3lab" or name.startswith("a ")]


def faults(package: Path) -> list[str]:
    """Every import that goes down or sideways, as `file:line: what`."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        here = place_of(path, package)
        if here and here not in ORDER:
            found.append(f"{path.relative_to(package)}:1: {here} has no place in the order")
            continue
        for line, name in imports(ast.parse(path.read_text())):
            there = name.split(".")[1] if "." in name else ""
            there = "cli" if there.startswith("cli") else there
            if name.startswith("a ") or (there in ORDER and here and ORDER.index(there) > ORDER.index(here)):
                found.append(f"{path.relative_to(package)}:{line}: {here} imports {name}")
    return found


def test_a_folder_imports_only_from_those_above_it() -> None:
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("drafter/model.py", "from eagle3lab.training.loss import fused_loss"),
        ("core/files.py", "from eagle3lab import points"),
        ("runs/pipeline.py", "def f():\n    from eagle3lab.steps.run import open_run"),
        ("plots/fc.py", "import eagle3lab.widgets.fc"),
        ("steps/run.py", "from eagle3lab.cli_accept import accept_app"),
        ("capture/store.py", "from ..doctor import run"),
        ("extras/new.py", "import math"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, where: str, line: str) -> None:
    path = tmp_path / where
    path.parent.mkdir()
    path.write_text(f'"""Text."""\n{line}\n')
    (fault,) = faults(tmp_path)
    assert fault.startswith(where)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("training/loss.py", "from eagle3lab.drafter.model import Eagle3Drafter"),
        ("steps/run.py", "from eagle3lab import __version__, points"),
        ("cli.py", "from eagle3lab import cli_states"),
        ("core/hashes.py", "from eagle3lab.core.files import read_json"),
    ],
)
def test_a_right_import_is_not(tmp_path: Path, where: str, line: str) -> None:
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{line}\n")
    assert faults(tmp_path) == []


def test_the_order_names_every_place() -> None:
    places = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    places = {"cli" if place.startswith("cli") else place for place in places if not place.startswith("__")}
    assert places == set(ORDER)


def test_no_file_is_over_500_lines() -> None:
    root = repository()
    folders = ("eagle3lab", "tests", "scripts", "benchmarks")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")] + [*root.glob("docs/*.md")]
    generated = {root / "docs/checks.md"}
    lines = {path: path.read_text().count("\n") for path in files if path not in generated}
    assert {str(path.relative_to(root)): n for path, n in lines.items() if n > MOST_LINES} == {}
