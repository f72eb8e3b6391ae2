"""The names of a notebook while its statements are followed: values, imported things, functions, times on a clock.

Nothing is executed: a name that anything unknown may have set is dropped.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from eagle3lab.doctor.arithmetic import LARGEST, Unknown, evaluate
from eagle3lab.doctor.notebook import imports_of, reached
from eagle3lab.doctor.notebook_parameters import shared_names
from eagle3lab.doctor.views import real

ROUNDS = 100
"""Rounds of a loop that are followed one by one; a longer one is followed once and its seconds are multiplied."""
_FUNCTIONS = 1000
"""Functions of a notebook up to which a class gets those of its bases."""
_UNWRAPPED = {"tqdm", "list", "tuple", "iter"}
_SETS_ANY = {"exec", "globals", "locals", "vars"}
_CLOCKS = {"time.time", "time.monotonic", "time.perf_counter"}
_OBJECTS = {"threading.Event"}
"""Imported classes whose objects are known."""

missing: Any = object()
"""The value of what is unknown."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the notebook.

    Fields:
        nested: it is defined inside another. defaults: (value, path) of arguments.
        shared: names that it declares global.
        object: path that a method's `self` stands for; an object is known by its class alone.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    nested: bool
    defaults: Mapping[str, tuple[Any, str]]
    shared: frozenset[str] = frozenset()
    object: str = ""


