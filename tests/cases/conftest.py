"""`pytest tests/cases --cases DIR`: every case of every YAML file in DIR is one test.

Default: `data` (faults of the field) and `variations` (the same kinds with other numbers, names and layouts).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

DATA = Path(__file__).parent / "data"
VARIATIONS = Path(__file__).parent / "variations"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", default="", help="folder of case files, in the format of tests/cases/data/README.md")


def load(folder: Path) -> list[dict]:
    """All cases of a folder, each with the name of its file."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        found += [{**case, "file": path.stem} for case in content["cases"]]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--cases", default="")
        folders = [Path(asked)] if asked else [DATA, VARIATIONS]
        cases = [case for folder in folders for case in load(folder)]
        if not cases:
            raise pytest.UsageError(f"no case file in {asked}")
        metafunc.parametrize("case", cases, ids=[f"{case['file']}/{case['id']}" for case in cases])
