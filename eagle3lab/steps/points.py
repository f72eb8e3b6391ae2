"""`eagle3lab points`: which points an engine captures for a list of ids, and which list to write for given points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import PointsError, UsageError
from eagle3lab.points import Captured, Written, captured, family_of, written
from eagle3lab.steps.output import table
from eagle3lab.targets.config import read_config, text_config


@dataclass(frozen=True)
class PointsOutcome:
    """Answer for one engine. `writes` is what to write for `found.resid_pre`; None when `ids` were the question."""

    blocks: int
    engine: str
    family: str | None
    version: str | None
    ids: list[int] | None
    found: Captured
    writes: list[Written] | None

    @property
    def exit_code(self) -> int:
        """1 when the engine refuses the list or captures fewer states than it has ids."""
        wanted = len(self.found.resid_pre) if self.ids is None else len(self.ids)
        return 1 if self.found.refused or len(self.found.resid_pre) < wanted else 0

    def as_json(self) -> dict[str, Any]:
        """`resid_pre`, `ambiguous`, `notes`, and what was asked."""
        answer: dict[str, Any] = {
            "resid_pre": self.found.resid_pre,
            "ambiguous": self.found.ambiguous,
            "notes": self.found.notes,
            "refused": self.found.refused,
            "ids": self.ids,
            "blocks": self.blocks,
            "engine": self.engine,
            "family": self.family,
            "engine_version": self.version,
        }
        if self.writes is not None:
            answer["write"] = [{"ids": entry.ids, "key": entry.key} for entry in self.writes]
        return answer

    def as_text(self) -> str:
        """A table of points, then the notes."""
        engine = self.engine + (f" {self.version}" if self.version else "")
        head = f"{engine}, family {self.family or 'not given'}, n = {self.blocks} blocks"
        if self.writes is not None:
            rows = [(entry.key, _comma(entry.ids)) for entry in self.writes]
            body = table(("write under", "the list"), rows)
        else:
            body = f"ids as written: {'none' if self.ids is None else _comma(self.ids)}"
        words = [(point, _meaning(point, self.blocks)) for point in self.found.resid_pre]
        state = "refused by the engine" if self.found.refused else "ambiguous" if self.found.ambiguous else ""
        parts = [head, body, "", table(("resid_pre", "which is"), words) if words else "nothing is captured"]
        if state:
            parts.append(state)
        return "\n".join([*parts, "", *(f"note: {note}" for note in self.found.notes)]).rstrip()


def points(
    *,
    engine: str,
    blocks: int | None = None,
    ids: Sequence[int] | None = None,
    resid_pre: Sequence[int] | None = None,
    family: str | None = None,
    target: Path | None = None,
    version: str | None = None,
) -> PointsOutcome:
    """Convert `ids` to points, or `resid_pre` to the list to write when it is given.

    Args:
        target: folder with the target's config.json, from which family and blocks are read when they are not given.

    Raises:
        PointsError: unknown names, invalid points, points that the engine cannot capture.
        ProfileError: no readable config.json in `target`.
        UsageError: no number of blocks, or one that the target's config contradicts.
    """
    if target is not None:
        blocks, family = _from_target(target, blocks, family)
    if blocks is None:
        raise UsageError("no number of blocks", rule="--blocks N, or --target DIR with a config.json")
    writes = None
    if resid_pre is not None:
        writes = written(resid_pre, blocks=blocks, engine=engine, family=family, version=version)
        ids = writes[0].ids
    listed = None if ids is None else list(ids)
    found = captured(listed, blocks=blocks, engine=engine, family=family, version=version)
    return PointsOutcome(blocks, engine, family, version, listed, found, writes)


def parse_ids(text: str | None, flag: str) -> list[int] | None:
    """`2,30,58` or `[2, 30, 58]` -> list; `none`, `null` or nothing -> None. `UsageError` names the flag."""
    if text is None or text.strip().lower() in ("none", "null"):
        return None
    try:
        return [int(part) for part in text.strip().strip("[]").split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}", rule="integers with commas, such as 2,30,58, or none") from error


def _from_target(target: Path, blocks: int | None, family: str | None) -> tuple[int | None, str | None]:
    config = read_config(target)
    text = text_config(config)
    found = text.get("num_hidden_layers")
    if blocks is not None and found is not None and found != blocks:
        raise UsageError(f"--blocks {blocks}, but {target} says num_hidden_layers {found}", rule="the two agree")
    known = family_of(config)
    if known is None and family is None:
        model_type = config.get("model_type", text.get("model_type", "unknown"))
        raise PointsError(f"{target}: model_type '{model_type}' is no known family", fix="add --family NAME")
    return (found if blocks is None else blocks), family or known


def _comma(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _meaning(point: int, blocks: int) -> str:
    if point == 0:
        return "the embedding"
    if point == blocks:
        return f"output of block {point - 1}, before the final norm"
    return f"input of block {point} = output of block {point - 1}"
