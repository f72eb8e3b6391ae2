"""Speed of `accept decode` against plain decoding by the same cache, against bare forwards, and against the forecast.

    python benchmarks/bench_decode.py --draft runs/<run>/drafter [--prompts 12] [--dtype bfloat16] [--threads 2]

Prompts are decoded with and without the drafter in turn, so that a busy moment falls on both. Printed: the ratio of
tokens a second with its 95 % bootstrap interval over prompts; the ceiling accept length / (verify + draft cost) with
both costs measured in this run as bare forwards; the loop's own overhead; replay against decoding in judged tokens a
second; and the forecast's best k by batch, checked at three batches by decoding. Nothing is printed that was not
measured in the run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3lab.acceptance import chain
from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.forecast import Costs, Option, best, chain_options, forecast
from eagle3lab.acceptance.forecast_costs import measure_costs
from eagle3lab.acceptance.intervals import ratio_interval
from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.acceptance.tree_replay import best_tree, rank_tables, tree_walks
from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.steps.accept import capture_replies
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.generate import generate
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile

CHECKED_BATCHES = (1, 4, 16)
TREE_TOPK, TREE_NODES = 4, (4, 7, 11, 15)
DEEPEST = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt at batch 1: tokens and seconds, plain and with the drafter. prefill is done alike, and timed once."""

    plain: list[int]
    fast: list[int]
    plain_seconds: float
    fast_seconds: float
    prefill: float


