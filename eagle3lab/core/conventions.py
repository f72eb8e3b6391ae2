"""Names of the loss masks' conventions, without torch; `eagle3lab.training.conventions` has the rules."""

from __future__ import annotations

from typing import Literal

Convention = Literal["served", "specforge", "speculators"]
