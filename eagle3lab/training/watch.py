"""What a training says of itself: rows for the curve, and a stop when its numbers mean nothing.

Numbers of a step stay where they are computed (`Window`); they are fetched, and added up over ranks, only when a row is
written or a checkpoint is due, so no step waits for the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.core.errors import TrainingError, UsageError
from eagle3lab.core.files import write_text
from eagle3lab.training.distributed import World, local
from eagle3lab.training.loss import StepSums

LINES = "training.jsonl"
"""Rows of the curve, one JSON a line, written while training goes on."""
RECENT = 20
"""Gradient norms kept to tell a rise."""
LEAST_STEPS = 30
LEAST_DROP, NOISE = 0.01, 3
"""A loss has left its start when the later half of its steps lies below the first quarter by this share of it, or by so
many standard errors where that is more."""
FIELDS = 6


class Window:
    """Numbers of the steps since the last row: loss, gradient norm, and six sums of each TTT step.

    The sums: weighted loss, hits, counted pairs, feature term, expected acceptance, and the counted pairs of the steps
    that had it. They are 0 in steps whose sums were not computed (`Trainer.step`).
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.seen = torch.zeros(0, 2 + FIELDS * depth, dtype=torch.float64)
        self._pending: list[Tensor] = []

    def add(self, loss: Tensor, norm: Tensor, sums: StepSums | None) -> None:
        """One step, without waiting for it. loss, norm: scalars on the device."""
        scalars = torch.stack([loss.detach(), norm.detach()]).double()
        none = scalars.new_zeros(self.depth)
        fields = (none,) * FIELDS
        if sums is not None:
            expected = (none, none) if sums.expected is None else (sums.expected, sums.counted)
            fields = (sums.loss, sums.hits, sums.counted, sums.feature, *expected)
        self._pending.append(torch.cat([scalars, *fields]))

    def fetch(self, world: World) -> Tensor:
        """float64 [n, 2 + 6K] of all steps so far, over all ranks; every rank must call it."""
        if self._pending:
            block = torch.stack(self._pending)
            norms = block[:, 1].clone()  # the norm is that of the whole gradient already
            world.sum(block)
            block[:, 1] = norms
            self.seen = torch.cat([self.seen, block.cpu()])
            self._pending = []
        return self.seen

    def restore(self, seen: Tensor) -> None:
        """Go on from a checkpoint's window."""
        self.seen = seen.view(-1, self.seen.shape[1])

    def clear(self) -> None:
        """Begin anew after a row."""
        self.seen = self.seen[:0]

    def row(self) -> dict[str, Any]:
        """What the fetched steps say, divided only here."""
        fields = self.seen[:, 2:].view(-1, FIELDS, self.depth)
        loss, hits, counted, feature, expected, measured = fields.sum(0)
        steps = max(int((fields[:, 2].sum(-1) > 0).sum()), 1)
        accuracy = _rates(hits, counted)
        return {
            "loss": float(loss.sum()) / steps,
            "loss_by_step": (loss / steps).tolist(),
            "feature_error_by_step": (feature / steps).tolist() if feature.any() else None,
            "accuracy_by_step": accuracy,
            "hits": hits.tolist(),
            "counted": counted.tolist(),
            "expected_acceptance_by_step": _rates(expected, measured),
            "simulated_accept_length": chain_length(accuracy),
            "gradient_norm": float(self.seen[:, 1].sum()) / max(len(self.seen), 1),
        }


def _rates(hits: Tensor, counted: Tensor) -> list[float | None]:
    """Shares by TTT step; None where nothing was counted."""
    pairs = zip(hits.tolist(), counted.tolist(), strict=True)
    return [hit / count if count else None for hit, count in pairs]


def chain_length(rates: Iterable[float | None]) -> float:
    """1 + sum of running products: accept length, bonus in, if each step were right at its rate given those before."""
    length, product = 1.0, 1.0
    for rate in rates:
        product *= rate or 0.0
        length += product
    return length


