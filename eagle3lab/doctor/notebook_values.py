"""What a notebook prints and how long its cells take, as far as plain arithmetic tells; nothing is executed.

Only what `arithmetic` evaluates, `print`, `sleep`, waits for a clock, the notebook's own functions, and the branches
and loops over such values are followed, with bounds on size, depth and steps. The first thing that is anything else
makes all that depends on it unknown.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3lab.doctor.arithmetic import FUNCTIONS
from eagle3lab.doctor.notebook import (
    SETTING_MAGICS,
    Cell,
    Notebook,
    imports_of,
    parse,
    reached,
    shell_seconds,
    shows,
)
from eagle3lab.doctor.notebook_names import ROUNDS, Names, missing, own_names, read_by, set_by
from eagle3lab.doctor.notebook_parameters import parameters_of, targets
from eagle3lab.doctor.views import real

STEPS = 200_000
"""Parts of statements that are followed in one notebook, those of a loop or a function once a round."""
LINES = 1000
DEPTH = 8
"""Calls inside calls that are followed."""
_AWAITED = {"asyncio.sleep", "anyio.sleep", "trio.sleep"}
_SHELLS = {"os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
_EXITS = {"sys.exit", "os._exit"}
_CALLS_THAT_HOLD = {*FUNCTIONS, "print", "range", "get_ipython", "get_ipython().system"}
_TAKES_ALL = {"list", "tuple", "set", "sum", "sorted", "max", "min", "dict", "frozenset"}
"""Built-ins that go over a whole generator."""
_SHORTENS = re.compile(r"time.?out|limit|deadline|fail_after|move_on|suppress|raises|patch|mock|freeze", re.IGNORECASE)
"""Context managers that end a sleep early, or replace it."""
_SHELL_CELL = re.compile(r"\s*%%(?:bash|sh)[ \t]*(?:\n|$)")
_JUMPS = (ast.Break, ast.Continue, ast.Return)
_LEAVES = (ast.Break, ast.Return)


class _Enough(Exception):
    """More statements than are followed."""


class _Ends(Exception):
    """The notebook ends here: something is raised and nothing catches it."""


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
    run.signals = any(".set(" in cell.source for cell in notebook.code)
    if not first:
        run.known.update(parameters)
    for cell in notebook.code:
        run.cell(cell)
        found.append(run.seconds)
        if cell.number in first:
            run.known.update(parameters)
    return found


class _Run(Names):
    """The names and the clock while the statements are followed.

    Fields:
        lines: what is printed. times: how often the statement at hand runs. steps, depth: against their bounds.
        result: what the function at hand returns. over: nothing runs any more. signals: some event may be set.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.lines: list[str] = []
        self.times, self.steps, self.depth = 1.0, 0, 0
        self.result: Any = missing
        self.over = self.signals = False
        self.sizes: dict[ast.AST, int] = {}
        self.unrolled: dict[ast.expr, tuple[ast.stmt, set[str]]] = {}

    def cell(self, cell: Cell) -> None:
        """Follow one cell."""
        self.seconds = 0.0
        self.clocks.clear()  # what else a cell before takes is unknown
        if cell.skipped or self.over:
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
            self.lose()
        except _Ends:
            self.over = "raises-exception" not in cell.tags
        self.times, self.depth = 1.0, 0

    def count(self, node: ast.AST) -> None:
        """Count the parts of a statement or a function that is followed."""
        if node not in self.sizes:
            self.sizes[node] = sum(1 for _ in ast.walk(node))
        self.steps += self.sizes[node]
        if self.steps > STEPS:
            raise _Enough

    # -- statements ----------------------------------------------------------------------------------------------------

    def body(self, statements: Sequence[ast.stmt]) -> str:
        """Follow statements; "break", "continue", "return", or "unsure" when a jump may leave the rest out."""
        for statement in statements:
            self.count(statement)
            self.results.clear()
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
        if isinstance(node, ast.Return):
            self.follow(node.value)
            self.result = None if node.value is None else self.value(node.value)
            return "return"
        if isinstance(node, ast.Raise):
            raise _Ends
        if isinstance(node, ast.If):
            return self.branch(node)
        if isinstance(node, ast.For):
            return self.loop(node)
        if isinstance(node, ast.While):
            return self.repeat(node)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            if any(_SHORTENS.search(ast.unparse(item.context_expr)) for item in node.items):
                return self.skip(node)
            for item in node.items:
                self.follow(item.context_expr)
                self.forget(item)
            return self.body(node.body)
        if isinstance(node, ast.Try):
            return self.attempt(node)
        self.simple(node)
        return ""

    def simple(self, node: ast.stmt) -> None:
        """A statement without others inside, or one that only defines."""
        if isinstance(node, ast.Expr):
            self.follow(node.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                self.assign(node.targets if isinstance(node, ast.Assign) else [node.target], node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            self.used.add(name)
            self.assign([node.target], ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imported(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.define(node.name, node)
        else:
            self.forget(node)

    def skip(self, node: ast.stmt) -> str:
        """Pass by a statement of which it is not known what runs."""
        self.forget(node)
        return "unsure" if _has(node, *_JUMPS) else ""

    def branch(self, node: ast.If) -> str:
        """The branch that is taken."""
        self.follow(node.test)
        test = self.value(node.test)
        self.use(node.test)
        return self.skip(node) if test is missing else self.body(node.body if test else node.orelse)

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

    def loop(self, node: ast.For) -> str:
        """Rounds of a `for` over known items."""
        self.use(node.iter)
        values = self.items(node.iter)
        if values is None:
            self.follow(node.iter)
            values = self.items(node.iter)
        if values is None:
            self.forget(node)
            return _inside("unsure", node)
        if len(values) > ROUNDS:
            return self.many(node, len(values))
        for value in values:
            self.bind(node.target, value, set())
            jump = self.body(node.body)
            if jump == "unsure":
                self.forget(node)
            if jump in ("break", "return") or (jump == "unsure" and _has(node, *_LEAVES)):
                return _inside(jump, node)
        return self.body(node.orelse)

    def many(self, node: ast.For, rounds: int) -> str:
        """Many rounds: one is followed, and its seconds are multiplied."""
        self.forget(node)
        self.clocks.clear()
        before, said = self.times, len(self.lines)
        self.times *= 1 if _has(node, *_LEAVES) else rounds
        jump = self.body(node.body)
        self.times = before
        del self.lines[said:]
        self.forget(node)
        return _inside(jump, node)

    def repeat(self, node: ast.While) -> str:
        """Rounds of a `while` whose test is known, or that waits for a clock."""
        self.use(node.test)
        breaks = _has(node, *_LEAVES)
        waits = self.waits(node.test)
        if waits is not None and not breaks and not (read_by(node.test) & set_by(node.body)):
            self.seconds += self.times * waits
            self.forget(node)
            return ""
        for _ in range(ROUNDS):
            self.follow(node.test)
            test = self.value(node.test)
            if test is missing:
                break
            if not test:
                return self.body(node.orelse)
            jump = self.body(node.body)
            if jump == "unsure":
                self.forget(node)
            if jump in ("break", "return") or (jump == "unsure" and breaks):
                return _inside(jump, node)
        else:
            if isinstance(node.test, ast.Constant) and not breaks and all(map(self.holds, node.body)):
                self.seconds = math.inf
        self.forget(node)
        return _inside("unsure", node)

    def assign(self, aims: Sequence[ast.expr], node: ast.expr) -> None:
        """Bind what an assignment sets."""
        self.follow(node)
        value, path, moment = self.value(node), self.path(node), self.moment(node)
        for aim in aims:
            self.bind(aim, value, read_by(node))
            if isinstance(aim, ast.Name):
                if isinstance(node, ast.Lambda):
                    self.define(aim.id, node)
                elif path:
                    self.paths[aim.id] = path
                elif moment and moment[0] == 1:
                    self.clocks[aim.id] = moment[1]

    # -- expressions ---------------------------------------------------------------------------------------------------

    def follow(self, node: ast.AST | None) -> None:
        """Follow the calls that an expression certainly makes."""
        if isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
            self.call(node.value, awaited=True)
        elif isinstance(node, ast.BoolOp):
            for number, item in enumerate(node.values):
                self.follow(item)
                value = self.value(item)
                if value is missing or bool(value) == isinstance(node.op, ast.Or):
                    for rest in node.values[number + 1 :] if value is missing else ():
                        self.forget(rest)
                    break
        elif isinstance(node, ast.IfExp):
            self.follow(node.test)
            test = self.value(node.test)
            if test is missing:
                self.forget(node)
            else:
                self.follow(node.body if test else node.orelse)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            self.comprehension(node)
        elif isinstance(node, ast.NamedExpr):
            self.assign([node.target], node.value)
        elif node is not None and not isinstance(node, (ast.Lambda, ast.GeneratorExp)):
            for child in ast.iter_child_nodes(node):
                self.follow(child)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        """A comprehension is the loop that it stands for, with names of its own."""
        if node not in self.unrolled:
            made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            body: list[ast.stmt] = [ast.Expr(part) for part in made]
            for part in reversed(node.generators):
                for test in reversed(part.ifs):
                    body = [ast.If(test, body, [])]
                body = [ast.For(part.target, part.iter, body, [])]
            own = {name for part in node.generators for name in targets(part.target)}
            self.unrolled[node] = body[0], own
        if any(part.is_async for part in node.generators):
            self.forget(node)
            return
        loop, own = self.unrolled[node]
        results, self.results = self.results, {}
        with self.scope(own, self.local | own):
            self.body([loop])
        self.results = results

    def call(self, call: ast.Call, *, awaited: bool = False) -> None:
        """A call that sleeps, prints, ends the notebook or enters a function; of any other, only what it may change."""
        path, function = self.path(call.func), ast.unparse(call.func)
        given = [*call.args, *(word.value for word in call.keywords)]
        for part in [call.func, *given]:
            if isinstance(part, ast.GeneratorExp) and function in _TAKES_ALL:
                self.comprehension(part)
            self.follow(part)
        first = next(iter(given), None)
        if (path in _AWAITED and awaited) or (path == "time.sleep" and not awaited):
            self.seconds += self.times * max(0.0, real(self.value(first)) or 0.0)
        elif path == "threading.Event().wait":
            # nothing else can set an event without a name
            alone = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)
            self.seconds += self.times * max(0.0, real(self.value(first)) or 0.0) * (alone or not self.signals)
        elif path in self.functions:
            self.enter(path, call, awaited=awaited)
        elif function == "get_ipython().system" or path in _SHELLS:
            text = self.value(first)
            text = " ".join(map(str, text)) if isinstance(text, list) else text
            if isinstance(text, str) and not any(word.arg == "timeout" for word in call.keywords):
                self.seconds += self.times * shell_seconds(text)
        elif function == "print" and not call.keywords:
            values = [self.value(item) for item in call.args]
            if missing not in values and len(self.lines) < LINES:
                self.lines.append(" ".join(map(str, values)))
        elif function == "get_ipython().run_line_magic":
            if str(self.value(first)) in SETTING_MAGICS:
                self.lose()
        elif path in _EXITS or function in ("exit", "quit"):
            raise _Ends
        elif self.value(call) is missing:
            self.forget(call)

    def enter(self, path: str, call: ast.Call, *, awaited: bool) -> None:
        """Follow a function of the notebook: its arguments, its body, what it returns."""
        function, made = self.functions[path], path.endswith("#class")
        node = function.node
        self.count(node)
        if self.depth >= DEPTH or (isinstance(node, ast.AsyncFunctionDef) and not awaited):
            self.forget(call)
            for part in [node.body] if isinstance(node, ast.Lambda) else node.body:
                self.forget(part)
            return
        own = own_names(node)
        arguments = {**function.defaults, **self.arguments(node, call, bool(function.object))}
        if function.object and node.args.args:
            arguments[node.args.args[0].arg] = missing, function.object
        results, self.results = self.results, {}
        hidden, local = (own, own | self.local) if function.nested else (own | self.local, own)
        self.depth += 1
        with self.scope(hidden, local):
            for name, (value, thing) in arguments.items():
                self.known |= {name: value} if value is not missing else {}
                self.paths |= {name: thing} if thing else {}
            result = self.inside(node)
        self.depth -= 1
        self.results = results
        if not made:
            self.results[call] = result

    def inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Any:
        """What the body of a function returns."""
        if isinstance(node, ast.Lambda):
            self.follow(node.body)
            return self.value(node.body)
        jump = self.body(node.body)
        if jump == "unsure":
            for statement in node.body:
                self.forget(statement)
        return self.result if jump == "return" else missing if jump else None

    def holds(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        """Whether nothing in a statement is likely to raise."""
        for item in reached(node):
            if isinstance(item, (ast.Raise, ast.Assert, ast.Subscript)):
                return False
            if isinstance(item, (ast.Import, ast.ImportFrom)):
                if any(path.split(".")[0] not in sys.stdlib_module_names for _, path in imports_of(item)):
                    return False
            elif isinstance(item, ast.Call):
                path = self.path(item.func)
                known = ast.unparse(item.func) in _CALLS_THAT_HOLD or path in {"time.sleep", *_AWAITED}
                if not known and not self.function_holds(path, seen):
                    return False
        return True

    def function_holds(self, path: str, seen: frozenset[str]) -> bool:
        """The same of a function of the notebook; one that calls itself is not sure."""
        if path not in self.functions or path in seen:
            return False
        node = self.functions[path].node
        self.count(node)
        parts = [node.body] if isinstance(node, ast.Lambda) else node.body
        return all(self.holds(part, seen | {path}) for part in parts)


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(item, kinds) for item in reached(node))


def _inside(jump: str, node: ast.stmt) -> str:
    """What a jump of a loop's body means behind the loop: only one out of the function leaves anything out."""
    if jump == "return":
        return jump
    return "unsure" if jump == "unsure" and _has(node, ast.Return) else ""
