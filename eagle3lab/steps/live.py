"""What a notebook shows while a drafter trains: a bar, and a figure that is redrawn in place."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from eagle3lab.plots.instruments import training_instruments
from eagle3lab.plots.publish import Plot, render
from eagle3lab.runs.directory import Run
from eagle3lab.steps.show import training_bar
from eagle3lab.targets.profiles import load_profile

REDRAW_SECONDS = 10.0
"""Least time between two drawings."""
DRAWING_SHARE = 0.02
"""Most of the time that drawing may take: the training waits meanwhile (over a second a drawing on two cores)."""


@contextmanager
def training_live(run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """The training bar of `run` and, in a notebook, its instruments. An executed notebook keeps the last drawing.

    Yields:
        `update(row)`, for `train_drafter(progress=...)`.
    """
    points, history = load_profile(run.manifest.profile).model.points, []
    figure = _Figure()
    due = 0.0
    with training_bar(run) as bar:

        def update(row: dict[str, Any]) -> None:
            nonlocal due
            bar(row)
            history.append(row)
            begun = time.monotonic()
            if begun >= due:
                figure.show(training_instruments(history, points))
                now = time.monotonic()
                due = now + max(REDRAW_SECONDS, (now - begun) / DRAWING_SHARE)

        yield update
    if history:
        figure.show(training_instruments(history, points))


class _Figure:
    """One place in a notebook's output; nothing anywhere else."""

    def __init__(self) -> None:
        self._handle: Any = None
        try:
            from IPython import get_ipython
        except ImportError:
            self._live = False
        else:
            self._live = get_ipython() is not None

    def show(self, plot: Plot) -> None:
        """Draw here, in place of what was drawn before."""
        if not self._live:
            return
        from IPython.display import display

        png = base64.b64encode(render(plot.figure, "png")).decode()
        data = {"image/png": png, "text/plain": f"[figure] {plot.alt}"}
        shown: dict[str, Any] = {"raw": True, "metadata": {"image/png": {"alt": plot.alt}}}
        if self._handle is None:
            self._handle = display(data, display_id=True, **shown)
        else:
            self._handle.update(data, **shown)
