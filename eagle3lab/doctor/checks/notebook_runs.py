"""Executed notebooks: cells that never ran, errors that a runner did not see, widgets without their state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from eagle3lab.doctor.checks.notebooks import each, named
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, warning
from eagle3lab.doctor.notebook import WIDGET_VIEW, Notebook
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping


@check(
    code="notebook-ran",
    title="cells that never ran or that failed",
    reads=("notebook|notebooks",),
    rule="in an executed notebook every code cell has an execution count, in order, and none has an error",
    fix="run the notebook again; a killed kernel is most often out of memory",
    symptom="a killed kernel leaves a notebook whose cells are all marked completed",
)
def ran(facts: Facts) -> Iterator[Finding]:
    """A source notebook (nothing ran) is silent."""
    for name, notebook in each(facts):
        if notebook.executed:
            for finding in _ran(notebook):
                yield named(name, finding)


def _ran(notebook: Notebook) -> Iterator[Finding]:
    count = len(notebook.code)
    for cell in notebook.code:
        failure = cell.failure
        if failure is not None and "raises-exception" not in cell.tags:
            what = f"{str(failure.get('ename'))[:60]}: {' '.join(str(failure.get('evalue')).split())[:160]}"
            text = f"cell {cell.number} of {count} failed with {what}"
            yield error("cell", text, actual=what, failing_cell=cell.number, of=count, status="error")
            return
    expected = [cell for cell in notebook.code if not cell.empty and not cell.skipped]
    stripped = not any(cell.ran for cell in expected) and any(cell.outputs for cell in expected)
    missing = [cell.number for cell in expected if cell.ran is False]
    if missing and not stripped:
        text = f"cell {missing[0]} of {count} never ran, {len(missing)} in all: the kernel died or was stopped"
        yield error("cell", text, actual=len(missing), cells=missing[:100], of=count, status="dead")
        return
    counts = [cell.count for cell in expected if cell.count is not None]
    if any(later <= earlier for earlier, later in itertools.pairwise(counts)):
        fell = any(later < earlier for earlier, later in itertools.pairwise(counts))
        what = "the cells ran out of order" if fell else "cells with one execution count are of several runs"
        text = f"{what}: {', '.join(map(str, counts[:20]))}"
        yield warning("cell", text, actual=counts[:100], of=count, fix="restart the kernel and run all cells")


@check(
    code="notebook-widgets",
    title="widgets in a saved notebook",
    reads=("notebook|notebooks",),
    rule="a saved widget has its state in the notebook and a static twin beside it; its callbacks did not raise",
    fix="save widget state, and show a figure, a table or a text beside the widget",
    symptom="an empty box in every viewer; a callback that raised passes nbmake",
)
def widgets(facts: Facts) -> Iterator[Finding]:
    """Views without a model, and errors inside Output widgets."""
    for name, notebook in each(facts):
        for finding in _widgets(notebook):
            yield named(name, finding)


def _widgets(notebook: Notebook) -> Iterator[Finding]:
    models = notebook.widget_models()
    for cell in notebook.code:
        views = [view for output in cell.outputs if (view := mapping(mapping(output.get("data")).get(WIDGET_VIEW)))]
        lost = [view for view in views if str(view.get("model_id")) not in models]
        if lost:
            text = f"cell {cell.number} shows {len(lost)} widgets whose state is not saved"
            yield warning("widgets", text, actual=len(lost), cell=cell.number)
    for identity, raw in models.items():
        outputs = mapping(mapping(raw).get("state")).get("outputs")
        for output in outputs if isinstance(outputs, list) else []:
            failure = mapping(output)
            if failure.get("output_type") == "error":
                what = f"{str(failure.get('ename'))[:60]}: {' '.join(str(failure.get('evalue')).split())[:160]}"
                text = f"a widget callback raised {what}"
                yield error("widgets", text, actual=what, model=str(identity)[:64])
                return
