"""What becomes of a parameter behind its cell: is it read, or does something set it again first? Nothing is executed.

Statements are followed in order. Where it is not known which of them run, what they set is only possible.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3lab.doctor.arithmetic import Unknown, evaluate
from eagle3lab.doctor.notebook import SETTING_MAGICS, Cell, Notebook, imports_of, names_of, parse, reached, shows
from eagle3lab.doctor.notebook_parameters import free_names, shared_names, targets

_READS_ANY = {"globals", "locals", "vars", "get_ipython"}
_RUNS_ANY = {"exec", "eval"}
_NOT_AS_WRITTEN = {"injected-parameters", "skip-execution"}
_MATTERS = {"def", "class", "lambda", "import", "%", "!", *_READS_ANY, *_RUNS_ANY}
"""Words of cells that may matter to a name that does not stand in them."""
_SETS_NOTHING = re.compile(r"\s*%%(?:bash|sh|script|writefile|html|javascript|js|latex|markdown|svg)\b(?!.*--out)")
"""Cell magics whose text is another language."""
_SWALLOWS = re.compile(r"suppress|raises")
_DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Kind = Literal["", "read", "set", "may", "unsure"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The first thing that happens to the parameter.

    Fields:
        kind: "" when nothing does; "may" when it is possibly set and what follows counts too; "unsure" when it is
            possibly set and what follows does not.
        node: what sets it. value: what it is set to, None when that is no plain expression.
    """

    kind: Kind
    node: ast.stmt | ast.expr | None = None
    value: ast.expr | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a parameter.

    Fields:
        kind: read (it takes effect), set (it is overwritten), may (it is possibly overwritten), "" (nothing uses it).
        cell: number of the cell that sets it. line: that line. value: what it is set to, when that is written there.
    """

    kind: Literal["", "read", "set", "may"]
    cell: int = 0
    line: str = ""
    value: ast.expr | None = None


_NOTHING, _READ = Meeting(""), Meeting("read")


def fate_of(notebook: Notebook, name: str) -> Fate:
    """The fate of a parameter behind the parameters cell; of one that is injected at the top when there is none.

    To print it is no use.
    """
    first = next((cell.number for cell in notebook.tagged("parameters")), 0)
    search, possible = _Search(name), Fate("")
    for cell in notebook.code:
        if cell.number <= first:
            search.define(cell)
            continue
        if _NOT_AS_WRITTEN & set(cell.tags):
            continue
        found = search.cell(cell)
        if found.kind == "read":
            return possible if possible.kind else Fate("read")
        if found.kind:
            lines, line = cell.source.splitlines(), found.node.lineno if found.node else 1
            fate = Fate("set" if found.kind == "set" else "may", cell.number, _line(lines, line), found.value)
            if found.kind != "may":
                return possible if found.kind == "unsure" and possible.kind else fate
            possible = possible if possible.kind else fate
    return possible


@functools.lru_cache(maxsize=64)
def _words(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+|[%!]", source))


def _line(lines: Sequence[str], number: int) -> str:
    return "".join(lines[number - 1 : number]).strip()


class _Search:
    """Follows statements for one name.

    Fields:
        readers: functions and classes of the notebook with the names that they read. setters: those that may set it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.readers: dict[str, list[str]] = {}
        self.setters: set[str] = set()

    def define(self, cell: Cell) -> None:
        """Note the functions of a cell that runs before the parameter is set."""
        for node in getattr(parse(cell.source), "body", []):
            if isinstance(node, _DEFERRED):
                self.keep(node.name, node)

    def cell(self, cell: Cell) -> Meeting:
        """What a cell does first."""
        words = _words(cell.source)
        if not words & _MATTERS and self.name not in words and not words & self.readers.keys():
            return _NOTHING
        tree = parse(cell.source)
        if tree is not None:
            try:
                return self.body(tree.body)
            except RecursionError:
                return Meeting("unsure")
        if self.mentioned(cell.source):
            return _READ
        return _NOTHING if _SETS_NOTHING.match(cell.source) or cell.empty else Meeting("unsure")

    def keep(self, name: str, node: ast.AST) -> None:
        """Note a function: its body runs when it is called."""
        self.readers[name] = free_names(node)
        self.setters.discard(name)
        if self.name in shared_names(node):
            self.setters.add(name)

    def behind(self, name: str) -> Meeting:
        """What the use of a name may do: of the parameter itself, or of a function that reaches it."""
        todo, seen, reads = [name], set[str](), False
        while todo:
            current = todo.pop()
            if current in self.setters:
                return Meeting("unsure")
            reads = reads or current == self.name
            seen.add(current)
            todo += [inner for inner in self.readers.get(current, ()) if inner not in seen]
        return _READ if reads else _NOTHING

    def mentioned(self, text: str) -> bool:
        """Whether a text that is no Python names the parameter, or a function that reaches it."""
        return any(self.behind(word).kind for word in set(re.findall(r"\w+", text)))

    def body(self, statements: Iterable[ast.stmt]) -> Meeting:
        """What statements do first."""
        found, jumps = _NOTHING, False
        for node in statements:
            found = _then(found, _possible(self.statement(node)) if jumps else self.statement(node))
            if found.kind not in ("", "may"):
                break
            jumps = jumps or any(isinstance(item, (ast.Break, ast.Continue)) for item in reached(node))
        return found

    def statement(self, node: ast.stmt) -> Meeting:
        """What a statement does first."""
        if (magic := _magic(node)) is not None:
            return self.magic(node, magic)
        if shows(node):
            return Meeting("set", node) if _walrus(node, self.name) else _NOTHING
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = [name for name, _ in imports_of(node)]
            return Meeting("set", node) if self.name in bound else Meeting("may", node) if "*" in bound else _NOTHING
        if isinstance(node, _DEFERRED):
            return self.definition(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            return self.assignment(node)
        if isinstance(node, ast.AugAssign):
            reads = isinstance(node.target, ast.Name) and node.target.id == self.name
            return _READ if reads else _then(self.part(node.target), self.part(node.value))
        if isinstance(node, ast.Delete):
            gone = any(self.name in targets(target) for target in node.targets)
            return Meeting("set", node) if gone else self.parts(node)
        return self.compound(node)

    def compound(self, node: ast.stmt) -> Meeting:
        """A statement with others inside."""
        if isinstance(node, (ast.If, ast.While)):
            test, truth, body = self.part(node.test), _truth(node.test), self.body(node.body)
            other = self.body(node.orelse)
            loop = isinstance(node, ast.While)
            unknown = _then(_possible(body), _possible(other)) if loop else _either([body, other])
            return _then(test, unknown if truth is None else body if truth else other)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            bound = Meeting("set", node, node.iter) if self.name in targets(node.target) else _NOTHING
            body = self.body(node.body) if _goes_round(node.iter) else _possible(self.body(node.body))
            return _then(self.part(node.iter), bound, body, _possible(self.body(node.orelse)))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            names = [name for item in node.items if item.optional_vars for name in targets(item.optional_vars)]
            bound = Meeting("set", node) if self.name in names else _NOTHING
            swallows = any(_SWALLOWS.search(ast.unparse(item.context_expr)) for item in node.items)
            body = _possible(self.body(node.body)) if swallows else self.body(node.body)
            return _then(*(self.part(item.context_expr) for item in node.items), bound, body)
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self.attempt(node)
        if isinstance(node, ast.Match):
            cases = [self.body(case.body) for case in node.cases]
            return _then(self.part(node.subject), _possible(_either([*cases, _NOTHING])))
        return self.parts(node)

    def attempt(self, node: ast.Try | ast.TryStar) -> Meeting:
        """A `try`: what its body sets is certain when nothing can raise before, or when every handler sets it too."""
        body = self.body(node.body)
        handlers = [self.body(handler.body) for handler in node.handlers]
        if body.kind == "set":
            plain = body.node is node.body[0] and isinstance(body.value, ast.Constant)
            ends = [found.kind == "set" or isinstance(handler.body[-1], ast.Raise)
                    for found, handler in zip(handlers, node.handlers, strict=True)]  # fmt: skip
            tried = body if plain or all(ends) else _possible(body)
        else:
            other = _either([_then(body, self.body(node.orelse)), *handlers])
            tried = _then(body, other if node.handlers else self.body(node.orelse))
        return _then(tried, self.body(node.finalbody))

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Meeting:
        """A `def` runs its decorators and defaults, and a decorator may run it; a `class` runs its body."""
        if isinstance(node, ast.ClassDef):
            parts: list[ast.AST] = [*node.bases, *(word.value for word in node.keywords)]
            parts += [item for item in node.body if not isinstance(item, _DEFERRED)]
            now = {word for part in parts for word in names_of(part)}
        else:
            now = {word for part in (*node.args.defaults, *node.args.kw_defaults) for word in names_of(part)}
        if node.decorator_list:
            now |= {*free_names(node), *(word for part in node.decorator_list for word in names_of(part))}
        found = _then(*(self.behind(word) for word in sorted(now)))
        self.keep(node.name, node)
        return _then(found, Meeting("set", node) if node.name == self.name else _NOTHING)

    def assignment(self, node: ast.Assign | ast.AnnAssign) -> Meeting:
        """An assignment; a lambda that gets a name is a function."""
        aims = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None:
            return _NOTHING
        names = [name for aim in aims for name in targets(aim)]
        if isinstance(node.value, ast.Lambda) and len(names) == len(aims):
            found = self.part(node.value.args)
            for name in names:
                self.keep(name, node.value)
        else:
            found = _then(self.part(node.value), *(self.part(aim) for aim in aims))
        return _then(
            found, Meeting("set", node, _piece(aims, node.value, self.name)) if self.name in names else _NOTHING
        )

    def magic(self, node: ast.stmt, text: str) -> Meeting:
        """A line magic or a shell command: it may read what it names, and some may set any name."""
        if self.mentioned(text):
            return _READ
        return Meeting("unsure", node) if SETTING_MAGICS & set(text.split()[:1]) else _NOTHING

    def parts(self, node: ast.AST) -> Meeting:
        """All parts of an expression in order."""
        return _then(*(self.part(child) for child in ast.iter_child_nodes(node)))

    def part(self, node: ast.AST) -> Meeting:
        """What an expression does first."""
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) or node.id in _RUNS_ANY:
                return Meeting("unsure") if node.id in _RUNS_ANY else _NOTHING
            return _READ if node.id in _READS_ANY else self.behind(node.id)
        if isinstance(node, ast.Lambda):
            return _then(*(self.behind(word) for word in free_names(node)))
        if isinstance(node, ast.NamedExpr):
            bound = node.target.id == self.name
            return _then(self.part(node.value), Meeting("set", node, node.value) if bound else _NOTHING)
        if isinstance(node, ast.BoolOp):
            return _then(self.part(node.values[0]), *(_possible(self.part(item)) for item in node.values[1:]))
        if isinstance(node, ast.IfExp):
            return _then(self.part(node.test), _either([self.part(node.body), self.part(node.orelse)]))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            own = {name for part in node.generators for name in targets(part.target)}
            return self.part(node.generators[0].iter) if self.name in own else _possible(self.parts(node))
        return self.parts(node)


