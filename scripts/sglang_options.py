"""List the command-line options of an SGLang release by reading its source, without importing it.

    pip download --no-deps sglang==0.5.23 -d FOLDER
    python scripts/sglang_options.py FOLDER/sglang-0.5.23-*.whl > eagle3lab/targets/sglang_options.json

`eagle3lab serve` checks launch arguments against this list where sglang is not installed. Options come from the
annotated fields in `arg_groups/fields/*.py` and from the `add_argument` calls in `server_args.py`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path

FIELDS = "sglang/srt/arg_groups/fields/"
SERVER_ARGS = "sglang/srt/server_args.py"


def main() -> None:
    wheel = Path(sys.argv[1])
    options: dict[str, dict] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith(FIELDS) and name.endswith(".py"):
                options.update(from_fields(ast.parse(archive.read(name))))
        options.update(from_add_argument(ast.parse(archive.read(SERVER_ARGS))))
    source = {
        "package": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "read_from": [FIELDS + "*.py", SERVER_ARGS],
        "licence": "Apache-2.0 (names of options only)",
    }
    lines = [f"    {json.dumps(name)}: {json.dumps(options[name])}" for name in sorted(options)]
    print('{\n  "source": ' + json.dumps(source) + ',\n  "options": {\n' + ",\n".join(lines) + "\n  }\n}")


def from_fields(tree: ast.Module) -> dict[str, dict]:
    """`name: A[T, "help"]` and `name: A[T, Arg(...)]` of every class."""
    found: dict[str, dict] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript)):
            continue
        annotation = node.annotation
        if ast.unparse(annotation.value) != "A" or not isinstance(annotation.slice, ast.Tuple):
            continue
        kind, *metadata = annotation.slice.elts
        arguments = {}
        for entry in metadata:
            if isinstance(entry, ast.Call) and ast.unparse(entry.func) == "Arg":
                arguments = {keyword.arg: keyword.value for keyword in entry.keywords}
        if _constant(arguments.get("no_cli")):
            continue
        flag = _constant(arguments.get("cli_name")) or "--" + ast.unparse(node.target).replace("_", "-")
        action = ast.unparse(arguments["action"]) if "action" in arguments else ""
        text = _inner(ast.unparse(kind))
        entry = {"takes": _takes(text, action, arguments)}
        number = text.lower().removeprefix("list[").removesuffix("]")
        if entry["takes"] != "none" and "type_parser" not in arguments and number in ("int", "float"):
            entry["type"] = number
        if choices := _choices(kind, arguments):
            entry["choices"] = choices
        if aliases := _constant(arguments.get("aliases")):
            entry["aliases"] = aliases
        if "BooleanOptionalAction" in action:
            entry.setdefault("aliases", []).append("--no-" + flag[2:])
        found[flag] = entry
    return found


def from_add_argument(tree: ast.Module) -> dict[str, dict]:
    """`parser.add_argument("--name", ...)`, deprecated spellings included."""
    found: dict[str, dict] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            names = [_constant(argument) for argument in node.args]
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            action = ast.unparse(keywords["action"]) if "action" in keywords else ""
            switch = "store_true" in action or "StoreTrue" in action
            found[names[0]] = {"takes": "none" if switch else "one"}
            if "Deprecated" in action or "(Deprecated" in ast.unparse(keywords.get("help", ast.Constant(""))):
                found[names[0]]["deprecated"] = True
    return found


def _constant(node: ast.expr | None):
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _inner(kind: str) -> str:
    return kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind.split(" | ")[0]


def _takes(kind: str, action: str, arguments: dict) -> str:
    if "nargs" in arguments:
        return {"?": "optional", "*": "many", "+": "many"}.get(_constant(arguments["nargs"]), "one")
    if action:
        return "none" if "Boolean" in action or "StoreTrue" in action else "many"
    if "const" in arguments:
        return "optional"
    if kind == "bool" and "type_parser" not in arguments:
        return "none"
    return "many" if kind.lower().startswith("list[") and "type_parser" not in arguments else "one"


def _choices(kind: ast.expr, arguments: dict) -> list | None:
    if "choices" in arguments:
        return _constant(arguments["choices"])
    for node in ast.walk(kind):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            return list(_constant(node.slice) if isinstance(node.slice, ast.Tuple) else [_constant(node.slice)])
    return None


if __name__ == "__main__":
    main()
