"""Speed of `accept decode` against plain decoding by the same cache, against bare forwards, and against the forecast.

    python benchmarks/bench_decode.py --draft runs/<run>/drafter [--part single|forecast] [--prompts 16] [--threads 2]

Prompts are decoded with and without the drafter in turn, so that a busy moment falls on both. Printed: the ratio of
tokens a second with its 95 % bootstrap interval over prompts; the ceiling accept length / (verify + draft cost) with
both costs measured in this run as bare forwards; the loop's own overhead; replay against decoding in judged tokens a
second; and the forecast's best chain or tree by batch, checked at three batches by decoding while all rows are busy
(tolerance: within 10 % of the measured speed-up). Nothing is printed that was not measured in the run.
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
from eagle3lab.acceptance.chain import ChainDecoder, Decoded, Round
from eagle3lab.acceptance.counts import total
from eagle3lab.acceptance.forecast import Costs, Option, best, forecast, joint_of, walked_chains
from eagle3lab.acceptance.forecast_costs import measure_costs
from eagle3lab.acceptance.intervals import ratio_interval
from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.acceptance.tree_replay import best_tree, rank_tables, tree_walks
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.checkpoint import load_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.steps.accept import capture_replies, where_texts_part
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.generate import generate
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile

CHECKED_BATCHES = (1, 4, 16)
TOLERANCE = 0.10
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
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default=compute_type("auto", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", default="all", choices=("all", "single", "forecast"), help="single = batch 1")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    folder = words.target or fetched_folder(load_profile(words.profile))
    target = load_target(folder, dtype=words.dtype)
    drafter = load_drafter(words.draft, target.embedding.weight, dtype=getattr(torch, words.dtype), target=folder)
    asked = held_out(words.set)[: words.prompts]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.prompt}]) for prompt in asked]
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(words).items()}, "torch": torch.__version__}
    if words.part != "forecast":
        found["single"] = single(target, drafter, prompts, words.steps, words.max_new_tokens)
        replies = found["single"].pop("replies")
        found["replay"] = replay_speed(target, drafter, prompts, replies, words.steps, found["single"])
    if words.part != "single":
        costs = measure_costs(
            target,
            drafter,
            batches=CHECKED_BATCHES,
            verify_tokens=(2, 3, 4, 5, 6, 8, 12, 16),
            draft_tokens=(1, 2, 4),
            extend_tokens=range(1, DEEPEST + 2),
            context=math.ceil(statistics.mean(map(len, prompts))) + words.max_new_tokens // 2,
            repeats=words.repeats,
        )
        found["forecast"] = forecasts(target, drafter, prompts, words.max_new_tokens, costs)
        found["costs_seconds"] = {
            table.name: {f"batch {b}, {n} tokens": seconds for (b, n), seconds in table.seconds.items()}
            for table in (costs.plain, costs.verify, costs.draft, costs.extend)
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
                verify_tokens=(steps + 1,),
                draft_tokens=(1,),
                extend_tokens=range(1, steps + 2),
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
    option = Option(f"chain {steps}", steps, 1, steps, counts.joint or ())
    found = [forecast(option, 1, one) for one in costs]
    steps_cost = [one.plain.at(1, 1) for one in costs]
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
        "gaps_at_first_difference": first_gaps(target, prompts, rows),
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


def first_gaps(target: Target, prompts: list[list[int]], rows: list[Row]) -> list[float]:
    """Where a text first differs from plain decoding: how far apart the two tokens' logits are, in a whole forward.

    In bf16 a verify forward of k + 1 tokens rounds otherwise than a forward of one; a logit of 16 to 32 has steps of
    0.125. Gaps of a few steps are ties that rounding decides; a larger one is a fault of the loop.
    """
    gaps = []
    for prompt, row in zip(prompts, rows, strict=True):
        parted = where_texts_part(target, prompt, row.plain, row.fast)
        if parted is not None:
            at, logits = parted
            gaps.append(abs(float(logits[row.plain[at]] - logits[row.fast[at]])))
    return gaps


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
    chains = walked_chains(walk_samples(drafter, samples, DEEPEST), DEEPEST)
    tables = rank_tables(drafter, samples, DEEPEST, TREE_TOPK)
    options = list(chains)
    for nodes in TREE_NODES:
        tree = best_tree(tables, TREE_TOPK, nodes)
        accepted = [n for one in tree_walks(tables, tree) for n in one.accepted]
        width = max(1, math.ceil(tree.slots / max(1, tree.steps - 1)))
        options.append(Option(f"static tree of {nodes}", tree.steps, width, tree.nodes, joint_of(accepted, tree.steps)))
    rows = []
    for batch in CHECKED_BATCHES:
        fastest = best(options, batch, costs)
        checked = max((forecast(option, batch, costs) for option in chains), key=lambda f: f.speedup)
        measured, accept_length = measured_speedup(target, drafter, prompts, checked.option.steps, batch, limit)
        rows.append(
            {
                "batch": batch,
                "best": "plain decoding" if fastest is None else fastest.option.name,
                "best_speedup": None if fastest is None else fastest.speedup,
                "checked": checked.option.name,
                "forecast_speedup": checked.speedup,
                "measured_speedup": measured,
                "forecast_accept_length": checked.option.accept_length,
                "measured_accept_length": accept_length,
                "within_tolerance": abs(checked.speedup / measured - 1) <= TOLERANCE,
            }
        )
    return {"rows": rows, "tolerance": TOLERANCE, "options": {one.name: one.accept_length for one in options}}


class Watched(ChainDecoder):
    """Notes when each round began while all rows were busy, and how many tokens there were by then."""

    def __init__(self, target: Target, drafter: Eagle3Drafter, steps: int) -> None:
        super().__init__(target, drafter, steps)
        self.full, self.made, self.marks = 0, 0, list[tuple[float, int]]()

    def watch(self, rows: list[list[int]], limit: int) -> tuple[float, int, int]:
        """Seconds, tokens and row-rounds of the full batch."""
        self.full, self.made, self.marks = len(rows), 0, []
        self.run(rows, max_new_tokens=limit, batch=len(rows))
        (first, begin), (last, end) = self.marks[0], self.marks[-1]
        return last - first, end - begin, (len(self.marks) - 1) * len(rows)

    def _round(self, *inputs: Any) -> Round:
        if len(inputs[3]) == self.full:
            self.marks.append((time.perf_counter(), self.made))
        found = super()._round(*inputs)
        self.made += int((found.agreed + 1).sum())
        return found


def watch_plain(target: Target, rows: list[list[int]], limit: int) -> tuple[float, int]:
    """Seconds and tokens of plain decoding while all rows are busy."""
    marks: list[tuple[float, int]] = []
    generate(
        target, rows, max_new_tokens=limit, batch=len(rows), progress=lambda n: marks.append((time.perf_counter(), n))
    )
    full = [marks[0]]
    for one in marks[1:]:
        if one[1] - full[-1][1] < len(rows):
            break
        full.append(one)
    return full[-1][0] - full[0][0], full[-1][1] - full[0][1]


def measured_speedup(
    target: Target, drafter: Eagle3Drafter, prompts: list[list[int]], steps: int, batch: int, limit: int
) -> tuple[float, float]:
    """Tokens a second with the drafter over those without, all rows busy, group by group in turn; and accept length."""
    decoder = Watched(target, drafter, steps)
    fast = [0.0, 0, 0]
    plain = [0.0, 0]
    for start in range(0, len(prompts) - batch + 1, batch):
        rows = prompts[start : start + batch]
        fast = [a + b for a, b in zip(fast, decoder.watch(rows, limit), strict=True)]
        plain = [a + b for a, b in zip(plain, watch_plain(target, rows, limit), strict=True)]
    return (fast[1] / fast[0]) / (plain[1] / plain[0]), fast[1] / fast[2]


if __name__ == "__main__":
    main()