def _then(*meetings: Meeting) -> Meeting:
    """The first that counts of things that happen one after the other."""
    possible = _NOTHING
    for found in meetings:
        if found.kind == "may":
            possible = possible if possible.kind else found
        elif found.kind == "set" or (found.kind and not possible.kind):
            return found
        elif found.kind:
            return Meeting("unsure", possible.node, possible.value)
    return possible


def _either(ways: Sequence[Meeting]) -> Meeting:
    """What is known when one of several ways is taken."""
    sets = [way for way in ways if way.kind in ("set", "may", "unsure")]
    if all(way.kind == "set" for way in ways):
        return ways[0]
    if any(way.kind in ("read", "unsure") for way in ways):
        return Meeting("unsure", sets[0].node, sets[0].value) if sets else _READ
    return Meeting("may", sets[0].node, sets[0].value) if sets else _NOTHING


def _possible(found: Meeting) -> Meeting:
    """The same where it may not happen."""
    return Meeting("may", found.node, found.value) if found.kind == "set" else found


def _truth(test: ast.expr) -> bool | None:
    """Whether a test holds, None when it depends on anything."""
    try:
        return bool(evaluate(test, {"__name__": "__main__"}))
    except (Unknown, ArithmeticError, ValueError, TypeError, RecursionError):
        return None


