"""`eagle3lab accept decode`: how many drafted tokens the target accepts, and the proof that the text is its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.acceptance.anatomy import entropy, lost_json, where_lost
from eagle3lab.acceptance.baselines import lookup_counts, without_repeats
from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.acceptance.controls import CONTROLS, replay_counts
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.intervals import compare
from eagle3lab.capture.store import Sample
from eagle3lab.capture.transformers_engine import capture_in_memory
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import Rendered, render_prompt
from eagle3lab.corpus.prompts import Prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs.directory import Run
from eagle3lab.steps.corpus import evaluation_sets
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.generate import Generated, generate
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile

MEANINGLESS = "random target: acceptance has no meaning"
"""Stands in `metrics.json` (`meaningless`) and in the report instead of a headline."""
SPEED_PROMPTS, SPEED_TOKENS = 3, 32
"""Prompts decoded one at a time, with and without the drafter, for tokens a second, and new tokens of each."""


@dataclass(frozen=True, slots=True)
class Written:
    """What the prompts of a set became: token ids of the prompts, plain replies, and those of speculative decoding."""

    rendered: list[list[int]]
    plain: list[Generated]
    replies: list[Decoded]


@dataclass(frozen=True, slots=True)
class SetResult:
    """One held-out set.

    Attributes:
        name: `own`, `fresh` or `humaneval`.
        prompts: the prompts; replies: speculative decoding of each, in the same order.
        metrics: keys of `accept --json` plus `kinds`, `repeats`, `lookup`, `controls`, `compared`,
            `lost`, `coverage`.
    """

    name: str
    prompts: list[Prompt]
    replies: list[Decoded]
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AcceptSummary:
    """Acceptance of a run's drafter, or of another checkpoint. `decode(tokens)` turns ids into text.

    Attributes:
        sets: the headline first.
        timing: seconds of decoding all sets together, by part.
        speed: tokens a second, plain and with the drafter; {} when acceptance means nothing.
        meaningless: why these numbers say nothing about drafting; None for a target that was trained.
    """

    sets: dict[str, SetResult]
    k: int
    drafter: Path
    timing: dict[str, Any]
    speed: dict[str, Any]
    decode: Callable[[list[int]], str]
    meaningless: str | None = None


def measure(run: Run, *, draft: str = "", progress: Callable[[str, int], None] | None = None) -> AcceptSummary:
    """Measure on the held-out sets of the run's preset and write `metrics.json`.

    Args:
        draft: folder of another checkpoint for the same target; "" = the run's own drafter.
        progress: called with (what, tokens so far).
    """
    if not draft:
        run.require("train")
    with run.recording("accept"):
        profile, preset, seed = load_profile(run.manifest.profile), run.preset, run.manifest.seed
        target_folder = fetched_folder(profile)
        run.require_inputs(target=weight_hash(target_folder))
        target = load_target(target_folder, dtype="float32")
        folder = Path(draft).expanduser() if draft else run.drafter
        drafter = load_drafter(folder, target.embedding.weight, target=target_folder)
        rival = None
        if draft and (run.drafter / "config.json").is_file():
            rival = load_drafter(run.drafter, target.embedding.weight, target=target_folder)
        k = profile.draft_tokens
        asked = {name: held_out(name)[: preset.eval_prompts] for name in evaluation_sets(profile)}
        if preset.humaneval:  # read before anything is decoded: a set that is missing must not cost an hour first
            asked["humaneval"] = held_out("humaneval")
        written, timing = decode_sets(
            target, drafter, asked, k=k, max_new_tokens=preset.max_new_tokens, progress=progress
        )
        sets = {
            name: measure_set(
                target,
                drafter,
                name,
                prompts,
                written[name],
                k=k,
                max_new_tokens=preset.max_new_tokens,
                control_prompts=preset.control_prompts,
                seed=seed,
                rival=rival,
            )
            for name, prompts in asked.items()
        }
        meaningless = MEANINGLESS if profile.random_weights else None
        speed: dict[str, Any] = {}
        if not meaningless:  # what drafting gains follows from acceptance
            first = next(iter(sets.values()))
            dtype = compute_type(preset.precision, profile.model.dtype)
            fast = load_target(target_folder, dtype=dtype)
            speed = measure_speed(
                fast,
                load_drafter(folder, fast.embedding.weight, dtype=fast.dtype, target=target_folder),
                first.prompts[: min(SPEED_PROMPTS, max(1, preset.eval_prompts // 8))],
                k,
                min(SPEED_TOKENS, preset.max_new_tokens),
            )
        summary = AcceptSummary(
            sets, k, folder, timing, speed, lambda tokens: target.tokenizer.decode(tokens), meaningless
        )
        _write(run, summary)
        return summary


def decode_sets(
    target: Target,
    drafter: Eagle3Drafter,
    asked: Mapping[str, Sequence[Prompt]],
    *,
    k: int,
    max_new_tokens: int,
    batch: int = 128,
    progress: Callable[[str, int], None] | None = None,
) -> tuple[dict[str, Written], dict[str, Any]]:
    """Decode all sets together, first plainly and then with the drafter: one long batch keeps the cores busier than a
    short one a set. What every set's prompts became, and the seconds of the parts."""
    rendered = {
        name: [render_prompt(target.tokenizer, [{"role": "user", "content": p.prompt}]) for p in prompts]
        for name, prompts in asked.items()
    }
    everything = [ids for one in rendered.values() for ids in one]
    clock = time.perf_counter()
    plain = generate(
        target,
        everything,
        max_new_tokens=max_new_tokens,
        batch=batch,
        progress=(lambda n: progress("plain", n)) if progress else None,
    )
    middle = time.perf_counter()
    decoder = ChainDecoder(target, drafter, k)
    replies = decoder.run(
        everything,
        max_new_tokens=max_new_tokens,
        batch=batch,
        progress=(lambda n: progress("speculative", n)) if progress else None,
    )
    timing = {
        "plain_seconds": middle - clock,
        "speculative_seconds": time.perf_counter() - middle,
        "batch": batch,
        "draft_seconds": decoder.clock.draft,
        "verify_seconds": decoder.clock.verify,
        "rounds": decoder.clock.rounds,
    }
    written, start = {}, 0
    for name, prompts in rendered.items():
        part = slice(start, start + len(prompts))
        written[name] = Written(prompts, plain[part], replies[part])
        start += len(prompts)
    return written, timing


