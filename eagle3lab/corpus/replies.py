"""Replies that the target wrote itself, and the files that ship them.

A file of replies is gzip JSON lines: `id`, `kind`, `prompt`, `reply` (text without the end token), `ended` (true: the
target ended by itself, its end token counts as a reply token), and `reply_ids` only where tokenising `reply` would
give other tokens than the target produced. The manifest beside it has the weight hash of the target: replies of other
weights are not this target's own and are refused.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.core.errors import CorpusError
from eagle3lab.core.files import read_json, write_bytes, write_json
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.paths import cache_folder
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.corpus.prompts import Prompt, read_jsonl

if TYPE_CHECKING:
    from eagle3lab.targets.model import Target

REPLIES_MANIFEST = "replies.json"
ROWS_PER_FILE = 1500


@dataclass(frozen=True, slots=True)
class Reply:
    """One exchange: the prompt and the very tokens that the target answered (its end token included if it ended).

    Attributes:
        extra: one of those that only a preset with more samples than the others gets to (`build_corpus`).
    """

    id: str
    kind: str
    prompt: str
    tokens: list[int]
    ended: bool
    extra: bool = False


def regenerated_folder(weight_sha256: str) -> Path:
    """Where replies of other weights than the shipped ones live: in the cache, under the hash of those weights."""
    return cache_folder() / "replies" / weight_sha256[:16]


def first_part_tokens(facts: Mapping[str, Any]) -> int:
    """Reply tokens of a manifest without the extra ones: what is made again for other weights."""
    return sum(entry["reply_tokens"] for entry in facts["files"].values() if not entry.get("extra", False))


def write_replies(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int = 64,
    progress: Callable[[int], None] | None = None,
) -> list[Reply]:
    """Let the target answer every prompt, greedy (`temperature` 0) or sampled. Empty replies are dropped."""
    from eagle3lab.targets.generate import generate

    rendered = [render_prompt(target.tokenizer, [{"role": "user", "content": p.prompt}]) for p in prompts]
    made = generate(
        target,
        rendered,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch=batch,
        progress=progress,
    )
    stops = set(target.eos_ids)
    return [
        Reply(p.id, p.kind, p.prompt, g.tokens, g.ended)
        for p, g in zip(prompts, made, strict=True)
        if any(token not in stops for token in g.tokens)
    ]


def save_replies(folder: Path, groups: Mapping[str, Sequence[Reply]], tokenizer: Any, facts: dict[str, Any]) -> None:
    """Write replies as gzip JSON lines (no file over about 1 MB) and `replies.json` with `facts` and file hashes.

    Args:
        groups: precision that the target computed in (`float32`, `bfloat16`) -> replies made so. Greedy text follows
            the top logit, so where two are closer than rounding the precision decides; it is kept per file.
    """
    files: dict[str, dict[str, Any]] = {}
    for compute, replies in groups.items():
        for number, start in enumerate(range(0, len(replies), ROWS_PER_FILE)):
            some = replies[start : start + ROWS_PER_FILE]
            text = "".join(json.dumps(_to_row(reply, tokenizer), ensure_ascii=False) + "\n" for reply in some)
            path = folder / f"replies-{compute}-{number:02d}.jsonl.gz"
            write_bytes(path, gzip.compress(text.encode(), mtime=0))
            tokens = sum(len(reply.tokens) for reply in some)
            files[path.name] = {
                "sha256": sha256_file(path),
                "replies": len(some),
                "reply_tokens": tokens,
                "compute": compute,
            }
    total = sum(entry["reply_tokens"] for entry in files.values())
    write_json(
        folder / REPLIES_MANIFEST, {"schema": "eagle3lab-replies/1", **facts, "reply_tokens": total, "files": files}
    )


def _to_row(reply: Reply, tokenizer: Any) -> dict[str, Any]:
    body = reply.tokens[:-1] if reply.ended else reply.tokens
    text = tokenizer.decode(body)
    row: dict[str, Any] = {
        "id": reply.id,
        "kind": reply.kind,
        "prompt": reply.prompt,
        "reply": text,
        "ended": reply.ended,
    }
    if list(tokenizer(text, add_special_tokens=False)["input_ids"]) != body:
        row["reply_ids"] = body
    return row


def load_replies(folder: Path, tokenizer: Any, *, weight_sha256: str, eos_id: int) -> list[Reply]:
    """Read the replies of a folder.

    Raises:
        CorpusError: made with other weights, or a file that does not match its hash.
    """
    facts = read_json(folder / REPLIES_MANIFEST)
    if facts["target_weight_sha256"] != weight_sha256:
        raise CorpusError(
            f"replies in {folder} were written by weights {facts['target_weight_sha256'][:12]}, "
            f"this target has {weight_sha256[:12]}",
            rule="a drafter learns the target's own replies",
            fix=f"add --regenerate: about {first_part_tokens(facts) / 1000:.0f} k tokens; the shipped ones took "
            f"{facts['seconds'] / 60:.0f} minutes on 2 cores",
        )
    replies = []
    for name, expected in facts["files"].items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected["sha256"]:
            raise CorpusError(f"{path} is missing or does not match its hash", fix=f"git checkout -- {path}")
        rows = read_jsonl(path)
        written = [row["reply"] for row in rows if row.get("reply_ids") is None]
        # All at once: 8,000 calls take two seconds.
        made = iter(tokenizer(written, add_special_tokens=False)["input_ids"] if written else ())
        for row in rows:
            ids = row.get("reply_ids")
            body = list(next(made)) if ids is None else ids
            tokens = [*body, eos_id] if row["ended"] else body
            replies.append(
                Reply(row["id"], row["kind"], row["prompt"], tokens, row["ended"], expected.get("extra", False))
            )
    return replies
