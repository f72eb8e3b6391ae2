"""Names that a training chooses by, without torch: loss masks (`eagle3lab.training.conventions`), schedules."""

from __future__ import annotations

from typing import Literal, get_args

Convention = Literal["served", "specforge", "speculators"]
Schedule = Literal["cosine", "linear"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
