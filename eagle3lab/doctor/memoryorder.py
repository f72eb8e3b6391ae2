"""What a writer that takes an array's raw memory stores when the array is not row-major. No findings in here.

Source: safetensors issues 825, 826 and 829: the numpy writer of 0.8.0 takes the bytes at the array's address.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

ELEMENTS = 100_000
"""Most elements of an array, and the largest number in an expression."""
TEXT = 1000
"""Characters of a description or an expression."""
_ARRAY = re.compile(r"\b(?:a?range)\(([^()]*)\)")
_SHAPE = re.compile(r"shape\s*(?:of|is|[=:])?\s*[\[(]*\s*(\d[\d,\sx]*)")
_DTYPES = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"}
_SHORT = {"f32": "float32", "f64": "float64", "f16": "float16", "i64": "int64", "i32": "int32", "float": "float32"}
_ORDERS = ("C", "F", "A", "K")
_KEYWORDS = {
    *("order", "axis", "axes", "axis1", "axis2", "source", "destination", "shape", "newshape", "dtype", "start", "k"),
    *("dim", "dims", "dim0", "dim1", "copy"),
}
"""Keywords of the functions below that a call may name: none of them writes anywhere."""


def array_of(description: str) -> np.ndarray | None:
    """`arange(12) as float32, shape [3, 4]` as an array; None when it is something else or too large."""
    if len(description) > TEXT:
        return None
    match, sizes = _ARRAY.search(description), _SHAPE.search(description)
    values = None if match is None else _range(match[1])
    if values is None or sizes is None:
        return None
    words = [_SHORT.get(word, word) for word in re.findall(r"[a-z]+\d*", description.lower())]
    dtype = next((word for word in words if word in _DTYPES), "float32")
    shape = [int(size) for size in re.findall(r"\d{1,7}", sizes[1])]
    if int(np.prod(shape, dtype=np.float64)) != len(values):
        return None
    return np.arange(values.start, values.stop, values.step).astype(dtype).reshape(shape)


def _range(arguments: str) -> range | None:
    """The numbers of `12`, `6, 18`, `0, 24, 2` or `12, dtype=float32`."""
    numbers = [part.strip() for part in arguments.split(",")]
    ends = [int(part) for part in numbers if re.fullmatch(r"-?\d{1,7}", part)]
    if not 0 < len(ends) <= 3 or numbers[: len(ends)] != [str(end) for end in ends]:
        return None
    found = range(*ends) if len(ends) < 3 or ends[2] else range(0)
    return found if 0 < len(found) <= ELEMENTS else None


def view_of(expression: str, array: np.ndarray) -> np.ndarray | None:
    """`a.T`, `a[:, ::2]`, `asfortranarray(a)`, `a.transpose(1, 0, 2)` ...: only views and copies, no code is run."""
    if len(expression) > TEXT:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        found = _evaluate(tree.body, array)
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, np.ndarray) else None


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
    """The value of one node; `ValueError` for what is no view and for an array that is too large to look at."""
    found = _value(node, array)
    if isinstance(found, np.ndarray) and found.size > ELEMENTS:
        raise ValueError("too large")
    return found


def _value(node: ast.expr, array: np.ndarray) -> Any:
    if isinstance(node, ast.Name):
        return array if node.id == "a" else _dtype(node.id)
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, array)
    if isinstance(node, (ast.Tuple, ast.List)):
        parts = [_evaluate(item, array) for item in node.elts]
        return tuple(parts) if isinstance(node, ast.Tuple) else parts
    if isinstance(node, ast.Slice):
        parts = [None if part is None else _evaluate(part, array) for part in (node.lower, node.upper, node.step)]
        return slice(*parts)
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, array)[_evaluate(node.slice, array)]
    if isinstance(node, ast.Attribute):
        return _attribute(node, array)
    if isinstance(node, ast.Call):
        return _call(node, array)
    raise ValueError(f"{type(node).__name__} is no view")


def _constant(value: Any) -> Any:
    """None, `...`, a text, a truth value or a small whole number."""
    if value is None or value is Ellipsis or isinstance(value, str):
        return value
    if isinstance(value, int) and abs(value) <= ELEMENTS:
        return value
    raise ValueError("no such number")


def _dtype(dtype: Any) -> str:
    """A dtype by its name in numpy or torch: no texts of any length, no objects."""
    name = str(dtype)
    if name not in _DTYPES | {"float", "int", "double"}:
        raise ValueError(f"{name} is not known")
    return {"float": "float64", "int": "int64", "double": "float64"}.get(name, name)


def _library(node: ast.expr) -> str:
    """`np`, `torch` or nothing."""
    name = node.id if isinstance(node, ast.Name) else ""
    return {"numpy": "np"}.get(name, name) if name in ("np", "numpy", "torch") else ""


def _attribute(node: ast.Attribute, array: np.ndarray) -> Any:
    """`np.newaxis`, `np.float64`, `x.T`, `x.mT`."""
    if _library(node.value):
        return None if node.attr == "newaxis" else _dtype(node.attr)
    owner = _evaluate(node.value, array)
    if node.attr in ("T", "mT") and isinstance(owner, np.ndarray):
        return owner.T if node.attr == "T" else owner.swapaxes(-1, -2)
    raise ValueError("no such view")


def _call(node: ast.Call, array: np.ndarray) -> Any:
    """A function or a method of the tables; torch's names have torch's meaning."""
    arguments = [_evaluate(item, array) for item in node.args]
    named = {str(key.arg): _evaluate(key.value, array) for key in node.keywords}
    if not named.keys() <= _KEYWORDS or named.get("order", "C") not in _ORDERS:
        raise ValueError("no such view")
    if "dtype" in named:
        named["dtype"] = _dtype(named["dtype"])
    if isinstance(node.func, ast.Name):
        return _FUNCTIONS[_known(node.func.id, _FUNCTIONS)](*arguments, **named)
    if not isinstance(node.func, ast.Attribute):
        raise ValueError("no such view")
    library, name = _library(node.func.value), node.func.attr
    if library:
        functions = _TORCH if library == "torch" else _FUNCTIONS
        return functions[_known(name, functions)](*arguments, **named)
    owner = _evaluate(node.func.value, array)
    if not isinstance(owner, np.ndarray):
        raise ValueError("no such view")
    if name == "transpose" and (named.keys() & {"dim0", "dim1"} or (len(arguments) == 2 and owner.ndim > 2)):
        return _swap(owner, *arguments, **named)  # torch's meaning; numpy refuses it
    if name == "astype":
        return owner.astype(_dtype(*arguments, **named))
    if name in _METHODS:
        return getattr(owner, name)(*arguments, **named)
    return _TORCH[_known(name, _TORCH)](owner, *arguments, **named)


def _known(name: str, table: Mapping[str, Any]) -> str:
    if name not in table:
        raise ValueError(f"{name} is no view")
    return name


def _broadcast(x: np.ndarray, *shape: Any, **named: Any) -> np.ndarray:
    """`broadcast_to(x, (3, 4))`, `x.expand(3, 4)`; -1 keeps a size."""
    sizes = list(shape[0] if shape and not isinstance(shape[0], int) else shape or named["shape"])
    offset = len(sizes) - x.ndim
    sizes = [x.shape[place - offset] if size == -1 and place >= offset else size for place, size in enumerate(sizes)]
    return np.broadcast_to(x, sizes)


def _einsum(pattern: Any, x: np.ndarray) -> np.ndarray:
    """`einsum('ij->ji', x)`: of one array, axes in another order or left out."""
    if not isinstance(pattern, str) or not re.fullmatch(r"\s*[a-zA-Z.\s]+(?:->[a-zA-Z.\s]*)?", pattern):
        raise ValueError("no such view")
    return np.asarray(np.einsum(pattern, x))


def _swap(x: np.ndarray, first: Any = None, second: Any = None, *, dim0: Any = None, dim1: Any = None) -> np.ndarray:
    return x.swapaxes(dim0 if first is None else first, dim1 if second is None else second)


def _permute(x: np.ndarray, *dims: Any, **named: Any) -> np.ndarray:
    """torch's `permute(1, 0)`, `permute((1, 0))` and `permute(dims=(1, 0))`."""
    return x.transpose(*(dims or (named["dims"],)))