@torch.no_grad()
def fc_stds(fc: Tensor, points: int, world: World) -> list[float]:
    """Standard deviation of every point's block of fc [H, P*Ht]; fc may be spread over ranks by rows."""
    part = local(fc)
    sums = torch.zeros(2, points, dtype=torch.float64, device=part.device)
    for rows in part.split(256):  # Kimi's fc in float64, twice, would be 2.5 GB
        blocks = rows.double().unflatten(-1, (points, -1))
        sums += torch.stack([blocks.sum((0, 2)), blocks.square().sum((0, 2))])
    count = sums.new_full((1,), part.numel() // points)
    # With several copies each row is held several times: all three sums grow alike, and the ratio does not.
    total, square, n = (x.cpu() for x in world.sum(torch.cat([*sums, count])).split([points, points, 1]))
    return (square / n - (total / n).square()).clamp_min(0).sqrt().tolist()


class Guard:
    """Stops a training whose loss is not finite, or has not left its start when it should have.

    Args:
        patience: step at which that is judged, once; 0 = never.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience and max(patience, LEAST_STEPS)
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float] = []

    def see(self, last_step: int, seen: Tensor, causes: Callable[[int | None], list[str]]) -> None:
        """Look at fetched steps, the last of which is `last_step` (counted from 1); those seen before are passed over.

        Args:
            causes: likely causes, asked only when it stops: of the step that went wrong, or None for a stuck loss.

        Raises:
            TrainingError: naming the step, the values and the likely causes.
        """
        new = seen[len(seen) - (last_step - self.step) :, :2].tolist() if last_step > self.step else []
        for loss, norm in new:
            self.step += 1
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise TrainingError(
                    f"loss {loss:g}, gradient norm {norm:g} at step {self.step}",
                    rule="both must be finite",
                    fix=_told([*causes(self.step), *self._rising()]) or "lower the learning rate",
                )
            self.norms = [*self.norms[-RECENT + 1 :], norm]
            if self.step <= self.patience:
                self.losses.append(loss)
            if self.step == self.patience == len(self.losses):  # not after a resume with another patience
                self._judge_start(causes)

    def _judge_start(self, causes: Callable[[int | None], list[str]]) -> None:
        first, later = self.losses[: len(self.losses) // 4], self.losses[len(self.losses) // 2 :]
        start, now, noise = _mean(first), _mean(later), _variance(self.losses)
        error = math.sqrt(noise / len(first) + noise / len(later))
        if now >= start - max(NOISE * error, LEAST_DROP * abs(start)):
            raise TrainingError(
                f"the loss is {now:.4g} after {self.step} steps, it began at {start:.4g}",
                rule=f"it falls by {LEAST_DROP:.0%} and more than its own noise",
                fix=_told(causes(None)) or "raise learning_rate; eagle3lab doctor --states DIR",
            )
        self.losses = []

    def _rising(self) -> list[str]:
        calm = sorted(self.norms)[: max(1, len(self.norms) // 2)]
        if len(self.norms) > 3 and self.norms[-1] > 5 * _mean(calm):
            return [f"learning rate too high: the gradient norm rose from {_mean(calm):.3g} to {self.norms[-1]:.3g}"]
        return []

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "losses": self.losses, "norms": self.norms}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def _told(causes: list[str]) -> str:
    return "likely: " + "; or ".join(causes) if causes else ""


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def _variance(values: list[float]) -> float:
    """Of the noise alone, from neighbours: a falling start would count as noise otherwise."""
    return sum((b - a) ** 2 for a, b in pairwise(values)) / max(2 * (len(values) - 1), 1)


class Lines:
    """The rows of a training as JSON lines, and on to a TensorBoard folder if asked.

    Args:
        rows: what an earlier part of this training wrote; lines after its checkpoint are dropped.
    """

    def __init__(self, folder: Path, rows: list[dict[str, Any]], *, tensorboard: bool = False) -> None:
        self.path = folder / LINES
        write_text(self.path, "".join(_line(row) for row in rows))
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UsageError(
                    "TensorBoard is not installed", rule="--tensorboard needs it", fix="pip install tensorboard"
                ) from error
            after = rows[-1]["step"] + 1 if rows else None
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        if self._board is not None:
            for name, value in _scalars(row):
                self._board.add_scalar(name, value, row["step"])
            self._board.flush()

    def close(self) -> None:
        """End the TensorBoard file, if there is one."""
        if self._board is not None:
            self._board.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _scalars(row: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """(name, value) of everything numeric; lists by TTT step or point get a number behind the name."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{index}", float(item)) for index, item in enumerate(value) if item is not None)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield name, float(value)
