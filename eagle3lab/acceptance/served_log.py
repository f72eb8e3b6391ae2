"""The file that makes a served measurement resumable: one JSON line a finished request, on disk before the next.

The first line says what is measured; a file of another measurement is refused. A line that a killed process left half
written is dropped. Failed requests are recorded and tried again on resume.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import AcceptanceError
from eagle3lab.core.files import require_place

SCHEMA = "eagle3lab-served/1"


class ServedLog:
    """Records of one measurement, in memory and, with a path, on disk.

    Args:
        path: JSON lines; None keeps the records in memory only.
        identity: all that decides the numbers: prompts' hash, settings, server facts.

    Raises:
        AcceptanceError: the file belongs to another measurement (the differing keys are named), or is no such file.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        self.path, self.identity = path, identity
        self.records: list[dict[str, Any]] = []
        self.dropped = 0
        self._lock = threading.Lock()
        if path is not None:
            require_place(path)
        if path is not None and path.exists() and path.stat().st_size:
            self._load(path)
        else:
            self._append({"schema": SCHEMA, "identity": identity})

    def add(self, record: dict[str, Any]) -> None:
        """Append one record; it is on disk when this returns. Safe from several threads."""
        with self._lock:
            self.records.append(record)
            self._append(record)

    def latest(self, kind: str, role: str) -> dict[str, dict[str, Any]]:
        """Last record by name of one kind (`prompt` or `group`) and role (`server` or `baseline`)."""
        found = [r for r in self.records if r.get("kind") == kind and r.get("role") == role]
        return {record["name"]: record for record in found}

    def _append(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("ab") as handle:
            handle.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())

    def _load(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
        except ValueError as error:
            raise AcceptanceError(
                f"{path} is not a record of a measurement ({error})", fix="name a new file"
            ) from error
        first = rows[0] if rows and isinstance(rows[0], dict) else {}
        if first.get("schema") != SCHEMA:
            raise AcceptanceError(
                f"{path} starts with {str(first)[:60]}", rule=f"schema {SCHEMA}", fix="name a new file for --resume"
            )
        theirs = first.get("identity") or {}
        wrong = [key for key in {**theirs, **self.identity} if theirs.get(key) != self.identity.get(key)]
        if wrong:
            shown = ", ".join(f"{key} {theirs.get(key)!r}, now {self.identity.get(key)!r}" for key in wrong)
            raise AcceptanceError(
                f"{path} holds another measurement: {shown[:300]}",
                rule="only the same measurement is resumed",
                fix="name a new file for --resume",
            )
        self.records = rows[1:]
        self.dropped = len(data) - len(whole)
        if self.dropped:
            with path.open("r+b") as handle:
                handle.truncate(len(whole))
