"""What a notebook prints under given parameters, as far as plain arithmetic tells; nothing is executed.

Only numbers, texts, names, + - * / // % **, comparisons, f-strings and `print` are followed, with bounds on size. The
first thing that is anything else makes all that depends on it unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from eagle3lab.doctor.notebook import Notebook, parameters_of, parse

LARGEST = 10.0**18
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "round": round, "abs": abs}
_FUNCTIONS |= {"min": min, "max": max, "len": len}


class Unknown(Exception):
    """Something that is not plain arithmetic."""


def printed(notebook: Notebook, parameters: Mapping[str, Any]) -> list[str]:
    """Lines that the code cells print when the parameters really take effect (derived values computed after them)."""
    tagged = notebook.tagged("parameters")
    known: dict[str, Any] = {}
    lines: list[str] = []
    names = {p.name for cell in tagged for p in parameters_of(cell)}
    given = {name: value for name, value in parameters.items() if name in names or not tagged}
    for cell in notebook.code:
        tree = parse(cell.source)
        for statement in tree.body if tree else []:
            _run(statement, known, lines, given)
    return lines


def _run(statement: ast.stmt, known: dict[str, Any], lines: list[str], given: Mapping[str, Any]) -> None:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                known.pop(target.id, None)
                value = given.get(target.id, _missing)
                if value is not _missing:
                    known[target.id] = value
                elif statement.value is not None:
                    _try(partial(_assign, known, target.id, statement.value))
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Name) and call.func.id == "print" and not call.keywords:
            _try(lambda: lines.append(" ".join(str(evaluate(item, known)) for item in call.args)))


def _assign(known: dict[str, Any], name: str, value: ast.expr) -> None:
    known[name] = evaluate(value, known)


_missing = object()


def _try(action: Callable[[], Any]) -> None:
    try:
        action()
    except (Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
        return  # unknown stays unknown


def evaluate(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    """Value of an expression; `Unknown` for anything that is not plain arithmetic on known values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(evaluate(node.operand, known))
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_number(evaluate(side, known)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise Unknown
        return _number(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [evaluate(item, known) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(part, known) for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise Unknown
        return _FUNCTIONS[node.func.id](*(evaluate(item, known) for item in node.args))
    raise Unknown


def _piece(part: ast.expr, known: Mapping[str, Any]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.FormattedValue) and part.conversion in (-1, 115):
        spec = "" if part.format_spec is None else evaluate(part.format_spec, known)
        if len(spec) > 16 or sum(c.isdigit() for c in spec) > 3:
            raise Unknown
        return format(evaluate(part.value, known), spec)
    raise Unknown


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > LARGEST:
        raise Unknown
    return value
