"""Parameters that papermill wrote into the running notebook: an unknown name is an error here, not a warning.

`eagle3lab run` and `sweep` check names before anything runs. Who calls papermill directly, with a name that the
notebook does not have, would get a run with the default in its place.
"""

from __future__ import annotations

import ast

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.runs.parameters import NOTEBOOKS, STANDALONE

MARK = "# Parameters\n"
"""First line of the cell that papermill adds after the one tagged `parameters`."""


def injected_names(sources: list[str]) -> list[str]:
    """Names that the cell added by papermill assigns; [] when there is none. sources: of the cells that ran so far."""
    cell = next((text for text in sources if text.startswith(MARK)), "")
    return [
        target.id
        for node in ast.parse(cell).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def refuse_unknown(notebook: str) -> None:
    """`UsageError` for a name that papermill injected and `notebook` does not declare; outside a kernel, nothing."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    known = (NOTEBOOKS | STANDALONE)[notebook].model_fields
    for name in injected_names([] if shell is None else list(shell.user_ns.get("In", []))):
        if name not in known:
            raise UsageError(f"unknown parameter '{name}' for {notebook}", rule=nearest(name, known))
