"""A sweep file: which parameters to run, on what. Read strictly; what it asks for is known before anything runs.

    profile: smollm2
    preset: quick
    fixed: {train_steps: 200}            # the same in every job
    grid:                                # every combination; or `list:` with one mapping a job
      learning_rate: [1e-3, 2e-3, 4e-3]
      seed: [0, 1]
    workers: 2                           # jobs at the same time

A job is a run with these parameters. Two jobs with equal parameters are one, however they are written.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.core.hashes import sha256_file
from eagle3lab.doctor.readers.bounded import YamlLoader, check_size, read_text
from eagle3lab.runs.directory import NOTEBOOK_OF, parameters_hash
from eagle3lab.runs.parameters import NOTEBOOKS
from eagle3lab.runs.presets import OVERRIDABLE, Preset, find_preset, with_overrides
from eagle3lab.runs.resolve import NEEDED
from eagle3lab.targets.profiles import load_profile

MOST_JOBS = 10_000
SWEPT = ("seed", *OVERRIDABLE)
"""Names that a job may set: the seed and the amounts of a preset."""

AMOUNTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("timeout_min", "nodes", "cpus_per_task", "tasks_per_node"), (int,)),
    "mem_gb": (int, float),
}
"""Options that submitit 1.5 has for every cluster, of which there can be neither none nor fewer."""

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class SweepFile(BaseModel):
    """The keys of a sweep file.

    Fields:
        profile, preset: of every job.
        fixed: parameters of every job. grid: name -> values, every combination. list: one mapping a job.
        notebooks: names of those that run; default is all of a run's. A step that one needs must be among them.
        workers: jobs at the same time. max_minutes: of one job, which then stops cleanly and counts as not done.
        executor: `local` processes, or `submitit` (extra `cluster`).
        submitit: options for it: `timeout_min` (needed), `cluster` (slurm, local, debug), `slurm_partition`, ...
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    profile: str = "smollm2"
    preset: str = "quick"
    fixed: dict[str, Any] = {}
    grid: dict[str, list[Any]] | None = None
    list_: list[dict[str, Any]] | None = Field(default=None, alias="list")
    notebooks: list[str] = Field(default=list(NOTEBOOKS), min_length=1)
    workers: int = Field(default=1, ge=1, le=1000)
    max_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    executor: Literal["local", "submitit"] = "local"
    submitit: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """One run that a sweep asks for.

    Fields:
        number: from 1, in the order of the file. parameters: those of the file, `fixed` left out.
        seed, overrides: what the run gets; an amount that it would have anyway is no override.
        sha256: over profile, preset, seed and overrides: equal parameters have equal hashes.
        profile_sha256: of a user's own profile file; "" for a shipped profile, which belongs to the code.
    """

    number: int
    parameters: dict[str, Any]
    profile: str
    preset: str
    seed: int
    overrides: dict[str, Any]
    sha256: str
    profile_sha256: str = ""

    @property
    def label(self) -> str:
        """`learning_rate=0.001 seed=1`."""
        return " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "the preset's own amounts"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep file.

    Fields:
        name: of the file without its suffix. text: as read.
        jobs: with different parameters each. repeated: how many more the file asks for that equal one of them.
        notebooks: those that run, in their order.
    """

    name: str
    text: str
    file: SweepFile
    jobs: tuple[Job, ...]
    repeated: int
    notebooks: tuple[str, ...]


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file.

    Raises:
        UsageError, ReadError, ProfileError: it is not there, not YAML, a name is unknown (the nearest is named), a
            value has the wrong type or is out of range, or it asks for no job at all.
    """
    text = read_text(path)
    file = _validated(_parsed(text, path), path)
    profile, profile_sha256 = _profile(file.profile)
    preset = base_preset(profile, file.preset)
    jobs: dict[str, Job] = {}
    asked = 0
    for parameters in _combinations(file, path):
        asked += 1
        checked = _checked(file.fixed | parameters, preset, path)
        parameters = {name: checked[name] for name in parameters}
        seed = checked.pop("seed", 0)
        overrides = changed(preset, checked)
        digest = parameters_hash(profile, file.preset, seed, overrides)
        jobs.setdefault(
            digest,
            Job(len(jobs) + 1, parameters, profile, file.preset, seed, overrides, digest, profile_sha256),
        )
    return Sweep(path.stem, text, file, tuple(jobs.values()), asked - len(jobs), _notebooks(file, path))


def base_preset(profile: str, preset: str) -> Preset:
    """The amounts of a run without overrides: the preset's, or the profile's where it has its own."""
    return with_overrides(find_preset(preset), load_profile(profile).amounts or {})


def changed(preset: Preset, overrides: dict[str, Any]) -> dict[str, Any]:
    """The `overrides` that really differ from `preset`, sorted: `train_steps=40` at a preset of 40 steps is none."""
    return {name: value for name, value in sorted(overrides.items()) if value != getattr(preset, name)}


