"""Schemas of a run's own files: `manifest.json` and `status.json`. Strict: an unknown key is an error."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

RUN_SCHEMA: Final = "eagle3lab-run/1"
STATUS_SCHEMA: Final = "eagle3lab-status/1"

State = Literal["ok", "error", "timeout", "dead"]
"""How a notebook ended. `timeout`: stopped by --max-minutes. `dead`: its process vanished."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Manifest(_Strict):
    """What a run was asked to do and with what. Written when the run is created.

    Fields:
        profile, preset, seed: as asked. amounts: what the profile puts in place of the preset's. overrides: amounts
            that this run changes. draft: the user's own checkpoint that was looked at, empty in every other run.
        effective: every amount as this run took it: a preset that changes later does not change an old run.
        parameters_sha256: hash over profile, preset, seed and overrides; its first 6 hex digits end the run's name.
        code_sha256: hash over the package's sources and the notebooks.
        inputs: name -> sha256 or id of what was read (target weights, corpus, states); grows as steps finish.
        command: how to make this run again.
    """

    schema_: Literal["eagle3lab-run/1"] = Field(default=RUN_SCHEMA, alias="schema")
    profile: str
    preset: str
    seed: int = Field(ge=0)
    amounts: dict[str, Any] = {}
    overrides: dict[str, Any]
    draft: str = ""
    effective: dict[str, Any] = {}
    parameters_sha256: str
    code_sha256: str
    created: str
    command: str
    git: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    inputs: dict[str, str] = {}


class NotebookStatus(_Strict):
    """How one notebook ended, judged by the cells that really ran.

    Fields:
        cells: code cells that hold something. ran: those with an execution count.
        failing_cell: 1-based number among the code cells, None when none failed. source: its first line.
        error: `Class: message` of the failing cell, or why the process is gone.
    """

    status: State
    cells: int
    ran: int
    seconds: float
    failing_cell: int | None = None
    source: str | None = None
    error: str | None = None
    interrupted: bool = False


class StepStatus(_Strict):
    """One step of a run (corpus, capture, train, ...), whoever called it: a notebook, a command or a test.

    `running` with a process that is gone reads as `dead`.
    """

    status: Literal["ok", "error", "running", "dead"]
    started: str
    seconds: float | None = None
    pid: int
    error: str | None = None


class Status(_Strict):
    """`status.json`: notebooks and steps so far, and whether --max-minutes cut the run short."""

    schema_: Literal["eagle3lab-status/1"] = Field(default=STATUS_SCHEMA, alias="schema")
    truncated: bool = False
    notebooks: dict[str, NotebookStatus] = {}
    steps: dict[str, StepStatus] = {}