def _goes_round(items: ast.expr) -> bool:
    """Whether a loop over these certainly has a round."""
    if isinstance(items, ast.Call) and ast.unparse(items.func) == "range" and len(items.args) == 1:
        items = items.args[0]
        return isinstance(items, ast.Constant) and isinstance(items.value, int) and items.value > 0
    return isinstance(items, (ast.List, ast.Tuple)) and bool(items.elts)


def _walrus(node: ast.AST, name: str) -> bool:
    return any(isinstance(item, ast.NamedExpr) and item.target.id == name for item in reached(node))


def _piece(aims: Sequence[ast.expr], value: ast.expr, name: str) -> ast.expr:
    """What this name gets: its part of a tuple that is taken apart."""
    for aim in aims:
        if isinstance(aim, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            for item, part in zip(aim.elts, value.elts, strict=False):
                if isinstance(item, ast.Starred):
                    break
                if isinstance(item, ast.Name) and item.id == name:
                    return part
    return value


def _magic(statement: ast.stmt) -> str | None:
    """Name and text of a line magic or of a shell command, None for any other statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    shell = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    if isinstance(call, ast.Call) and isinstance(shell, ast.Call) and ast.unparse(shell) == "get_ipython()":
        return " ".join(str(part.value) for part in call.args if isinstance(part, ast.Constant))
    return None
