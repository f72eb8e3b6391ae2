"""Every module, public class and public function of the package says what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from eagle3lab.core.paths import repository

PACKAGE = repository() / "eagle3lab"


def undocumented(tree: ast.Module, name: str) -> list[str]:
    """`name:line: what` for each public definition without a docstring. What stands inside a function is private."""
    found = [] if ast.get_docstring(tree) or not tree.body else [f"{name}:1: module"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                visit(node.body, prefix)
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # dunders follow Python's own contract; overloads carry the text of their implementation
            if node.name.startswith("_") or any("overload" in ast.unparse(d) for d in node.decorator_list):
                continue
            if not ast.get_docstring(node):
                found.append(f"{name}:{node.lineno}: {prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return found


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_public_definitions_have_docstrings(folder: Path) -> None:
    files = sorted(folder.glob("*.py"))
    assert [line for path in files for line in undocumented(ast.parse(path.read_text()), path.name)] == []


def test_a_missing_docstring_is_found() -> None:
    source = '''
"""Module."""
def said():
    """Yes."""
    def inner(): ...
def _private(): ...
def unsaid(): ...
class Thing:
    """Yes."""
    def __len__(self): ...
    def method(self): ...
'''
    assert undocumented(ast.parse(source), "m.py") == ["m.py:7: unsaid", "m.py:11: Thing.method"]
    assert undocumented(ast.parse("x = 1"), "m.py") == ["m.py:1: module"]
