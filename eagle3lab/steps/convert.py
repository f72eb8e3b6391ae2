"""`eagle3lab convert`: a drafter, or captured states, into the layout of an engine or of another trainer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.drafter.layouts import check_layout


@dataclass(frozen=True)
class ConvertOutcome:
    """What was written where. kind: drafter | states; numbers: what was counted, by name."""

    kind: str
    source: str
    destination: str
    source_layout: str
    layout: str
    numbers: dict[str, int]
    points: list[int] | None
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Always 0: what cannot be converted is an error, not an outcome."""
        return 0

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    def as_text(self) -> str:
        """One line of what was done, then the notes."""
        counted = ", ".join(f"{value} {name}" for name, value in self.numbers.items())
        head = f"{self.kind}: {self.source} ({self.source_layout}) -> {self.destination} ({self.layout}): {counted}"
        points = "unknown" if self.points is None else ", ".join(map(str, self.points))
        return "\n".join([head, f"resid_pre: {points}", *(f"note: {note}" for note in self.notes)])


def convert(
    source: Path,
    destination: Path,
    *,
    to: str,
    target: Path | None = None,
    family: str | None = None,
    blocks: int | None = None,
    verifier: str | None = None,
) -> ConvertOutcome:
    """Convert what lies in `source`: a drafter (`config.json`), or states (`manifest.json`, `*.ckpt`, `hs_*`).

    Raises:
        UsageError: an unknown layout, a source that is neither, or an option that this conversion would not read.
        CheckpointError, StoreError, PointsError: what the other side cannot express, or a broken source.
    """
    layout = check_layout(to)
    if not source.is_dir():
        raise UsageError(f"no folder {source}", rule="the source is a drafter's folder or a folder of states")
    if target is not None and not target.exists():
        raise UsageError(f"--target {target} is not there", rule="the target's folder")
    drafter = (source / "config.json").is_file()
    if verifier is not None and not (drafter and layout == "speculators"):
        raise UsageError(
            f"--verifier {verifier} with {'' if drafter else 'states and '}--to {layout}",
            rule="a drafter's config of the layout speculators names its verifier, nothing else does",
            fix="leave out --verifier, or --to speculators",
        )
    if drafter:
        from eagle3lab.drafter.convert import convert_checkpoint

        done = convert_checkpoint(
            source, destination, layout, target=target, family=family, blocks=blocks, verifier=verifier
        )
        numbers = {"tensors": done.tensors, "renamed": done.renamed, "bytes": done.bytes}
        return ConvertOutcome(
            "drafter", str(source), str(destination), done.source, layout, numbers, done.config.points, done.notes
        )
    from eagle3lab.capture.exchange import convert_states, states_kind

    kind = states_kind(source)
    if kind is None:
        raise UsageError(
            f"{source} has no config.json, manifest.json, *.ckpt or hs_*.safetensors",
            rule="the source is a drafter's folder or a folder of states",
        )
    if unread := [name for name, value in (("--family", family), ("--blocks", blocks)) if value is not None]:
        raise UsageError(f"{unread[0]} with captured states", rule="only a drafter's layer ids depend on it")
    moved = convert_states(source, destination, layout, target=target)
    return ConvertOutcome(
        "states",
        str(source),
        str(destination),
        kind,
        layout,
        {"samples": moved.samples, "tokens": moved.tokens},
        moved.points,
        moved.notes,
    )
