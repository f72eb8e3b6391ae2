"""One drafter under two flags, computed here: the run's own, and a thin one at Kimi-K2.5's true widths."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3lab.runs.directory import Run
from eagle3lab.steps.corpus import evaluation_sets
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.profiles import load_profile

if TYPE_CHECKING:
    from eagle3lab.acceptance.flags import Algorithm, Served

ALGORITHMS: tuple[Algorithm, Algorithm] = ("EAGLE", "EAGLE3")
PROMPTS, NEW_TOKENS = 3, 24
"""Held-out prompts decoded under each flag, and the longest reply."""
KIMI_TOKENS = 6
"""Tokens decoded at Kimi's width: enough to see what reaches fc."""


@dataclass(frozen=True, slots=True)
class Case:
    """The run's drafter decoded under both flags, beside plain greedy decoding.

    Attributes:
        served: by algorithm. plain: replies of plain decoding. seconds: of plain decoding.
        meaningless: the target is random, so only the widths and zeros say something.
    """

    served: dict[str, Served]
    plain: list[list[int]]
    seconds: float
    meaningless: bool

    def lossless(self, algorithm: str) -> int:
        """Replies that equal plain decoding token for token."""
        replies = self.served[algorithm].replies
        return sum(a == b.tokens for a, b in zip(self.plain, replies, strict=True))


def decode_both(run: Run) -> Case:
    """Decode a few held-out prompts with the run's drafter, as each flag would have it."""
    from eagle3lab.acceptance.flags import serve
    from eagle3lab.corpus.build import held_out
    from eagle3lab.corpus.chat import render_prompt
    from eagle3lab.drafter.checkpoint import load_drafter
    from eagle3lab.targets.generate import generate
    from eagle3lab.targets.model import load_target

    run.require("train")
    profile = load_profile(run.manifest.profile)
    folder = fetched_folder(profile)
    run.require_inputs(target=weight_hash(folder))
    target = load_target(folder, dtype="float32")
    drafter = load_drafter(run.drafter, target.embedding.weight, target=folder)
    asked = held_out(evaluation_sets(profile)[0])[:PROMPTS]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": one.prompt}]) for one in asked]
    started = time.perf_counter()
    plain = [reply.tokens for reply in generate(target, prompts, max_new_tokens=NEW_TOKENS)]
    seconds = time.perf_counter() - started
    k = profile.draft_tokens
    names = [one.id for one in asked]
    served: dict[str, Served] = {
        flag: serve(target, drafter, prompts, names, algorithm=flag, k=k, max_new_tokens=NEW_TOKENS)
        for flag in ALGORITHMS
    }
    return Case(served, plain, seconds, profile.random_weights)


def decode_at_kimi_width() -> dict[str, Served]:
    """Both flags at Kimi-K2.5's true widths: 61 blocks, hidden 7168, points 2/30/58, fc [7168, 21504].

    Target and drafter are random and thin, drawn in memory: what they write means nothing, what they hand over is as
    wide as the real thing.
    """
    import torch

    from eagle3lab.acceptance.flags import serve
    from eagle3lab.corpus.chat import render_prompt
    from eagle3lab.drafter.model import Eagle3Drafter, kept_to_d2t
    from eagle3lab.steps.train import draft_config
    from eagle3lab.targets.random_target import draw_target

    profile = load_profile("kimi-thin")
    target = draw_target(profile, moe_intermediate_size=8, intermediate_size=8)
    size = profile.drafter.draft_vocab_size if profile.drafter else target.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = draft_config(profile, target, size)
        drafter = Eagle3Drafter(config, target.embedding.weight, kept_to_d2t(range(size))).eval().requires_grad_(False)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Why?"}])
    options: dict[str, Any] = {"k": 3, "max_new_tokens": KIMI_TOKENS}
    return {flag: serve(target, drafter, [prompt], ["why"], algorithm=flag, **options) for flag in ALGORITHMS}


def width_rows(served: dict[str, Served], where: str) -> list[tuple[object, ...]]:
    """One row a flag: what reached the drafter and whether fc was called."""
    rows: list[tuple[object, ...]] = []
    for flag, one in served.items():
        calls = f"{len(one.fc_inputs)} times, {one.fc_inputs[0]:,} wide" if one.fc_inputs else "never"
        rows.append((where, flag, f"{one.handed:,}", f"{one.embedding:,}", calls))
    return rows


WIDTH_HEAD = ("target", "flag", "numbers a token handed to the drafter", "width of an embedding", "fc called")
