"""How every figure looks. Colours that the colour-blind and a grey printer can tell apart, with markers besides.

Figures are built without pyplot: nothing global changes, and a figure in one cell cannot leak into another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6A3D9A", "#4D4D4D")
"""Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), the yellow left out: it vanishes on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")

_RC: dict[Any, Any] = {
    "figure.dpi": 110,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@contextmanager
def styled() -> Iterator[None]:
    """The settings above, inside the block only."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_figure(panels: int = 1, *, width: float = 7.0, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` axes side by side; width and height in inches. Call it inside `styled()`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def colour(index: int) -> str:
    """Colour number `index`, going round."""
    return PALETTE[index % len(PALETTE)]


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of line number `index`: three signs, so that grey print keeps two."""
    return {
        "color": colour(index),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "markersize": 5,
    }
