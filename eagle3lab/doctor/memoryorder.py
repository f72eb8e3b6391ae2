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
_ARRAY = re.compile(r"arange\(\s*(\d{1,7})\s*(?:,[^)]*)?\)")
_SHAPE = re.compile(r"shape\s*[\[(]*\s*(\d[\d,\sx]*)")
_DTYPES = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"}
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "asfortranarray": np.asfortranarray,
    "ascontiguousarray": np.ascontiguousarray,
    "transpose": np.transpose,
    "swapaxes": np.swapaxes,
    "moveaxis": np.moveaxis,
}
_FUNCTIONS |= {name: getattr(np, name) for name in ("flip", "flipud", "fliplr", "rot90", "rollaxis", "squeeze")}
_FUNCTIONS |= {"array": np.array, "asarray": np.asarray, "copy": np.copy}
_METHODS = {"transpose", "swapaxes", "copy", "reshape", "ravel", "squeeze"}
_ORDERS = ("C", "F", "A", "K")


def array_of(description: str) -> np.ndarray | None:
    """`arange(12) as float32, shape [3, 4]` as an array; None when it is something else or too large."""
    match, sizes = _ARRAY.search(description), _SHAPE.search(description)
    if match is None or sizes is None or int(match[1]) > ELEMENTS:
        return None
    dtype = next((name for name in re.findall(r"[a-z]+\d+", description) if name in _DTYPES), "float32")
    shape = [int(size) for size in re.findall(r"\d+", sizes[1])]
    if int(np.prod(shape, dtype=np.int64)) != int(match[1]):
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
    if isinstance(node, ast.Call):
        return _call(node, array)
    raise ValueError(f"{type(node).__name__} is no view")


def _call(node: ast.Call, array: np.ndarray) -> Any:
    """numpy's functions and methods, and torch's names for the same (`permute`, `contiguous`, `t`)."""
    arguments = [_evaluate(item, array) for item in node.args]
    order = {str(key.arg): _evaluate(key.value, array) for key in node.keywords}
    if order and (set(order) != {"order"} or order["order"] not in _ORDERS):
        raise ValueError("no such view")
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*arguments, **order)
    if not isinstance(node.func, ast.Attribute):
        raise ValueError("no such view")
    name = node.func.attr
    if isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy"):
        return _FUNCTIONS[name](*arguments, **order) if name in _FUNCTIONS else None
    owner = _evaluate(node.func.value, array)
    if name == "contiguous" and not arguments:
        return np.ascontiguousarray(owner)
    if name in ("permute", "t"):
        return owner.transpose(*arguments)
    if name == "transpose" and len(arguments) == 2 and owner.ndim > 2:
        return owner.swapaxes(*arguments)  # torch's meaning; numpy refuses it
    if name in _METHODS:
        return getattr(owner, name)(*arguments, **order)
    raise ValueError("no such view")
