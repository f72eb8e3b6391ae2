"""`eagle3lab corpus build`: replies of the target itself to a file of prompts.

    eagle3lab corpus build --prompts data/prompts/train.jsonl

Without --out they go to the cache, under the hash of the target's weights, where a run of the same weights finds them.
The shipped replies in `data/replies` were made by this command's functions; their manifest says with what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import CorpusError
from eagle3lab.core.files import folder_lock, make_folder, read_json
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.paths import data_folder
from eagle3lab.corpus.prompts import Prompt, read_prompts, write_own_prompts
from eagle3lab.corpus.replies import (
    REPLIES_MANIFEST,
    first_part_tokens,
    regenerated_folder,
    save_replies,
    write_replies,
)
from eagle3lab.steps.options import require
from eagle3lab.targets.fetch import fetch, fetched_folder, weight_hash
from eagle3lab.targets.model import load_target
from eagle3lab.targets.profiles import load_profile


def build_replies(
    profile: str,
    prompts: Path | None = None,
    *,
    own: int = 0,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    compute: str = "float32",
    seed: int = 0,
    batch: int = 64,
    out: Path | None = None,
    shortest: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Path:
    """Let the target answer prompts, and write them with a manifest.

    Args:
        prompts: JSONL of prompts; None = the training prompts of this project.
        shortest: take only that many of them, the shortest; None = all.
        own: also ask the target for this many prompts of its own (empty and repeated ones are dropped).
        temperature: 0 = greedy.
        compute: precision of the forwards, `float32` or `bfloat16`.
        progress: called with (what, tokens so far).

    Raises:
        CorpusError: the profile has no chat turns, or `out` holds replies already.
        UsageError: an amount that means nothing.
    """
    require(
        ("--own", own, own >= 0, "0 or more"),
        ("--temperature", temperature, 0 <= temperature < math.inf, "0 or more"),
        ("--max-new-tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("--seed", seed, seed >= 0, "0 or more"),
    )
    described = load_profile(profile)
    if described.chat is None:
        raise CorpusError(f"profile '{profile}' has no [chat] section", rule="prompts need chat turns")
    folder = fetched_folder(described)
    weights = weight_hash(folder)
    out = out or regenerated_folder(weights)
    if (out / REPLIES_MANIFEST).exists():
        raise CorpusError(f"{out} holds replies already", rule="nothing is overwritten", fix=f"rm -r {out}")
    make_folder(out)  # before the work, not after it
    source = prompts or data_folder() / "prompts" / "train.jsonl"
    asked: list[Prompt] = read_prompts(source)
    if shortest is not None:
        asked = sorted(asked, key=lambda prompt: (len(prompt.prompt), prompt.id))[:shortest]
    target = load_target(folder, dtype=compute)
    started = time.monotonic()
    if own:
        chat = described.chat
        asked += write_own_prompts(
            target,
            own,
            user_header=chat.user_header,
            system_prompt=chat.system_prompt,
            seed=seed,
            progress=(lambda n: progress("prompts", n)) if progress else None,
        )
    replies = write_replies(
        target,
        asked,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch=batch,
        progress=(lambda n: progress("replies", n)) if progress else None,
    )
    facts: dict[str, Any] = {
        "target_id": described.model.id,
        "target_weight_sha256": weights,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "batch": batch,
        "own_asked": own,
        "prompts_sha256": sha256_file(source),
        "seconds": round(time.monotonic() - started, 1),
    }
    save_replies(out, {compute: replies}, target.tokenizer, facts)
    return out


OWN_ASKED = 4200
"""Prompts that the target is asked for when its replies are made anew: as many as for the shipped ones."""


RANDOM_REPLIES = 30
"""Replies of a target with random weights: the pipeline needs some, and nothing is learnt from more of them."""


def random_replies(profile: str, *, note: Callable[[str], None] = print) -> Path:
    """Replies of a target with random weights, made once for these weights; they carry the shape of text and no sense.

    They are sampled: greedily, such a target gives every prompt the same reply.
    """
    folder = regenerated_folder(weight_hash(fetched_folder(load_profile(profile))))
    with folder_lock(folder, note=note):
        if not (folder / REPLIES_MANIFEST).exists():
            build_replies(profile, shortest=RANDOM_REPLIES, temperature=1.0, max_new_tokens=32)
    return folder


def regenerate_if_needed(profile: str, *, note: Callable[[str], None] = print) -> Path | None:
    """Make the replies of this target when the shipped ones belong to other weights; None when they are its own.

    A target with random weights has none to regenerate: every run of it sees to that itself.
    """
    described = load_profile(profile)
    if described.random_weights:
        return None
    weights = weight_hash(fetch(described, note=note))
    facts = read_json(data_folder() / "replies" / REPLIES_MANIFEST)
    folder = regenerated_folder(weights)
    if facts["target_weight_sha256"] == weights or (folder / REPLIES_MANIFEST).exists():
        return None
    note(f"regenerating about {first_part_tokens(facts) / 1000:.0f} k reply tokens with {described.model.id}")
    return build_replies(profile, own=OWN_ASKED, progress=progress_line(note))


def progress_line(note: Callable[[str], None], every: int = 5000) -> Callable[[str, int], None]:
    """A progress callback that says a line each `every` tokens, with the speed so far."""
    started, said = time.monotonic(), {"": 0}

    def progress(what: str, tokens: int) -> None:
        if tokens - said.get(what, 0) >= every:
            said[what] = tokens
            note(f"{what}: {tokens} tokens, {tokens / (time.monotonic() - started):.0f} tokens/s")

    return progress
