"""What notebooks use to talk: words as Markdown, tables, progress bars that also read well in a log."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from eagle3lab.runs.directory import Run

LOG_SECONDS = 2.0
"""Least time between two redraws of a bar: an executed notebook keeps every one of them."""


def say(text: str) -> None:
    """Show `text` as Markdown in a notebook, as it is anywhere else."""
    try:
        from IPython import get_ipython
        from IPython.display import Markdown, display
    except ImportError:
        print(text)
        return
    if get_ipython() is None:
        print(text)
    else:
        display(Markdown(text))


def fenced(text: str, width: int = 92) -> str:
    """`text` as a Markdown block of fixed width, long lines broken between words.

    JupyterLab breaks such a block inside words instead.
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip(" -")))
        kept = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += [line] if len(line) <= width else kept
    return "\n".join(["```", *lines, "```"])


def show_html(code: str) -> None:
    """Show HTML made by `eagle3lab.plots` (already escaped)."""
    from IPython.display import HTML, display

    display(HTML(code))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; None prints as `unknown`, pipes inside cells are escaped."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join("unknown" if c is None else str(c).replace("|", "\\|") for c in cells) + " |"

    return "\n".join([line(head), "|" + " --- |" * len(head), *(line(row) for row in rows)])


@contextmanager
def bar(description: str, unit: str = " tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar for steps that tell how much of what is done: yields `update(done, total)`."""
    from tqdm import tqdm

    with tqdm(
        desc=description, unit=unit, unit_scale=True, mininterval=LOG_SECONDS, file=sys.stderr, ncols=100
    ) as line:

        def update(done: int, total: int) -> None:
            line.total = total
            line.update(done - line.n)

        yield update


@contextmanager
def training_bar(run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar over the optimiser steps of `run`, with loss, accuracy, tokens/s and the time that remains."""
    from tqdm import tqdm

    total = run.preset.train_steps
    with tqdm(total=total, desc="training", unit=" steps", mininterval=LOG_SECONDS, file=sys.stderr, ncols=110) as line:

        def update(row: dict[str, Any]) -> None:
            speed, right = row["tokens_per_second"], row["accuracy_by_step"][0]
            line.set_postfix_str(f"loss {row['loss']:.2f}, right {right:.0%}, {speed:.0f} tokens/s", refresh=False)
            line.update(row["step"] - line.n)

        yield update


@contextmanager
def counting_bar() -> Iterator[Callable[[str, int], None]]:
    """A counter for `measure`: yields `update(what, tokens)`; every new `what` is a line of its own."""
    from tqdm import tqdm

    shown, line = "", None

    def update(what: str, tokens: int) -> None:
        nonlocal shown, line
        if line is None or what != shown:
            if line is not None:
                line.close()
            shown = what
            line = tqdm(desc=what, unit=" tokens", mininterval=LOG_SECONDS, file=sys.stderr, ncols=100)
        line.update(tokens - line.n)

    try:
        yield update
    finally:
        if line is not None:
            line.close()
