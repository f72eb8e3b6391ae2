"""Values of plain expressions out of a syntax tree, bounded in size; nothing is executed.

Numbers, texts, names, + - * / // % **, comparisons, `and`, `or`, `a if b else c`, f-strings and a few built-ins.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 10.0**18
LONGEST = 10_000
"""Characters of a text that an operator makes."""
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "round": round, "abs": abs}
FUNCTIONS |= {"min": min, "max": max, "len": len}


class Unknown(Exception):
    """Something that is not plain arithmetic."""


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
        return _operation(node.op, evaluate(node.left, known), evaluate(node.right, known))
    if isinstance(node, (ast.Compare, ast.BoolOp, ast.IfExp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        return _choice(node, known)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [evaluate(item, known) for item in node.elts]
        if any(isinstance(part, (list, tuple)) for item in items if isinstance(item, (list, tuple)) for part in item):
            raise Unknown
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.JoinedStr):
        text = "".join(_piece(part, known) for part in node.values)
        if len(text) > LONGEST:
            raise Unknown
        return text
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise Unknown
        return FUNCTIONS[node.func.id](*(evaluate(item, known) for item in node.args))
    raise Unknown


def _operation(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(op, (ast.Add, ast.Mult)):
        added = isinstance(op, ast.Add) and isinstance(right, str)
        length = len(left) + len(right) if added else len(left) * abs(_number(right))
        if length > LONGEST:
            raise Unknown
        return left + right if added else left * right
    left, right = _number(left), _number(right)
    if isinstance(op, ast.Pow) and abs(right) > 64:
        raise Unknown
    return _number(_OPERATORS[type(op)](left, right))


def _choice(node: ast.Compare | ast.BoolOp | ast.IfExp | ast.UnaryOp, known: Mapping[str, Any]) -> Any:
    """A comparison, `not`, `and`, `or`, `a if b else c`."""
    if isinstance(node, ast.UnaryOp):
        return not evaluate(node.operand, known)
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, known) else node.orelse, known)
    if isinstance(node, ast.BoolOp):
        value: Any = None
        for item in node.values:
            value = evaluate(item, known)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value
    left = evaluate(node.left, known)
    for op, item in zip(node.ops, node.comparators, strict=True):
        right = evaluate(item, known)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


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
