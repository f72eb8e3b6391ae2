"""Parameters of the notebooks: one strict model each, and a static look at the cells that papermill writes into.

papermill only warns about an unknown name, never checks a type, and injects into a notebook without a `parameters`
tag so early that the notebook's own values win. Here all three are errors before anything runs.
"""

from __future__ import annotations

import ast
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.core.files import read_json
from eagle3lab.runs.presets import OVERRIDABLE, Preset, find_preset

TAG = "parameters"


class NotebookParameters(BaseModel):
    """Parameters that every notebook has. Strict: no unknown name, no text where a number belongs.

    Fields:
        profile: name of a shipped target profile, or the path of a TOML file.
        preset: quick | default | long.
        run: run directory; "" finds or makes one (`eagle3lab.runs.resolve`).
        seed: of everything random.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    profile: str = "smollm2"
    preset: str = "quick"
    run: str = ""
    seed: int = Field(default=0, ge=0, lt=2**31)


class CheckpointParameters(NotebookParameters):
    """Those, and `draft`: a drafter checkpoint of the reader's own; "" takes the run's."""

    draft: str = ""


class ComparisonParameters(NotebookParameters):
    """Those, and `runs`: run directories or sweeps, commas between; "" takes what is there. `run` is the baseline."""

    runs: str = ""


NOTEBOOKS: dict[str, type[NotebookParameters]] = {
    "00_preflight": NotebookParameters,
    "01_load_target": NotebookParameters,
    "02_capture_hidden_states": NotebookParameters,
    "03_train_drafter": NotebookParameters,
    "04_inspect_fc": CheckpointParameters,
    "05_measure_acceptance": CheckpointParameters,
}
"""The notebooks of a run, in order, with their parameters."""

STANDALONE: dict[str, type[NotebookParameters]] = {
    "06_zero_acceptance": NotebookParameters,
    "07_compare_runs": ComparisonParameters,
}
"""Notebooks that read runs and are no part of one: `eagle3lab run` does not execute them."""


def validate(notebook: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` checked against the model of `notebook`, defaults filled in.

    Raises:
        UsageError: unknown notebook, unknown name (the nearest is named), wrong type or value, unknown preset.
    """
    models = NOTEBOOKS | STANDALONE
    if notebook not in models:
        raise UsageError(f"unknown notebook '{notebook}'", rule=nearest(notebook, models))
    model = models[notebook]
    for name in values:
        if name not in model.model_fields:
            raise UsageError(f"unknown parameter '{name}' for {notebook}", rule=nearest(name, model.model_fields))
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UsageError(
            f"parameter {name} of {notebook} is {first['input']!r} ({type(first['input']).__name__})",
            rule=first["msg"][:1].lower() + first["msg"][1:],
        ) from error
    find_preset(checked.preset)
    return checked.model_dump()


def parse_assignments(words: list[str]) -> dict[str, Any]:
    """`-p NAME=VALUE` words of `eagle3lab run` as values of the declared types.

    Known names: `seed`, `draft`, and the amounts of a preset.

    Raises:
        UsageError: no `=`, a name given twice or unknown (the nearest is named), a value of the wrong type.
    """
    kinds: dict[str, Any] = {"seed": int, "draft": str}
    kinds |= {name: kind for name, kind in typing.get_type_hints(Preset).items() if name in OVERRIDABLE}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"-p {word!r}", rule="it is NAME=VALUE", fix="eagle3lab run -p seed=1")
        if name in {"profile", "preset"}:
            raise UsageError(f"-p {word!r}", rule=f"--{name} has an option of its own", fix=f"--{name} {text}")
        if name not in kinds:
            raise UsageError(f"unknown parameter '{name}'", rule=nearest(name, kinds), fix="eagle3lab run --help")
        if name in found:
            raise UsageError(f"parameter {name} is given twice", rule="once each")
        found[name] = _parsed(name, text, kinds[name])
    return found


def _parsed(name: str, text: str, kind: Any) -> Any:
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if str in allowed or typing.get_origin(kind) is typing.Literal:
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if type(value) is int and float in allowed:
        value = float(value)
    if type(value) not in allowed:
        names = " or ".join("None" if one is types.NoneType else one.__name__ for one in allowed)
        raise UsageError(f"parameter {name} is {text!r} ({type(value).__name__})", rule=f"{name} is {names}")
    return value


