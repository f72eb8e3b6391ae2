"""What nbmake does not notice: a cell that never ran, errors that the notebook allows, a widget callback that raised.

`notebooks/conftest.py` loads this, so that `pytest --nbmake notebooks` fails on all three.
"""

from __future__ import annotations

from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.runs.judge import judge
from eagle3lab.runs.parameters import NOTEBOOKS, STANDALONE, check_notebook


def pytest_configure(config: Any) -> None:
    """Let every notebook that nbmake runs be checked before and judged after."""
    if getattr(config.option, "nbmake", False):
        install()


def install() -> None:
    """Replace nbmake's runner by one that checks the source first and judges the executed cells afterwards."""
    from nbmake import pytest_items

    if not getattr(pytest_items.NotebookRun, "guarded", False):
        pytest_items.NotebookRun = _guarded(pytest_items.NotebookRun)


def _guarded(base: type) -> type:
    from nbmake.nb_result import NotebookError, NotebookResult

    class GuardedRun(base):
        guarded = True

        def execute(self) -> Any:
            try:
                refuse_permissive(self.filename)
            except UsageError as error:
                return NotebookResult(nb=None, error=_error(str(error), -1))
            result = super().execute()
            verdict = judge(result.nb)
            if result.error is None and not verdict.ok:
                what = "never ran" if verdict.never_ran else f"raised {verdict.name}: {verdict.message}"
                line = f"code cell {verdict.failing_cell} of {verdict.cells} ({verdict.source}) {what}"
                return NotebookResult(nb=result.nb, error=_error(line, verdict.failing_cell or 0))
            return result

    def _error(line: str, cell: int) -> Any:
        return NotebookError(summary=line, trace=line, failing_cell_index=cell)

    return GuardedRun


def refuse_permissive(path: Any) -> None:
    """Refuse a notebook whose metadata would hide a failure; one of the lab's own is held against its model too."""
    if path.stem in NOTEBOOKS | STANDALONE:
        check_notebook(path)
        return
    from eagle3lab.core.files import read_json

    value = read_json(path)
    for key in value.get("metadata", {}).get("execution", {}):
        raise UsageError(f"{path.name} sets execution.{key} in its metadata", rule="it would override the test's limit")
    for number, cell in enumerate(value["cells"], 1):
        tags = set(cell.get("metadata", {}).get("tags", []))
        if bad := tags & {"raises-exception", "skip-execution"}:
            raise UsageError(f"{path.name}: cell {number} is tagged {min(bad)}", rule="every cell runs and works")
