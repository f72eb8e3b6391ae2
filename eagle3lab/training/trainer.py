"""Train an EAGLE-3 drafter on captured states.

    eagle3lab train --profile smollm2 --preset quick
    torchrun --nproc-per-node 8 -m -- eagle3lab train --run RUN [--shards 8]

AdamW with fp32 masters, cosine schedule with warm-up, gradient clipping, bf16 autocast. Every step is decided by
(settings, seed, data), so an interrupted training continues from its last checkpoint onto the same batches, and a step
is the same on any number of ranks (`eagle3lab.training.distributed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3lab.acceptance.replay import walk_samples
from eagle3lab.core.conventions import Convention
from eagle3lab.core.errors import TrainingError
from eagle3lab.core.files import atomic_write
from eagle3lab.core.hashes import sha256_bytes, sha256_json
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.drafter.packed import Packed
from eagle3lab.targets.model import Target
from eagle3lab.training import checkpoints
from eagle3lab.training.batches import BatchPlan, Reader, States, ahead, moved
from eagle3lab.training.causes import of_bad_step, of_stuck_loss
from eagle3lab.training.conventions import labelled
from eagle3lab.training.distributed import World, full, spread, whole
from eagle3lab.training.estimate import Meter, available_memory, matrix_rate, memory, require_memory
from eagle3lab.training.head_rows import HeadRows, RowGradient, places
from eagle3lab.training.loss import LossKind, StepSums, Supervision, ttt_loss
from eagle3lab.training.watch import Guard, Lines, Window, fc_stds

COUNTED_SAMPLES = 2000
"""Samples that are read to count tokens for `head_rows`."""
FULL_HEAD_SHARE = 0.05
SNAPSHOT_SHARES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
"""fc is saved at these shares of the steps: the trajectory that `inspect` draws."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What decides a training, apart from the data. Steps and tokens, never seconds."""

    steps: int
    """Optimiser steps."""
    batch_tokens: int = 512
    """Tokens a step (prompt tokens included), over all ranks."""
    ttt_steps: int = 3
    """K: depth of the training-time test. A served chain may be longer: the drafter goes on from its own states."""
    chain: int | None = None
    """Drafts of a chain in the held-out replay; None = K."""
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
    head_rows: int = 0
    """Rows of the head that a step's loss is taken over (`training.head_rows`); 0 = all."""
    full_head_share: float = FULL_HEAD_SHARE
    """Last share of the steps, over all rows whatever `head_rows` says."""
    precision: Literal["bf16", "fp32"] = "bf16"
    feature_weight: float = 0.0
    """Of the feature term (`training.loss`): how near the drafter's normed state is to the target's. 0 = none."""
    train_lm_head: bool = True
    """False: the head stays the target's rows."""
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    """Steps between held-out evaluations; 0 = at the start and the end only."""
    checkpoint_every: int = 0
    """Steps between resume checkpoints; 0 = none."""
    stuck_after: int = 200
    """Steps after which a loss that has not left its start stops the training; 0 = never."""


WITHOUT_EFFECT = ("log_every", "evaluate_every", "checkpoint_every", "stuck_after")
"""Settings that a resume may change: no number of the training depends on them."""


@dataclass(frozen=True, slots=True)
class Watching:
    """What is shown and guarded, without effect on the training.

    matrix_rate: operations a second that a large matrix product reaches; None = measured at the start.
    memory_bytes: what one rank may still take; None = what is free at the start.
    """

    matrix_rate: float | None = None
    memory_bytes: int | None = None
    tensorboard: bool = False