def measure_set(
    target: Target,
    drafter: Eagle3Drafter,
    name: str,
    prompts: Sequence[Prompt],
    written: Written,
    *,
    k: int,
    max_new_tokens: int,
    control_prompts: int,
    seed: int,
    rival: Eagle3Drafter | None = None,
) -> SetResult:
    """Counts, comparison of the texts, baselines and controls for one set.

    Args:
        rival: another drafter, replayed on the control prompts and compared by prompt.
    """
    rendered, plain, replies = written.rendered, written.plain, written.replies
    names = [p.id for p in prompts]
    texts = [reply.tokens for reply in replies]
    accepted = [reply.accepted for reply in replies]
    counts = total(reply.counts(p.id, k) for reply, p in zip(replies, prompts, strict=True))
    lookup = lookup_counts(rendered, texts, names, k)
    against: dict[str, tuple[AcceptanceCounts, AcceptanceCounts]] = {"lookup": (lookup, counts)}
    share, other = without_repeats(rendered, texts, accepted)
    metrics = counts.to_json(seed=seed) | {
        "k": k,
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "prompts": len(prompts),
        "lossless": all(a.tokens == b.tokens for a, b in zip(plain, replies, strict=True)),
        "differences": differences(target, rendered, plain, replies, names),
        "repeats": {"share_of_steps": share, "accept_length_without": other},
        "lookup": _short(lookup.to_json(seed=seed)),
        "compared": {},
        "lost": None,
        "kinds": _by_kind(replies, prompts, k, seed),
        "coverage": _coverage(drafter, texts),
        "controls": {},
    }
    if control_prompts:
        some = slice(0, control_prompts)
        samples = capture_replies(target, rendered[some], texts[some], drafter.config.points)
        own = replay_counts(drafter, samples, names[some], k)
        controls = {
            control: replay_counts(make(drafter, seed), samples, names[some], k) for control, make in CONTROLS.items()
        }
        metrics["replay"] = _short(own.to_json(seed=seed))
        metrics["controls"] = {control: _short(one.to_json(seed=seed)) for control, one in controls.items()}
        metrics["lost"] = _lost(target, drafter, samples, rendered[some], replies[some])
        against |= {control: (one, own) for control, one in controls.items()}
        if rival is not None:
            against["other"] = (replay_counts(rival, samples, names[some], k), own)
    metrics["compared"] = {
        name: asdict(compare(theirs, ours, seed=seed))
        for name, (theirs, ours) in against.items()
        if theirs.verify_steps and ours.verify_steps
    }
    return SetResult(name, list(prompts), replies, metrics)


def _lost(
    target: Target,
    drafter: Eagle3Drafter,
    samples: Sequence[Sample],
    prompts: Sequence[list[int]],
    replies: Sequence[Decoded],
) -> list[dict[str, Any]]:
    """Where drafts are refused, by the sort of place; the target's entropy comes from its captured last states."""
    # The token at place i of a reply was chosen from the state one slot before it.
    states = [sample.last[len(prompt) - 1 : -1] for sample, prompt in zip(samples, prompts, strict=True)]
    entropies = [torch.cat([entropy(target.logits(part)) for part in last.split(256)]) for last in states]
    ends_line = cache(lambda token: target.tokenizer.decode([token]).endswith("\n"))
    return lost_json(where_lost(replies, entropies, drafter.t2d, ends_line))


