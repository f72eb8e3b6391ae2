"""Error classes, one a boundary. Every message is one line: what, the actual value, the rule, the next command.

`Eagle3LabError` carries the exit code that the command line uses (DESIGN: 2 = the work could not start).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Eagle3LabError(Exception):
    """Base of every error that a user can cause or meet. `str(error)` is the one line that is printed.

    Args:
        what: what went wrong, with the actual value in it.
        rule: what would have been right.
        fix: the next command to type, or the next thing to do.
    """

    exit_code = 2

    def __init__(self, what: str, *, rule: str = "", fix: str = "") -> None:
        self.what, self.rule, self.fix = what, rule, fix
        super().__init__("; ".join(part for part in (what, rule, f"next: {fix}" if fix else "") if part))


class UsageError(Eagle3LabError):
    """A flag, parameter or name that does not exist or has the wrong type."""


class ProfileError(Eagle3LabError):
    """A target profile that is unknown, unreadable or inconsistent."""


class FetchError(Eagle3LabError):
    """A model file that could not be fetched, or that is not the file its hash promises."""


class CorpusError(Eagle3LabError):
    """Prompts, responses or loss masks that cannot be used."""


class StoreError(Eagle3LabError):
    """A folder of captured hidden states that is missing, damaged or belongs to something else."""


class PointsError(Eagle3LabError):
    """Capture points out of range, unsorted, duplicated, or not the ones that the other side has."""


class CheckpointError(Eagle3LabError):
    """A drafter checkpoint that cannot be read or written as asked."""


class TrainingError(Eagle3LabError):
    """Training that cannot start, or was stopped because its numbers became meaningless."""


class AcceptanceError(Eagle3LabError):
    """Acceptance counts that are impossible, or a measurement that proved itself wrong."""


class ServerError(Eagle3LabError):
    """An engine process that did not start, or does not run what was asked."""


class RunError(Eagle3LabError):
    """A run directory that is missing, unfinished or not resumable."""


class DiskError(Eagle3LabError):
    """Not enough disk for what is about to be written."""


def closest(name: str, known: Iterable[str]) -> tuple[str, float]:
    """(the known name that `name` most probably misspells, how alike they are from 0 to 1)."""
    alike = {one: difflib.SequenceMatcher(None, name, one).ratio() for one in known}
    best = max(alike, key=alike.__getitem__)
    return best, alike[best]


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known name, or the sorted list of all known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(names)
