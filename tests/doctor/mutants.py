"""Mutants of a check's rule: one comparison, connective, negation or bare condition turned round."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

_OPPOSITE = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def _places(tree: ast.AST) -> list[ast.AST]:
    kinds = (ast.Compare, ast.BoolOp, ast.UnaryOp)
    turned = [node for node in ast.walk(tree) if isinstance(node, kinds) and not _is_number(node)]
    bare = [node for node in ast.walk(tree) if isinstance(node, ast.If) and not isinstance(node.test, kinds)]
    return [*turned, *bare]


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not)


def _turn(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _OPPOSITE[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = _OPPOSITE[type(node.op)]()
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.UnaryOp):
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)


def _closure(module: ModuleType, start: FunctionType) -> list[FunctionType]:
    """`start` and the functions of the same module that it calls, directly or through another."""
    found, todo = [], [start]
    while todo:
        function = todo.pop(0)
        if function in found:
            continue
        found.append(function)
        names = function.__code__.co_names
        todo += [f for n in names if inspect.isfunction(f := vars(module).get(n)) and f.__module__ == module.__name__]
    return found


def mutants(check_function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """(what was turned round, the check's function inside a module copy where it is)."""
    module = sys.modules[check_function.__module__]
    source = inspect.getsource(module)
    names = {function.__name__ for function in _closure(module, check_function)}
    tree = ast.parse(source)
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    wanted.sort(key=lambda node: node.name != check_function.__name__)  # the rule itself before its helpers
    for function in wanted:
        for number in range(len(_places(function))):
            changed = copy.deepcopy(function)
            changed.decorator_list = []
            place = _places(changed)[number]
            before = ast.unparse(place.test if isinstance(place, ast.If) else place)
            _turn(place)
            namespace = dict(vars(module))
            others = [copy.deepcopy(node) for node in wanted if node.name != function.name]
            for node in others:
                node.decorator_list = []
            body = ast.fix_missing_locations(ast.Module([*others, changed], []))
            exec(compile(body, f"<mutant of {module.__name__}>", "exec"), namespace)
            yield f"{function.name}: {before}", namespace[check_function.__name__]
