"""What SGLang makes of an EAGLE-3 drafter under `--speculative-algorithm EAGLE3` and under `EAGLE`, in this process.

| | EAGLE3 | EAGLE (alias NEXTN) |
|---|---|---|
| the target records | states at the capture points | nothing |
| the drafter is handed | those, side by side: P*H numbers a token | the state after the final norm: H numbers |
| fc | called | skipped: what came is as wide as an embedding already |
| head | the drafter's own, ids through d2t | the target's, d2t unused |

Both are accepted at launch, neither logs anything. Source: SGLang 0.5.23, as read; `tests/engines` serves the same
drafter both ways with the real engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.model import Target

Algorithm = Literal["EAGLE", "EAGLE3"]


@dataclass(frozen=True, slots=True)
class Served:
    """One drafter decoded under one flag.

    Attributes:
        handed: numbers a token that reached the drafter. embedding: width of an embedding.
        fc_inputs: width of fc's input, one entry a call; [] when it was never called.
        names: of the prompts; replies: in the same order. seconds: of the decoding.
    """

    algorithm: Algorithm
    k: int
    handed: int
    embedding: int
    fc_inputs: list[int]
    names: list[str]
    replies: list[Decoded]
    seconds: float

    @property
    def counts(self) -> AcceptanceCounts:
        """Over all prompts, and of each."""
        return total(r.counts(name, self.k) for name, r in zip(self.names, self.replies, strict=True))


class FlaggedDrafter(Eagle3Drafter):
    """A drafter that looks at the width of what it is handed, as SGLang's does, and skips fc where none seems needed.

    It shares its parameters with the drafter that it is made from.
    """

    def __init__(self, drafter: Eagle3Drafter) -> None:
        nn.Module.__init__(self)
        self.config, self.rotary_factor = drafter.config, drafter.rotary_factor
        for name, child in drafter.named_children():
            self.add_module(name, child)
        for name, buffer in drafter.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.handed = 0

    def fuse(self, aux: Tensor) -> Tensor:
        """[N, P*H] -> [N, H] through fc; [N, H] as it is."""
        self.handed = aux.shape[-1]
        return aux if self.handed == self.embedding.shape[-1] else super().fuse(aux)


class FlaggedDecoder(ChainDecoder):
    """Greedy chain decoding with what the flag hands to the drafter."""

    def __init__(self, target: Target, drafter: Eagle3Drafter, k: int, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        served = FlaggedDrafter(drafter)
        if algorithm == "EAGLE":
            rows = target.vocab_size
            served.lm_head = target.head  # the same call: states in, logits out
            served.d2t, served.t2d = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)
        super().__init__(target, served, k)

    def _read(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        last, states = super()._read(*arguments, **named)
        return last, last if self.algorithm == "EAGLE" else states


def serve(
    target: Target,
    drafter: Eagle3Drafter,
    prompts: Sequence[list[int]],
    names: Sequence[str],
    *,
    algorithm: Algorithm,
    k: int,
    max_new_tokens: int,
) -> Served:
    """Decode `prompts` greedily as the flag would have it, and note every call of fc.

    Args:
        prompts: token ids; names: one a prompt. k: drafted tokens a verify step.
    """
    decoder = FlaggedDecoder(target, drafter, k, algorithm)
    inputs: list[int] = []
    handle = drafter.fc.register_forward_hook(lambda _, args, __: inputs.append(args[0].shape[-1]))
    started = time.perf_counter()
    try:
        replies = decoder.run(prompts, max_new_tokens=max_new_tokens)
    finally:
        handle.remove()
    return Served(
        algorithm=algorithm,
        k=k,
        handed=cast(FlaggedDrafter, decoder.drafter).handed,
        embedding=drafter.embedding.shape[-1],
        fc_inputs=inputs,
        names=list(names),
        replies=replies,
        seconds=time.perf_counter() - started,
    )
