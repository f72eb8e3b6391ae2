"""Replay on sampled text: the expected counts of rejection sampling, teacher-forced on the text.

p and q are the target's and the drafter's distributions at one temperature. When decoding with `Rejection` writes the
token x at a place, the draft there was kept with probability w = min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)), whatever
stood before: the rule makes the pair (token, kept) so that the token follows p and P(kept, x) = min(p(x), q(x)). Up to
a kept draft the drafter has seen exactly the ids of the text. So for a text that was sampled from p, the path of
decoding along it is a Markov chain with known chances, and its expected counts follow without drawing anything:

    chance that a chain started at slot t keeps at least j drafts = w_1(t) * ... * w_j(t)

On text that came about otherwise (greedy, other temperature, another model) the same sum is an average over the wrong
contexts; the result names itself teacher-forced in either case, because nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3lab.acceptance.intervals import ratio_interval
from eagle3lab.acceptance.replay import pack_samples, response_runs
from eagle3lab.acceptance.sampling import overlap
from eagle3lab.capture.store import Sample
from eagle3lab.core.errors import AcceptanceError
from eagle3lab.drafter.model import Eagle3Drafter

CHUNK_ROWS = 256
"""Rows of p over V that are alive at once."""


@dataclass(frozen=True, slots=True)
class ExpectedWalk:
    """Expected counts of one reply.

    Attributes:
        steps: expected verify steps along the decode path.
        at_least: [k] expected verify steps that keep at least 1, 2, ..., k drafts.
        overlap: [k] sum over all judged places of sum(min(p, q)) at draft step 1..k; places: how many were judged.
    """

    steps: float
    at_least: np.ndarray
    overlap: np.ndarray
    places: np.ndarray


def expected_walks(
    drafter: Eagle3Drafter,
    samples: Iterable[Sample],
    k: int,
    *,
    logits: Callable[[Tensor], Tensor],
    temperature: float,
    batch_tokens: int = 4096,
) -> list[ExpectedWalk]:
    """Expected counts of every sample.

    Args:
        logits: the target's head: states after the final norm [n, Ht] -> float32 logits [n, V].
        temperature: of p and q, above 0.
    """
    if temperature <= 0:
        raise AcceptanceError(
            f"temperature is {temperature}", rule="expected counts need a temperature above 0; greedy text is walked"
        )
    walks: list[ExpectedWalk] = []
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if sum(len(s.input_ids) for s in group) >= batch_tokens:
            walks += _walk_group(drafter, group, k, logits, temperature)
            group = []
    return walks + (_walk_group(drafter, group, k, logits, temperature) if group else [])


@torch.inference_mode()
def _walk_group(
    drafter: Eagle3Drafter,
    samples: list[Sample],
    k: int,
    logits: Callable[[Tensor], Tensor],
    temperature: float,
) -> list[ExpectedWalk]:
    batch = pack_samples(samples, drafter.fc.weight.device)
    hidden = drafter(batch, k)
    walks = []
    for s in batch.segments:
        parts = []
        for first, stop in response_runs(batch.mask[s.start : s.stop]):
            row = s.row + s.start + first - s.active
            text, last = (part[s.start + first : s.start + stop] for part in (batch.input_ids, batch.last))
            chance, shared = _chances(
                drafter, [h[row : row + len(text)] for h in hidden], text, last, logits, temperature
            )
            places = np.array([max(len(text) - step - 2, 0) for step in range(k)])
            parts.append(_expected(chance, shared.sum(1), places))
        walks.append(_joined(parts, k))
    return walks


def _joined(parts: Sequence[ExpectedWalk], k: int) -> ExpectedWalk:
    """The replies of one sample as one."""
    zero = np.zeros(k)
    return ExpectedWalk(
        sum(part.steps for part in parts),
        sum((part.at_least for part in parts), zero),
        sum((part.overlap for part in parts), zero),
        sum((part.places for part in parts), zero.astype(int)),
    )


def _chances(
    drafter: Eagle3Drafter,
    hidden: list[Tensor],
    text: Tensor,
    last: Tensor,
    logits: Callable[[Tensor], Tensor],
    temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
    """w and sum(min(p, q)), [k, R] each, of every slot of one reply; 0 where the text ends before the drafted place.

    At step s (from 0) slot r drafts x_{r+s+2}; p stands in the last state of x_{r+s+1}.
    """
    steps, size = len(hidden), len(text)
    chance, shared = torch.zeros(2, steps, size, device=text.device)
    kept, draft_ids = drafter.kept_ids, drafter.draft_ids(text)
    for start in range(1, size - 1, CHUNK_ROWS):
        place = torch.arange(
            start, min(start + CHUNK_ROWS, size - 1), device=text.device
        )  # x_place is read, x_{place+1} is judged
        p = (logits(last[place]) / temperature).softmax(-1)
        own = p.gather(1, text[place + 1][:, None])[:, 0]
        for step in range(steps):
            inside = place - step - 1 >= 0
            row, some = (place - step - 1)[inside], inside.nonzero()[:, 0]
            q = (drafter.lm_head(hidden[step][row]).float() / temperature).softmax(-1)
            target = draft_ids[place + 1][some]
            drafted = q.gather(1, target.clamp_min(0)[:, None])[:, 0] * (target >= 0)
            chance[step, row] = (drafted / own[some]).clamp(max=1)
            shared[step, row] = overlap(p[some], q, kept)
    return chance.double().cpu().numpy(), shared.double().cpu().numpy()


def _expected(chance: np.ndarray, shared: np.ndarray, places: np.ndarray) -> ExpectedWalk:
    """Follow all paths at once: visit[t] = chance that a chain starts at slot t."""
    steps, size = chance.shape
    reach = np.cumprod(chance, axis=0)  # [k, R]: at least j kept
    exactly = np.vstack([np.ones(size), reach]) - np.vstack([reach, np.zeros(size)])  # [k+1, R]: j kept, then not
    visit = np.zeros(size + steps + 1)
    visit[:1] = 1.0
    last = max(size - 2, 0)
    for slot in range(last):
        visit[slot + 1 : slot + steps + 2] += visit[slot] * exactly[:, slot]
    return ExpectedWalk(float(visit[:last].sum()), reach[:, :last] @ visit[:last], shared, places)


def expected_metrics(walks: Sequence[ExpectedWalk], *, temperature: float, seed: int = 0) -> dict[str, object]:
    """Keys of `accept replay --json` for sampled text; unknown is null."""
    steps = sum(walk.steps for walk in walks)
    at_least = np.sum([walk.at_least for walk in walks], axis=0) if walks else np.zeros(0)
    places = np.sum([walk.places for walk in walks], axis=0) if walks else np.zeros(0)
    shared = np.sum([walk.overlap for walk in walks], axis=0) if walks else np.zeros(0)
    interval = ratio_interval([(float(walk.at_least.sum()), walk.steps) for walk in walks], seed=seed)
    return {
        "kind": "teacher-forced expectation",
        "temperature": temperature,
        "accept_length": 1 + float(at_least.sum()) / steps if steps else None,
        "accept_length_interval": None if interval is None else [1 + interval[0], 1 + interval[1]],
        "joint": [float(value) / steps for value in at_least] if steps else None,
        "expected_verify_steps": steps,
        "overlap_all_positions": [float(s) / int(n) if n else None for s, n in zip(shared, places, strict=True)],
        "judged_positions": [int(n) for n in places],
    }
