"""Judging executed notebooks: by the cells that really ran."""

from __future__ import annotations

import copy

from toys import notebook

from eagle3lab.runs.judge import judge

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no\nsuch block", "traceback": []}


def executed(*cells: str) -> dict:
    value = copy.deepcopy(notebook(*cells))
    for number, cell in enumerate(value["cells"], 1):
        cell["execution_count"] = number
        cell["metadata"]["papermill"] = {"status": "completed", "exception": None}
    return value


def test_all_ran() -> None:
    verdict = judge(executed("a = 1", "", "# done"))
    assert verdict.ok and (verdict.cells, verdict.ran) == (3, 3)


def test_a_cell_that_never_ran_fails_even_when_the_runner_says_completed() -> None:
    value = executed("a = 1", "b = 2")
    value["cells"][2]["execution_count"] = None
    verdict = judge(value)
    assert not verdict.ok and verdict.never_ran and verdict.failing_cell == 3 and verdict.source == "b = 2"


def test_an_error_output_fails_though_errors_were_allowed() -> None:
    value = executed("a = 1", "raise ValueError", "c = 3")
    value["cells"][2]["outputs"] = [ERROR]
    verdict = judge(value)
    assert (verdict.failing_cell, verdict.name, verdict.message) == (3, "ValueError", "no such block")


def test_a_widget_callback_that_raised_fails() -> None:
    value = executed("slider")
    value["cells"][1]["outputs"] = [{"output_type": "display_data", "data": {WIDGET: {"model_id": "box"}}}]
    good = {
        "state": {"inner": {"state": {"outputs": [{"output_type": "stream", "text": "fine"}]}}, "box": {"state": {}}}
    }
    value["metadata"]["widgets"] = {STATE: good}
    assert judge(value).ok
    good["state"]["inner"]["state"]["outputs"].append(ERROR)
    assert judge(value).name == "ValueError"


def test_the_cell_that_papermill_adds_is_not_numbered() -> None:
    value = executed("a = 1", "raise ValueError")
    injected = copy.deepcopy(value["cells"][0]) | {"metadata": {"tags": ["injected-parameters"]}}
    value["cells"].insert(1, injected)
    value["cells"][3]["outputs"] = [ERROR]
    assert judge(value).failing_cell == 3 and judge(value).cells == 3
