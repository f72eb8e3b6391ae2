"""The run directory: `runs/<utc>-<profile>-<slug>-<6 hex>/`, everything that one run asked for, did and found.

    manifest.json   what was asked, with which code, versions and machine
    status.json     how each notebook and each step ended
    metrics.json    what was measured; all that depends on the clock stands under `timing`
    notebooks/      the executed notebooks
    drafter/        the trained drafter in the SGLang layout
    figures/        PNG, PDF, the plotted data as CSV, and a JSON with the alternative text
    report.html     the whole in one file

Steps may run in several processes one after the other; every file is replaced whole, under one lock.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from eagle3lab.core.errors import RunError, nearest
from eagle3lab.core.files import folder_lock, make_folder, read_json, write_json
from eagle3lab.core.hashes import sha256_json
from eagle3lab.core.paths import runs_folder
from eagle3lab.runs import provenance
from eagle3lab.runs.presets import OVERRIDABLE, Preset, find_preset, with_overrides
from eagle3lab.runs.schemas import Manifest, Metrics, NotebookStatus, Status, StepStatus
from eagle3lab.targets.profiles import load_profile

STEPS = ("fetch", "corpus", "capture", "train", "inspect", "accept")
"""Steps in data order. A step needs some of those before it."""

WORK_LOCK = ".work.lock"

NEEDS = {"fetch": (), "corpus": ("fetch",), "capture": ("corpus",), "train": ("capture",)}
NEEDS |= {"inspect": ("train",), "accept": ("train",)}

NOTEBOOK_OF = {
    "fetch": "01_load_target",
    "corpus": "02_capture_hidden_states",
    "capture": "02_capture_hidden_states",
    "train": "03_train_drafter",
    "inspect": "04_inspect_fc",
    "accept": "05_measure_acceptance",
}


def parameters_hash(profile: str, preset: str, seed: int, overrides: dict[str, Any]) -> str:
    """sha256 of what decides a run's result on one machine; its first 6 hex digits end the run's name."""
    return sha256_json({"profile": profile, "preset": preset, "seed": seed, "overrides": overrides})


class Run:
    """One run directory. Create it with `Run.create`, find it with `Run.open` or `Run.newest`.

    Attributes:
        path: the folder.
        manifest: what was asked (`profile`, `preset`, `seed`, `overrides`, ...).
        preset: the amounts, with those of the profile and the run's overrides applied.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        kept = {name: value for name, value in manifest.effective.items() if name in OVERRIDABLE}
        amounts = kept or manifest.amounts | manifest.overrides
        self.preset: Preset = with_overrides(find_preset(manifest.preset), amounts)

    def __repr__(self) -> str:
        return f"Run({self.path.name})"

    # -- create and find -------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        profile: str,
        preset: str,
        parameters: dict[str, Any] | None = None,
        seed: int = 0,
        *,
        folder: Path | None = None,
        slug: str = "",
        command: str = "",
        draft: str = "",
    ) -> Run:
        """Make a new run directory.

        Args:
            profile: name of a shipped profile or path of a user's TOML.
            preset: quick | default | long.
            parameters: amounts of the preset that this run changes (`eagle3lab.runs.presets.OVERRIDABLE`).
            seed: of everything random.
            folder: where run directories live; None = `runs/` (or EAGLE3LAB_RUNS).
            slug: middle part of the name; empty = the preset.
            draft: a checkpoint of the user's that is looked at; such a run is never taken for one that trains.

        Raises:
            ProfileError: unknown profile. UsageError: unknown preset or amount, or a value of the wrong type.
        """
        overrides = dict(sorted((parameters or {}).items()))
        amounts = load_profile(profile).amounts or {}
        effective = asdict(with_overrides(find_preset(preset), amounts | overrides))
        digest = parameters_hash(profile, preset, seed, overrides | ({"draft": draft} if draft else {}))
        manifest = Manifest(
            profile=profile,
            preset=preset,
            seed=seed,
            amounts=amounts,
            overrides=overrides,
            draft=draft,
            effective={name: effective[name] for name in OVERRIDABLE},
            parameters_sha256=digest,
            code_sha256=provenance.code_hash(),
            created=_now(),
            command=command or _command(profile, preset, seed, overrides),
            git=provenance.git_state(),
            versions=provenance.versions(),
            machine=provenance.machine(),
        )
        path = _new_folder(folder or runs_folder(), f"{_word(Path(profile).stem)}-{_word(slug or preset)}-{digest[:6]}")
        for name in ("notebooks", "figures"):
            (path / name).mkdir()
        write_json(path / "status.json", Status().model_dump(by_alias=True))
        write_json(path / "manifest.json", manifest.model_dump(by_alias=True))
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run at `path`, or the one of that name under `runs/`.

        Raises:
            RunError: no such folder, no manifest, or one that does not follow the schema.
        """
        given = Path(path).expanduser()
        folder = given if given.is_dir() or given.is_absolute() else runs_folder() / given
        if not folder.is_dir():
            names = [one.name for one in _folders(runs_folder())]
            raise RunError(
                f"no run directory {str(path)!r}",
                rule=nearest(given.name, names) if names else "there is no run yet",
                fix="eagle3lab runs list" if names else "eagle3lab run",
            )
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise RunError(f"{folder} has no manifest.json", rule="a run directory has one", fix="eagle3lab runs list")
        return cls(folder.absolute(), _validated(Manifest, read_json(manifest), manifest))

    @classmethod
    def newest(cls, step: str, *, folder: Path | None = None) -> Run | None:
        """The newest run whose `step` is ok, or None."""
        return next((run for run in cls.all(folder=folder) if run.step_state(step) == "ok"), None)

    @classmethod
    def all(cls, *, folder: Path | None = None) -> Iterator[Run]:
        """Every readable run, newest first. Folders that are no runs, or of an older schema, are passed over."""
        for path in reversed(_folders(folder or runs_folder())):
            with contextlib.suppress(RunError):
                yield cls.open(path)

    # -- where things lie ------------------------------------------------------------------------------------------

    @property
    def notebooks(self) -> Path:
        """Executed notebooks."""
        return self.path / "notebooks"

    @property
    def figures(self) -> Path:
        """Figures with their data and alternative texts."""
        return self.path / "figures"

    @property
    def drafter(self) -> Path:
        """The trained drafter."""
        return self.path / "drafter"

    def drafter_name(self, folder: Path) -> str:
        """How `metrics.json` names the drafter that was looked at: `drafter` for the run's own, else its path."""
        return "drafter" if folder.resolve() == self.drafter.resolve() else str(folder)

    # -- status ----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """`status.json` as it is now; a step whose process is gone without finishing reads as dead."""
        path = self.path / "status.json"
        status = _validated(Status, read_json(path), path) if path.is_file() else Status()
        for step in status.steps.values():
            if step.status == "running" and not _alive(step.pid):
                step.status = "dead"
        return status

    def step_state(self, step: str) -> str:
        """`ok`, `error`, `running`, `dead`, or `missing` when the step was never begun."""
        found = self.status.steps.get(step)
        return found.status if found else "missing"

    def require(self, step: str) -> None:
        """Refuse, with the next command, unless `step` of this run is ok."""
        state = self.step_state(step)
        if state != "ok":
            raise RunError(
                f"step '{step}' of run {self.path.name} is {state}",
                rule=f"it must be ok before its results are read (notebook {NOTEBOOK_OF[step]})",
                fix=f"eagle3lab run --resume {self.path}",
            )

    @contextlib.contextmanager
    def recording(self, step: str) -> Iterator[None]:
        """Record `step` as running, then ok, or error with its one line. Steps after it look here."""
        if step not in STEPS:
            raise RunError(f"unknown step '{step}'", rule=nearest(step, STEPS))
        begun, started = time.monotonic(), _now()
        self._set_step(step, StepStatus(status="running", started=started, pid=os.getpid()))
        problem: str | None = None
        try:
            yield
        except BaseException as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            raise
        finally:
            self._set_step(
                step,
                StepStatus(
                    status="error" if problem else "ok",
                    started=started,
                    seconds=round(time.monotonic() - begun, 3),
                    pid=os.getpid(),
                    error=problem,
                ),
            )

    def _set_step(self, step: str, value: StepStatus) -> None:
        with self._changing_status() as status:
            status.steps[step] = value

    def set_notebook(self, name: str, value: NotebookStatus) -> None:
        """Record how the notebook `name` (without suffix) ended."""
        with self._changing_status() as status:
            status.notebooks[name] = value

    def forget(self, step: str) -> None:
        """Drop the record of `step` and of every step that needs it: another result is about to take its place."""
        gone = {step}
        for later in STEPS:
            if gone & set(NEEDS[later]):
                gone.add(later)
        with self._changing_status() as status:
            for one in gone:
                status.steps.pop(one, None)
                status.notebooks.pop(NOTEBOOK_OF[one], None)

    def set_truncated(self, truncated: bool) -> None:
        """Mark the run as cut short by --max-minutes, or clear the mark when it was finished after all."""
        with self._changing_status() as status:
            status.truncated = truncated

    @contextlib.contextmanager
    def _changing_status(self) -> Iterator[Status]:
        with self._lock():
            status = self.status
            yield status
            write_json(self.path / "status.json", status.model_dump(by_alias=True))

    # -- results ---------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """`metrics.json`, or {} before anything was measured; `RunError` for one that the lab cannot have written."""
        path = self.path / "metrics.json"
        if not path.is_file():
            return {}
        found: dict[str, Any] = read_json(path)
        _validated(Metrics, found, path)
        return found

    def merge_metrics(self, values: dict[str, Any], *, timing: dict[str, Any] | None = None) -> None:
        """Merge `values` into `metrics.json` (mappings key by key, anything else is replaced).

        What depends on the clock or on the machine's load goes into `timing`, and only there: apart from it, the same
        parameters and seed give the same file.
        """
        with self._lock():
            merged = _merge(self.metrics(), values | ({"timing": timing} if timing else {}))
            clock = merged.pop("timing", {})
            write_json(self.path / "metrics.json", {**merged, "timing": clock})

    def add_inputs(self, **hashes: str) -> None:
        """Note in the manifest what a step read: name -> sha256."""
        with self._lock():
            path = self.path / "manifest.json"
            manifest = _validated(Manifest, read_json(path), path)
            manifest.inputs.update(hashes)
            write_json(path, manifest.model_dump(by_alias=True))
            self.manifest = manifest

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work on this run alone: two chains of notebooks, or two trainings, would write the same files.

        The lock is the kernel's, so it ends with its process.

        Raises:
            RunError: another process works on it.
        """
        with (self.path / WORK_LOCK).open("a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    f"another process works on run {self.path.name}",
                    rule="one at a time",
                    fix="wait for it, or stop it with Ctrl-C",
                ) from error
            yield

    def being_worked_on(self) -> bool:
        """Whether a process holds `working`, or does a step of it."""
        if any(step.status == "running" for step in self.status.steps.values()):
            return True
        lock = self.path / WORK_LOCK
        if not lock.is_file():
            return False
        with lock.open() as handle:  # to read alone: another person's run may be listed too
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def began_with(self, name: str, sha256: str | None) -> bool:
        """Whether nothing speaks against the input `name` being this one: true where either hash is not known."""
        return sha256 is None or self.manifest.inputs.get(name, sha256) == sha256

    def require_inputs(self, **now: str) -> None:
        """Refuse to go on where an input that a step noted is another one now: name -> sha256."""
        for name, sha256 in now.items():
            if not self.began_with(name, sha256):
                noted = self.manifest.inputs[name]
                raise RunError(
                    f"the {name} of run {self.path.name} was {noted[:12]}, now it is {sha256[:12]}",
                    rule="a run ends with the inputs it began with",
                    fix="eagle3lab run, a new one; or put the old one back",
                )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with folder_lock(self.path / "run", note=lambda _: None):
            yield


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "run"


def _new_folder(parent: Path, tail: str) -> Path:
    """`parent/<utc>-<tail>`; a second run within the same second waits for the next one."""
    make_folder(parent)
    while True:
        path = parent / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{tail}"
        try:
            path.mkdir()
        except FileExistsError:
            time.sleep(0.1)
        else:
            return path.absolute()


def _folders(parent: Path) -> list[Path]:
    """Run directories under `parent`, oldest first: their names begin with the time."""
    return sorted(path.parent for path in parent.glob("*/manifest.json"))


def _command(profile: str, preset: str, seed: int, overrides: dict[str, Any]) -> str:
    values = [f"{name}={value}" for name, value in {"seed": seed, **overrides}.items()]
    words = ["eagle3lab", "run", "--profile", profile, "--preset", preset]
    return shlex.join([*words, *(word for value in values for word in ("-p", value))])


def _validated(schema: type[BaseModel], value: Any, path: Path) -> Any:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RunError(f"{path}: {where}: {first['msg']}", rule="written by this version of eagle3lab") from error


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
