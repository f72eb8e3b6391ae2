"""Copy the figures of a finished run into figures/, with the manifest and the metrics that made them, and an index.

make figures            the newest run whose acceptance was measured at the default or long preset
make figures RUN=PATH   that run
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from eagle3lab.core.errors import Eagle3LabError, RunError
from eagle3lab.core.files import read_json, write_text
from eagle3lab.core.paths import repository
from eagle3lab.runs.directory import Run

KINDS = (".png", ".pdf", ".csv", ".json")
LARGEST = 1_000_000
"""Bytes of one committed file."""


def reference(words: list[str]) -> Run:
    """The run named on the command line, or the newest measured one that is not `quick`."""
    if words:
        return Run.open(words[0])
    for run in Run.all():
        if run.step_state("accept") == "ok" and run.manifest.preset != "quick":
            return run
    raise RunError("no finished run at the default or long preset", rule="figures come from one", fix="make run")


def export(run: Run, folder: Path) -> list[str]:
    """Replace what lies in `folder` by the figures of `run`; returns their names.

    Raises:
        RunError: acceptance was not measured, a figure lacks one of its four files, or a file is too large to commit.
    """
    run.require("accept")
    names = sorted(path.stem for path in run.figures.glob("*.png"))
    sources = [run.figures / f"{name}{kind}" for name in names for kind in KINDS]
    sources += [run.path / "manifest.json", run.path / "metrics.json"]
    if absent := [path.name for path in sources if not path.is_file()]:
        raise RunError(f"{run.path.name} lacks {', '.join(absent)}", rule="a figure has PNG, PDF, CSV and JSON")
    if large := [path.name for path in sources if path.stat().st_size > LARGEST]:
        raise RunError(f"{', '.join(large)} over {LARGEST} bytes", rule="figures are committed: keep them small")
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.suffix in KINDS:
            old.unlink()
    for path in sources:
        shutil.copyfile(path, folder / path.name)
    write_text(folder / "README.md", index(run, names))
    return names


def index(run: Run, names: list[str]) -> str:
    """What each figure shows, in words, and how to make all of them again."""
    manifest = run.manifest
    lines = [
        "# Figures of the reference run",
        "",
        f"Run `{run.path.name}`: {manifest.profile}, preset {manifest.preset}, seed {manifest.seed}; its",
        "[manifest](manifest.json) and [metrics](metrics.json). Written by `make figures`; do not edit by hand.",
        "",
        "```bash",
        f".venv/bin/{manifest.command}",
        "make figures RUN=runs/...",
        "```",
    ]
    for name in names:
        words = read_json(run.figures / f"{name}.json")
        lines += [
            "",
            f"## {words['title']}",
            "",
            f"![{words['title']}]({name}.png)",
            "",
            f"{words['alt']} [Data]({name}.csv), [PDF]({name}.pdf).",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Export, and print what was exported."""
    folder = repository() / "figures"
    try:
        run = reference(sys.argv[1:])
        names = export(run, folder)
    except Eagle3LabError as error:
        print(f"eagle3lab: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(names)} figures of {run.path.name} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
