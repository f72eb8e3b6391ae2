"""Save a figure with everything that belongs to it, and hand it to the notebook.

figures/<notebook>_<name>.png   300 dpi
figures/<notebook>_<name>.pdf   vector, fonts as text
figures/<notebook>_<name>.csv   the plotted numbers
figures/<notebook>_<name>.json  title and alternative text, for the report and for people who do not see it
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.core.errors import UsageError
from eagle3lab.core.files import write_bytes, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 300
SCREEN_DPI = 110


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure, the numbers it shows, and what it says in words.

    Attributes:
        figure: matplotlib figure.
        rows: plotted data, one mapping a row, same keys in each.
        title: a short name.
        alt: what a reader who cannot see the figure has to know; computed from the data.
    """

    figure: Figure
    rows: Sequence[Mapping[str, Any]]
    title: str
    alt: str

    def publish(self, folder: Path, name: str) -> Published:
        """Write the four files `folder/name.*`, each whole or not at all, and return what a notebook shows."""
        return publish(self, folder, name)


@dataclass(frozen=True, slots=True)
class Published:
    """What a notebook displays: the PNG, with the alternative text beside it."""

    path: Path
    png: bytes
    alt: str

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": f"[figure] {self.alt}"}
        return data, {"image/png": {"alt": self.alt}}


def publish(plot: Plot, folder: Path, name: str) -> Published:
    """Write PNG, PDF, CSV and JSON of `plot` as `folder/name.*`.

    The files depend on the data alone: no time stamps inside.

    Raises:
        UsageError: `name` is no plain file name, or there is no data row or alternative text.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UsageError(f"figure name {name!r}", rule="letters, digits, _ . - only")
    if not plot.rows or not plot.alt:
        raise UsageError(f"figure {name} has {len(plot.rows)} data rows", rule="data and alternative text are required")
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / f"{name}.png", render(plot.figure, "png", dpi=DPI))
    write_bytes(folder / f"{name}.pdf", render(plot.figure, "pdf"))
    write_text(folder / f"{name}.csv", to_csv(plot.rows))
    write_json(folder / f"{name}.json", {"title": plot.title, "alt": plot.alt, "data": f"{name}.csv"})
    return Published(folder / f"{name}.png", render(plot.figure, "png", dpi=SCREEN_DPI), plot.alt)


def render(figure: Figure, kind: str, *, dpi: int = SCREEN_DPI) -> bytes:
    """`figure` as PNG or PDF bytes, without dates or program versions inside."""
    from eagle3lab.plots.style import styled

    metadata: dict[str, Any] = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}[kind]
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; None is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
