"""Look at the weights of a drafter by hand: tensor, point block, log scale, another checkpoint for comparison.

`Browser.plot(choice)` is a pure function of the files and the choice, and is what the tests call. `fc_widget` only
wires controls to it. A viewer that runs no widgets sees the static twin, which the same output carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3lab.core.errors import Eagle3LabError, UsageError, nearest
from eagle3lab.inspection.distribution import Distribution, distribution
from eagle3lab.inspection.formats import WEIGHT_FORMATS
from eagle3lab.inspection.layout import FcLayout, find_fc
from eagle3lab.inspection.matrices import as_layout
from eagle3lab.inspection.report import number
from eagle3lab.inspection.scan import Scan, scan_fc
from eagle3lab.inspection.tensorfile import Checkpoint, open_checkpoint
from eagle3lab.plots.fc import weight_histogram
from eagle3lab.plots.publish import SCREEN_DPI, Plot, Published, render

if TYPE_CHECKING:
    from ipywidgets import VBox

ALL = "all"
BINS, SPAN = 72, 4.0
"""About how many bins are drawn, and how many standard deviations they reach to each side."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the controls say. block: `all` or the name of a point. compare: draw the other checkpoint too."""

    tensor: str
    block: str = ALL
    log: bool = False
    compare: bool = False


class Browser:
    """The matrices of a checkpoint, scanned when first asked for.

    Args:
        path: drafter folder or .safetensors file.
        other: checkpoint to compare with, or None.
        points: names of fc's column blocks.
    """

    def __init__(self, path: Path | str, *, other: Path | str | None = None, points: list[str] | None = None) -> None:
        self._checkpoint = open_checkpoint(path)
        self._other = None if other is None else open_checkpoint(other)
        self._fc = find_fc(self._checkpoint, points=points)
        self._points = self._fc.points
        self._scans: dict[tuple[bool, str], Scan] = {}

    @property
    def tensors(self) -> list[str]:
        """Names of all weight matrices, fc first."""
        found = [t.name for t in self._checkpoint if len(t.shape) == 2 and t.size and t.dtype in WEIGHT_FORMATS]
        return [self._fc.name, *(name for name in found if name != self._fc.name)]

    @property
    def first(self) -> Choice:
        """What is shown before anybody chooses."""
        return Choice(self._fc.name)

    @property
    def can_compare(self) -> bool:
        """Whether another checkpoint was given."""
        return self._other is not None

    def blocks(self, tensor: str) -> list[str]:
        """Blocks that `tensor` has: `all`, and the points when it is fc."""
        return [ALL, *self._points] if tensor == self._fc.name else [ALL]

    def plot(self, choice: Choice) -> Plot:
        """Histogram of the chosen weights.

        Raises:
            UsageError: a tensor or block that is not there.
            CheckpointError: the other checkpoint has no such tensor.
        """
        if choice.tensor not in self.tensors:
            raise UsageError(f"tensor {choice.tensor!r}", rule=nearest(choice.tensor, self.tensors))
        if choice.block not in self.blocks(choice.tensor):
            raise UsageError(f"block {choice.block!r}", rule=nearest(choice.block, self.blocks(choice.tensor)))
        shown = self._weights(choice, other=False)
        edges = _bin_edges(shown)
        series = [{"label": "this checkpoint", "density": _density(shown, edges)}]
        if choice.compare and self._other is not None:
            series.append({"label": "the other", "density": _density(self._weights(choice, other=True), edges)})
        title = choice.tensor if choice.block == ALL else f"{choice.tensor}, point {choice.block}"
        drawn = weight_histogram(edges.tolist(), series, title=title, log=choice.log)
        return replace(drawn, alt=f"{drawn.alt} {self.describe(choice)}")

    def describe(self, choice: Choice) -> str:
        """The same in words: moments with standard errors."""
        m = self._weights(choice, other=False).moments
        return (
            f"{choice.tensor} ({choice.block}): mean {number(m.mean, m.mean_se)}, std {number(m.std, m.std_se)}, "
            f"excess kurtosis {number(m.kurtosis, m.kurtosis_se)}, largest magnitude {m.largest:.6g}."
        )

    def _weights(self, choice: Choice, *, other: bool) -> Distribution:
        scan = self._scan(choice.tensor, other=other)
        return distribution(scan, None if choice.block == ALL else scan.layout.points.index(choice.block))

    def _scan(self, tensor: str, *, other: bool) -> Scan:
        key = (other, tensor)
        if key not in self._scans:
            self._scans[key] = scan_fc(self._layout(tensor, other=other))
        return self._scans[key]

    def _layout(self, tensor: str, *, other: bool) -> FcLayout:
        checkpoint: Checkpoint = self._other if other and self._other is not None else self._checkpoint
        if tensor == self._fc.name:
            return find_fc(checkpoint, points=self._points)
        return as_layout(checkpoint[tensor])


def _bin_edges(found: Distribution) -> np.ndarray:
    """Bins a power of two wide: other widths hold now more, now fewer cells of a 16-bit grid, and show teeth."""
    std = found.moments.std
    std = std if math.isfinite(std) and std > 0 else 1.0
    width = 2.0 ** round(math.log2(2 * SPAN * std / BINS))
    side = math.ceil(SPAN * std / width)
    return np.arange(-side, side + 1) * width


def _density(found: Distribution, edges: np.ndarray) -> list[float]:
    counts, _ = np.histogram(found.values, edges, weights=found.counts)
    return (counts / max(1, found.n) / np.diff(edges)).tolist()


def after_tensor(browser: Browser, choice: Choice, tensor: str) -> Choice:
    """The choice once another tensor is picked: a block that it does not have falls back to `all`."""
    return replace(choice, tensor=tensor, block=choice.block if choice.block in browser.blocks(tensor) else ALL)


def static_twin(browser: Browser, choice: Choice | None = None) -> Published:
    """The figure of a choice as a picture with its words, for viewers that run no widgets."""
    plot = browser.plot(choice or browser.first)
    return Published(Path(), render(plot.figure, "png", dpi=SCREEN_DPI), plot.alt)


def fc_widget(browser: Browser, *, show: Callable[[Any], None] | None = None) -> VBox:
    """Controls above the figure. Errors are shown as their one line, inside the figure's place.

    Args:
        show: displays the picture; IPython's `display` when None.
    """
    import ipywidgets as w

    if show is None:
        from IPython.display import display

        show = display
    first = browser.first
    tensor = w.Dropdown(options=browser.tensors, value=first.tensor, description="tensor")
    block = w.ToggleButtons(options=browser.blocks(first.tensor), value=first.block, description="point")
    log = w.Checkbox(value=first.log, description="log scale")
    compare = w.Checkbox(value=first.compare, description="compare", disabled=not browser.can_compare)
    place = w.Output()

    picture = show

    def draw(_: Any = None) -> None:
        choice = Choice(tensor.value, block.value, log.value, compare.value)
        place.clear_output(wait=True)
        with place:
            try:
                picture(static_twin(browser, choice))
            except Eagle3LabError as error:
                print(error)

    def change_tensor(_: Any) -> None:
        kept = after_tensor(browser, Choice(tensor.value, block.value or ALL), tensor.value).block
        block.unobserve(draw, "value")
        block.options = browser.blocks(tensor.value)
        block.value = kept
        block.observe(draw, "value")
        draw()

    tensor.observe(change_tensor, "value")
    for control in (block, log, compare):
        control.observe(draw, "value")
    draw()
    return w.VBox([w.HBox([tensor, log, compare]), block, place])
