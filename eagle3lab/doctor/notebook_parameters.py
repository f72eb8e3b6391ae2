"""Parameters of a notebook: what the parameters cell assigns and from what it computes it; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from eagle3lab.doctor.notebook import Cell, parse, reached

_AT_ONCE = {"sorted", "min", "max", "sum", "list", "tuple", "set", "dict", "any", "all"}
"""Built-ins that call a function which they are given before they return."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One name that the parameters cell assigns.

    Fields:
        kind: its type hint, else the type of its default, None when neither tells. hinted: it is the hint.
        needs: names that its value is computed from, also those that decide whether it is.
    """

    name: str
    kind: str | None
    needs: tuple[str, ...]
    hinted: bool = False


def parameters_of(cell: Cell) -> list[Parameter]:
    """Names that a parameters cell assigns, in order of their last assignment."""
    tree = parse(cell.source)
    found = _Assignments()
    found.body(tree.body if tree else [], None)
    return list(found.parameters.values())


class _Assignments:
    """Follows the statements of a parameters cell.

    Fields:
        parameters: by name. functions: what the cell defines, for the names that a call of it reads.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.functions: dict[str, ast.AST] = {}

    def body(self, statements: Iterable[ast.stmt], tests: tuple[str, ...] | None) -> None:
        """Follow statements. tests: names that decide whether they run, None where nothing does."""
        for node in statements:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.functions[node.name] = node
                continue
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                hint = ast.unparse(node.annotation)
                self.add(Parameter(node.target.id, hint, self.needs(node.value), hinted=True), tests)
            elif isinstance(node, ast.Assign):
                self.assign([name for target in node.targets for name in targets(target)], node.value, tests)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                self.add(Parameter(name, self.kind(name), (name, *self.needs(node.value))), tests)
            self.inner(node, tests)

    def inner(self, node: ast.stmt, tests: tuple[str, ...] | None) -> None:
        """Statements and `:=` inside a statement."""
        condition = getattr(node, "test", None) or getattr(node, "iter", None) or getattr(node, "subject", None)
        below = (*(tests or ()), *self.needs(condition))
        for part in (getattr(node, field, None) for field in ("body", "orelse", "finalbody", "handlers", "cases")):
            for item in part if isinstance(part, list) else []:
                self.body([item] if isinstance(item, ast.stmt) else item.body, below)
        if not hasattr(node, "body"):
            for item in reached(node):
                if isinstance(item, ast.NamedExpr):
                    self.assign(targets(item.target), item.value, tests)

    def assign(self, names: Iterable[str], value: ast.expr, tests: tuple[str, ...] | None) -> None:
        """Note an assignment; a lambda also as the function that it is."""
        for name in names:
            if isinstance(value, ast.Lambda):
                self.functions[name] = value
            self.add(Parameter(name, _kind(value), self.needs(value)), tests)

    def add(self, new: Parameter, tests: tuple[str, ...] | None) -> None:
        """Note a parameter; where the old value may remain or is read, what that needs counts too."""
        old = self.parameters.pop(new.name, None)
        needs = [*new.needs, *(tests or ())]
        if old and (tests is not None or new.name in needs):
            needs += old.needs
        if tests is not None:  # the type of one branch is not the type of the name
            new = replace(new, kind=old.kind if old else None, hinted=bool(old and old.hinted))
        kept = tuple(dict.fromkeys(name for name in needs if name != new.name))
        self.parameters[new.name] = replace(new, needs=kept)

    def kind(self, name: str) -> str | None:
        """Type of a name so far."""
        return self.parameters[name].kind if name in self.parameters else None

    def needs(self, node: ast.AST | None) -> tuple[str, ...]:
        """Names that an expression reads when it is evaluated, those inside the functions that it calls too."""
        return tuple(dict.fromkeys(_reads(node, self.functions))) if node else ()


def _reads(node: ast.AST, functions: Mapping[str, ast.AST]) -> Iterator[str]:
    """A lambda that is kept, not called, reads its names later: only its defaults count."""
    if isinstance(node, ast.Lambda):
        node = node.args
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, _COMPREHENSIONS):
        inside = {name for part in node.generators for name in targets(part.target)}
        first, rest = node.generators[0].iter, list(ast.iter_child_nodes(node))
        rest += [*node.generators[0].ifs, *node.generators[1:]]
        yield from _reads(first, functions)
        parts = (_reads(child, functions) for child in rest if child is not node.generators[0])
        yield from (name for part in parts for name in part if name not in inside)
        return
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            yield from _behind(node.func.id, functions)
        if isinstance(node.func, ast.Lambda) or (isinstance(node.func, ast.Name) and node.func.id in _AT_ONCE):
            for part in (node.func, *node.args, *(word.value for word in node.keywords)):
                yield from free_names(part) if isinstance(part, ast.Lambda) else ()
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, functions)


def _behind(name: str, functions: Mapping[str, ast.AST]) -> Iterator[str]:
    todo, seen = [name], set[str]()
    while todo:
        function = functions.get(todo.pop())
        inner = free_names(function) if function is not None else []
        yield from inner
        todo += [other for other in inner if other in functions and other not in seen]
        seen |= set(inner)


def free_names(function: ast.AST) -> list[str]:
    """Names of the notebook that a function, a class or a lambda reads."""
    parts = list(ast.walk(function))
    own = {part.arg for part in parts if isinstance(part, ast.arg)}
    own |= {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    own -= shared_names(function)
    read = (part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
    return list(dict.fromkeys(name for name in read if name not in own))


def shared_names(function: ast.AST) -> set[str]:
    """Names that a function declares global: it may set those of the notebook."""
    return {name for part in ast.walk(function) if isinstance(part, ast.Global) for name in part.names}


def targets(target: ast.expr) -> Iterator[str]:
    """Names that an assignment to this target sets."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Starred):
        yield from targets(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            yield from targets(item)


def _kind(node: ast.expr | None) -> str | None:
    """Type name of a literal default; None for None and for anything computed."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return None if value is None else type(value).__name__
