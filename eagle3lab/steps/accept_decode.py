"""`eagle3lab accept decode`: speculative decoding in this process, and the proof that the text is the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.acceptance.counts import total
from eagle3lab.acceptance.sampling import rule_for
from eagle3lab.acceptance.served_prompts import ServedPrompt, read_served_prompts
from eagle3lab.acceptance.tree import DynamicTree, Shape, StaticTree
from eagle3lab.acceptance.tree_decode import TreeDecoder
from eagle3lab.core.errors import UsageError
from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.steps.accept import differences
from eagle3lab.steps.accept_outcome import AcceptOutcome, check_options, shown
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.generate import Generated, generate
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile

TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
"""Top-2 gap in logits below which two right forwards may choose differently: about one rounding step at logit 32."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is drafted a round: a chain of `steps`, a static tree, or a dynamic one.

    Fields:
        steps: draft steps k. widths: children by level of a static tree. topk above 1: dynamic tree.
        draft_tokens: tokens of a dynamic tree with the current one, as SGLang counts them.
    """

    steps: int = 3
    widths: tuple[int, ...] | None = None
    topk: int = 1
    draft_tokens: int | None = None

    def shape(self) -> Shape | None:
        """None for a chain. `UsageError` when the words contradict each other."""
        if self.widths is not None:
            if self.topk != 1 or self.draft_tokens is not None:
                raise UsageError("--tree with --topk or --draft-tokens", rule="a static tree, or a dynamic one")
            return StaticTree.branching(self.widths)
        if self.topk == 1:
            if self.draft_tokens not in (None, self.steps + 1):
                raise UsageError(
                    f"--draft-tokens {self.draft_tokens}", rule=f"a chain has steps + 1 = {self.steps + 1}"
                )
            return None
        if self.draft_tokens is None:
            raise UsageError(f"--topk {self.topk} without --draft-tokens", rule="a dynamic tree has a number of tokens")
        return DynamicTree(self.steps, self.topk, self.draft_tokens - 1)

    def describe(self) -> str:
        """One word group for settings."""
        shape = self.shape()
        if shape is None:
            return f"chain of {self.steps}"
        kind = f"static tree {','.join(map(str, self.widths))}" if self.widths else f"dynamic tree topk {self.topk}"
        return f"{kind}, depth {shape.steps}, {shape.nodes} drafted tokens"


def parse_widths(words: str) -> tuple[int, ...]:
    """`4,2,1` -> (4, 2, 1)."""
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise UsageError(f"--tree {words!r}", rule="children by level, such as 4,2,1") from error


def decode(
    draft: Path,
    *,
    profile: str = "smollm2",
    target: Path | None = None,
    prompts: Path | None = None,
    held_out_set: str = "fresh",
    limit: int | None = None,
    drafting: Drafting | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    max_new_tokens: int = 128,
    dtype: str = "float32",
    gate: float | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> AcceptOutcome:
    """Load target and drafter and measure.

    Args:
        target: model folder; None = the profile's fetched one. prompts: JSONL; None = the held-out set.
        dtype: of both models. progress: called with (what, tokens so far).
    """
    if dtype not in TIE:
        raise UsageError(f"dtype {dtype!r}", rule=f"known: {', '.join(TIE)}")
    check_options(gate=gate, temperature=temperature, seed=seed, limit=limit)
    if batch < 1 or max_new_tokens < 1:
        raise UsageError(f"--batch {batch}, --max-new-tokens {max_new_tokens}", rule="1 or more")
    drafting = drafting or Drafting()
    drafting.shape()  # wrong words are found before a model is loaded
    asked = _prompts(prompts, held_out_set)[:limit]
    folder = target or fetched_folder(load_profile(profile))
    model = load_target(folder, dtype=dtype)
    drafter = load_drafter(draft, model.embedding.weight, dtype=getattr(torch, dtype), target=folder)
    rendered = [render_prompt(model.tokenizer, list(prompt.messages)) for prompt in asked]
    return measure(
        model,
        drafter,
        rendered,
        [prompt.id for prompt in asked],
        drafting=drafting,
        temperature=temperature,
        seed=seed,
        batch=batch,
        max_new_tokens=max_new_tokens,
        gate=gate,
        progress=progress,
        title=f"decoding with {draft} on {folder}",
    )


def measure(
    target: Target,
    drafter: Eagle3Drafter,
    prompts: Sequence[list[int]],
    names: Sequence[str],
    *,
    drafting: Drafting,
    temperature: float,
    seed: int,
    batch: int,
    max_new_tokens: int,
    gate: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    title: str = "decoding",
) -> AcceptOutcome:
    """Decode with the drafter and, greedily, without it; compare the texts."""
    shape = drafting.shape()
    rule = rule_for(temperature, sampled_drafts=shape is None, seed=seed)
    if shape is None:
        decoder = ChainDecoder(target, drafter, drafting.steps, rule)
    else:
        decoder = TreeDecoder(target, drafter, shape, rule)
    started = time.perf_counter()
    replies = decoder.run(prompts, max_new_tokens=max_new_tokens, batch=batch, progress=_told(progress, "speculative"))
    middle = time.perf_counter()
    plain: list[Generated] | None = None
    if temperature == 0:
        plain = generate(target, prompts, max_new_tokens=max_new_tokens, batch=batch, progress=_told(progress, "plain"))
    end = time.perf_counter()
    counts = total(reply.counts(name, decoder.k) for reply, name in zip(replies, names, strict=True))
    found = [] if plain is None else differences(target, prompts, plain, replies, names)
    tie = TIE[str(target.dtype).removeprefix("torch.")]
    wrong = [d for d in found if d["top2_gap"] > tie]
    metrics: dict[str, Any] = counts.to_json(seed=seed) | {
        "lossless": None if plain is None else not found,
        "differences": found,
        "timing": _timing(replies, plain, middle - started, end - middle, decoder),
    }
    return AcceptOutcome(
        metrics,
        title,
        gate=gate,
        lines=_lines(metrics, len(prompts)),
        problems=tuple(
            f"prompt {d['prompt']} differs from plain decoding at token {d['token']}, top-2 gap {d['top2_gap']:.4g}: "
            "no tie, a fault of the decoder"
            for d in wrong[:3]
        ),
        settings={
            "drafting": drafting.describe(),
            "temperature": temperature,
            "rule": "greedy" if temperature == 0 else type(rule).__name__,
            "max_new_tokens": max_new_tokens,
            "batch": batch,
            "dtype": str(target.dtype).removeprefix("torch."),
            "seed": seed,
            "prompts": len(prompts),
        },
    )


def _timing(
    replies: Sequence[Decoded], plain: Sequence[Generated] | None, fast: float, slow: float, decoder: ChainDecoder
) -> dict[str, Any]:
    tokens = sum(len(reply.tokens) for reply in replies)
    plain_tokens = None if plain is None else sum(len(reply.tokens) for reply in plain)
    return {
        "tokens_per_second": tokens / fast if fast else None,
        "plain_tokens_per_second": plain_tokens / slow if plain_tokens and slow else None,
        "prefill_seconds": decoder.clock.prefill,
        "draft_seconds": decoder.clock.draft,
        "verify_seconds": decoder.clock.verify,
        "rounds": decoder.clock.rounds,
    }


def _lines(metrics: dict[str, Any], prompts: int) -> tuple[str, ...]:
    timing, found = metrics["timing"], metrics["differences"]
    if metrics["lossless"] is None:
        text = "text: sampled, so it is compared by distribution and not here"
    elif metrics["lossless"]:
        text = f"text: equal to plain decoding, token for token, on {prompts} prompts"
    else:
        gap = max(d["top2_gap"] for d in found)
        text = f"text: {len(found)} of {prompts} prompts part from plain decoding, largest top-2 gap there {gap:.4g}"
    speed = f"{shown(timing['tokens_per_second'])} tokens/s, plain {shown(timing['plain_tokens_per_second'])}"
    return text, f"speed: {speed} (clock time of this run, one after the other)"


def _told(progress: Callable[[str, int], None] | None, what: str) -> Callable[[int], None] | None:
    return None if progress is None else lambda tokens: progress(what, tokens)


def _prompts(path: Path | None, name: str) -> list[ServedPrompt]:
    if path is not None:
        return read_served_prompts(path)
    return [
        ServedPrompt(prompt.id, prompt.kind, ({"role": "user", "content": prompt.prompt},), prompt.prompt)
        for prompt in held_out(name)
    ]