@dataclass(slots=True)
class TrainResult:
    """What a training leaves: rows for the curve, held-out rows, the best of those, and where it stopped.

    seconds: of all stretches of an interrupted training, each up to the checkpoint that the next went on from.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    steps_done: int = 0
    truncated: bool = False
    seconds: float = 0.0


class Trainer:
    """One training.

    Args:
        drafter: built by `eagle3lab.drafter.init.build_drafter`.
        target: its head is the teacher's.
        store: captured states, or anything that gives samples (`batches.States`).
        train, held_out: sample numbers in it.
        folder: receives `fc_snapshots/`, `checkpoints/` and the rows.
        world: the ranks that train together; None = this process alone.
        first_epoch: see `BatchPlan`.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: Target,
        store: States,
        train: Sequence[int],
        held_out: Sequence[int],
        settings: TrainSettings,
        folder: Path,
        *,
        world: World | None = None,
        watching: Watching | None = None,
        first_epoch: Sequence[Sequence[int]] | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        if not train:
            raise TrainingError("0 training samples", rule="capture at least one conversation with a reply")
        if settings.feature_weight and drafter.config.hidden_size != drafter.config.target_hidden_size:
            raise TrainingError(
                f"feature_weight {settings.feature_weight:g}, a drafter of hidden size {drafter.config.hidden_size} "
                f"and a target of {drafter.config.target_hidden_size}",
                rule="the feature term compares their states, so both have the same size",
                fix="feature_weight=0",
            )
        s, self.world, self.watching, self.note = settings, world or World(), watching or Watching(), note
        self.drafter, self.store, self.settings, self.folder = drafter, store, settings, folder
        self.train, self.held_out = list(train), list(held_out)
        lengths = [store.length(i) for i in range(len(store))]
        self.plan = BatchPlan(lengths, train, s.batch_tokens, s.seed, first_epoch)
        self.compute = torch.bfloat16 if s.precision == "bf16" else torch.float32
        device, kept = self.world.device, drafter.kept_ids.to(target.head.weight.device)
        self.teacher_head = target.head.weight[kept].detach().to(device, self.compute)
        self.full_head = None if store.manifest.greedy else target.head.weight.detach().to(device, self.compute)
        # A store may hold the last state before the target's final norm; the teacher's head reads it after.
        norm = None if store.manifest.last == "post_norm" else _final_norm(target)
        lookup = drafter.draft_ids(torch.arange(drafter.config.vocab_size, device=drafter.d2t.device))
        rows = None
        if 0 < s.head_rows < drafter.config.draft_vocab_size:
            stop = s.steps - round(s.full_head_share * s.steps)
            rows = HeadRows(self._token_counts(lookup.cpu()), lookup.cpu(), s.head_rows, s.seed, stop)
        self.reader = Reader(
            store, self.plan, s.convention, s.ttt_steps, decay=s.step_decay, final_norm=norm, head_rows=rows,
            rank=self.world.rank, ranks=self.world.size,
        )  # fmt: skip
        drafter.lm_head.weight.requires_grad_(s.train_lm_head)
        self.lookup = lookup.to(device)
        self.fc_start = fc_stds(drafter.fc.weight, len(drafter.config.points), World())
        self.plain = spread(drafter, self.world, self.compute)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=s.learning_rate, betas=(0.9, s.beta2), weight_decay=s.weight_decay, fused=True
        )
        self.result, self.window = TrainResult(), Window(s.ttt_steps)
        self.guard = Guard(min(s.stuck_after, s.steps // 2))
        self.lines: Lines | None = None
        self.row_gradient: RowGradient | None = None

    def _token_counts(self, lookup: Tensor) -> Tensor:
        """int64 [Vd]: how often draft tokens are supervised in the training samples, or in some evenly out of many."""
        some = self.train[:: max(1, len(self.train) // COUNTED_SAMPLES)]
        ids = torch.cat([self.store.input_ids(i)[self.store.loss_mask(i).bool()] for i in some])
        drafted = lookup[ids]
        return torch.bincount(drafted[drafted >= 0], minlength=self.drafter.config.draft_vocab_size)

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

    def step(
        self, step: int, batch: Packed, bare: Supervision, rows: Tensor | None = None, *, told: bool = False
    ) -> tuple[Tensor, Tensor, StepSums | None]:
        """One optimiser step on this rank's part of a batch.

        Args:
            step: from 0.
            bare: supervision without labels (`conventions.supervise`).
            rows: int64 [R], rows of the head that the loss is taken over, ascending; None = all.
            told: the step's numbers will be shown: also sum the expected acceptance.

        Returns:
            loss of this part, gradient norm of the whole batch before clipping, and the part's sums by TTT step over
            all rows of the head: None where only some were computed and nothing is to be told.
        """
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        choice = self.choice(batch)
        with self._precision():
            hidden = [h.to(self.compute) for h in self.drafter(batch, s.ttt_steps)]

        def loss_over(rows: Tensor | None, hidden: list[Tensor], weight: Tensor) -> tuple[Tensor, StepSums]:
            labels, teacher = choice, self.teacher_head
            if rows is not None:
                labels, teacher = places(rows, choice), teacher[rows]
            return ttt_loss(
                hidden, weight, teacher, batch.last, labelled(s.convention, bare, labels),
                kind=s.loss, temperature=s.teacher_temperature, feature_weight=s.feature_weight, expected=told,
            )  # fmt: skip

        sums: StepSums | None
        weight = part = self.drafter.lm_head.weight
        alone = rows is not None and self.world.size == 1 and weight.requires_grad  # else gradients go through autograd
        if rows is not None:
            part = weight.detach()[rows].requires_grad_() if alone else weight.index_select(0, rows)
        loss, sums = loss_over(rows, hidden, part)
        if rows is not None:  # over a part of the rows a hit is easier: never shown
            sums = loss_over(None, [h.detach() for h in hidden], weight.detach())[1] if told else None
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if alone and rows is not None and part.grad is not None:
            self.row_gradient = self.row_gradient or RowGradient(weight)
            weight.grad = self.row_gradient.put(rows, part.grad)
        else:
            self.row_gradient = None
        return loss.detach(), self._update(), sums

    def _precision(self) -> torch.autocast:
        """What forwards run in."""
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self.settings.precision == "bf16")

    def _update(self) -> Tensor:
        """One AdamW step on gradients clipped to the norm `clip`; returns the norm before."""
        if self.world.size > 1:
            norm = full(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip, foreach=True))
        else:  # the fused optimiser divides what it reads anyway: a pass over all gradients less
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            scale = (norm / self.settings.clip).clamp_min(1.0)
            self.optimizer.grad_scale = scale  # type: ignore[attr-defined]  # where torch.amp.GradScaler puts it
        self.optimizer.step()
        return norm

    def run(
        self, *, max_seconds: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None
    ) -> TrainResult:
        """Train to the last step, or stop cleanly (`truncated`) when `max_seconds` have passed, with a checkpoint.

        Raises:
            TrainingError: it will not fit into memory, its numbers are not finite, or its loss does not move.
        """
        s, result = self.settings, self.result
        self.require_memory()
        rate = self.watching.matrix_rate or matrix_rate(self.world.device, self.compute)
        meter, before = Meter(self.plain, s.ttt_steps, rate, self.world, s.train_lm_head), result.seconds
        if self.world.leader:
            self.lines = Lines(self.folder, result.history, tensorboard=self.watching.tensorboard)
        snapshots = {round(share * s.steps) for share in SNAPSHOT_SHARES}
        if result.steps_done == 0:
            with meter.pause():
                self.snapshot(0)
                self.evaluate(0)
        shares = ahead(
            self.reader, range(result.steps_done, s.steps),
            one_core=not self.store.live, end=getattr(self.store, "stop_waiting", None),
        )  # fmt: skip
        cut = False
        for step, share in shares:
            done = step + 1
            told = done % s.log_every == 0 or done == s.steps
            meter.count(share)
            batch, bare = moved(share.batch, self.world.device), moved(share.bare, self.world.device)
            rows = None if share.rows is None else share.rows.to(self.world.device, non_blocking=True)
            self.window.add(*self.step(step, batch, bare, rows, told=told))
            result.steps_done = done
            if max_seconds is not None and done < s.steps and (told or (self.world.size == 1 and share.rows is None)):
                cut = self.world.same(meter.seconds() > max_seconds)
            if told:
                self._tell(done, meter, progress)
            with meter.pause():
                if done in snapshots:
                    self.snapshot(done)
                if done < s.steps:
                    better = bool(s.evaluate_every) and done % s.evaluate_every == 0 and self.evaluate(done)
                    if s.checkpoint_every and (cut or done % s.checkpoint_every == 0 or better):
                        result.seconds = before + meter.seconds()
                        self.save()
            if cut:
                break
        # After the checkpoint: a training that goes on from it knows nothing of this end.
        result.truncated = cut
        if cut and not told:
            self._tell(result.steps_done, meter, progress)
        self.evaluate(result.steps_done)
        result.seconds = before + meter.seconds()
        if self.lines is not None:
            self.lines.close()
        return result

    def require_memory(self) -> None:
        """Refuse before the first step what will not fit: the largest batch, with every slot active."""
        s, lengths = self.settings, self.plan.lengths
        longest = max(lengths[i] for i in self.train)
        needed = memory(
            self.plain.config,
            sum(p.numel() for p in self.parameters),
            tokens=max(longest, s.batch_tokens // self.world.size),
            steps=s.ttt_steps,
            compute=self.compute,
            shards=self.world.shards,
            ranks=self.world.size,
            device=self.world.device.type,
        )
        limit = self.watching.memory_bytes
        require_memory(needed, available_memory(self.world.device) if limit is None else limit, s.batch_tokens)

    def _tell(self, done: int, meter: Meter, progress: Callable[[dict[str, Any]], None] | None) -> None:
        """Write one row of the curve."""
        self._check(done)
        ratios = fc_stds(self.drafter.fc.weight, len(self.drafter.config.points), self.world)
        row = {
            "step": done,
            **self.window.row(),
            "learning_rate": self.learning_rate(done - 1),
            "fc_std_ratio_by_point": [now / at for now, at in zip(ratios, self.fc_start, strict=True)],
            **meter.row(self.settings.steps - done),
        }
        self.window.clear()
        self.result.history.append(row)
        if self.lines is not None:
            self.lines.write(row)
            if progress is not None:
                progress(row)

    def _check(self, done: int) -> None:
        """Fetch the numbers of the steps so far; stop if they mean nothing. Before anything is written."""
        self.guard.see(
            done,
            self.window.fetch(self.world),
            lambda step: of_stuck_loss(self) if step is None else of_bad_step(self, step),
        )

    def evaluate(self, step: int) -> bool:
        """Held-out replay: accept length along the decode path and over all positions (teacher-forced, in
        the precision of the training).

        Returns:
            whether it is the best so far.
        """
        result = self.result
        # Samples of the first epoch may still be captured; held-out ones come last, and are not waited for before it.
        early = self.plan.first_epoch is not None and step < self.settings.steps and not self.plan.position(step)[0]
        if not self.held_out or early or (result.held_out and result.held_out[-1]["step"] == step):
            return False
        drafter = whole(self.drafter, self.plain)
        mine = self.held_out[self.world.rank :: self.world.size]
        chain = self.settings.chain or self.settings.ttt_steps
        walks = walk_samples(drafter, (self.store[i] for i in mine), chain, precision=self._precision())
        counts = torch.tensor(
            [
                sum(len(w.starts) for w in walks),
                sum(sum(w.accepted) for w in walks),
                sum(len(w.prefix) for w in walks),
                sum(int(w.prefix.sum()) for w in walks),
            ],
            device=self.world.device,
        )
        chains, accepted, positions, prefix = self.world.sum(counts).tolist()
        row = {
            "step": step,
            "chains": chains,
            "accepted": accepted,
            "simulated_accept_length": 1 + accepted / max(chains, 1),
            "all_positions_accept_length": 1 + prefix / positions if positions else None,
            "greedy_text": self.store.manifest.greedy,
        }
        result.held_out.append(row)
        better = result.best is None or row["simulated_accept_length"] > result.best["simulated_accept_length"]
        if better:
            result.best = row
        return better

    def snapshot(self, step: int) -> None:
        """Write `fc_snapshots/step-NNNNNN.safetensors` with the tensor `fc.weight` in bf16."""
        from safetensors.torch import save_file

        path = self.folder / "fc_snapshots" / f"step-{step:06d}.safetensors"
        fc = full(self.drafter.fc.weight.detach()).to("cpu", torch.bfloat16).contiguous()
        if self.world.leader:
            atomic_write(path, lambda temporary: save_file({"fc.weight": fc}, temporary))

    def identity(self) -> dict[str, Any]:
        """What decides this training: a resume must find it the same (`checkpoints.require_same`)."""
        manifest, drafter = self.store.manifest, self.plain
        settings = {k: v for k, v in asdict(self.settings).items() if k not in (*WITHOUT_EFFECT, "seed")}
        return {
            **settings,
            "data_seed": self.settings.seed,
            "points": manifest.points,
            "states_sha256": {shard.name: shard.sha256 for shard in manifest.shards},
            "capture_sha256": sha256_json(manifest.identity()),
            "samples_sha256": sha256_json([self.train, self.held_out, self.plan.lengths, self.plan.first_epoch]),
            "draft_vocabulary_sha256": sha256_bytes(drafter.d2t.cpu().numpy().tobytes()),
            "drafter": drafter.config.model_dump(),
            "world_size": self.world.size,
            "shards": self.world.shards,
        }

    def save(self) -> None:
        """Write a resume checkpoint (`checkpoints`), unless the numbers since the last one mean nothing."""
        done, result = self.result.steps_done, self.result
        self._check(done)
        tensors = checkpoints.training_tensors(self.drafter, self.optimizer, self.window.seen, self.world)
        epoch, place = self.plan.position(done)
        kept = {"weights": True, "optimizer": True, "scheduler": {"last_step": done}, "rng": True}
        state = {
            "run": {"step": done, **kept, "sampler": {"epoch": epoch, "batch": place}, **self.identity()},
            "best": result.best,
            "result": asdict(result),
            "guard": self.guard.state(),
            "fc_start": self.fc_start,
            "tensors": checkpoints.shapes(tensors, self.world),
        }
        checkpoints.save(self.folder, done, tensors, state, self.world)

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint if there is one; True if it was used.

        Raises:
            TrainingError: it was written with other data, order, points or settings (all named).
        """
        found = self.world.lead(lambda: checkpoints.newest(self.folder, self.note))
        if found is None:
            return False
        note = self.note if self.world.leader else lambda _: None
        checkpoints.require_same(found, self.identity(), note)
        self.window.restore(checkpoints.load(found, self.drafter, self.optimizer, self.world))
        self.result = TrainResult(**found.state["result"])
        self.guard.restore(found.state["guard"])
        self.fc_start = found.state["fc_start"]
        return True


def _final_norm(target: Target) -> Callable[[Tensor], Tensor]:
    """Last states before the target's final norm -> after it, rounded once to their own type."""

    @torch.no_grad()
    def apply(last: Tensor) -> Tensor:
        return target.final_norm(last.to(target.device, target.dtype)).to(last)

    return apply
