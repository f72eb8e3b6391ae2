"""What fc does to real hidden states: the only tests that can say useful, or dead although the weights look alive.

Two kinds. Geometry (`eagle3lab.inspection.geometry`) needs fc and states. Acceptance needs the whole drafter: the
states are replayed (`eagle3lab.acceptance.replay`) after a point block was silenced, replaced by its mean, or shuffled
between tokens, after fc was replaced by a fresh draw, and with the blocks in every other order. Each is compared with
the drafter as it is, prompt by prompt, with a 95 % interval over prompts.

Needs torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from eagle3lab.acceptance.controls import replay_counts
from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.intervals import compare
from eagle3lab.capture.store import Sample, Store
from eagle3lab.core.errors import CheckpointError, StoreError
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.init import FcInit, init_fc
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.inspection.formats import to_float32
from eagle3lab.inspection.geometry import Geometry, geometry
from eagle3lab.inspection.layout import FcLayout, role_of
from eagle3lab.inspection.tensorfile import open_checkpoint
from eagle3lab.points import compare as compare_points

GEOMETRY_TOKENS = 2048
REPLAY_TOKENS = 2500
STEPS = 3
"""Tokens drafted in a chain."""
SILENT, FRESH = "zero fc", "fresh fc"
NO_EFFECT = 0.02
"""Accept length within which silencing fc is called without effect."""
MOST_ORDERS = 3
"""Other orders of the blocks are tried up to this many points (5 replays)."""


@dataclass(frozen=True)
class Ablation:
    """One change and what it does to the accept length (bonus in). difference: changed minus unchanged, with its 95 %
    interval over prompts (None with one prompt)."""

    name: str
    accept_length: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def hurts(self) -> bool:
        """The interval lies below 0."""
        return self.interval is not None and self.interval[1] < 0


@dataclass(frozen=True)
class Functional:
    """Everything measured on captured states. accept_length: None when no drafter could be replayed.

    greedy: the states lie along the target's own greedy text, so that replay counts what decoding would.
    """

    geometry: Geometry
    accept_length: float | None = None
    verify_steps: int = 0
    prompts: int = 0
    greedy: bool = True
    ablations: list[Ablation] = field(default_factory=list)
    orders: list[Ablation] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def pick(store: Store, tokens: int) -> list[Sample]:
    """Samples spread evenly over the store, `tokens` in all (at least two samples, if there are two)."""
    total = sum(store.lengths)
    wanted = max(2, math.ceil(len(store) * min(1.0, tokens / max(1, total))))
    step = max(1, len(store) // wanted)
    found: list[Sample] = []
    for index in range(0, len(store), step):
        found.append(store[index])
        if sum(len(sample.input_ids) for sample in found) >= tokens and len(found) > 1:
            break
    return found


def change_block(
    samples: Sequence[Sample], block: int, points: int, change: Callable[[Tensor], Tensor]
) -> list[Sample]:
    """Samples whose states of one point were put through `change`: [T, Ht] of all samples end to end -> the same."""
    lengths = [len(sample.aux) for sample in samples]
    aux = torch.cat([sample.aux for sample in samples]).clone()
    width = aux.shape[1] // points
    at = slice(block * width, (block + 1) * width)
    aux[:, at] = change(aux[:, at].float()).to(aux.dtype)
    return [replace(sample, aux=part) for sample, part in zip(samples, aux.split(lengths), strict=True)]


def _mean(states: Tensor) -> Tensor:
    return states.mean(dim=0, keepdim=True).expand_as(states)


def with_weight(drafter: Eagle3Drafter, weight: Tensor) -> Eagle3Drafter:
    """The same drafter with another fc."""
    changed = copy.copy(drafter)
    changed._modules = dict(drafter._modules)
    changed.fc = copy.deepcopy(drafter.fc)
    with torch.no_grad():
        changed.fc.weight.copy_(weight)
    return changed


def reordered(weight: Tensor, order: Sequence[int], points: int) -> Tensor:
    """fc with its column blocks in another order."""
    blocks = weight.chunk(points, dim=1)
    return torch.cat([blocks[i] for i in order], dim=1)


def measure(
    drafter: Eagle3Drafter,
    store: Store,
    points: Sequence[str],
    *,
    start: FcInit = "kaiming-uniform",
    tokens: int = REPLAY_TOKENS,
    seed: int = 0,
) -> Functional:
    """Geometry and every ablation of a drafter on a store of captured states.

    Args:
        points: names of fc's blocks.
        start: family of the fresh draw that fc is replaced by; the recorded one is the fairest.
        tokens: of the states that are replayed.

    Raises:
        StoreError: the states hold no reply that could be replayed.
    """
    samples = pick(store, tokens)
    names = [str(sample.sample_id) for sample in samples]
    aux = torch.cat([sample.aux for sample in samples])
    step = max(1, len(aux) // GEOMETRY_TOKENS)
    shape = geometry(drafter.fc.weight, _as_read(drafter, aux[::step]), points)
    count = len(points)
    plain = replay_counts(drafter, samples, names, STEPS)
    if plain.accept_length is None:
        raise StoreError(f"{store.folder} holds no reply of three tokens", rule="replay needs the target's replies")

    def against_plain(name: str, counts: AcceptanceCounts) -> Ablation:
        paired = compare(plain, counts)
        return Ablation(name, counts.accept_length or math.nan, paired.difference, paired.interval)

    generator = torch.Generator().manual_seed(seed)
    found = []
    for block, point in enumerate(points):
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "zero": torch.zeros_like,
            "mean": _mean,
            "shuffle": lambda states: states[torch.randperm(len(states), generator=generator)],
        }
        for name, change in changes.items():
            changed = change_block(samples, block, count, change)
            found.append(against_plain(f"{name} {point}", replay_counts(drafter, changed, names, STEPS)))
    weight = drafter.fc.weight
    found.append(against_plain(SILENT, replay_counts(with_weight(drafter, weight * 0), samples, names, STEPS)))
    drawn = torch.empty_like(weight, dtype=torch.float32)
    init_fc(drawn, start, seed)
    found.append(against_plain(FRESH, replay_counts(with_weight(drafter, drawn), samples, names, STEPS)))
    orders = []
    if 1 < count <= MOST_ORDERS:
        for order in list(permutations(range(count)))[1:]:
            name = " ".join(str(points[i]) for i in order)
            other = with_weight(drafter, reordered(weight, order, count))
            orders.append(against_plain(name, replay_counts(other, samples, names, STEPS)))
    return Functional(
        geometry=shape, accept_length=plain.accept_length, verify_steps=plain.verify_steps, prompts=len(samples),
        greedy=store.manifest.greedy, ablations=found, orders=orders,
    )  # fmt: skip


def _as_read(drafter: Eagle3Drafter, aux: Tensor) -> Tensor:
    """States after the norms that stand before fc, as fc reads them."""
    with torch.inference_mode():
        aux = aux.to(drafter.fc.weight.dtype)
        bypass = copy.copy(drafter)
        bypass._modules = dict(drafter._modules) | {"fc": torch.nn.Identity()}
        return bypass.fuse(aux)


def judge_function(found: Functional, points: Sequence[str]) -> tuple[list[str], list[str]]:
    """(labels, evidence) that captured states decide.

    USEFUL: a fresh draw in fc's place drafts worse, prompt by prompt (95 % interval below 0). DEAD: silencing all of
    fc changes nothing (the interval holds 0 and lies within `NO_EFFECT`).
    """
    lines = [
        f"states: point {g.point} gives {g.energy:.1%} of the output's energy (state norm {g.state_norm:.3g}, gain "
        f"{g.gain:.3f}); {g.alignment:.1%} of its weight lies in the states' top directions (chance {g.chance:.1%})"
        for g in found.geometry.points
    ]
    if found.accept_length is None:
        return [], lines
    kind = "replay" if found.greedy else "teacher-forced replay of sampled text"
    lines.append(
        f"{kind}: accept length {found.accept_length:.3f} (bonus in, {found.verify_steps} verify steps, "
        f"{found.prompts} samples, k = {STEPS})"
    )
    by_name = {entry.name: entry for entry in found.ablations}
    for entry in found.ablations:
        lines.append(f"{entry.name}: {_told(entry)}")
    labels = ["USEFUL"] if by_name[FRESH].hurts else []
    silent = by_name[SILENT]
    if silent.interval and silent.interval[0] > -NO_EFFECT and silent.interval[1] < NO_EFFECT:
        labels = ["DEAD"]
        lines.append("silencing all of fc changes nothing: it has no effect on the output")
    better = [entry for entry in found.orders if entry.interval and entry.interval[0] > 0]
    if better:
        best = max(better, key=lambda entry: entry.difference)
        lines.append(f"block order: the states fit the order {best.name} better than the stored one: {_told(best)}")
    elif found.orders:
        lines.append(f"block order: none of the {len(found.orders)} other orders drafts better than the stored one")
    return labels, lines


def _told(entry: Ablation) -> str:
    interval = "" if entry.interval is None else f" [{entry.interval[0]:+.3f}, {entry.interval[1]:+.3f}]"
    return f"accept length {entry.accept_length:.3f}, {entry.difference:+.3f}{interval}"


def look(
    layout: FcLayout, folder: Path, states: Path, *, target: Path | None, start: str | None, seed: int = 0
) -> tuple[Functional, list[str], list[str]]:
    """Measure the drafter in `folder` on `states`: (measurements, labels, evidence).

    Args:
        layout: its fc. target: folder of the target, whose embedding the drafter borrows; None measures geometry only.
        start: recorded family of fc, or None.

    Raises:
        StoreError: states of another width or of other points, or captured from other target weights.
        CheckpointError: a drafter that cannot be loaded whole.
    """
    store = Store(states)
    manifest = store.manifest
    if layout.shape[1] != manifest.width:
        raise StoreError(
            f"{states} has {manifest.width} numbers a token, fc reads {layout.shape[1]}",
            rule="states of the target and points that the drafter was trained for",
        )
    points = [str(point) for point in manifest.points]
    if target is None:
        aux = torch.cat([sample.aux for sample in pick(store, GEOMETRY_TOKENS)])
        weight = torch.from_numpy(layout.region(slice(0, layout.shape[0]), slice(0, layout.shape[1])))
        found = Functional(geometry(weight, aux, points), greedy=manifest.greedy)
        labels, lines = judge_function(found, points)
        return found, labels, [*lines, "acceptance not measured: --target names the target's folder"]
    drafter = load_drafter(folder, _embedding(target), target=target)
    if difference := compare_points(manifest.points, drafter.config.points):
        raise StoreError(f"{states}: {difference}", rule="states and drafter must have the same points")
    known: FcInit = start if start in get_args(FcInit) else "kaiming-uniform"  # type: ignore[assignment]
    found = measure(drafter, store, points, start=known, seed=seed)
    labels, lines = judge_function(found, points)
    return found, labels, [*lines, f"{FRESH} is a draw of {known}, seed {seed}"]


def _embedding(target: Path) -> Tensor:
    checkpoint = open_checkpoint(target)
    found = next((t for t in checkpoint if len(t.shape) == 2 and role_of(t.name, t.shape) == "embedding"), None)
    if found is None:
        raise CheckpointError(f"{target} has no embed_tokens.weight", rule="--target is the target's folder")
    return torch.from_numpy(np.array(to_float32(np.array(found.raw()), found.dtype)))
