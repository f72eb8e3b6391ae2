"""Train an EAGLE-3 drafter on captured states.

    eagle3lab train --profile smollm2 --preset quick

AdamW with fp32 masters, cosine schedule with warm-up, gradient clipping, bf16 autocast. Every step is decided by
(settings, seed, data), so an interrupted training continues from its last checkpoint onto the same batches.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.capture.store import Store
from eagle3lab.core.errors import TrainingError
from eagle3lab.core.files import atomic_write
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed
from eagle3lab.targets.model import Target
from eagle3lab.training.batches import BatchPlan, load_batch
from eagle3lab.training.conventions import Convention, supervise
from eagle3lab.training.loss import LossKind, ttt_loss

SNAPSHOT_SHARES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
"""fc is saved at these shares of the steps: the trajectory that `inspect` draws."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What decides a training, apart from the data. Steps and tokens, never seconds."""

    steps: int
    """Optimiser steps."""
    batch_tokens: int = 512
    """Tokens a step (prompt tokens included)."""
    ttt_steps: int = 3
    """K: depth of the training-time test; at least the chain length that will be served."""
    learning_rate: float = 1e-3
    warmup_share: float = 0.03
    final_share: float = 0.02
    """Learning rate at the end as a share of the peak."""
    weight_decay: float = 0.0
    beta2: float = 0.95
    clip: float = 1.0
    """Largest gradient norm."""
    convention: Convention = "served"
    loss: LossKind = "ce"
    teacher_temperature: float = 1.0
    """Of the teacher's distribution. 1 = the target's own; below 1 the greedy choice weighs more."""
    step_decay: float | None = None
    """Base of the step weights; None = the convention's."""
    precision: Literal["bf16", "fp32"] = "bf16"
    train_lm_head: bool = True
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    """Steps between held-out evaluations; 0 = at the start and the end only."""
    checkpoint_every: int = 0
    """Steps between resume checkpoints; 0 = none."""


@dataclass(slots=True)
class TrainResult:
    """What a training leaves: rows for the curve, held-out rows, and where it stopped."""

    history: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    steps_done: int = 0
    truncated: bool = False


