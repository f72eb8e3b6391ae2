"""The command `eagle3lab sweep`; as in `cli.py`, heavy imports stand inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML: profile, preset, grid or list, workers, ...")],
    workers: Annotated[int | None, typer.Option(help="Jobs at the same time, instead of the file's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which jobs there are, run nothing.")] = False,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="Also take finished runs that other code or versions made.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run a grid or a list of parameters; what is finished is not run again, failures do not end the rest."""
    from eagle3lab.cli import finish
    from eagle3lab.steps import sweep as step

    # With --json, stdout carries the result alone.
    note = (lambda line: typer.echo(line, err=True)) if json_output else typer.echo
    finish(step.sweep(file, workers=workers, dry_run=dry_run, any_code=any_code, note=note), json_output)
