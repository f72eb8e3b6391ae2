"""A drafter trained for a moment on a tiny target's own greedy text, and the text itself: shared by decoding tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from eagle3lab.acceptance.chain import ChainDecoder, Decoded
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.capture.store import Sample
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.targets.generate import generate
from eagle3lab.targets.model import Target
from tests.tiny import POINTS, VOCAB, tiny_drafter, tiny_target

LIMIT = 24


@dataclass(frozen=True)
class Lab:
    """A target, its prompts (of unequal length), plain greedy replies, and drafters by name."""

    target: Target
    prompts: list[list[int]]
    plain: list[list[int]]
    drafters: dict[str, Eagle3Drafter]


def some_prompts(count: int, seed: int = 0, longest: int = 9) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def states_of(target: Target, prompts: list[list[int]], replies: list[list[int]]) -> list[Sample]:
    """States along prompt + reply."""
    samples = []
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        ids = torch.tensor([*prompt, *reply])
        last, states = target.states(ids[None], points=POINTS)
        mask = torch.arange(len(ids)) >= len(prompt)
        samples.append(Sample(number, ids, mask, torch.cat(states, -1)[0], last[0]))
    return samples


def teach(drafter: Eagle3Drafter, samples: list[Sample], steps: int = 60) -> Eagle3Drafter:
    """Cross-entropy on the text's own next tokens, 3 TTT steps: enough to accept some drafts and refuse others."""
    from eagle3lab.drafter.packed import pack

    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids))
    batch = pack(
        torch.cat([s.input_ids for s in samples]),
        torch.cat([s.aux for s in samples]),
        torch.cat([s.last for s in samples]),
        offsets,
        torch.cat([s.loss_mask for s in samples]),
    )
    drafter.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for k, h in enumerate(drafter(batch, 3)):
            labels = drafter.draft_ids(batch.shifted(batch.input_ids, k + 2)[batch.active])
            inside = batch.shifted(torch.ones_like(batch.mask), k + 2)[batch.active] & (labels >= 0)
            loss = loss + torch.nn.functional.cross_entropy(drafter.lm_head(h)[inside], labels[inside])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return drafter.eval().requires_grad_(False)


@cache
def lab() -> Lab:
    """Built once a test session. Half of the prompts are what the drafter is taught on."""
    torch.set_num_threads(1)
    target = tiny_target()
    prompts = some_prompts(40)
    plain = [reply.tokens for reply in generate(target, prompts, max_new_tokens=LIMIT, batch=8)]
    taught = teach(tiny_drafter(target, draft_vocab=80), states_of(target, prompts[:20], plain[:20]))
    return Lab(target, prompts, plain, {"fresh": tiny_drafter(target).eval().requires_grad_(False), "taught": taught})


class Oracle(ChainDecoder):
    """A perfect copy of the target: drafts what plain decoding says, wrong only after `right` tokens of each chain.

    `texts`: plain continuation by prompt; the current place is found from how many tokens the row has read.
    """

    def __init__(
        self, target: Target, drafter: Eagle3Drafter, k: int, texts: dict[tuple[int, ...], list[int]], right: int = 99
    ) -> None:
        super().__init__(target, drafter, k)
        self.texts, self.right = texts, right
        self.prompts: list[list[int]] = []

    def _batch(self, prompts: list[list[int]], limit: int) -> list[Decoded]:
        self.prompts = prompts
        return super()._batch(prompts, limit)

    def _closed_up(self, going):
        kept = super()._closed_up(going)
        self.prompts = [self.prompts[row] for row in kept.tolist()]
        return kept

    def _draft(self, cache, h, slot):
        drafts = []
        for place, prompt in zip(slot.tolist(), self.prompts, strict=True):
            text = self.texts[tuple(prompt)]
            done = place - len(prompt) + 1  # the first free slot is the place of the current token
            own = [*text[done : done + self.k], *([0] * self.k)][: self.k]
            drafts.append([token if j < self.right else (token + 1) % VOCAB for j, token in enumerate(own)])
        return torch.tensor(drafts), None


def counts_of(replies: list[Decoded], k: int) -> AcceptanceCounts:
    """Totals with one count a prompt."""
    return total(reply.counts(str(i), k) for i, reply in enumerate(replies))
