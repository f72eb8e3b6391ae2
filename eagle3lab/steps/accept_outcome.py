"""What `accept replay`, `decode` and `served` print, and the gate that all three share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from eagle3lab.steps.options import require
from eagle3lab.steps.output import table


def check_options(*, gate: float | None, temperature: float | None, seed: int, limit: int | None = None) -> None:
    """Refuse (`UsageError`) what no measurement can mean: NaN passes every gate, a limit of -1 drops a prompt."""
    require(
        ("--min-accept-length", gate, gate is None or math.isfinite(gate), "a finite number"),
        ("--temperature", temperature, temperature is None or 0 <= temperature < math.inf, "0 or more"),
        ("--seed", seed, seed >= 0, "0 or more"),
        ("--limit", limit, limit is None or limit >= 1, "1 or more"),
    )


@dataclass(frozen=True, slots=True)
class AcceptOutcome:
    """A measurement of acceptance.

    Attributes:
        metrics: the keys of `accept --json`.
        title: what was measured, one line.
        gate: --min-accept-length, judged by the lower end of the interval; None = no gate.
        lines: more lines of the text form. problems: what makes the measurement incomplete; any of them exits 1.
        interval_over: what was resampled.
    """

    metrics: dict[str, Any]
    title: str
    gate: float | None = None
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    interval_over: str = "prompts"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> str | None:
        """Why the gate is missed, None when it is met or there is none. Without an interval it cannot be met."""
        if self.gate is None:
            return None
        interval = self.metrics.get("accept_length_interval")
        if interval is None:
            few = f"accept length has no interval (fewer than two {self.interval_over})"
            return f"{few}, so --min-accept-length {self.gate:g} cannot be judged"
        if interval[0] < self.gate:
            return f"lower end of the accept length {interval[0]:.4f} is below --min-accept-length {self.gate:g}"
        return None

    @property
    def exit_code(self) -> int:
        """1 when the gate is missed or the measurement is incomplete."""
        return 1 if self.missed or self.problems else 0

    def as_json(self) -> dict[str, Any]:
        """The metrics, the settings beside them, and the gate."""
        gate = None if self.gate is None else {"min_accept_length": self.gate, "met": self.missed is None}
        return {**self.metrics, "settings": self.settings, "gate": gate, "problems": list(self.problems)}

    def as_text(self) -> str:
        """Accept length with its interval first, then by position, then settings and problems."""
        m = self.metrics
        counts = m.get("counts") or {}
        head = f"accept length {shown(m.get('accept_length'))} {_interval(m.get('accept_length_interval'))}"
        lines = [
            self.title,
            f"{head} (1 + accepted / verify steps, bonus included; 95 % over {self.interval_over})",
            f"accept rate {shown(m.get('accept_rate'))} (accepted {shown(counts.get('accepted'))} of "
            f"{shown(counts.get('proposed'))} proposed, {shown(counts.get('verify_steps'))} verify steps)",
        ]
        if m.get("joint"):
            conditional = m.get("conditional") or [None] * len(m["joint"])
            rows = [
                [place, shown(joint), shown(c)]
                for place, (joint, c) in enumerate(zip(m["joint"], conditional, strict=True), 1)
            ]
            lines.append(table(["position", "joint", "conditional"], rows))
        else:
            lines.append("by position: unknown")
        lines += self.lines
        lines.append("settings: " + ", ".join(f"{name} {value}" for name, value in self.settings.items()))
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.gate is not None:
            lines.append(f"gate: {self.missed or f'accept length is at least {self.gate:g}'}")
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A number for people; None is unknown, never 0."""
    if value is None:
        return "unknown"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _interval(interval: Any) -> str:
    return "[interval unknown]" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]"
