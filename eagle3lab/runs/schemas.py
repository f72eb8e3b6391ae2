"""Schemas of a run's own files: `manifest.json` and `status.json`. Strict: an unknown key is an error."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

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


class _Open(BaseModel):
    """Keys are added, never renamed: what is not listed here may be anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Length(_Open):
    accept_length: FiniteFloat | None = None


class _Counts(_Open):
    verify_steps: int | None = None
    accepted: int | None = None
    proposed: int | None = None


class _Repeats(_Open):
    share_of_steps: FiniteFloat | None = None
    accept_length_without: FiniteFloat | None = None


class _Measured(_Length):
    accept_length_interval: list[FiniteFloat] | None = Field(default=None, min_length=2, max_length=2)
    accept_rate: FiniteFloat | None = None
    joint: list[FiniteFloat | None] | None = None
    conditional: list[FiniteFloat | None] | None = None
    counts: _Counts | None = None
    lossless: bool | None = None


class _Set(_Measured):
    prompts: int | None = None
    k: int | None = None
    max_new_tokens: int | None = None
    repeats: _Repeats | None = None
    lookup: _Length | None = None
    coverage: FiniteFloat | None = None
    differences: list[Any] | None = None
    controls: dict[str, _Length] | None = None


class _Speed(_Open):
    batch: int
    plain_tokens_per_second: FiniteFloat
    speculative_tokens_per_second: FiniteFloat
    ratio: FiniteFloat


class _Timing(_Open):
    speed: _Speed | None = None
    total_seconds: FiniteFloat | None = None
    peak_memory_bytes: FiniteFloat | None = None

    @field_validator("speed", mode="before")
    @classmethod
    def _not_measured(cls, value: Any) -> Any:
        return None if value == {} else value


class Metrics(_Measured):
    """`metrics.json` as far as the lab reads it; every key may be missing, and a number that is unknown is null."""

    sets: dict[str, _Set] = {}
    timing: _Timing = _Timing()
