"""Which run a notebook works on, when its `run` parameter does not say.

| where the notebook runs | `run = ""` means |
|---|---|
| Jupyter (a person looks) | the newest run whose needed steps are ok, and that is printed |
| papermill, nbmake | the run of these very parameters and this very code, made and filled as far as needed |
| with `draft` set | a new run, filled as far as needed |

A batch job never takes "the latest": two jobs at once would read each other's results.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import RunError
from eagle3lab.core.files import folder_lock
from eagle3lab.core.paths import runs_folder
from eagle3lab.runs import provenance
from eagle3lab.runs.directory import NEEDS, Run, parameters_hash
from eagle3lab.runs.parameters import validate

BATCH_VARIABLE = "EAGLE3LAB_BATCH"
"""Set to 1 by the pipeline and by `make test`; 0 forces the rule of Jupyter."""

Builders = Mapping[str, Callable[[Run], object]]
"""Step -> function that does it for one run. The steps themselves hand them in: they stand below this folder."""

NEEDED: dict[str, str | None] = {
    "00_preflight": None,
    "01_load_target": None,
    "02_capture_hidden_states": "fetch",
    "03_train_drafter": "capture",
    "04_inspect_fc": "train",
    "05_measure_acceptance": "train",
    "06_zero_acceptance": "train",
}
"""Notebook -> the last step that must be done before it. Those without one make a new run."""

NEEDED_WITH_DRAFT: dict[str, str | None] = {"04_inspect_fc": None, "05_measure_acceptance": "corpus"}
"""The same when the reader's own checkpoint is looked at: nothing is trained for that."""

OWN = {
    "01_load_target": "fetch",
    "02_capture_hidden_states": "capture",
    "03_train_drafter": "train",
    "04_inspect_fc": "inspect",
    "05_measure_acceptance": "accept",
}
"""Notebook -> the step it does itself. A batch job never does it again in a run that has it: it takes a new run."""


def in_batch() -> bool:
    """Whether nobody looks: set by our variable, else true unless a Jupyter front end started this kernel.

    A Jupyter server names the notebook in JPY_SESSION_NAME, and VS Code sets VSCODE_PID; a papermill that is called
    from inside a notebook inherits both, but then the kernel's parent is a kernel itself.
    """
    asked = os.environ.get(BATCH_VARIABLE)
    if asked in {"0", "1"}:
        return asked == "1"
    front_end = "JPY_SESSION_NAME" in os.environ or "VSCODE_PID" in os.environ
    return not front_end or _parent_runs_notebooks()


def _parent_runs_notebooks() -> bool:
    import psutil

    parent = psutil.Process().parent()
    # Whole words: a Jupyter server over a folder such as /tmp/pytest-of-me is still a Jupyter server.
    words = {Path(word).name.removesuffix(".exe") for word in (parent.cmdline() if parent else []) if word[:1] != "-"}
    return not words.isdisjoint({"ipykernel_launcher", "papermill", "pytest", "py.test", "nbclient"})


def resolve_run(notebook: str, builders: Builders, *, note: Callable[[str], None] = print, **values: Any) -> Run:
    """The run that `notebook` works on; its parameters are checked first.

    Args:
        notebook: `03_train_drafter`, ...
        builders: how to do the steps that are missing.
        note: receives one line that says which run it is and why.
        values: the notebook's parameters: profile, preset, run, seed, and draft where it has one.

    Raises:
        UsageError: a parameter of the wrong type, an unknown preset.
        RunError: the run is not there, or its needed step is not ok.
    """
    checked = validate(notebook, values)
    profile, preset, seed = checked["profile"], checked["preset"], checked["seed"]
    needed: str | None = NEEDED_WITH_DRAFT[notebook] if checked.get("draft") else NEEDED[notebook]
    if checked["run"]:
        run = Run.open(checked["run"])
        if needed is not None:
            run.require(needed)
        note(_line(run, "given"))
        return run
    if checked.get("draft"):
        # A foreign checkpoint gets a run of its own: its numbers must not stand where a run's drafter was measured.
        draft = str(checked["draft"])
        again = f"papermill notebooks/{notebook}.ipynb out.ipynb -p draft {shlex.quote(draft)}"
        again += f" -p profile {shlex.quote(profile)} -p preset {preset} -p seed {seed}"
        run = Run.create(profile, preset, seed=seed, slug=f"{preset}-own-checkpoint", draft=draft, command=again)
        note(_line(run, "new, for your checkpoint"))
        if needed is not None:
            build(run, needed, builders, note=note)
        return run
    if in_batch():
        with folder_lock(runs_folder() / parameters_hash(profile, preset, seed, {})[:12], note=note):
            found = find_same(profile, preset, seed, without=OWN.get(notebook))
            why = "same parameters and code, filled as far as needed" if found else "new"
            run = found or Run.create(profile, preset, seed=seed)
            note(_line(run, why))
            if needed is not None:
                build(run, needed, builders, note=note)
        return run
    if needed is None:
        run = Run.create(profile, preset, seed=seed)
        note(_line(run, "new"))
        return run
    newest = Run.newest(needed)
    if newest is None:
        raise RunError(
            f"no run has finished step '{needed}'",
            rule=f"{notebook} reads its results",
            fix=f"run the notebook before this one, or eagle3lab run --preset {preset}",
        )
    note(_line(newest, f"the newest whose step '{needed}' is ok; set run = ... for another"))
    return newest


def find_same(
    profile: str, preset: str, seed: int, overrides: dict[str, Any] | None = None, *, without: str | None = None
) -> Run | None:
    """The newest run of these parameters, made by this code with these versions, that nobody is working on.

    Args:
        without: a step that must not be done in it yet.
    """
    digest = parameters_hash(profile, preset, seed, overrides or {})
    wanted, target = (digest, provenance.code_hash(), provenance.versions()), provenance.target_hash(profile)
    for run in Run.all():
        manifest = run.manifest
        if (manifest.parameters_sha256, manifest.code_sha256, manifest.versions) != wanted:
            continue
        if run.status.truncated or not run.began_with("target", target):
            continue  # `--max-minutes` left another drafter than these parameters do
        if (without is None or run.step_state(without) != "ok") and not run.being_worked_on():
            return run
    return None


def build(run: Run, step: str, builders: Builders, *, note: Callable[[str], None] = print) -> None:
    """Do the steps up to and including `step` that are not ok in `run`."""
    for before in NEEDS[step]:
        build(run, before, builders, note=note)
    if run.step_state(step) != "ok":
        note(f"building step '{step}' of {run.path.name}")
        builders[step](run)
        run.require(step)


def _line(run: Run, why: str) -> str:
    manifest = run.manifest
    return f"run {run.path.name} ({why}): {manifest.profile}, preset {manifest.preset}, seed {manifest.seed}"