def _reshape(x: np.ndarray, *shape: Any) -> np.ndarray:
    """torch's `view`: the same memory in another shape."""
    if not x.flags.c_contiguous:
        raise ValueError("no such view")
    return x.reshape(*shape)


def _expand_dims(x: np.ndarray, dim: Any) -> np.ndarray:
    return np.expand_dims(x, dim)


def _flip(x: np.ndarray, *dims: Any, **named: Any) -> np.ndarray:
    """torch's `flip` copies."""
    axes = named["dims"] if not dims else dims[0] if len(dims) == 1 else dims
    return np.ascontiguousarray(np.flip(x, tuple(axes) if isinstance(axes, list) else axes))


def _select(x: np.ndarray, dim: Any, index: Any) -> np.ndarray:
    return x.swapaxes(0, dim)[index] if dim == 0 else np.moveaxis(x, dim, 0)[index]


def _same(x: np.ndarray) -> np.ndarray:
    return x


_NUMPY_NAMES = (
    *("asfortranarray", "ascontiguousarray", "transpose", "permute_dims", "matrix_transpose", "swapaxes", "moveaxis"),
    *("flip", "flipud", "fliplr", "rot90", "rollaxis", "squeeze", "expand_dims", "array", "asarray", "copy", "ravel"),
    *("reshape", "roll", "split", "hsplit", "vsplit", "dsplit", "stack", "concatenate", "vstack", "hstack"),
    *("atleast_2d", "atleast_3d", "diagonal"),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _NUMPY_NAMES if hasattr(np, name)}
_FUNCTIONS |= {"broadcast_to": _broadcast, "einsum": _einsum, "slice": slice}
_METHODS = {"transpose", "swapaxes", "copy", "reshape", "ravel", "flatten", "squeeze", "diagonal"}
_TORCH: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _swap),
    **dict.fromkeys(("clone", "contiguous"), np.ascontiguousarray),
    **dict.fromkeys(("from_numpy", "as_tensor", "asarray", "numpy", "detach", "cpu", "tensor"), _same),
    **dict.fromkeys(("movedim", "moveaxis"), np.moveaxis),
    **{"permute": _permute, "t": np.transpose, "flip": _flip, "unsqueeze": _expand_dims, "select": _select},
    **{"expand": _broadcast, "broadcast_to": _broadcast, "view": _reshape, "reshape": np.reshape, "einsum": _einsum},
    **{"squeeze": np.squeeze, "flatten": np.ravel, "ravel": np.ravel},
}
"""torch's functions, also as methods."""
