"""`eagle3lab runs list|prune`: what was run here, and what to throw away."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.runs.directory import Run
from eagle3lab.runs.parameters import NOTEBOOKS
from eagle3lab.steps.output import table


@dataclass(frozen=True, slots=True)
class RunsOutcome:
    """Rows of a listing; `removed` and `would_remove` hold names of runs that prune took away, or would."""

    rows: list[dict[str, Any]]
    removed: tuple[str, ...] = ()
    would_remove: tuple[str, ...] = ()
    listing: bool = True

    @property
    def exit_code(self) -> int:
        """Always 0: an empty list is no error."""
        return 0

    def as_json(self) -> dict[str, Any]:
        """`runs`, `removed`, `would_remove`."""
        return {"runs": self.rows, "removed": list(self.removed), "would_remove": list(self.would_remove)}

    def as_text(self) -> str:
        """A table, or the names of what was removed."""
        if not self.listing:
            if self.would_remove:
                names = "\n".join(self.would_remove)
                return f"would remove {len(self.would_remove)} runs (add --yes to do it):\n{names}"
            return "\n".join(f"removed {name}" for name in self.removed) or "nothing to remove"
        if not self.rows:
            return "no run yet; next: eagle3lab run"
        head = ("run", "notebooks ok", "state", "accept length", "MB")
        return table(
            head, [(r["name"], r["notebooks_ok"], r["state"], r["accept_length"], r["megabytes"]) for r in self.rows]
        )


def list_runs() -> RunsOutcome:
    """All runs, newest first."""
    return RunsOutcome([_row(run) for run in Run.all()])


def prune_runs(*, keep: int, unfinished: bool, yes: bool) -> RunsOutcome:
    """Remove the runs after the newest `keep` (with `unfinished`: only those that did not end well).

    A run in which a step is running is never touched. Without `yes` nothing is removed, only named.
    """
    if keep < 0:
        raise UsageError(f"--keep {keep}", rule="0 or more", fix="eagle3lab runs prune --keep 10")
    doomed: list[Path] = []
    for run in list(Run.all())[keep:]:
        row = _row(run)
        if row["state"] != "running" and not (unfinished and row["state"] == "ok"):
            doomed.append(run.path)
    names = tuple(path.name for path in doomed)
    if not yes:
        return RunsOutcome([], would_remove=names, listing=False)
    for path in doomed:
        # A link inside `runs/` is removed itself; what it points to may belong to somebody else.
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    return RunsOutcome([], removed=names, listing=False)


def _row(run: Run) -> dict[str, Any]:
    status = run.status
    ok = sum(one.status == "ok" for one in status.notebooks.values())
    bad = next((one.status for one in status.notebooks.values() if one.status != "ok"), None)
    if run.being_worked_on():
        state = "running"
    elif status.truncated:
        state = "truncated"
    else:
        whole = ok == len(NOTEBOOKS) or (ok and run.manifest.draft)  # of an own checkpoint one notebook is the run
        state = bad or ("ok" if whole else "unfinished")
    length = run.metrics().get("accept_length")
    return {
        "name": run.path.name,
        "profile": run.manifest.profile,
        "preset": run.manifest.preset,
        "seed": run.manifest.seed,
        "notebooks_ok": f"{ok}/{len(NOTEBOOKS)}",
        "state": state,
        "accept_length": None if length is None else round(length, 3),
        "megabytes": round(sum(path.lstat().st_size for path in run.path.rglob("*") if path.is_file()) / 1e6, 1),
    }
