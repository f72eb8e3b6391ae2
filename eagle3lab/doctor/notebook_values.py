"""What a notebook prints and how long its cells take, as far as plain arithmetic tells; nothing is executed.

Only what `arithmetic` evaluates, `print`, `sleep`, and the branches and loops over such values are followed, with
bounds on size and steps. The first thing that is anything else makes all that depends on it unknown.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.doctor.arithmetic import FUNCTIONS, LARGEST, Unknown, evaluate
from eagle3lab.doctor.notebook import (
    SETTING_MAGICS,
    Cell,
    Notebook,
    imports_of,
    parameters_of,
    parse,
    reached,
    shell_seconds,
    shows,
)
from eagle3lab.doctor.views import real

STEPS = 200_000
"""Parts of statements that are followed in one notebook, those of a loop once a round."""
LINES = 1000
ROUNDS = 100
"""Rounds of a loop that are followed one by one; a longer one is followed once and its seconds are multiplied."""
_AWAITED = {"asyncio.sleep", "anyio.sleep", "trio.sleep"}
_SHELLS = {"os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
_UNWRAPPED = {"tqdm", "list", "tuple", "iter"}
_CALLS_THAT_HOLD = {*FUNCTIONS, "print", "range", "get_ipython", "get_ipython().system"}
_SETS_ANY = {"exec", "globals", "locals", "vars"}
_SHORTENS = re.compile(r"time.?out|limit|deadline|fail_after|move_on|suppress|raises|patch|mock|freeze", re.IGNORECASE)
"""Context managers that end a sleep early, or replace it."""
_SHELL_CELL = re.compile(r"\s*%%(?:bash|sh)[ \t]*(?:\n|$)")


class _Enough(Exception):
    """More statements than are followed."""


_missing: Any = object()


def printed(notebook: Notebook, parameters: Mapping[str, Any]) -> list[str]:
    """Lines that the code cells print when the parameters really take effect (derived values computed after them)."""
    tagged = notebook.tagged("parameters")
    names = {p.name for cell in tagged for p in parameters_of(cell)}
    run = _Run({name: value for name, value in parameters.items() if name in names or not tagged})
    if not tagged:
        run.known.update(run.given)
    for cell in notebook.code:
        run.declares = cell in tagged
        run.cell(cell)
    return run.lines


def seconds_of(notebook: Notebook, parameters: Mapping[str, Any]) -> list[float]:
    """Seconds that each code cell certainly takes in its sleeps; infinity for one that never ends.

    The parameters act as a runner makes them act: behind the parameters cell, at the top when there is none.
    """
    first = [cell.number for cell in notebook.tagged("parameters")[:1]]
    run, found = _Run({}), []
    if not first:
        run.known.update(parameters)
    for cell in notebook.code:
        run.seconds = 0.0
        run.cell(cell)
        found.append(run.seconds)
        if cell.number in first:
            run.known.update(parameters)
    return found


class _Run:
    """The names and the clock while the statements are followed.

    Fields:
        known: name -> value. paths: name -> the imported thing it stands for ("time.sleep").
        given: parameters that replace what assigns them; used: those that something has read.
        times: how often the statement at hand runs.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.known: dict[str, Any] = {"__name__": "__main__"}
        self.paths = {"time": "time", "asyncio": "asyncio", "sleep": "time.sleep", "os": "os"}
        self.given, self.used, self.declares = given, set[str](), False
        self.lines: list[str] = []
        self.seconds, self.times, self.steps = 0.0, 1.0, 0
        self.sizes: dict[ast.stmt, int] = {}

    def cell(self, cell: Cell) -> None:
        """Follow one cell."""
        if cell.skipped:
            return
        shell = _SHELL_CELL.match(cell.source)
        if shell:
            self.seconds += shell_seconds(cell.source[shell.end() :])
            return
        tree = parse(cell.source)
        try:
            if tree is None:
                raise _Enough
            self.body(tree.body)
        except (_Enough, RecursionError):
            self.known.clear()
        self.times = 1.0

    def body(self, statements: Sequence[ast.stmt]) -> str:
        """Follow statements; "break", "continue", or "unsure" when a jump may leave the rest out."""
        for statement in statements:
            if statement not in self.sizes:
                self.sizes[statement] = sum(1 for _ in ast.walk(statement))
            self.steps += self.sizes[statement]
            if self.steps > STEPS:
                raise _Enough
            jump = self.statement(statement)
            if not shows(statement):
                self.use(statement)
            if jump:
                return jump
        return ""

    def statement(self, node: ast.stmt) -> str:
        """Follow one statement; says what `body` says."""
        if isinstance(node, (ast.Break, ast.Continue)):
            return "break" if isinstance(node, ast.Break) else "continue"
        if isinstance(node, ast.If):
            return self.branch(node)
        if isinstance(node, ast.For):
            self.loop(node)
        elif isinstance(node, ast.While):
            self.repeat(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            if any(_SHORTENS.search(ast.unparse(item.context_expr)) for item in node.items):
                return self.skip(node)
            for item in node.items:
                self.forget(item)
            return self.body(node.body)
        elif isinstance(node, ast.Try):
            return self.attempt(node)
        elif isinstance(node, ast.Expr):
            self.expression(node.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                self.assign(node.targets if isinstance(node, ast.Assign) else [node.target], node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            self.used.add(name)
            self.assign([node.target], ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imported(node)
        else:
            self.forget(node)
        return ""

    def use(self, node: ast.AST) -> None:
        """Note that parameters have been read."""
        if self.given and not self.declares:
            self.used |= _read(node)

    def skip(self, node: ast.stmt) -> str:
        """Pass by a statement of which it is not known what runs."""
        self.forget(node)
        return "unsure" if _has(node, ast.Break, ast.Continue) else ""

    def branch(self, node: ast.If) -> str:
        """The branch that is taken."""
        test = self.value(node.test)
        self.use(node.test)
        return self.skip(node) if test is _missing else self.body(node.body if test else node.orelse)

    def attempt(self, node: ast.Try) -> str:
        """Statements of a `try`: behind the first that may raise nothing is certain, when something catches it."""
        jump = ""
        for statement in [*node.body, *node.orelse]:
            if node.handlers and not self.holds(statement):
                jump = self.skip(node)
                break
            jump = self.body([statement])
            if jump:
                break
        return self.body(node.finalbody) or jump

    def loop(self, node: ast.For) -> None:
        """Rounds of a `for` over known items."""
        self.use(node.iter)
        values, breaks = self.items(node.iter), _has(node, ast.Break)
        if values is None:
            self.skip(node)
            return
        if len(values) > ROUNDS:
            self.forget(node)
            before, said = self.times, len(self.lines)
            self.times *= 1 if breaks else len(values)
            self.body(node.body)
            self.times = before
            del self.lines[said:]
            self.forget(node)
            return
        for value in values:
            self.bind(node.target, value, set())
            jump = self.body(node.body)
            if jump == "unsure":
                self.forget(node)
            if jump == "break" or (jump == "unsure" and breaks):
                return
        self.body(node.orelse)

    def repeat(self, node: ast.While) -> None:
        """Rounds of a `while` whose test is known."""
        self.use(node.test)
        breaks = _has(node, ast.Break)
        for _ in range(ROUNDS):
            test = self.value(node.test)
            if test is _missing:
                break
            if not test:
                self.body(node.orelse)
                return
            jump = self.body(node.body)
            if jump == "unsure":
                self.forget(node)
            if jump == "break" or (jump == "unsure" and breaks):
                return
        else:
            if isinstance(node.test, ast.Constant) and not breaks and all(map(self.holds, node.body)):
                self.seconds = math.inf
        self.forget(node)

    def expression(self, node: ast.expr) -> None:
        """A call that sleeps or prints; of any other, only that it may change lists."""
        awaited = isinstance(node, ast.Await)
        call = node.value if isinstance(node, ast.Await) else node
        if not isinstance(call, ast.Call):
            self.forget(node)
            return
        path, function = self.path(call.func), ast.unparse(call.func)
        first = next(iter([*call.args, *(word.value for word in call.keywords)]), None)
        if (path in _AWAITED and awaited) or (path == "time.sleep" and not awaited):
            self.seconds += self.times * max(0.0, real(self.value(first)) or 0.0)
        elif function == "get_ipython().system" or path in _SHELLS:
            text = self.value(first)
            text = " ".join(map(str, text)) if isinstance(text, list) else text
            if isinstance(text, str) and not any(word.arg == "timeout" for word in call.keywords):
                self.seconds += self.times * shell_seconds(text)
        elif function == "print" and not call.keywords:
            values = [self.value(item) for item in call.args]
            if _missing not in values and len(self.lines) < LINES:
                self.lines.append(" ".join(map(str, values)))
        elif function == "get_ipython().run_line_magic":
            if str(self.value(first)) in SETTING_MAGICS:
                self.known.clear()
        else:
            self.forget(node)

    def assign(self, targets: list[ast.expr], node: ast.expr) -> None:
        """Bind what an assignment sets."""
        value, path = self.value(node), self.path(node)
        if value is _missing:
            self.expression(node)
        for target in targets:
            self.bind(target, value, _read(node))
            if path and isinstance(target, ast.Name):
                self.paths[target.id] = path

    def bind(self, target: ast.expr, value: Any, reads: set[str]) -> None:
        """Set a name, or each of several, to a value; to nothing known when it is missing."""
        if isinstance(target, ast.Name):
            name = target.id
            # a given value stands for the default, not for what is computed from it later
            if name in self.given and (self.declares or not (name in self.used or name in reads)):
                value = self.given[name]
            self.known.pop(name, None)
            self.paths.pop(name, None)
            if value is not _missing:
                self.known[name] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            fits = isinstance(value, (list, tuple)) and len(value) == len(target.elts)
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            parts = value if fits and not starred else [_missing] * len(target.elts)
            for item, part in zip(target.elts, parts, strict=True):
                self.bind(item, part, reads)
        else:
            self.forget(target)

    def imported(self, node: ast.Import | ast.ImportFrom) -> None:
        """Names that an import binds."""
        for name, path in imports_of(node):
            if name == "*":
                self.known.clear()
                self.paths |= {"sleep": f"{path[:-2]}.sleep"} if path[:-2] in ("time", "asyncio") else {}
                continue
            self.known.pop(name, None)
            self.paths[name] = path

    def forget(self, node: ast.AST) -> None:
        """Drop what a part that is not followed may have set; lists too, when it could change one."""
        for item in reached(node):
            if isinstance(item, (ast.Import, ast.ImportFrom)):
                for name, path in imports_of(item):
                    self.known.pop(name, None)
                    if self.paths.get(name) != path:
                        self.paths.pop(name, None)
            elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                shared = [name for part in ast.walk(item) if isinstance(part, ast.Global) for name in part.names]
                for name in (item.name, *shared):
                    self._drop(name)
            elif isinstance(item, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(item.ctx, ast.Load):
                root: ast.expr = item
                while isinstance(root, (ast.Attribute, ast.Subscript)):
                    root = root.value
                if isinstance(root, ast.Name):
                    self._drop(root.id)
        read = _read(node)
        if read & _SETS_ANY:
            self.known.clear()
        elif any(isinstance(self.known.get(name), list) for name in read):
            self.known = {name: value for name, value in self.known.items() if not isinstance(value, (list, tuple))}

    def _drop(self, name: str) -> None:
        self.known.pop(name, None)
        self.paths.pop(name, None)

    def holds(self, node: ast.AST) -> bool:
        """Whether nothing in a statement is likely to raise."""
        for item in ast.walk(node):
            if isinstance(item, (ast.Raise, ast.Assert, ast.Subscript)):
                return False
            if isinstance(item, (ast.Import, ast.ImportFrom)):
                if any(path.split(".")[0] not in sys.stdlib_module_names for _, path in imports_of(item)):
                    return False
            elif (
                isinstance(item, ast.Call)
                and ast.unparse(item.func) not in _CALLS_THAT_HOLD
                and self.path(item.func) not in {"time.sleep", *_AWAITED}
            ):
                return False
        return True

    def path(self, node: ast.expr) -> str:
        """Dotted name of the imported thing that an expression stands for, "" when it is none."""
        if isinstance(node, ast.Attribute):
            root = self.path(node.value)
            return f"{root}.{node.attr}" if root else ""
        return self.paths.get(node.id, "") if isinstance(node, ast.Name) else ""

    def value(self, node: ast.expr | None) -> Any:
        """Value of an expression, `_missing` when it is unknown."""
        try:
            return evaluate(node, self.known)
        except (Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
            return _missing

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
                return [_missing] * len(values) if len(values) <= ROUNDS else values
            return values
        value = self.value(node)
        if isinstance(value, (list, tuple, str)):
            return value
        if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(item, ast.Starred) for item in node.elts):
            return [self.value(item) for item in node.elts]
        return None


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(item, kinds) for item in ast.walk(node))


def _read(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}