class Names:
    """What the names stand for.

    Fields:
        known: name -> value. paths: name -> the imported or defined thing it stands for ("time.sleep", "main#0").
        clocks: name -> second of the cell at which a clock was read into it.
        functions: path -> function. fields: path of an attribute -> value. results: what a followed call returned.
        local: names of the functions that are being followed. losses: how often names were dropped at large.
        given: parameters that replace what assigns them; used: those that something has read.
        seconds: the clock.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.known: dict[str, Any] = {"__name__": "__main__"}
        self.paths = {"time": "time", "asyncio": "asyncio", "sleep": "time.sleep", "os": "os"}
        self.clocks: dict[str, float] = {}
        self.functions: dict[str, Function] = {}
        self.fields: dict[str, Any] = {}
        self.results: dict[ast.Call, Any] = {}
        self.local: set[str] = set()
        self.losses = 0
        self.given, self.used, self.declares = given, set[str](), False
        self.seconds = 0.0

    # -- reading -------------------------------------------------------------------------------------------------------

    def path(self, node: ast.expr) -> str:
        """Dotted name of the imported or defined thing that an expression stands for, "" when it is none."""
        if isinstance(node, ast.Attribute):
            root = self.path(node.value)
            return f"{root}.{node.attr}" if root else ""
        if isinstance(node, ast.Call):
            root = self.path(node.func)
            return f"{root}()" if root in _OBJECTS or root.endswith("#class") else ""
        return self.paths.get(node.id, "") if isinstance(node, ast.Name) else ""

    def value(self, node: ast.expr | None) -> Any:
        """Value of an expression, `missing` when it is unknown."""
        try:
            if node is not None and (self.fields or self.results):
                node = self._filled(node)
            return evaluate(node, self.known)
        except (Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
            return missing

    def _filled(self, node: ast.expr) -> ast.expr:
        """A copy of an expression with known attributes and results of calls as constants."""
        constant = self._constant(node)
        if constant is not None:
            return constant
        filled = copy.copy(node)
        for name, part in ast.iter_fields(node):
            if isinstance(part, ast.expr):
                setattr(filled, name, self._filled(part))
            elif isinstance(part, list):
                setattr(filled, name, [self._filled(item) if isinstance(item, ast.expr) else item for item in part])
        return filled

    def _constant(self, node: ast.AST) -> ast.Constant | None:
        value = missing
        if isinstance(node, ast.Call):
            value = self.results.get(node, missing)
        elif isinstance(node, ast.Attribute) and self.fields:
            value = self.fields.get(self.path(node), missing)
        return ast.Constant(value) if isinstance(value, (int, float, str, type(None))) else None

    def items(self, node: ast.expr) -> Sequence[Any] | None:
        """What a loop goes over, None when even the number of items is unknown."""
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("range", "trange"):
                bounds = [self.value(item) for item in node.args]
                whole = (
                    all(type(bound) is int and abs(bound) <= LARGEST for bound in bounds)
                    and len(bounds) <= 3
                    and 0 not in bounds[2:]
                )
                return range(*bounds) if whole else None
            values = self.items(node.args[0]) if name in {*_UNWRAPPED, "enumerate"} else None
            if name == "enumerate" and values is not None:
                return [missing] * len(values) if len(values) <= ROUNDS else values
            return values
        value = self.value(node)
        if isinstance(value, (list, tuple, str)):
            return value
        if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(item, ast.Starred) for item in node.elts):
            return [self.value(item) for item in node.elts]
        return None

    def moment(self, node: ast.expr) -> tuple[int, float] | None:
        """(1, second of the cell) of a reading of a clock, (0, seconds) of a span, None of anything else."""
        if isinstance(node, ast.Call) and self.path(node.func) in _CLOCKS:
            return 1, self.seconds
        if isinstance(node, ast.Name) and node.id in self.clocks:
            return 1, self.clocks[node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            left, right = self.moment(node.left), self.moment(node.right)
            sign = 1 if isinstance(node.op, ast.Add) else -1
            return (left[0] + sign * right[0], left[1] + sign * right[1]) if left and right else None
        span = real(self.value(node))
        return None if span is None else (0, span)

    def waits(self, test: ast.expr) -> float | None:
        """Seconds until a test on the clock (`time.time() - start < 5`) no longer holds, None for another test."""
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return None
        early, late = test.left, test.comparators[0]
        if isinstance(test.ops[0], (ast.Gt, ast.GtE)):
            early, late = late, early
        elif not isinstance(test.ops[0], (ast.Lt, ast.LtE)):
            return None
        calls = [[item for item in ast.walk(side) if isinstance(item, ast.Call)] for side in (early, late)]
        reads = [any(self.path(call.func) in _CLOCKS for call in side) for side in calls]
        left, right = self.moment(early), self.moment(late)
        if reads != [True, False] or not left or not right or left[0] != right[0]:
            return None
        return max(0.0, right[1] - left[1])

    def arguments(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, call: ast.Call, method: bool
    ) -> dict[str, tuple[Any, str]]:
        """(value, path) of each argument that a call gives."""
        if any(isinstance(item, ast.Starred) for item in call.args) or any(word.arg is None for word in call.keywords):
            return {}
        names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
        given = dict(zip(names[method:], call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        return {name: (self.value(item), self.path(item)) for name, item in given.items()}

    def defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> dict[str, tuple[Any, str]]:
        """(value, path) of each argument that has a default, computed where the function is defined."""
        names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
        found = list(zip(reversed(names), reversed(node.args.defaults), strict=False))
        words = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        found += [(item.arg, default) for item, default in words if default is not None]
        return {name: (self.value(item), self.path(item)) for name, item in found}

    def use(self, node: ast.AST) -> None:
        """Note that parameters have been read."""
        if self.given and not self.declares:
            self.used |= read_by(node)

    # -- setting -------------------------------------------------------------------------------------------------------

    def bind(self, target: ast.expr, value: Any, reads: set[str]) -> None:
        """Set a name, or each of several, to a value; to nothing known when it is missing."""
        if isinstance(target, ast.Name):
            name = target.id
            fresh = self.declares or not (name in self.used or name in reads)
            # a given value stands for the default, not for what is computed from it later
            if name in self.given and name not in self.local and fresh:
                value = self.given[name]
            self.drop(name)
            if value is not missing:
                self.known[name] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            fits = isinstance(value, (list, tuple)) and len(value) == len(target.elts)
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            parts = value if fits and not starred else [missing] * len(target.elts)
            for item, part in zip(target.elts, parts, strict=True):
                self.bind(item, part, reads)
        elif isinstance(target, ast.Attribute) and self.path(target.value).endswith("#class()"):
            # of which object is not known: another value than before makes it unknown for good
            path = self.path(target)
            self.functions.pop(path, None)
            self.fields[path] = value if self.fields.get(path, value) == value else missing
        else:
            self.forget(target)

    def imported(self, node: ast.Import | ast.ImportFrom) -> None:
        """Names that an import binds."""
        for name, path in imports_of(node):
            if name == "*":
                self.lose()
                self.paths |= {"sleep": f"{path[:-2]}.sleep"} if path[:-2] in ("time", "asyncio") else {}
                continue
            self.drop(name)
            self.paths[name] = path

    def define(self, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) -> None:
        """Note a function or a class; one that is decorated or that yields does not run as it is written."""
        plain = isinstance(node, ast.Lambda) or not node.decorator_list
        if isinstance(node, ast.ClassDef):
            plain = all(ast.unparse(item).endswith("dataclass") for item in node.decorator_list) and not node.keywords
        self.drop(name)
        if not plain or (not isinstance(node, ast.ClassDef) and _yields(node)):
            self.forget(node)
            return
        path = f"{name}#{len(self.functions)}"
        if not isinstance(node, ast.ClassDef):
            self.functions[path] = Function(node, bool(self.local), self.defaults(node), frozenset(shared_names(node)))
            self.paths[name] = path
            return
        self.paths[name] = f"{path}#class"
        self._methods(node, f"{path}#class")

    def _methods(self, node: ast.ClassDef, path: str) -> None:
        """Note what a class defines, and what it has of the classes of the notebook that it is built on."""
        for base in map(self.path, node.bases if len(self.functions) < _FUNCTIONS else ()):
            for known, function in list(self.functions.items()):
                if base and known.startswith(f"{base}()."):
                    own = f"{path}()" if function.object else ""
                    self.functions[path + known[len(base) :]] = replace(function, object=own)
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.pop(f"{path}().{item.name}", None)
                kinds = {ast.unparse(mark) for mark in item.decorator_list}
                if kinds <= {"staticmethod", "classmethod"} and not _yields(item):
                    own = "" if "staticmethod" in kinds else f"{path}()"
                    shared = frozenset(shared_names(item))
                    function = Function(item, bool(self.local), self.defaults(item), shared, own)
                    self.functions[f"{path}().{item.name}"] = function
                    if kinds:
                        self.functions[f"{path}.{item.name}"] = function
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                self.fields[f"{path}().{item.targets[0].id}"] = self.value(item.value)
        self.functions[path] = self.functions.get(f"{path}().__init__", _EMPTY)
        # an attribute that is set at two places has a value that depends on the order of the calls
        set_at = Counter(item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute) and _stored(item))
        for name, times in set_at.items():
            if times > 1 or f"{path}().{name}" in self.fields:
                self.fields[f"{path}().{name}"] = missing

    def drop(self, name: str) -> None:
        """Make a name unknown."""
        tables: list[dict[str, Any]] = [self.known, self.paths, self.clocks]
        for table in tables:
            table.pop(name, None)

    def lose(self) -> None:
        """Make every value unknown, and what the notebook's functions do."""
        self.known.clear()
        self.known["__name__"] = "__main__"
        self.clocks.clear()
        self.functions.clear()
        self.fields.clear()
        self.losses += 1

    def forget(self, node: ast.AST) -> None:
        """Drop what a part that is not followed may have set; lists too, when it could change one."""
        for item in reached(node):
            if isinstance(item, (ast.Import, ast.ImportFrom)):
                for name, path in imports_of(item):
                    if self.paths.get(name) == path:
                        self.known.pop(name, None)
                    else:
                        self.drop(name)
            elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for name in (item.name, *shared_names(item)):
                    self.drop(name)
            elif isinstance(item, (ast.Name, ast.Attribute, ast.Subscript)) and _stored(item):
                if isinstance(item, ast.Attribute) and self.path(item.value).endswith("#class()"):
                    self.functions.pop(self.path(item), None)
                    self.fields[self.path(item)] = missing
                    continue
                root: ast.expr = item
                while isinstance(root, (ast.Attribute, ast.Subscript)):
                    root = root.value
                if isinstance(root, ast.Name):
                    self.drop(root.id)
        read = read_by(node)
        for name in read:
            function = self.functions.get(self.paths.get(name, ""))
            for shared in function.shared if function else ():
                self.drop(shared)
        if read & _SETS_ANY:
            self.lose()
        elif any(isinstance(self.known.get(name), list) for name in read):
            for name in [name for name, value in self.known.items() if isinstance(value, (list, tuple))]:
                del self.known[name]
            self.losses += 1

    @contextmanager
    def scope(self, hidden: set[str], local: set[str]) -> Iterator[None]:
        """Follow what has names of its own. hidden: names that mean something else inside; local: those of its own."""
        tables: list[dict[str, Any]] = [self.known, self.paths, self.clocks]
        saved = [{name: table[name] for name in hidden if name in table} for table in tables]
        losses, outer = self.losses, self.local
        for name in hidden:
            self.drop(name)
        self.local = local
        try:
            yield
        finally:
            self.local = outer
            for name in hidden:
                self.drop(name)
            if losses == self.losses:
                for table, names in zip(tables, saved, strict=True):
                    table.update(names)


_EMPTY = Function(ast.Lambda(ast.arguments([], [], None, [], [], None, []), ast.Constant(None)), False, {})
"""What an object does when it is made and its class has no `__init__`."""


def read_by(node: ast.AST) -> set[str]:
    """Names that a part reads when it runs."""
    return {item.id for item in reached(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}


def set_by(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that statements set."""
    return {
        item.id
        for statement in statements
        for item in reached(statement)
        if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load)
    }


def own_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names that are a function's own: its arguments and what its body sets."""
    found = {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
    outer: set[str] = set()
    for part in [] if isinstance(node, ast.Lambda) else node.body:
        for item in reached(part):
            if isinstance(item, (ast.Import, ast.ImportFrom)):
                found |= {name for name, _ in imports_of(item)}
            elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
                found |= {item.name} if item.name else set()
            elif isinstance(item, (ast.Global, ast.Nonlocal)):
                outer |= set(item.names)
            elif isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load):
                found.add(item.id)
    return found - outer


def _stored(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _yields(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    parts = [node.body] if isinstance(node, ast.Lambda) else node.body
    return any(isinstance(item, (ast.Yield, ast.YieldFrom)) for part in parts for item in reached(part))
