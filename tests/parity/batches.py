"""What both sides are fed: real states of the embedded target on real text, and a drafter that is right half the time.

Replies are written text, not the target's own, so that the target's choice often differs from the next token: taking
the next token for the label would show. States are rounded to bf16, as a store holds them, and computed with in fp32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.corpus.build import held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.init import build_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.steps.train import draft_config
from eagle3lab.targets.model import Target
from eagle3lab.targets.profiles import Profile
from eagle3lab.training.conventions import pack_for, supervise
from eagle3lab.training.loss import ttt_loss
from tests.parity.peers.exchange import write_batch

LENGTH = 128
OUT_OF_VOCABULARY = 0.15
"""Share of supervised positions whose choice the draft vocabulary must not hold, aimed at."""
FILLERS = 200
"""Kept ids that nobody chooses, so that the vocabulary is not only right answers."""
STEPS = (3, 7)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. ids int64 [T], mask bool [T], aux [T, P*H]; pre, post [T, H]: last state before, after the norm."""

    ids: Tensor
    mask: Tensor
    aux: Tensor
    pre: Tensor
    post: Tensor

    def cut(self, length: int, mask: Tensor | None = None) -> Row:
        """The first `length` tokens, with another mask if given."""
        kept = (self.mask if mask is None else mask)[:length]
        return Row(self.ids[:length], kept, self.aux[:length], self.pre[:length], self.post[:length])


@dataclass(frozen=True, slots=True)
class Bench:
    """Target, drafter and batches of one test session."""

    target: Target
    drafter: Eagle3Drafter
    batches: dict[str, list[Row]]

    def choice(self, rows: list[Row]) -> Tensor:
        """int64 [N], draft id of the target's choice after every slot, -1 = out of vocabulary."""
        return self.drafter.draft_ids(self.target.logits(torch.cat([row.post for row in rows])).argmax(-1))


def real_rows(target: Target, points: list[int], count: int = 2) -> list[Row]:
    """Captured states of `count` conversations of LENGTH tokens."""
    prompts = held_out("fresh")
    questions = [p.prompt for p in prompts if p.kind == "chat"][:count]
    texts = [p.prompt for p in prompts if p.kind == "summarising"][:count]
    rows = []
    for question, text in zip(questions, texts, strict=True):
        header = render_prompt(target.tokenizer, [{"role": "user", "content": question}])
        body = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*header, *body][:LENGTH])
        mask = torch.arange(LENGTH) >= len(header)
        pre, states = target.states(ids[None], points=points, pre_norm=True)
        pre, aux = pre[0].bfloat16().float(), torch.cat(states, -1)[0].bfloat16().float()
        with torch.no_grad():
            rows.append(Row(ids, mask, aux, pre, target.final_norm(pre)))
    return rows


def keep(target: Target, rows: list[Row]) -> Tensor:
    """int64 [Vd] ascending: the most frequent choices up to the wanted coverage, and fillers nobody chooses."""
    choices = torch.cat([target.logits(row.post).argmax(-1)[row.mask] for row in rows]).tolist()
    kept, covered = [], 0
    for token, number in sorted(Counter(choices).items(), key=lambda item: (-item[1], item[0])):
        if covered + number > (1 - OUT_OF_VOCABULARY) * len(choices):
            break
        kept.append(token)
        covered += number
    chosen = set(choices)
    fillers = [token for token in range(1000, target.vocab_size, 97) if token not in chosen][:FILLERS]
    return torch.tensor(sorted(kept + fillers))


def pack_rows(convention: str, steps: int, rows: list[Row], mask: Tensor | None = None):
    """Pack samples for a convention, as the trainer does."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row.ids))
    parts = [torch.cat([getattr(row, name) for row in rows]) for name in ("ids", "aux", "post", "mask")]
    return pack_for(convention, steps, *parts[:3], offsets, parts[3] if mask is None else mask)


def fitted_drafter(
    target: Target, config: DraftConfig, kept: Tensor, rows: list[Row], updates: int = 25
) -> Eagle3Drafter:
    """A drafter some updates into fitting `rows`: norms differ from one and its choices are often right."""
    drafter, _ = build_drafter(config, target, kept, seed=1)
    head = target.head.weight[kept].detach()
    choice = drafter.draft_ids(target.logits(torch.cat([row.post for row in rows])).argmax(-1))
    batch = pack_rows("speculators", 1, rows)
    supervision = supervise("speculators", batch, 1, choice)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(updates):
        loss, _ = ttt_loss(drafter(batch, 1), drafter.lm_head.weight, head, batch.last, supervision)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def make_bench(target: Target, profile: Profile) -> Bench:
    """Target, drafter and the two batches: `full`, and `ragged` with a short row and a single supervised token."""
    rows = real_rows(target, profile.model.points)
    kept = keep(target, rows)
    drafter = fitted_drafter(target, draft_config(profile, target, len(kept)), kept, rows)
    single = torch.zeros(LENGTH, dtype=torch.bool)
    single[70] = True
    return Bench(target, drafter, {"full": rows, "ragged": [rows[0], rows[1].cut(83, single)]})


def hand_over(bench: Bench, rows: list[Row], folder: Path) -> None:
    """Write a batch for a peer."""
    target, drafter, config = bench.target, bench.drafter, bench.drafter.config
    tensors = {
        "target.embedding": drafter.embedding,
        "target.head": target.head.weight.float().clone(),  # tied to the embedding in this target
        "target.norm": target.final_norm.weight.float(),
        "d2t": drafter.d2t,
        "t2d": drafter.t2d,
    }
    tensors |= {f"drafter.{name}": parameter for name, parameter in drafter.named_parameters()}
    for i, row in enumerate(rows):
        tensors |= {f"ids.{i}": row.ids, f"mask.{i}": row.mask.long(), f"aux.{i}": row.aux}
        tensors |= {f"pre.{i}": row.pre, f"post.{i}": row.post}
    llama: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
        )
    }
    llama |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "pad_token_id": None, "pretraining_tp": 1}
    llama["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    write_batch(
        folder,
        tensors,
        {
            "llama": llama,
            "draft_vocab_size": config.draft_vocab_size,
            "points": config.points,
            "samples": len(rows),
            "steps": list(STEPS),
        },
    )
