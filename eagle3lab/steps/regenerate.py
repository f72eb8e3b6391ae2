"""`eagle3lab regenerate`: let the served target answer a file of prompts, so that a drafter learns its own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle3lab.core.errors import UsageError
from eagle3lab.core.files import require_place
from eagle3lab.corpus.prompts import read_prompts
from eagle3lab.corpus.regenerate import Outcome, Settings, regenerate, served_model, settings_path
from eagle3lab.steps.options import require

EXAMPLES = 5
"""Failed prompts that are named; all of them are counted."""


@dataclass(frozen=True, slots=True)
class Regenerated:
    """Result of the command. Exit code 1 when a prompt got no reply: the file is good, but not complete."""

    out: Path
    settings: Settings
    prompts: int
    outcome: Outcome

    @property
    def exit_code(self) -> int:
        """0 = every prompt has a reply."""
        return 1 if self.outcome.failed else 0

    def as_json(self) -> dict[str, Any]:
        """Counts and settings."""
        done = self.outcome
        return {
            "out": str(self.out),
            "model": self.settings.model,
            "temperature": self.settings.temperature,
            "prompts": self.prompts,
            "replies": done.replies,
            "new": done.new,
            "retries": done.retries,
            "failed": done.failed,
            "timing": {"seconds": done.seconds},
        }

    def as_text(self) -> str:
        """One line, and one for each of the first failures."""
        done, how = self.outcome, f"{self.settings.model}, temperature {self.settings.temperature:g}"
        lines = [
            f"{done.replies} of {self.prompts} replies in {self.out} ({done.new} new, {how}, {done.retries} requests "
            f"repeated, {done.seconds:.0f} s); made as {settings_path(self.out).name} says"
        ]
        lines += [f"no reply: {id}: {reason}" for id, reason in list(done.failed.items())[:EXAMPLES]]
        if len(done.failed) > EXAMPLES:
            lines.append(f"no reply: {len(done.failed) - EXAMPLES} more")
        return "\n".join(lines + (["next: the same command again asks for these alone"] if done.failed else []))


def regenerate_file(
    *,
    server: str,
    prompts: Path,
    out: Path,
    model: str | None = None,
    temperature: float = 0.0,
    max_tokens: int = 2048,
    seed: int = 0,
    concurrency: int = 32,
    retries: int = 5,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] = print,
) -> Regenerated:
    """Ask for every prompt of `prompts` that has no reply in `out` yet.

    Args:
        model: name of the target on the server; None = the first that it lists.
        thinking: passed to the chat template; None = the template's default.

    Raises:
        UsageError: a server address that is no URL, or a number out of range.
    """
    try:
        whole = server.startswith(("http://", "https://")) and bool(urlsplit(server).port or urlsplit(server).hostname)
    except ValueError:  # a port above 65535, a bracket that is not closed
        whole = False
    if not whole:
        raise UsageError(f"--server {server}", rule="a URL", fix="--server http://127.0.0.1:30000")
    require_place(out)
    require(
        ("--concurrency", concurrency, concurrency >= 1, ">= 1"),
        ("--retries", retries, retries >= 0, ">= 0"),
        ("--max-tokens", max_tokens, max_tokens >= 1, ">= 1"),
        ("--temperature", temperature, 0 <= temperature <= 2, "0 to 2; 0 is greedy"),
    )
    listed = read_prompts(prompts)
    template = None if thinking is None else {"thinking": thinking}
    settings = Settings(model or served_model(server.rstrip("/")), temperature, max_tokens, seed, template=template)
    done = regenerate(
        listed, out, settings, server=server, concurrency=concurrency, retries=retries, progress=progress, note=note
    )
    return Regenerated(out, settings, len(listed), done)
