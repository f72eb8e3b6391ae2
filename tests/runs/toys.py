"""Notebooks made by hand, with the shape of real ones."""

from __future__ import annotations

from typing import Any

PARAMETERS = (
    'profile: str = "smollm2"  # p\npreset: str = "quick"  # q\nrun: str = ""  # r\nseed: int = 0  # s',
    'draft: str = ""  # d',
)


def notebook(*cells: str, draft: bool = False, **metadata: Any) -> dict[str, Any]:
    """A notebook with a parameters cell and `cells`, as nbformat 4.5 JSON."""
    first = PARAMETERS[0] + ("\n" + PARAMETERS[1] if draft else "")
    sources = [(first, ["parameters"]), *((cell, []) for cell in cells)]
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}} | metadata,
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "metadata": {"tags": tags} if tags else {},
                "source": source,
                "outputs": [],
                "execution_count": None,
            }
            for number, (source, tags) in enumerate(sources)
        ],
    }
