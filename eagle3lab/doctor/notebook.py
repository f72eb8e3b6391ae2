"""A notebook as plain facts: cells, tags, limits, what ran. No findings in here, and nothing is executed.

Two spellings are read: nbformat 4 (`{"cells": [{"cell_type", "source", "metadata": {"tags": [...]}}]}`) and the short
one of case files (`{"cells": [{"source", "tags"}]}`). Anything of the wrong type reads as absent.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from eagle3lab.doctor.views import mapping, real, whole

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
SOURCE_LIMIT = 1_000_000
_SHELL_BLOCK = re.compile(r"\s*(?:if|for|while|until|case|select|function|exit|return)\b|.*(?:<<|[({])")
_SHELL_SLEEP = re.compile(r"\s*sleep((?:\s+\d+(?:\.\d*)?[smhd]?)+)\s*(?:#.*)?$")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINE_MAGIC = re.compile(r"^(\s*)([%!?])(.*)$", re.MULTILINE)
_CELL_MAGIC = re.compile(r"\s*%%(\S*)")
SETTING_MAGICS = {"run", "store", "reset", "pylab", "rerun", "recall"}
"""Line magics that may set any name."""
_LANGUAGE = (("kernelspec", "language"), ("language_info", "name"))
_FORMATTING = {"str", "repr", "format", "type", "len", "round", "int", "float", "bool", "list", "tuple", "sorted"}
_STARTED = ("iopub.execute_input", "iopub.status.busy")
_ENDED = ("shell.execute_reply", "iopub.status.idle")
_TIMED = re.compile(r"(?:-[a-z]+(?:[ \t]+\d+|\d+)?[ \t]+)*")
"""Options of %time and %timeit, in front of the statement."""
_STILL_PYTHON = {"time", "timeit", "capture", "prun"}
"""Cell magics that run what is under them as Python."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Fields:
        number: 1-based among all cells of its kind.
        ran: whether it has an execution count, None when the notebook does not tell. count: that count.
        seconds: how long it took, None when no runner noted it.
    """

    number: int
    code: bool
    source: str
    tags: tuple[str, ...]
    ran: bool | None
    count: int | None
    outputs: tuple[Mapping[str, Any], ...]
    seconds: float | None

    @property
    def empty(self) -> bool:
        """Whether nothing stands in it; a runner skips such a cell."""
        return not self.source.strip()

    @property
    def skipped(self) -> bool:
        """Whether a runner passes it by: tagged skip-execution."""
        return "skip-execution" in self.tags

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """Its first error output, None when it has none."""
        return next((output for output in self.outputs if output.get("output_type") == "error"), None)


@dataclass(frozen=True)
class Notebook:
    """Fields: cells in order; metadata of the notebook; code: the code cells alone."""

    cells: tuple[Cell, ...]
    metadata: Mapping[str, Any]

    @property
    def code(self) -> tuple[Cell, ...]:
        """Code cells in order."""
        return tuple(cell for cell in self.cells if cell.code)

    @property
    def kernel(self) -> str | None:
        """Name of the kernelspec, None when there is none."""
        name = mapping(self.metadata.get("kernelspec")).get("name")
        return name if isinstance(name, str) and name else None

    @property
    def execution(self) -> Mapping[str, Any]:
        """`metadata.execution`: timeout, allow_errors; {} when absent."""
        return mapping(self.metadata.get("execution"))

    @property
    def timeout(self) -> float | None:
        """`execution.timeout` in seconds, None when absent."""
        return real(self.execution.get("timeout"))

    @property
    def sets_timeout(self) -> bool:
        """Whether `execution.timeout` is a number or null; null is no limit."""
        return "timeout" in self.execution and (self.timeout is not None or self.execution["timeout"] is None)

    @property
    def executed(self) -> bool:
        """Whether this is an executed copy: a code cell has a count or an error, or a runner left its mark.

        Counts are often stripped before a notebook is committed, and its outputs are not.
        """
        marked = bool(mapping(self.metadata.get("papermill")))
        return marked or any(cell.ran or cell.failure is not None for cell in self.code)

    @property
    def injected(self) -> Mapping[str, Any]:
        """Parameters that papermill noted in its copy, else those of its cell; {} in any other notebook."""
        noted = mapping(mapping(self.metadata.get("papermill")).get("parameters"))
        return noted or {k: v for cell in self.tagged("injected-parameters")[:1] for k, v in _literals(cell.source)}

    @property
    def python(self) -> bool:
        """Whether its cells are Python, as far as it tells."""
        told = (mapping(self.metadata.get(key)).get(name) for key, name in _LANGUAGE)
        return all(str(language).lower() in ("python", "ipython", "none") for language in told)

    def tagged(self, tag: str) -> list[Cell]:
        """Code cells with this tag."""
        return [cell for cell in self.code if tag in cell.tags]

    def widget_models(self) -> Mapping[str, Any]:
        """Saved widget state by model id; {} when the notebook has none."""
        state = mapping(mapping(self.metadata.get("widgets")).get(WIDGET_STATE))
        return mapping(state.get("state"))


def notebook_of(raw: Any) -> Notebook:
    """Build the view; never raises on a malformed notebook."""
    found = mapping(raw)
    cells: list[Cell] = []
    numbers = {True: 0, False: 0}
    listed = found.get("cells")
    for item in listed if isinstance(listed, list) else []:
        cell = mapping(item)
        code = cell.get("cell_type", "code") == "code"
        numbers[code] += 1
        cells.append(_cell(cell, code, numbers[code]))
    return Notebook(tuple(cells), mapping(found.get("metadata")))


def _cell(cell: Mapping[str, Any], code: bool, number: int) -> Cell:
    metadata = mapping(cell.get("metadata"))
    source = cell.get("source")
    text = "".join(str(line) for line in source) if isinstance(source, list) else source
    tags = cell.get("tags", metadata.get("tags"))
    outputs = cell.get("outputs")
    ran = cell["execution_count"] is not None if "execution_count" in cell else None
    return Cell(
        number=number,
        code=code,
        source=text[:SOURCE_LIMIT] if isinstance(text, str) else "",
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        ran=ran,
        count=whole(cell.get("execution_count")),
        outputs=tuple(mapping(output) for output in outputs) if isinstance(outputs, list) else (),
        seconds=_duration(metadata),
    )


def _duration(metadata: Mapping[str, Any]) -> float | None:
    """Seconds as papermill notes them, else between the kernel's messages that nbclient and JupyterLab keep."""
    noted = real(mapping(metadata.get("papermill")).get("duration"))
    if noted is not None:
        return noted
    times = mapping(metadata.get("execution"))
    start = next((times[key] for key in _STARTED if isinstance(times.get(key), str)), "")
    end = next((times[key] for key in _ENDED if isinstance(times.get(key), str)), "")
    try:
        seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError, OverflowError):  # no time, or one with a zone and one without
        return None
    return seconds if seconds >= 0 else None


