"""How an executed notebook ended, judged by the cells that really ran, not by what the runner says.

A killed kernel leaves a notebook whose cells are all marked completed, without an error: the sign is a code cell
without an execution count. A widget callback that raises leaves its error inside the widget's output, where neither
papermill nor nbmake looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cells of an executed notebook.

    Fields:
        cells: code cells that hold something. ran: those with an execution count.
        failing_cell: 1-based number, among the code cells, of the first that raised or never ran; None if all is well.
        source: first line of that cell. name: class of the error, None for a cell that never ran. message: its text.
    """

    cells: int
    ran: int
    failing_cell: int | None = None
    source: str | None = None
    name: str | None = None
    message: str | None = None

    @property
    def ok(self) -> bool:
        """Every cell ran and none raised."""
        return self.failing_cell is None

    @property
    def never_ran(self) -> bool:
        """The first thing wrong is a cell that never ran."""
        return self.failing_cell is not None and self.name is None


def judge(notebook: Mapping[str, Any]) -> Verdict:
    """Judge a notebook (nbformat 4 as mappings), after execution."""
    cells = [cell for cell in notebook["cells"] if _counts(cell)]
    ran = sum(cell.get("execution_count") is not None for cell in cells)
    widgets = _widget_errors(notebook)
    for number, cell in enumerate(cells, 1):
        first = next((line for line in _text(cell["source"]).splitlines() if line.strip()), "")
        error = next(_errors(cell.get("outputs", []), widgets), None)
        if error is not None:
            return Verdict(len(cells), ran, number, first, error["ename"], " ".join(str(error["evalue"]).split()))
        if cell.get("execution_count") is None:
            return Verdict(len(cells), ran, number, first)
    return Verdict(len(cells), ran)


def _counts(cell: Mapping[str, Any]) -> bool:
    """Code that holds something; papermill's own cell is not numbered, so that numbers are those of the source."""
    injected = "injected-parameters" in cell.get("metadata", {}).get("tags", [])
    return cell["cell_type"] == "code" and not injected and bool(_text(cell["source"]).strip())


def _errors(outputs: list[Any], widgets: Mapping[str, list[Any]]) -> Iterator[Mapping[str, Any]]:
    for output in outputs:
        if output["output_type"] == "error":
            yield output
        model = _view(output)
        if model is None:
            continue
        # An Output widget may stand inside a box of the displayed one; any error of the notebook's widgets counts.
        for errors in widgets.values():
            yield from errors


def _view(output: Mapping[str, Any]) -> str | None:
    return output.get("data", {}).get("application/vnd.jupyter.widget-view+json", {}).get("model_id")


def _widget_errors(notebook: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Model id -> error outputs that an Output widget holds."""
    state = (
        notebook.get("metadata", {})
        .get("widgets", {})
        .get("application/vnd.jupyter.widget-state+json", {})
        .get("state", {})
    )
    found = {}
    for model, value in state.items():
        outputs = value.get("state", {}).get("outputs") or []
        errors = [one for one in outputs if isinstance(one, Mapping) and one.get("output_type") == "error"]
        if errors:
            found[model] = errors
    return found


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
