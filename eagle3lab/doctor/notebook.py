"""A notebook as plain facts: cells, tags, parameters, limits, what ran. No findings in here, and nothing is executed.

Two spellings are read: nbformat 4 (`{"cells": [{"cell_type", "source", "metadata": {"tags": [...]}}]}`) and the short
one of case files (`{"cells": [{"source", "tags"}]}`). Anything of the wrong type reads as absent.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3lab.doctor.views import mapping, real

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
SOURCE_LIMIT = 1_000_000
_SHELL_BLOCK = re.compile(r"\s*(?:if|for|while|until|case|select|function|exit|return)\b|.*(?:<<|[({])")
_SHELL_SLEEP = re.compile(r"\s*sleep((?:\s+\d+(?:\.\d*)?[smhd]?)+)\s*(?:#.*)?$")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINE_MAGIC = re.compile(r"^(\s*)([%!?])(.*)$", re.MULTILINE)
_CELL_MAGIC = re.compile(r"\s*%%(\S*)")
_STILL_PYTHON = {"time", "timeit", "capture", "prun"}
"""Cell magics that run what is under them as Python."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. number: 1-based among all cells of its kind; ran: None when the notebook does not tell."""

    number: int
    code: bool
    source: str
    tags: tuple[str, ...]
    ran: bool | None
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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One assignment of the parameters cell.

    Fields:
        kind: its type hint, else the type of its default, None when neither tells. hinted: it is the hint.
        needs: names that its value reads.
    """

    name: str
    kind: str | None
    needs: tuple[str, ...]
    hinted: bool = False


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
        """Whether this is an executed copy: some code cell has an execution count, or a runner left its mark."""
        return any(cell.ran for cell in self.code) or bool(mapping(self.metadata.get("papermill")))

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
        outputs=tuple(mapping(output) for output in outputs) if isinstance(outputs, list) else (),
        seconds=real(mapping(metadata.get("papermill")).get("duration")),
    )


def parse(source: str) -> ast.Module | None:
    """Syntax tree of a cell, line magics as the `get_ipython()` calls that they are; None when it is no Python."""
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
    name, _, rest = text.partition(" ")
    return f"{indent}get_ipython().run_line_magic({name!r}, {rest!r})" if sign == "%" else f"{indent}pass"


def parameters_of(cell: Cell) -> list[Parameter]:
    """Assignments of a parameters cell, in order."""
    tree = parse(cell.source)
    found: list[Parameter] = []
    for statement in tree.body if tree else []:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            found.append(Parameter(statement.target.id, kind, _names(statement.value), hinted=True))
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for name in _targets(target):
                    found.append(Parameter(name, _kind(statement.value), _names(statement.value)))
    return found


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            yield from _targets(item)


def _names(node: ast.AST | None) -> tuple[str, ...]:
    if node is None:
        return ()
    return tuple(dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)))


def _kind(node: ast.expr | None) -> str | None:
    """Type name of a literal default; None for None and for anything computed."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return None if value is None else type(value).__name__


SETTING_MAGICS = {"run", "store", "reset", "pylab", "rerun", "recall"}
"""Line magics that may set any name."""
_READS_ANY = {"globals", "locals", "vars", "exec", "eval", "get_ipython"}
_NOT_AS_WRITTEN = {"injected-parameters", "skip-execution"}


def set_again(notebook: Notebook, name: str) -> tuple[Cell, str, ast.expr] | None:
    """(cell, line, value) where a cell behind the parameters cell sets a parameter that nothing has used before.

    To print it is no use. Only what is certain counts: assignments and loops at top level whose value does not read the
    parameter; a magic that names it or may set it, a cell that is no Python, and what may read every name (`globals()`)
    end the search.
    """
    tagged = notebook.tagged("parameters")
    for cell in notebook.code if tagged else ():
        if cell.number <= tagged[0].number or _NOT_AS_WRITTEN & set(cell.tags):
            continue
        tree, lines = parse(cell.source), cell.source.splitlines()
        if tree is None:
            return None
        for statement in tree.body:
            if (magic := _magic(statement)) is not None:
                if name in magic or SETTING_MAGICS & set(magic.split()[:1]):
                    return None
                continue
            words = set(_names(statement))
            if words & _READS_ANY:
                return None
            names, value = _assigned(statement)
            if name in names and value is not None:
                line = "".join(lines[statement.lineno - 1 : statement.lineno]).strip()
                return None if name in _names(value) else (cell, line, value)
            if name in words and not shows(statement):
                return None
    return None


def _magic(statement: ast.stmt) -> str | None:
    """Name and text of a line magic or of a shell command, None for any other statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("get_ipython()."):
        return " ".join(str(part.value) for part in call.args if isinstance(part, ast.Constant))
    return None


def _assigned(statement: ast.stmt) -> tuple[list[str], ast.expr | None]:
    """Names that an assignment or a loop sets for certain, and what they are set to."""
    if isinstance(statement, ast.Assign):
        return [name for target in statement.targets for name in _targets(target)], statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id], statement.value
    if isinstance(statement, ast.For):
        return list(_targets(statement.target)), statement.iter
    return [], None


def shows(statement: ast.stmt) -> bool:
    """Whether a statement only prints or displays."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("print", "display")
    return isinstance(value, ast.Name)


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
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.comprehension) and child is node.target):
            yield from reached(child)


def imports_of(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """(name, dotted path) of what an import binds."""
    if isinstance(node, ast.ImportFrom):
        return [(alias.asname or alias.name, f"{node.module or ''}.{alias.name}") for alias in node.names]
    return [(alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0])
            for alias in node.names]  # fmt: skip