def _literals(source: str) -> Iterator[tuple[str, Any]]:
    """Name and value of every plain assignment of a literal."""
    tree = parse(source)
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue  # float("nan"), a value that no literal writes


@functools.lru_cache(maxsize=64)
def parse(source: str) -> ast.Module | None:
    """Syntax tree of a cell, not to be changed; None when it is no Python.

    Line magics are the `get_ipython()` calls that they stand for.
    """
    cell_magic = _CELL_MAGIC.match(source)
    if cell_magic:
        if cell_magic[1] not in _STILL_PYTHON:
            return None
        source = "\n" + source[cell_magic.end() :].partition("\n")[2]
    # as it stands first: a line of an expression may begin with %
    for text in (source, _LINE_MAGIC.sub(_call, source)):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _call(line: re.Match[str]) -> str:
    indent, sign, text = line.groups()
    if sign == "!":
        return f"{indent}get_ipython().system({text!r})"
    if sign == "?":
        return f"{indent}pass"
    name, _, rest = text.partition(" ")
    if name in ("time", "timeit"):
        statement = _TIMED.sub("", rest.strip(), count=1)
        # %timeit keeps what it sets to itself
        if _parses(statement, "eval") or (name == "time" and _parses(statement, "exec")):
            return indent + statement
    return f"{indent}get_ipython().run_line_magic({name!r}, {rest!r})"


def _parses(text: str, mode: str) -> bool:
    try:
        compile(text, "<line>", mode, ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text)


def names_of(node: ast.AST | None) -> tuple[str, ...]:
    """Names that stand anywhere in a part, in order, each once."""
    if node is None:
        return ()
    return tuple(dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)))


def shows(statement: ast.stmt) -> bool:
    """Whether a statement only prints or displays; what else it calls may do more with a value."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("print", "display"):
        return all(_formats(item.func) for item in ast.walk(value) if isinstance(item, ast.Call) and item is not value)
    return isinstance(value, ast.Name)


def _formats(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, (ast.Constant, ast.JoinedStr))
    return isinstance(function, ast.Name) and function.id in _FORMATTING


def shell_seconds(text: str) -> float:
    """Seconds of the plain `sleep` commands of a shell text; behind a block or another command's && nothing is sure."""
    total = 0.0
    for line in re.split(r"[;\n]", text):
        if _SHELL_BLOCK.match(line):
            break
        for command in line.split("&&"):
            found = _SHELL_SLEEP.match(command)
            if not found:
                break
            total += sum(float(part.rstrip("smhd")) * _UNITS.get(part[-1], 1) for part in found[1].split())
    return total


def reached(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that act on the names of the notebook: not the inside of a function, nor what a comprehension sets."""
    waiting = [node]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        own = item.target if isinstance(item, ast.comprehension) else None
        waiting += [child for child in reversed(list(ast.iter_child_nodes(item))) if child is not own]


def imports_of(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """(name, dotted path) of what an import binds."""
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, f"{node.module or ''}.{alias.name}") for alias in node.names]
    return [(alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0])
            for alias in node.names]  # fmt: skip
