"""Options of a command that have a right type and still cannot mean anything."""

from __future__ import annotations

from typing import Any

from eagle3lab.core.errors import UsageError


def require(*options: tuple[str, Any, bool, str]) -> None:
    """Refuse (`UsageError`) the first of some options (flag, value, whether it is right, rule) that is not right."""
    for flag, value, right, rule in options:
        if not right:
            raise UsageError(f"{flag} {value}", rule=rule)