class Trainer:
    """One training.

    Args:
        drafter: built by `eagle3lab.drafter.init.build_drafter`.
        target: its head is the teacher's.
        store: captured states; train, held_out: sample numbers in it.
        folder: receives `fc_snapshots/` and the resume checkpoint.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: Target,
        store: Store,
        train: list[int],
        held_out: list[int],
        settings: TrainSettings,
        folder: Path,
    ) -> None:
        if not train:
            raise TrainingError("0 training samples", rule="capture at least one conversation with a reply")
        self.drafter, self.store, self.settings, self.folder = drafter, store, settings, folder
        self.held_out = held_out
        self.plan = BatchPlan([store.length(i) for i in range(len(store))], train, settings.batch_tokens, settings.seed)
        kept = drafter.kept_ids
        self.compute = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self.teacher_head = target.head.weight[kept].detach().to(self.compute)
        # A store may hold the last state before the target's final norm; the teacher's head reads it after.
        self.final_norm = None if store.manifest.last == "post_norm" else _final_norm(target)
        self.full_head = None if store.manifest.greedy else target.head.weight.detach().to(self.compute)
        drafter.lm_head.weight.requires_grad_(settings.train_lm_head)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.result = TrainResult()
        lookup = torch.full((drafter.config.vocab_size,), -1, dtype=torch.int64)
        lookup[kept] = torch.arange(len(kept))
        self.lookup = lookup

    def learning_rate(self, step: int) -> float:
        """Cosine from the peak to `final_share` of it after a linear warm-up. step: from 0."""
        s = self.settings
        warm = max(1, round(s.warmup_share * s.steps))
        if step < warm:
            return s.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, s.steps - warm)
        return s.learning_rate * (s.final_share + (1 - s.final_share) * 0.5 * (1 + math.cos(math.pi * progress)))

    def choice(self, batch: Packed) -> Tensor:
        """int64 [N]: draft id of what the target chooses after every slot, -1 = out of the draft vocabulary.

        On greedy replies that is the next token of the text; otherwise the argmax over the full vocabulary.
        """
        if self.full_head is None:
            return self.lookup[batch.shifted(batch.input_ids, 1)]
        best = torch.cat([(piece.to(self.compute) @ self.full_head.T).argmax(-1) for piece in batch.last.split(256)])
        return self.lookup[best]

    def run(
        self, *, max_seconds: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None
    ) -> TrainResult:
        """Train to the last step, or stop cleanly (`truncated`) when `max_seconds` have passed."""
        s, started = self.settings, time.monotonic()
        snapshots = {round(share * s.steps) for share in SNAPSHOT_SHARES}
        first = self.result.steps_done
        if first == 0:
            self.snapshot(0)
            self.evaluate(0)
        sums: list[tuple[int, Any, float]] = []
        tokens, since = 0, time.monotonic()
        for step in range(first, s.steps):
            batch = load_batch(self.store, self.plan.step(step), s.convention, s.ttt_steps, self.final_norm)
            _, step_sums, norm = self.step(step, batch)
            tokens += batch.tokens
            sums.append((batch.tokens, step_sums, norm))
            done = step + 1
            self.result.steps_done = done
            if done % s.log_every == 0 or done == s.steps:
                row = self._row(done, sums, tokens / (time.monotonic() - since))
                self.result.history.append(row)
                sums, tokens, since = [], 0, time.monotonic()
                if progress is not None:
                    progress(row)
            if done in snapshots:
                self.snapshot(done)
            if s.evaluate_every and done % s.evaluate_every == 0 and done != s.steps:
                self.evaluate(done)
                since = time.monotonic()
            if s.checkpoint_every and done % s.checkpoint_every == 0:
                self.save()
            if max_seconds is not None and time.monotonic() - started > max_seconds and done < s.steps:
                self.result.truncated = True
                break
        self.evaluate(self.result.steps_done)
        return self.result

    def step(self, step: int, batch: Packed) -> tuple[float, Any, float]:
        """One optimiser step; returns the loss, the sums per TTT step and the gradient norm before clipping."""
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        supervision = supervise(s.convention, batch, s.ttt_steps, self.choice(batch), decay=s.step_decay)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=s.precision == "bf16"):
            hidden = self.drafter(batch, s.ttt_steps)
        hidden = [h.to(self.compute) for h in hidden]
        loss, sums = ttt_loss(
            hidden,
            self.drafter.lm_head.weight,
            self.teacher_head,
            batch.last,
            supervision,
            kind=s.loss,
            temperature=s.teacher_temperature,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, s.clip, foreach=True))
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(norm):
            raise TrainingError(
                f"loss {value}, gradient norm {norm} at step {step + 1}",
                rule="both must be finite",
                fix="lower learning_rate, or look for non-finite states: eagle3lab doctor --states DIR",
            )
        self.optimizer.step()
        return value, sums, norm

    def _row(self, step: int, sums: list[tuple[int, Any, float]], speed: float) -> dict[str, Any]:
        """One line of the curve: per TTT step, sums divided at the end only."""
        loss = sum(item.loss for _, item, _ in sums) / len(sums)
        hits, counted = sum(item.hits for _, item, _ in sums), sum(item.counted for _, item, _ in sums)
        return {
            "step": step,
            "loss": float(loss.sum()),
            "loss_by_step": loss.tolist(),
            "accuracy_by_step": (hits / counted).tolist(),
            "hits": hits.tolist(),
            "counted": counted.tolist(),
            "learning_rate": self.learning_rate(step - 1),
            "gradient_norm": sum(n for _, _, n in sums) / len(sums),
            "tokens_per_second": speed,
        }

    def evaluate(self, step: int) -> None:
        """Held-out replay: accept length along the decode path and accuracy by position (teacher-forced, k = K)."""
        if not self.held_out or (self.result.held_out and self.result.held_out[-1]["step"] == step):
            return
        walks = walk_samples(self.drafter, (self.store[i] for i in self.held_out), self.settings.ttt_steps)
        chains, accepted = sum(len(w.starts) for w in walks), sum(sum(w.accepted) for w in walks)
        positions = torch.cat([w.prefix for w in walks]) if walks else torch.zeros(0)
        self.result.held_out.append(
            {
                "step": step,
                "chains": chains,
                "accepted": accepted,
                "simulated_accept_length": 1 + accepted / max(chains, 1),
                "all_positions_accept_length": 1 + float(positions.float().mean()) if len(positions) else None,
                "greedy_text": self.store.manifest.greedy,
            }
        )

    def snapshot(self, step: int) -> None:
        """Write `fc_snapshots/step-NNNNNN.safetensors` with the tensor `fc.weight` in bf16."""
        from safetensors.torch import save_file

        path = self.folder / "fc_snapshots" / f"step-{step:06d}.safetensors"
        fc = self.drafter.fc.weight.detach().to(torch.bfloat16).contiguous()
        atomic_write(path, lambda temporary: save_file({"fc.weight": fc}, temporary))

    def save(self) -> None:
        """Write the resume checkpoint (whole or absent). Read back with `weights_only=True`: nothing is unpickled."""
        state = {
            "model": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "settings": asdict(self.settings),
            "result": json.dumps(asdict(self.result)),
        }
        atomic_write(self.folder / "resume.pt", lambda temporary: torch.save(state, temporary))

    def resume(self) -> bool:
        """Continue from the resume checkpoint if there is one with the same settings; True if it was used."""
        path = self.folder / "resume.pt"
        if not path.is_file():
            return False
        state = torch.load(path, weights_only=True)
        if state["settings"] != asdict(self.settings):
            changed = [name for name, value in asdict(self.settings).items() if state["settings"].get(name) != value]
            raise TrainingError(
                f"{path} was written with other settings: {', '.join(changed)}",
                rule="a resume keeps its settings",
                fix=f"delete {path} to start again",
            )
        self.drafter.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.result = TrainResult(**json.loads(state["result"]))
        return True


def _final_norm(target: Target) -> Callable[[Tensor], Tensor]:
    """Last states before the target's final norm -> after it, rounded once to their own type."""

    @torch.no_grad()
    def apply(last: Tensor) -> Tensor:
        return target.final_norm(last.to(target.dtype)).to(last.dtype)

    return apply
