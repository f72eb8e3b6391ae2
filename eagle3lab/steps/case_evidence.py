"""Answers of a real engine, committed under `data/evidence`: read, labelled as such, never computed again here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.sources import from_sglang_meta_info
from eagle3lab.core.errors import AcceptanceError, RunError
from eagle3lab.core.files import read_json
from eagle3lab.core.paths import data_folder

if TYPE_CHECKING:
    from eagle3lab.acceptance.flags import Algorithm

REMAKE = "EAGLE3LAB_WRITE_EVIDENCE=1 make test-engines"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One committed file of a real engine's answers.

    Attributes:
        facts: the file, or None; problem: why it is None, one line.
        counts: of each prompt, by its id; texts: its tokens. meta: what the engine said of it.
    """

    algorithm: Algorithm
    path: Path
    facts: dict[str, Any] | None
    counts: dict[str, AcceptanceCounts]
    meta: dict[str, dict[str, Any]]
    texts: dict[str, list[int]]
    problem: str = ""


def read_evidence(algorithm: Algorithm, folder: Path | None = None) -> Evidence:
    """The answers of a real SGLang under `algorithm` from `data/evidence`; absent or broken is said, not raised."""
    path = (folder or data_folder() / "evidence") / f"sglang-{algorithm.lower()}.json"
    if not path.is_file():
        return Evidence(algorithm, path, None, {}, {}, {}, f"{path.name} is not here: nothing is shown in its place")
    try:
        facts = read_json(path)
        meta = {str(one["id"]): dict(one["meta_info"]) for one in facts["prompts"]}
        texts = {str(one["id"]): list(one["tokens"]) for one in facts["prompts"]}
        steps = facts["arguments"]["speculative_num_steps"]
        counts = {name: from_sglang_meta_info(one, steps=steps, prompt=name) for name, one in meta.items()}
        known = {name: one for name, one in counts.items() if one is not None}
        if not all(isinstance(facts[key], str) for key in ("what", "command", "date")):
            raise TypeError("what, command and date are text")
        facts["versions"] = {str(name): str(version) for name, version in facts["versions"].items()}
    except (RunError, AcceptanceError, KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        return Evidence(algorithm, path, None, {}, {}, {}, f"{path.name} cannot be read ({told})")
    return Evidence(algorithm, path, facts, known, meta, texts)


def evidence_label(found: Evidence) -> str:
    """Where a file comes from, in one line; or that it is not there, and how to make it."""
    if found.facts is None:
        return f"**{found.algorithm}**: {found.problem}. It is made by `{REMAKE}`."
    versions = ", ".join(f"{name} {version}" for name, version in found.facts["versions"].items())
    return (
        f"**{found.algorithm}**: committed evidence `data/evidence/{found.path.name}`, not computed here. "
        f"{found.facts['what']}. Made {found.facts['date']} by `{found.facts['command']}` with {versions}."
    )


def evidence_rows(pair: tuple[Evidence, Evidence]) -> list[tuple[object, ...]]:
    """One row a flag and prompt: counts, accept length from counts, and the length that SGLang itself reports."""
    rows: list[tuple[object, ...]] = []
    for found in pair:
        for name, counts in found.counts.items():
            length = f"{counts.accept_length:.2f}" if counts.accept_length else None
            told = found.meta[name].get("spec_accept_length")
            rows.append(
                (found.algorithm, name, counts.verify_steps, counts.proposed, counts.accepted, length,
                 None if told is None else f"{told:.4f}", same_reply(pair, name))
            )  # fmt: skip
    return rows


EVIDENCE_HEAD = (
    "flag", "prompt", "verify steps", "drafted", "accepted", "accept length from counts", "SGLang's spec_accept_length",
    "same text under both flags",
)  # fmt: skip


def same_reply(pair: tuple[Evidence, Evidence], name: str) -> str:
    """Whether both flags wrote the same tokens for a prompt; `unknown` when one of them did not answer it."""
    first, second = (found.texts.get(name) for found in pair)
    return "unknown" if first is None or second is None else "yes" if first == second else "no"
