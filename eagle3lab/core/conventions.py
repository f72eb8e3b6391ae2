"""Names of the loss masks' conventions, without torch; `eagle3lab.training.conventions` has the rules."""

from __future__ import annotations

from typing import Literal, get_args

Convention = Literal["served", "specforge", "speculators"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