def capture_replies(
    target: Target, prompts: Sequence[list[int]], replies: Sequence[list[int]], points: list[int]
) -> list[Sample]:
    """States along prompt + reply, in the target's own precision."""
    pairs = zip(prompts, replies, strict=True)
    texts = [Rendered([*prompt, *reply], [False] * len(prompt) + [True] * len(reply)) for prompt, reply in pairs]
    return capture_in_memory(target, texts, points)


def differences(
    target: Target,
    prompts: Sequence[list[int]],
    plain: Sequence[Generated],
    replies: Sequence[Decoded],
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Where speculative and plain text part, with the target's top-2 gap there: a tie in the last bits, or a fault."""
    found = []
    for prompt, a, b, name in zip(prompts, plain, replies, names, strict=True):
        parted = where_texts_part(target, prompt, a.tokens, b.tokens)
        if parted is not None:
            place, logits = parted
            top = logits.topk(2).values
            found.append({"prompt": name, "token": place, "top2_gap": float(top[0] - top[1])})
    return found


def where_texts_part(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> tuple[int, Tensor] | None:
    """First place where two replies to a prompt differ (the end of the shorter one when it begins the longer), and the
    target's logits [V] there in one whole forward; None when they are the same."""
    if plain == other:
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((i for i, (x, y) in pairs if x != y), min(len(plain), len(other)))
    last, _ = target.states(torch.tensor([[*prompt, *plain[:place]]]))
    return place, target.logits(last[0, -1])


def measure_speed(
    target: Target, drafter: Eagle3Drafter, prompts: Sequence[Prompt], k: int, max_new_tokens: int
) -> dict[str, Any]:
    """Tokens a second at batch 1, plain and speculative, prompt by prompt in turn."""
    seconds, tokens = {"plain": 0.0, "speculative": 0.0}, {"plain": 0, "speculative": 0}
    decoder = ChainDecoder(target, drafter, k)
    for prompt in prompts:
        ids = [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.prompt}])]
        for kind in ("plain", "speculative"):
            clock = time.perf_counter()
            made = (
                generate(target, ids, max_new_tokens=max_new_tokens, batch=1)
                if kind == "plain"
                else decoder.run(ids, max_new_tokens=max_new_tokens, batch=1)
            )
            seconds[kind] += time.perf_counter() - clock
            tokens[kind] += sum(len(reply.tokens) for reply in made)
    plain, fast = (tokens[kind] / seconds[kind] if seconds[kind] else 0.0 for kind in ("plain", "speculative"))
    return {
        "plain_tokens_per_second": plain,
        "speculative_tokens_per_second": fast,
        "ratio": fast / plain if plain else 0.0,
        "prompts": len(prompts),
        "batch": 1,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def _by_kind(replies: Sequence[Decoded], prompts: Sequence[Prompt], k: int, seed: int) -> dict[str, Any]:
    kinds = sorted({p.kind for p in prompts})
    return {
        kind: _short(
            total(r.counts(p.id, k) for r, p in zip(replies, prompts, strict=True) if p.kind == kind).to_json(seed=seed)
        )
        for kind in kinds
    }


def _short(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "per_prompt"}


def _coverage(drafter: Eagle3Drafter, texts: Sequence[list[int]]) -> float:
    """Share of reply tokens that the drafter's vocabulary holds: no drafter can accept more."""
    ids = torch.tensor([token for text in texts for token in text[1:]])
    return float((drafter.draft_ids(ids) >= 0).float().mean()) if len(ids) else 0.0


def _write(run: Run, found: AcceptSummary) -> None:
    sets = found.sets
    if not all(result.metrics["lossless"] for result in sets.values()):
        gaps = [d for r in sets.values() for d in r.metrics["differences"]]
        if any(gap["top2_gap"] > 1e-3 for gap in gaps):
            raise AcceptanceError(
                f"speculative text differs from plain decoding: {gaps[0]}",
                rule="greedy text is the target's own; a difference at a clear top-2 gap is a fault of the decoder",
            )
    name = next(iter(sets))
    keys = ("accept_length", "accept_length_interval", "accept_rate", "joint", "conditional", "counts", "lossless")
    headline = {"meaningless": found.meaningless} if found.meaningless else {k: sets[name].metrics[k] for k in keys}
    run.merge_metrics(
        {
            "preset": run.manifest.preset,
            "headline": name,
            "drafter": run.drafter_name(found.drafter),
            **headline,
            "sets": {name: result.metrics for name, result in sets.items()},
        },
        timing={"accept": found.timing, "speed": found.speed},
    )
