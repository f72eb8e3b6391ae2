"""The public surface is frozen: options of the command line and parameters of the notebooks, in `surface.txt`.

Keys are added, never renamed. When something was added on purpose, renew the list and look at its diff:

    python tests/house/test_surface.py > tests/house/surface.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from eagle3lab.cli import app
from eagle3lab.runs.parameters import NOTEBOOKS, STANDALONE
from eagle3lab.runs.presets import OVERRIDABLE

LIST = Path(__file__).with_name("surface.txt")


def commands(group: object, prefix: str = "eagle3lab") -> Iterator[str]:
    """One line for each command with its arguments and options, in alphabetical order."""
    for parameter in sorted(group.params, key=lambda one: one.name):
        if parameter.name != "help":
            yield f"{prefix} {written(parameter)}"
    for name, command in sorted(getattr(group, "commands", {}).items()):
        yield from commands(command, f"{prefix} {name}")


def written(parameter: object) -> str:
    """An option as `--name/-n` with `default=...`, an argument as `NAME`."""
    argument = parameter.param_type_name == "argument"
    words = parameter.name.upper() if argument else "/".join(sorted(parameter.opts, reverse=True))
    required = " required" if parameter.required else f" default={parameter.default!r}"
    return f"{words}{required}"


def surface() -> str:
    """The whole list, one line an item."""
    lines = list(commands(typer.main.get_command(app)))
    for name, model in sorted((NOTEBOOKS | STANDALONE).items()):
        lines += [f"notebook {name} {field}: default={info.default!r}" for field, info in model.model_fields.items()]
    lines += [f"run --parameter {name}" for name in sorted(OVERRIDABLE)]
    return "\n".join(lines) + "\n"


def difference(frozen: str, now: str) -> tuple[list[str], list[str]]:
    """(gone, new) lines."""
    before, after = frozen.splitlines(), now.splitlines()
    return [line for line in before if line not in after], [line for line in after if line not in before]


def test_the_surface_is_the_frozen_one() -> None:
    gone, new = difference(LIST.read_text(), surface())
    renew = "renew: python tests/house/test_surface.py > tests/house/surface.txt"
    assert not gone, f"removed or renamed (users depend on them): {gone}; {renew}"
    assert not new, f"new: {new}; {renew}"


def test_a_renamed_option_is_found() -> None:
    frozen = "eagle3lab fetch --profile default='smollm2'\neagle3lab fetch --source default=None\n"
    gone, new = difference(frozen, frozen.replace("--source", "--from"))
    assert gone == ["eagle3lab fetch --source default=None"] and new == ["eagle3lab fetch --from default=None"]


if __name__ == "__main__":
    print(surface(), end="")
