"""`eagle3lab accept replay`: acceptance from captured states alone, thousands of positions a second, no decoding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3lab.acceptance.counts import from_lengths, total
from eagle3lab.acceptance.replay import all_positions_length, walk_samples
from eagle3lab.acceptance.sampling_head import TargetEnds, read_target_ends
from eagle3lab.acceptance.sampling_replay import expected_metrics, expected_walks
from eagle3lab.capture.store import Sample, Store
from eagle3lab.core.errors import AcceptanceError, UsageError
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.steps.accept_outcome import AcceptOutcome, check_options, shown
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.profiles import load_profile

GREEDY_SHARE = 0.9
"""Of greedy text at least this much is the target's choice again; states in 16 or 8 bits change some near ties."""
LOOKED_AT = 8
"""Samples whose text is compared with the target's choice."""
GREEDY = "replay of greedy text along the decode path: the counts of decoding"
SAMPLED = "teacher-forced: top drafts on text that is not greedy (the counts of target-only sampling)"


def replay(
    states: Path,
    draft: Path,
    *,
    profile: str = "smollm2",
    target: Path | None = None,
    steps: int = 3,
    temperature: float | None = None,
    samples: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    gate: float | None = None,
    seed: int = 0,
) -> AcceptOutcome:
    """Replay a folder of states with a drafter.

    Args:
        target: model folder whose embedding (and head, for a temperature) is read; None = the profile's fetched one.
        steps: draft steps k. temperature: expected acceptance sum(min(p, q)) at it; None = top drafts against the text.
        samples: `A:B`, the samples of the folder to use, such as those that were held back; None = all.
        device: `cpu`, or `cuda` for the drafter and the target's head.
    """
    if steps < 1 or (temperature is not None and temperature <= 0):
        raise UsageError(f"steps {steps}, temperature {temperature}", rule="steps 1 or more, temperature above 0")
    check_options(gate=gate, temperature=temperature, seed=seed)
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype {dtype!r}", rule="float32 or bfloat16")
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no GPU", rule="cpu, or cuda on a machine that has one")
    folder = target or fetched_folder(load_profile(profile))
    ends = read_target_ends(folder)
    drafter = load_drafter(draft, ends.embedding, dtype=getattr(torch, dtype), target=folder).to(device)
    store = Store(states, points=drafter.config.points)
    chosen = _range(samples, len(store))
    part, ends, pre_norm = _Part(store, chosen), ends.to(device), store.manifest.last == "pre_norm"
    share = own_choice(part, ends, pre_norm=pre_norm) if store.manifest.greedy else None
    greedy = share is not None and share >= GREEDY_SHARE
    outcome = measure(
        drafter,
        part,
        steps=steps,
        greedy=greedy,
        temperature=temperature,
        ends=ends,
        pre_norm=pre_norm,
        gate=gate,
        seed=seed,
        title=f"replay of {len(chosen)} of {len(store)} samples of {states} with {draft}",
    )
    outcome.metrics["own_choice"] = share
    if share is not None and not greedy:
        told = f"the states are marked greedy, but {share:.0%} of the reply tokens looked at are the target's choice"
        return replace(outcome, lines=(told, *outcome.lines))
    return outcome


def own_choice(samples: Iterable[Sample], ends: TargetEnds, *, pre_norm: bool) -> float | None:
    """Share of reply tokens that the target itself would choose, over the first samples; None without a reply token."""
    chosen = counted = 0
    for sample, _ in zip(samples, range(LOOKED_AT), strict=False):
        replies = sample.loss_mask[1:].bool().nonzero().squeeze(-1)
        logits = ends.logits(sample.last[replies].to(ends.embedding.device), pre_norm=pre_norm)
        chosen += int((logits.argmax(-1).cpu() == sample.input_ids[replies + 1].cpu()).sum())
        counted += len(replies)
    return chosen / counted if counted else None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some samples of a store, read one by one each time they are walked: the folder may be larger than memory."""

    store: Store
    members: range

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sample]:
        return (self.store[index] for index in self.members)


def measure(
    drafter: Eagle3Drafter,
    samples: Sequence[Sample] | _Part,
    *,
    steps: int,
    greedy: bool,
    temperature: float | None,
    ends: TargetEnds,
    pre_norm: bool = False,
    gate: float | None = None,
    seed: int = 0,
    title: str = "replay",
) -> AcceptOutcome:
    """Counts along the decode path, or expected counts at a temperature; both with the all-positions average beside."""
    started = time.perf_counter()
    names: list[str] = []

    def noted() -> Iterator[Sample]:
        for sample in samples:
            names.append(str(sample.sample_id))
            yield sample

    walks = walk_samples(drafter, noted(), steps)
    if temperature is None:
        counts = total(
            from_lengths(walk.accepted, k=steps, prompt=name) for walk, name in zip(walks, names, strict=True)
        )
        metrics: dict[str, Any] = counts.to_json(seed=seed) | {"kind": GREEDY if greedy else SAMPLED}
    else:
        expected = expected_walks(
            drafter,
            samples,
            steps,
            logits=lambda last: ends.logits(last, pre_norm=pre_norm),
            temperature=temperature,
        )
        metrics = _expected(expected_metrics(expected, temperature=temperature, seed=seed), greedy)
    seconds = time.perf_counter() - started
    positions = sum(len(walk.prefix) for walk in walks)
    if positions == 0:
        raise AcceptanceError(
            f"{len(samples)} samples hold no position to judge", rule="a reply of 3 or more tokens in the loss mask"
        )
    metrics |= {
        "lossless": None,
        "all_positions_average_length": all_positions_length(walks),
        "positions": positions,
        "timing": {"seconds": seconds, "positions_per_second": positions / seconds if seconds else None},
    }
    lines = [
        f"kind: {metrics['kind']}",
        f"all-positions average length {shown(metrics['all_positions_average_length'])}: another number (chains from "
        "every slot), never to be compared with an accept length",
        f"speed: {shown(metrics['timing']['positions_per_second'])} positions/s",
    ]
    if temperature is not None:
        by_step = ", ".join(shown(value) for value in metrics["overlap_all_positions"])
        lines.insert(1, f"sum(min(p, q)) by draft step, all positions: {by_step}")
    return AcceptOutcome(
        metrics,
        title,
        gate=gate,
        lines=tuple(lines),
        interval_over="samples",
        settings={"k": steps, "temperature": 0 if temperature is None else temperature, "samples": len(samples)},
    )


def _expected(metrics: dict[str, Any], greedy: bool) -> dict[str, Any]:
    """Keys that counts would have; expected counts are no whole numbers and stand under their own name."""
    text = (
        "greedy text, not sampled"
        if greedy
        else "the states' text; exact in expectation if sampled at this temperature"
    )
    joint = metrics["joint"]
    conditional = None
    if joint is not None:
        conditional = [now / before if before else None for before, now in zip([1.0, *joint], joint, strict=False)]
    return metrics | {
        "kind": f"{metrics['kind']} on {text}",
        "conditional": conditional,
        "accept_rate": sum(joint) / len(joint) if joint else None,
        "counts": None,
    }


def _range(words: str | None, size: int) -> range:
    """Samples of `A:B`, either end may be left out or negative, as in Python."""
    if words is None:
        return range(size)
    try:
        first, stop = (int(word) if word.strip() else None for word in words.split(":"))
    except ValueError as error:
        raise UsageError(f"--samples {words!r}", rule="A:B, such as 0:100 or -48:") from error
    chosen = range(size)[first:stop]
    if not chosen:
        raise UsageError(f"--samples {words} of {size} samples is empty", rule="at least one sample")
    return chosen