@dataclass(frozen=True, slots=True)
class Declared:
    """One assignment of a parameters cell: `name: kind = default  # help`."""

    name: str
    kind: str
    default: Any
    help: str


def declared_parameters(path: Path) -> list[Declared]:
    """The parameters that a notebook file declares, read without running it.

    Raises:
        UsageError: not exactly one tagged cell, code that is no Python, an assignment without a type or comment, a
            name assigned twice, or a value that is computed (papermill would leave it at the old inputs).
    """
    cells = [cell for cell in read_json(path)["cells"] if TAG in cell.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise UsageError(f"{path.name} has {len(cells)} cells tagged '{TAG}'", rule="exactly one")
    source = cells[0]["source"]
    text = source if isinstance(source, str) else "".join(source)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{path.name}: the parameters cell is no Python ({error.msg}, line {error.lineno})") from error
    lines = text.splitlines()
    found: dict[str, Declared] = {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            raise UsageError(
                f"{path.name}: {lines[node.lineno - 1].strip()!r} in the parameters cell",
                rule="every line is NAME: TYPE = VALUE  # help; anything else belongs into a later cell",
            )
        name = node.target.id
        try:
            default = ast.literal_eval(node.value)
        except ValueError as error:
            raise UsageError(
                f"{path.name}: parameter {name} is computed ({ast.unparse(node.value)})",
                rule="a plain value: a computed one keeps the old inputs when papermill replaces them",
                fix="move it to the next cell",
            ) from error
        _, hash_sign, comment = lines[node.lineno - 1].partition("  # ")
        if not hash_sign:
            raise UsageError(f"{path.name}: parameter {name} has no comment", rule="NAME: TYPE = VALUE  # help")
        if name in found:
            raise UsageError(f"{path.name}: parameter {name} is assigned twice", rule="once")
        found[name] = Declared(name, ast.unparse(node.annotation), default, comment.strip())
    return list(found.values())


def check_notebook(path: Path) -> None:
    """Hold a source notebook against its model: same names, types and defaults; runnable everywhere.

    Raises:
        UsageError: what differs; also a kernel other than `python3`, errors that are allowed, a time limit in the
            metadata (both override the test runner's), or stored outputs.
    """
    notebook = read_json(path)
    model = (NOTEBOOKS | STANDALONE)[path.stem]
    declared = {one.name: one for one in declared_parameters(path)}
    wanted = {
        name: (field.annotation.__name__ if field.annotation else "Any", field.default)
        for name, field in model.model_fields.items()
    }
    for name in declared.keys() | wanted.keys():
        if name not in wanted:
            raise UsageError(f"{path.name} declares parameter '{name}'", rule=nearest(name, wanted))
        if name not in declared:
            raise UsageError(f"{path.name} does not declare parameter '{name}'", rule=f"{wanted[name][0]}")
        one = declared[name]
        if (one.kind, one.default) != wanted[name]:
            raise UsageError(
                f"{path.name}: {name}: {one.kind} = {one.default!r}", rule=f"{wanted[name][0]} = {wanted[name][1]!r}"
            )
    kernel = notebook["metadata"].get("kernelspec", {}).get("name")
    if kernel != "python3":
        raise UsageError(f"{path.name} asks for kernel {kernel!r}", rule="python3")
    execution = notebook["metadata"].get("execution", {})
    for key in ("allow_errors", "timeout"):
        if key in execution:
            raise UsageError(f"{path.name} sets execution.{key} in its metadata", rule="it would override the limit")
    for number, cell in enumerate(notebook["cells"]):
        tags = cell.get("metadata", {}).get("tags", [])
        if bad := {"raises-exception", "skip-execution"} & set(tags):
            raise UsageError(f"{path.name}: cell {number} is tagged {sorted(bad)[0]}", rule="every cell runs and works")
        if cell.get("outputs") or cell.get("execution_count"):
            raise UsageError(f"{path.name}: cell {number} holds outputs", rule="stripped", fix=f"nbstripout {path}")
