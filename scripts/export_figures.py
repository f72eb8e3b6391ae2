"""Copy the figures of a finished run into figures/, with the manifest and the metrics that made them.

make figures            the newest run whose acceptance was measured at the default or long preset
make figures RUN=PATH   that run
"""

from __future__ import annotations

import shutil
import sys

from eagle3lab.core.errors import Eagle3LabError, RunError
from eagle3lab.core.paths import repository
from eagle3lab.runs.directory import Run

KINDS = (".png", ".pdf", ".csv", ".json")


def reference(words: list[str]) -> Run:
    """The run named on the command line, or the newest measured one that is not `quick`."""
    if words:
        return Run.open(words[0])
    for run in Run.all():
        if run.step_state("accept") == "ok" and run.manifest.preset != "quick":
            return run
    raise RunError("no finished run at the default or long preset", rule="figures come from one", fix="make run")


def main() -> int:
    """Copy, and print what was copied."""
    try:
        run = reference(sys.argv[1:])
        run.require("accept")
    except Eagle3LabError as error:
        print(f"eagle3lab: {error}", file=sys.stderr)
        return error.exit_code
    folder = repository() / "figures"
    for old in folder.iterdir():
        if old.suffix in KINDS:
            old.unlink()
    names = [path for path in sorted(run.figures.iterdir()) if path.suffix in KINDS]
    for path in [*names, run.path / "manifest.json", run.path / "metrics.json"]:
        shutil.copyfile(path, folder / path.name)
    print(f"{len(names)} files of {run.path.name} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
