"""What a writer that takes an array's raw memory stores when the array is not row-major. No findings in here.

Source: safetensors issues 825, 826 and 829: the numpy writer of 0.8.0 takes the bytes at the array's address.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import numpy as np

ELEMENTS = 100_000
_ARRAY = re.compile(r"arange\((\d{1,7})\)\s*(?:as\s+(\w+))?\s*,?\s*shape\s*\[([\d,\s]*)\]")
_DTYPES = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8"}
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "asfortranarray": np.asfortranarray,
    "ascontiguousarray": np.ascontiguousarray,
    "transpose": np.transpose,
    "swapaxes": np.swapaxes,
    "moveaxis": np.moveaxis,
}
_METHODS = {"transpose", "swapaxes", "copy", "reshape", "ravel", "squeeze"}


def array_of(description: str) -> np.ndarray | None:
    """`arange(12) as float32, shape [3, 4]` as an array; None when it is something else or too large."""
    match = _ARRAY.search(description)
    if match is None or int(match[1]) > ELEMENTS:
        return None
    dtype = match[2] or "float32"
    shape = [int(size) for size in re.findall(r"\d+", match[3])]
    if dtype not in _DTYPES or int(np.prod(shape, dtype=np.int64)) != int(match[1]):
        return None
    return np.arange(int(match[1]), dtype=dtype).reshape(shape)


def view_of(expression: str, array: np.ndarray) -> np.ndarray | None:
    """`a.T`, `a[:, ::2]`, `asfortranarray(a)`, `a.transpose(1, 0, 2)` ...: only views and copies, no code is run."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        found = _evaluate(tree.body, array)
    except (SyntaxError, ValueError, TypeError, IndexError, AttributeError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, np.ndarray) and found.size <= ELEMENTS else None


def row_major(view: np.ndarray) -> bool:
    """Whether memory order is index order."""
    return bool(view.flags.c_contiguous)


def as_raw_memory(view: np.ndarray) -> np.ndarray | None:
    """What is read back when the bytes at the array's address were stored; None when that runs off the end."""
    owner = view
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    memory = np.frombuffer(owner.ravel(order="K").tobytes(), dtype=view.dtype)
    start = view.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    first, rest = divmod(start, view.itemsize)
    if rest or first < 0 or first + view.size > memory.size:
        return None
    return memory[first : first + view.size].reshape(view.shape)


def _evaluate(node: ast.expr, array: np.ndarray) -> Any:
    if isinstance(node, ast.Name) and node.id == "a":
        return array
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (int, str))):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, array)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_evaluate(item, array) for item in node.elts)
    if isinstance(node, ast.Slice):
        parts = [None if part is None else _evaluate(part, array) for part in (node.lower, node.upper, node.step)]
        return slice(*parts)
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, array)[_evaluate(node.slice, array)]
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return getattr(_evaluate(node.value, array), node.attr)
    if isinstance(node, ast.Call) and not node.keywords:
        return _call(node, array)
    raise ValueError(f"{type(node).__name__} is no view")


def _call(node: ast.Call, array: np.ndarray) -> Any:
    arguments = [_evaluate(item, array) for item in node.args]
    if isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy"):
            return _FUNCTIONS[node.func.attr](*arguments) if node.func.attr in _FUNCTIONS else None
        if node.func.attr in _METHODS:
            return getattr(_evaluate(node.func.value, array), node.func.attr)(*arguments)
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*arguments)
    raise ValueError("no such view")