class _Loader(YamlLoader):
    """The safe loader; a key that stands twice in one mapping is an error (YAML would keep the last in silence)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep=deep)


def _parsed(text: str, path: Path) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not YAML ({' '.join(str(error).split())[:200]})") from error
    check_size(value, str(path))
    return value


def _validated(value: Any, path: Path) -> SweepFile:
    known = [field.alias or name for name, field in SweepFile.model_fields.items()]
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds {_short(value)}", rule=f"a mapping with keys of {', '.join(known)}")
    for name in value:
        if name not in known:
            raise UsageError(f"{path}: unknown key {_short(name)}", rule=nearest(str(name), known))
    try:
        file = SweepFile.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where} is {_short(first['input'])}", rule=_lower(first["msg"])) from error
    if (file.grid is None) == (file.list_ is None):
        both = "neither grid nor list" if file.grid is None else "both grid and list"
        raise UsageError(f"{path} has {both}", rule="one of them says which jobs there are")
    if file.executor == "submitit" and "timeout_min" not in file.submitit:
        raise UsageError(
            f"{path}: submitit has no timeout_min", rule="minutes of one job; submitit's own default is a few minutes"
        )
    for name, value in file.submitit.items():
        if name in AMOUNTS and (type(value) not in AMOUNTS[name] or not 0 < value < math.inf):
            kind = "number" if float in AMOUNTS[name] else "whole number"
            raise UsageError(f"{path}: submitit.{name} is {_short(value)}", rule=f"a {kind} above 0")
    if file.executor != "submitit" and file.submitit:
        raise UsageError(f"{path}: submitit options with executor: {file.executor}", rule="executor: submitit")
    return file


def _profile(name: str) -> tuple[str, str]:
    """The profile as a run stores it, and the sha256 of a user's own file (kernels run in another folder)."""
    load_profile(name)
    if not (name.endswith(".toml") or "/" in name):
        return name, ""
    path = Path(name).expanduser().absolute()
    return str(path), sha256_file(path)


def _combinations(file: SweepFile, path: Path) -> list[dict[str, Any]]:
    """The parameters of every job, as written."""
    grid = file.grid or {}
    for name, values in grid.items():
        if not values:
            raise UsageError(f"{path}: grid.{name} is empty", rule="a list of at least one value")
    count = math.prod(len(values) for values in grid.values()) if file.list_ is None else len(file.list_)
    if not count or (file.list_ is None and not grid):
        raise UsageError(f"{path} asks for 0 jobs", rule="at least one parameter with a value")
    if count > MOST_JOBS:
        raise UsageError(f"{path} asks for {count} jobs", rule=f"at most {MOST_JOBS}")
    found = file.list_
    if found is None:
        found = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for parameters in found:
        if twice := sorted(parameters.keys() & file.fixed.keys()):
            raise UsageError(f"{path}: {twice[0]} is fixed and swept", rule="one of both")
    return found


def _checked(parameters: dict[str, Any], preset: Preset, path: Path) -> dict[str, Any]:
    """Names and types of one job's parameters; an int for a float becomes one, so that 1 and 1.0 are one job."""
    kinds = get_type_hints(Preset)
    checked = {}
    for name, value in parameters.items():
        if name not in SWEPT:
            raise UsageError(f"{path}: unknown parameter {_short(name)}", rule=nearest(str(name), SWEPT))
        if name == "seed":
            if type(value) is not int or not 0 <= value < 2**31:
                raise UsageError(f"{path}: seed is {_short(value)}", rule="a whole number, 0 <= seed < 2**31")
        elif kinds[name] is float and (type(value) is int or (isinstance(value, str) and _EXPONENT.fullmatch(value))):
            value = float(value)  # YAML 1.1 reads 1e-3 as text; YAML 1.2 and every reader as a number
        checked[name] = value
    try:
        with_overrides(preset, {name: value for name, value in checked.items() if name != "seed"})
    except UsageError as error:
        raise UsageError(f"{path}: {error.what[:200]}", rule=error.rule) from error
    return checked


def _notebooks(file: SweepFile, path: Path) -> tuple[str, ...]:
    for name in file.notebooks:
        if name not in NOTEBOOKS:
            raise UsageError(f"{path}: unknown notebook {_short(name)}", rule=nearest(str(name), NOTEBOOKS))
    for name in file.notebooks:
        step = NEEDED[name]
        if step is not None and NOTEBOOK_OF[step] not in file.notebooks:
            raise UsageError(f"{path}: {name} without {NOTEBOOK_OF[step]}", rule=f"it needs that one's step '{step}'")
    return tuple(name for name in NOTEBOOKS if name in file.notebooks)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
