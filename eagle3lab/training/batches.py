"""Which samples form which step: a plan that depends on lengths and seed alone, so any step can be resumed.

The plan knows nothing of ranks. A step's samples are dealt out to them afterwards, so a step trains on the same batch
however many there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from eagle3lab.capture.epochs import numbered_generator
from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.shards import Sample
from eagle3lab.core.conventions import Convention
from eagle3lab.core.threads import helper_thread
from eagle3lab.drafter.packed import Packed
from eagle3lab.training.conventions import pack_for, supervise, supervised
from eagle3lab.training.head_rows import HeadRows
from eagle3lab.training.loss import Supervision

Made = TypeVar("Made")


class States(Protocol):
    """Where samples come from: `Store`, one that is still being captured, or the target itself.

    live: the target computes a sample when it is asked for.
    """

    manifest: StatesManifest
    live: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        ...

    def input_ids(self, index: int) -> Tensor:
        """int64 [T] of sample `index`, without its states."""
        ...

    def loss_mask(self, index: int) -> Tensor:
        """bool [T] of sample `index`, without its states."""
        ...


class BatchPlan:
    """Shuffled epochs cut into batches of about `batch_tokens` tokens.

    Args:
        lengths: tokens of every sample.
        members: the samples to train on.
        first_epoch: the members in groups that the first epoch goes through one after the other, each shuffled: the
            order in which they are captured. None = one group.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        members: Sequence[int],
        batch_tokens: int,
        seed: int,
        first_epoch: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.lengths, self.members, self.batch_tokens, self.seed = lengths, list(members), batch_tokens, seed
        self.first_epoch = None if first_epoch is None else [list(group) for group in first_epoch]
        self._epochs: list[list[list[int]]] = []

    def step(self, index: int) -> list[int]:
        """Sample numbers of step `index`, counted from 0 over all epochs."""
        epoch, place = self.position(index)
        return self._epochs[epoch][place]

    def position(self, index: int) -> tuple[int, int]:
        """Epoch of step `index`, and its place in it."""
        epoch = 0
        while True:
            while len(self._epochs) <= epoch:
                self._epochs.append(self._cut(len(self._epochs)))
            if index < len(self._epochs[epoch]):
                return epoch, index
            index -= len(self._epochs[epoch])
            epoch += 1

    def _cut(self, epoch: int) -> list[list[int]]:
        generator = numbered_generator(self.seed, epoch)
        groups = self.first_epoch if epoch == 0 and self.first_epoch is not None else [self.members]
        order = [group[i] for group in groups for i in torch.randperm(len(group), generator=generator).tolist()]
        batches: list[list[int]] = []
        filled = self.batch_tokens
        for member in order:
            if filled + self.lengths[member] > self.batch_tokens and filled > 0:
                batches.append([])
                filled = 0
            batches[-1].append(member)
            filled += self.lengths[member]
        return batches


def deal(members: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """The samples of a step by rank, longest first to the rank that has least; some ranks may get none."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for member in sorted(members, key=lambda m: (-lengths[m], m)) if ranks > 1 else members:
        rank = tokens.index(min(tokens))
        hands[rank].append(member)
        tokens[rank] += lengths[member]
    return hands


def load_batch(
    store: States,
    members: Sequence[int],
    convention: Convention,
    steps: int,
    final_norm: Callable[[Tensor], Tensor] | None = None,
    *,
    silent: bool = False,
) -> Packed:
    """Read samples of a store and pack them for a convention.

    Args:
        final_norm: the target's, for a store whose last states were captured before it; see `Packed.last`.
        silent: supervise nothing: for a rank that only computes along.
    """
    samples = [store[member] for member in members]
    last = torch.cat([s.last for s in samples])
    mask = torch.cat([s.loss_mask for s in samples])
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids))
    return pack_for(
        convention,
        steps,
        torch.cat([s.input_ids for s in samples]),
        torch.cat([s.aux for s in samples]),
        last if final_norm is None else final_norm(last),
        offsets,
        torch.zeros_like(mask) if silent else mask,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step, ready to train on; `tokens` are those of the whole step.

    `rows`: rows of the head that the loss is taken over; None = all.
    """

    batch: Packed
    bare: Supervision
    tokens: int
    rows: Tensor | None = None


class Reader:
    """Makes the share of one rank for any step.

    A rank without samples computes along with one that is not supervised: its gradient is zero, and the exchange of
    gradients finds it in its place.
    """

    def __init__(
        self,
        store: States,
        plan: BatchPlan,
        convention: Convention,
        steps: int,
        *,
        decay: float | None = None,
        final_norm: Callable[[Tensor], Tensor] | None = None,
        head_rows: HeadRows | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.store, self.plan, self.convention, self.steps = store, plan, convention, steps
        self.decay, self.final_norm, self.rank, self.ranks = decay, final_norm, rank, ranks
        self.head_rows = head_rows

    def __call__(self, step: int) -> Share:
        """The share of step `step`, in the machine's memory."""
        members, lengths = self.plan.step(step), self.plan.lengths
        mine = deal(members, lengths, self.ranks)[self.rank]
        batch = load_batch(
            self.store, mine or members[:1], self.convention, self.steps, self.final_norm, silent=not mine
        )
        counts = None
        if self.ranks > 1:  # every rank reads all masks: cheaper than asking the others, and the same sums everywhere
            masks = [supervised(self.convention, self.store.loss_mask(m), self.steps) for m in members]
            counts = torch.cat(masks, -1).sum(-1)
        padded = max(lengths[m] for m in members) * len(members)
        bare = supervise(self.convention, batch, self.steps, None, decay=self.decay, padded_slots=padded, counts=counts)
        rows = None
        if self.head_rows is not None:  # of the whole step's text, so that all ranks choose the same
            ids = batch.input_ids if self.ranks == 1 else torch.cat([self.store.input_ids(m) for m in members])
            rows = self.head_rows(step, ids)
        return Share(batch, bare, sum(lengths[m] for m in members), rows)


def ahead(
    make: Callable[[int], Made],
    steps: Iterable[int],
    *,
    one_core: bool = True,
    end: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Made]]:
    """Yield `(step, make(step))`; the next one is made by a thread while the caller works on this one.

    Args:
        one_core: of that thread, as in `helper_thread`.
        end: called when the caller needs no more, before the thread is waited for: it may wait for something itself.
    """
    with helper_thread("reader", one_core=one_core) as pool, contextlib.ExitStack() as before:
        if end is not None:
            before.callback(end)
        waiting = None
        for step in steps:
            coming = (step, pool.submit(make, step))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def moved(value: Any, device: torch.device) -> Any:
    """A batch or a supervision with its tensors on `device`, without waiting for the copies."""
    if device.type == "cpu":
        return value
    tensors = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return replace(
        value,
        **{
            name: tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        },
    )