def main() -> None:
    """Parse words, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--profile", default="smollm2")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--set", default="fresh", help="held-out set")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-forecast", action="store_true", help="batch 1 only")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    folder = words.target or fetched_folder(load_profile(words.profile))
    target = load_target(folder, dtype=words.dtype)
    drafter = load_drafter(words.draft, target.embedding.weight, dtype=getattr(torch, words.dtype), target=folder)
    asked = held_out(words.set)[: words.prompts]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.prompt}]) for prompt in asked]
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(words).items()}, "torch": torch.__version__}
    found["single"] = single(target, drafter, prompts, words.steps, words.max_new_tokens)
    found["replay"] = replay_speed(
        target, drafter, prompts, found["single"].pop("replies"), words.steps, found["single"]
    )
    if not words.no_forecast:
        costs = measure_costs(
            target,
            drafter,
            batches=CHECKED_BATCHES,
            verify_tokens=(1, 2, 3, 4, 6, 8, 12, 16),
            draft_tokens=(1, 2, 3, 4, 6),
            repeats=words.repeats,
        )
        found["forecast"] = forecasts(target, drafter, prompts, words.max_new_tokens, costs)
        found["costs_seconds"] = {
            table.name: {f"batch {b}, {n} tokens": seconds for (b, n), seconds in table.seconds.items()}
            for table in (costs.verify, costs.draft)
        }
    text = json.dumps(found, indent=2)
    print(text)
    if words.json is not None:
        words.json.write_text(text + "\n", encoding="utf-8")


@contextmanager
def timed_forwards(target: Target, drafter: Eagle3Drafter) -> Iterator[list[float]]:
    """Seconds inside bare forwards (target and head; drafter's fc, layer and head) while the block runs: one sum."""
    spent = [0.0]
    began = [0.0]

    def start(*_: Any) -> None:
        began[0] = time.perf_counter()

    def stop(*_: Any) -> None:
        spent[0] += time.perf_counter() - began[0]

    hooks = [module.register_forward_pre_hook(start) for module in (drafter.fc, drafter.lm_head)]
    hooks += [module.register_forward_hook(stop) for module in (drafter.fc, drafter.lm_head)]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - started

        return run

    layer, own = chain.draft_extend, {"states": target.states, "logits": target.logits}
    chain.draft_extend = timed(layer)
    for name, call in own.items():
        setattr(target, name, timed(call))
    try:
        yield spent
    finally:
        chain.draft_extend = layer
        for hook in hooks:
            hook.remove()
        for name in own:
            delattr(target, name)  # the class's own method shows again


def single(target: Target, drafter: Eagle3Drafter, prompts: list[list[int]], steps: int, limit: int) -> dict[str, Any]:
    """Batch 1: ratio with interval, ceiling, overhead of the loop. Costs are measured between the prompts."""
    decoder = ChainDecoder(target, drafter, steps)
    decoder.run(prompts[:1], max_new_tokens=8, batch=1)  # allocate and warm up
    decoder.clock.prefill = 0.0
    rows: list[Row] = []
    replies: list[Decoded] = []
    costs: list[Costs] = []
    for prompt in prompts:
        costs.append(
            measure_costs(
                target,
                drafter,
                batches=(1,),
                verify_tokens=(1, steps + 1),
                draft_tokens=range(1, steps + 2),
                context=len(prompt) + limit // 2,
                repeats=2,
            )
        )
        started, prefill = time.perf_counter(), decoder.clock.prefill
        plain = generate(target, [prompt], max_new_tokens=limit, batch=1)[0]
        middle = time.perf_counter()
        reply = decoder.run([prompt], max_new_tokens=limit, batch=1)[0]
        end = time.perf_counter()
        took = decoder.clock.prefill - prefill
        rows.append(Row(plain.tokens, reply.tokens, middle - started, end - middle, took))
        replies.append(reply)
    with timed_forwards(target, drafter) as spent:
        started = time.perf_counter()
        decoder.run(prompts, max_new_tokens=limit, batch=1)
        whole = time.perf_counter() - started
    counts = total(reply.counts(str(i), steps) for i, reply in enumerate(replies))
    option = Option(f"chain {steps}", steps, 1, steps, counts.accept_length or math.nan)
    found = [forecast(option, 1, one) for one in costs]
    steps_cost = [one.verify.at(1, 1) for one in costs]
    verify = statistics.median(f.verify_seconds / s for f, s in zip(found, steps_cost, strict=True))
    draft = statistics.median(f.draft_seconds / s for f, s in zip(found, steps_cost, strict=True))
    ceiling = option.accept_length / (verify + draft)
    after = _rate(sum(row.fast_seconds - row.prefill for row in rows), sum(len(row.fast) - 1 for row in rows))
    after /= _rate(sum(row.plain_seconds - row.prefill for row in rows), sum(len(row.plain) - 1 for row in rows))
    pairs = [(row.plain_seconds / len(row.plain), row.fast_seconds / len(row.fast)) for row in rows]
    decode, plain_rate = (
        _rate(sum(row.fast_seconds for row in rows), sum(len(row.fast) for row in rows)),
        _rate(sum(row.plain_seconds for row in rows), sum(len(row.plain) for row in rows)),
    )
    return {
        "accept_length": option.accept_length,
        "accept_length_interval": counts.accept_length_interval(),
        "same_text": sum(row.plain == row.fast for row in rows),
        "ratio": decode / plain_rate,
        "ratio_interval": ratio_interval(pairs),
        "verify_cost_steps": verify,
        "draft_cost_steps": draft,
        "ceiling": ceiling,
        "ratio_without_prefill": after,
        "ratio_without_prefill_of_ceiling": after / ceiling,
        "loop_overhead": whole / spent[0] - 1,
        "decode_tokens_per_second": decode,
        "plain_tokens_per_second": plain_rate,
        "replies": replies,
    }


def _rate(seconds: float, tokens: int) -> float:
    return tokens / seconds


def replay_speed(
    target: Target,
    drafter: Eagle3Drafter,
    prompts: list[list[int]],
    replies: list[Decoded],
    steps: int,
    decoded: dict[str, Any],
) -> dict[str, Any]:
    """Judged tokens a second of replay from captured states, against decoding; counts must agree."""
    samples = capture_replies(target, prompts, [reply.tokens for reply in replies], drafter.config.points)
    walk_samples(drafter, samples[:1], steps)
    started = time.perf_counter()
    walks = walk_samples(drafter, samples, steps)
    seconds = time.perf_counter() - started
    tokens = sum(len(walk.prefix) for walk in walks)
    return {
        "positions_per_second": tokens / seconds,
        "times_decode": tokens / seconds / decoded["decode_tokens_per_second"],
        "accepted_in_replay": sum(sum(walk.accepted) for walk in walks),
        "accepted_in_decode": sum(sum(reply.accepted) for reply in replies),
    }


def forecasts(
    target: Target, drafter: Eagle3Drafter, prompts: list[list[int]], limit: int, costs: Costs
) -> dict[str, Any]:
    """Best chain or static tree by batch, and the best chain's forecast against a measurement at each batch."""
    plain = [reply.tokens for reply in generate(target, prompts, max_new_tokens=limit, batch=len(prompts))]
    samples = capture_replies(target, prompts, plain, drafter.config.points)
    chains = chain_options(_walked(walk_samples(drafter, samples, DEEPEST), DEEPEST).joint or ())
    tables = rank_tables(drafter, samples, DEEPEST, TREE_TOPK)
    trees = [(n, best_tree(tables, TREE_TOPK, n)) for n in TREE_NODES]
    options = [
        *chains,
        *(
            Option(
                f"static tree of {n}",
                tree.steps,
                max(1, math.ceil(tree.slots / max(1, tree.steps - 1))),
                tree.nodes,
                1 + sum(sum(w.accepted) for w in walks) / max(1, sum(len(w.accepted) for w in walks)),
            )
            for n, tree in trees
            for walks in [tree_walks(tables, tree)]
        ),
    ]
    rows = []
    for batch in CHECKED_BATCHES:
        fastest, checked = (
            best(options, batch, costs),
            max((forecast(option, batch, costs) for option in chains), key=lambda f: f.speedup),
        )
        rows.append(
            {
                "batch": batch,
                "best": "plain decoding" if fastest is None else fastest.option.name,
                "best_speedup": None if fastest is None else fastest.speedup,
                "checked": checked.option.name,
                "forecast_speedup": checked.speedup,
                "measured_speedup": _measured(target, drafter, prompts, checked.option.steps, batch, limit),
            }
        )
    return {"rows": rows, "options": {option.name: option.accept_length for option in options}}


def _measured(
    target: Target, drafter: Eagle3Drafter, prompts: list[list[int]], steps: int, batch: int, limit: int
) -> float:
    """Speed-up of rounds over plain steps at one batch, prefill left out. Rows that end early idle in both."""
    rows = (prompts * -(-batch // len(prompts)))[: max(batch, len(prompts) // batch * batch)]
    decoder = ChainDecoder(target, drafter, steps)
    started = time.perf_counter()
    tokens = sum(len(reply.tokens) - 1 for reply in decoder.run(rows, max_new_tokens=limit, batch=batch))
    fast = time.perf_counter() - started - decoder.clock.prefill
    started = time.perf_counter()
    plain_tokens = sum(len(reply.tokens) - 1 for reply in generate(target, rows, max_new_tokens=limit, batch=batch))
    slow = time.perf_counter() - started - decoder.clock.prefill  # the same prefill, timed once
    return (tokens / fast) / (plain_tokens / slow)


def _walked(walks: list[Any], steps: int) -> AcceptanceCounts:
    from eagle3lab.acceptance.counts import from_lengths

    return total(from_lengths(walk.accepted, k=steps, prompt=str(i)) for i, walk in enumerate(walks))


if __name__ == "__main__":
    main()
