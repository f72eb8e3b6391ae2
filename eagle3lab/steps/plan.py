"""`eagle3lab plan`: will the target fit, how much context is left, what do the states and the training cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import ProfileError, UsageError
from eagle3lab.core.files import free_bytes
from eagle3lab.core.paths import cache_folder
from eagle3lab.core.safetensors_header import read_header
from eagle3lab.steps.output import table
from eagle3lab.targets.config import read_config
from eagle3lab.targets.plan import (
    GIB,
    ID_AND_MASK_BYTES,
    KNOWN_MEMORIES,
    DrafterShape,
    Fit,
    TrainingMemory,
    fit,
    parse_memory,
    state_bytes_per_token,
    training_memory,
)
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.targets.shapes import TargetShape, target_shape

BATCH_TOKENS = 4096
TTT_STEPS = 7
CONTEXTS = (4096, 32768, 131072)


@dataclass(frozen=True)
class PlanOutcome:
    """The whole plan. `fits` has one entry when GPU memory was given, else one a common size; sizes in bytes."""

    name: str
    shape: TargetShape
    points: int
    fits: list[Fit]
    asked: bool
    files_bytes: int | None
    samples: int | None
    tokens: int | None
    free: int
    training: TrainingMemory
    notes: list[str]

    @property
    def state_bytes(self) -> int:
        """Stored bytes a token, `last` included."""
        return state_bytes_per_token(self.shape.hidden_size, self.points)

    @property
    def states_total(self) -> int | None:
        """Bytes of all states; None while samples or tokens are not given."""
        if self.samples is None or self.tokens is None:
            return None
        return self.samples * self.tokens * (self.state_bytes + ID_AND_MASK_BYTES)

    @property
    def refusals(self) -> list[str]:
        """Why the plan cannot work; only what was asked for is judged."""
        return [f"refused: {entry.reason}" for entry in self.fits if self.asked and entry.verdict == "refused"]

    @property
    def exit_code(self) -> int:
        """1 when the plan is refused."""
        return 1 if self.refusals else 0

    def as_json(self) -> dict[str, Any]:
        """All numbers, in bytes, tokens and parameters."""
        routed = next((part for part in self.shape.parts if part.kind == "routed experts"), None)
        rest = self.shape.stored_bytes - (routed.stored_bytes if routed else 0)
        return {
            "target": self.name,
            "verdict": self.fits[0].verdict if self.asked else "not judged",
            "refusals": self.refusals,
            "weights": {
                "parameters": self.shape.parameters,
                "routed_expert_parameters": routed.parameters if routed else 0,
                "routed_expert_bytes": round(routed.stored_bytes) if routed else 0,
                "rest_bytes": round(rest),
                "total_bytes": round(self.shape.stored_bytes),
                "files_bytes": self.files_bytes,
                "parts": {part.kind: round(part.stored_bytes) for part in self.shape.parts},
            },
            "fits": [_fit_json(entry, self.shape.context) for entry in self.fits],
            "states": {
                "bytes_per_token": self.state_bytes,
                "samples": self.samples,
                "tokens_per_sample": self.tokens,
                "total_bytes": self.states_total,
                "free_bytes": self.free,
            },
            "training": {
                "trained_parameters": self.training.parameters,
                "weights_and_optimiser_bytes": self.training.optimiser_and_weights,
                "frozen_bytes": self.training.frozen,
                "activation_bytes_estimate": self.training.activations,
                "total_bytes_estimate": self.training.total,
                "batch_tokens": BATCH_TOKENS,
                "ttt_steps": TTT_STEPS,
            },
            "notes": self.notes,
        }

    def as_text(self) -> str:
        """Tables: weights by kind, GPU memory, states, training."""
        shape = self.shape
        rows = [(part.kind, f"{part.parameters / 1e9:.3f}e9", _gb(part.stored_bytes)) for part in shape.parts]
        rows.append(("all", f"{shape.parameters / 1e9:.3f}e9", _gb(shape.stored_bytes)))
        lines = [f"{self.name}: {shape.blocks} blocks, hidden {shape.hidden_size}", ""]
        lines += [table(("weights", "parameters", "stored"), rows), ""]
        lines += [_memory_table(self.fits, shape.context), ""]
        judged = [entry for entry in self.fits if entry.reason and not (self.asked and entry.verdict == "refused")]
        lines += [f"{_label(entry)}: {entry.reason}" for entry in judged]
        lines += [f"states: {self.state_bytes} B a token ({self.points} points + last)" + self._states_text()]
        memory = self.training
        lines += [
            f"training, one rank: {memory.parameters / 1e9:.3f}e9 parameters, weights and AdamW "
            f"{memory.optimiser_and_weights / GIB:.1f} GiB, embeddings and teacher head {memory.frozen / GIB:.1f} GiB, "
            f"activations about {memory.activations / GIB:.1f} GiB at {BATCH_TOKENS} tokens x {TTT_STEPS} steps"
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes] + self.refusals)

    def _states_text(self) -> str:
        if self.states_total is None:
            return "; all of them: unknown without --samples and --tokens"
        count = f"{self.samples} samples x {self.tokens} tokens"
        return f"; {count} = {_gb(self.states_total)}, free here {_gb(self.free)}"


def plan(
    *,
    profile: str = "smollm2",
    target: Path | None = None,
    gpus: int | None = None,
    gpu_memory: str | None = None,
    context: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    with_drafter: bool = False,
) -> PlanOutcome:
    """Plan from a profile's numbers, or from a model folder's config.json and safetensors headers.

    Args:
        gpus: tensor-parallel size; default of the profile, else 1.
        gpu_memory: of one GPU, such as `96GiB`; None prints common sizes without a verdict.
        tokens: mean tokens a sample.
        with_drafter: count a served drafter too.

    Raises:
        ProfileError: no config to read. UsageError: a number that is not positive.
    """
    chosen = load_profile(profile)
    extra = chosen.plan or {}
    for flag, value in (("--gpus", gpus), ("--context", context), ("--samples", samples), ("--tokens", tokens)):
        if value is not None and value <= 0:
            raise UsageError(f"{flag} {value}", rule="a positive number")
    config = read_config(target) if target is not None else chosen.config
    if config is None:
        raise ProfileError(f"profile '{profile}' has no [config] to plan with", fix="eagle3lab plan --target FOLDER")
    shape = target_shape(config)
    drafter = _drafter(chosen, shape)
    ranks = gpus or extra.get("gpus", 1)
    memories = KNOWN_MEMORIES if gpu_memory is None else (parse_memory(gpu_memory),)
    served = drafter if with_drafter else None
    notes = [*shape.notes, "GPU memory is nominal: drivers keep about 1 %"]
    if target is None and "uncounted" in extra:
        notes.append(f"not counted: {extra['uncounted']}")
    stored = _files_bytes(target) if target is not None else None
    if stored is not None and abs(stored / shape.stored_bytes - 1) > 0.02:
        notes.append(
            f"the files hold {_gb(stored)}, the config counts {_gb(shape.stored_bytes)}: other parts are inside"
        )
    if samples and tokens:
        needed = samples * tokens * state_bytes_per_token(shape.hidden_size, len(chosen.model.points))
        if needed > free_bytes(cache_folder()):
            notes.append(f"the states do not fit here: {_gb(free_bytes(cache_folder()))} are free")
    return PlanOutcome(
        name=str(target) if target is not None else chosen.name,
        shape=shape,
        points=len(chosen.model.points),
        fits=[fit(shape, ranks, memory, context=context, drafter=served) for memory in memories],
        asked=gpu_memory is not None,
        files_bytes=stored,
        samples=samples,
        tokens=tokens,
        free=free_bytes(cache_folder()),
        training=training_memory(drafter, tokens=BATCH_TOKENS, ttt_steps=TTT_STEPS),
        notes=notes,
    )


def drafter_shape(profile: Profile) -> DrafterShape | None:
    """The drafter that the profile would serve; None without a config to take widths from."""
    return _drafter(profile, target_shape(profile.config)) if profile.config is not None else None


def _drafter(profile: Profile, shape: TargetShape) -> DrafterShape:
    given = (profile.plan or {}).get("drafter", {})
    heads = given.get("attention_heads", shape.attention_heads)
    return DrafterShape(
        hidden_size=shape.hidden_size,
        points=len(profile.model.points),
        target_hidden_size=shape.hidden_size,
        intermediate_size=given.get("intermediate_size", 4 * shape.hidden_size),
        attention_heads=heads,
        kv_heads=given.get("kv_heads", shape.kv_heads or heads),
        head_dim=given.get("head_dim", max(1, shape.hidden_size // heads)),
        draft_vocab_size=profile.drafter.draft_vocab_size if profile.drafter else shape.vocab_size,
        vocab_size=shape.vocab_size,
    )


def _files_bytes(target: Path) -> int | None:
    """Bytes of all tensors by local headers, else by the index; None when the folder has neither."""
    folder = target if target.is_dir() else target.parent
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        listed = read_config(index)
        total = (listed.get("metadata") or {}).get("total_size")
        names = set((listed.get("weight_map") or {}).values())
        if not all((folder / name).is_file() for name in names):
            return total if isinstance(total, int) else None
        shards = [folder / name for name in sorted(names)]
    return sum(read_header(shard).declared_bytes for shard in shards) if shards else None


def _fit_json(entry: Fit, limit: int | None) -> dict[str, Any]:
    return {
        "gpus": entry.ranks,
        "gpu_memory_bytes": entry.gpu_memory,
        "verdict": entry.verdict,
        "reason": entry.reason,
        "weights_per_rank_bytes": round(entry.weights),
        "weights_per_rank_gib": round(entry.weights / GIB, 3),
        "replicated_extra_bytes": round(entry.replicated_extra),
        "reserve_bytes": entry.reserve,
        "margin_bytes": round(entry.margin),
        "kv_bytes_per_token_per_rank": entry.kv_bytes_per_token,
        "kv_tokens": entry.kv_tokens,
        "context_left": entry.context(limit),
        "requests_at": {str(size): entry.kv_tokens // size for size in CONTEXTS},
        "mem_fraction_static": entry.mem_fraction,
        "chunked_prefill_size": entry.prefill_chunk,
        "cuda_graphs": entry.graphs,
    }


def _memory_table(fits: list[Fit], limit: int | None) -> str:
    head = (
        "GPUs",
        "verdict",
        "weights",
        "not split",
        "reserve",
        "margin",
        "KV B/token",
        "context left",
        "batch at 4k/32k",
    )
    rows = []
    for entry in fits:
        batch = "/".join(str(entry.kv_tokens // size) for size in CONTEXTS[:2])
        gib = [f"{size / GIB:.1f} GiB" for size in (entry.weights, entry.replicated_extra, entry.reserve, entry.margin)]
        rows.append((_label(entry), entry.verdict, *gib, entry.kv_bytes_per_token, entry.context(limit), batch))
    return table(head, rows) + "\n(each rank; margin is what SGLang's own reserve leaves for KV)"


def _label(entry: Fit) -> str:
    return f"{entry.ranks} x {entry.gpu_memory / GIB:.0f} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
