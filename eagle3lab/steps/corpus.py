"""Corpus of a run: the shipped replies of the target, rendered, split and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import FetchError
from eagle3lab.core.files import read_json
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.paths import data_folder
from eagle3lab.corpus.build import HELD_OUT, Corpus, build_corpus, held_out
from eagle3lab.corpus.replies import REPLIES_MANIFEST, load_replies, regenerated_folder
from eagle3lab.runs.directory import Run
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.profiles import Profile, load_profile


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """Counts of the corpus, and the draft vocabulary's coverage.

    Attributes:
        samples, validation: conversations to train on, and held back for the curve.
        reply_tokens: supervised tokens of both.
        by_kind: kind -> conversations.
        lengths: reply length of every conversation, in tokens.
        held_out: evaluation set -> {"prompts", "sha256"}.
    """

    samples: int
    validation: int
    reply_tokens: int
    by_kind: dict[str, int]
    lengths: list[int]
    draft_vocab_size: int
    coverage: float
    covered: int
    padded: int
    held_out: dict[str, dict[str, Any]]
    sha256: str
    greedy: bool


def evaluation_sets(profile: Profile) -> tuple[str, ...]:
    """Held-out sets of a target, headline first. A random target wrote no prompts, so it has no `own`."""
    return ("fresh",) if profile.random_weights else ("own", "fresh")


def load_tokenizer(profile: str) -> Any:
    """Tokenizer of a fetched target."""
    import transformers

    folder = fetched_folder(load_profile(profile))
    if not folder.is_dir():
        raise FetchError(
            f"target of profile '{profile}' is not here ({folder})", fix=f"eagle3lab fetch --profile {profile}"
        )
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def corpus_for(run: Run, tokenizer: Any = None) -> Corpus:
    """The corpus of a run; cheap enough to be made again by every step that needs it.

    Replies that were regenerated for these very weights are used when there are some, else the shipped ones.
    """
    profile = load_profile(run.manifest.profile)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(run.manifest.profile)
    weights = weight_hash(fetched_folder(profile))
    folder = regenerated_folder(weights)
    if not (folder / REPLIES_MANIFEST).exists():
        folder = data_folder() / "replies"
    facts = read_json(folder / REPLIES_MANIFEST)
    end = tokenizer.convert_tokens_to_ids(profile.chat.turn_end) if profile.chat else tokenizer.eos_token_id
    replies = load_replies(folder, tokenizer, weight_sha256=weights, eos_id=end)
    return build_corpus(tokenizer, replies, samples=run.preset.train_samples, greedy=facts["temperature"] == 0)


def prepare_corpus(run: Run, *, note: Callable[[str], None] = print) -> CorpusSummary:
    """Render, split and count; the numbers go into the run's manifest and metrics."""
    with run.recording("corpus"):
        profile = load_profile(run.manifest.profile)
        if profile.random_weights:
            from eagle3lab.steps.corpus_build import random_replies

            random_replies(run.manifest.profile, note=note)
        corpus = corpus_for(run)
        run.require_inputs(corpus=corpus.sha256)
        vocabulary = corpus.vocabulary(profile.model.vocab_size, run.preset.draft_vocab_size)
        sets: dict[str, dict[str, Any]] = {
            name: {"prompts": len(held_out(name)), "sha256": sha256_file(data_folder() / path)}
            for name, path in HELD_OUT.items()
            if name in evaluation_sets(profile)
        }
        summary = CorpusSummary(
            samples=len(corpus.train),
            validation=corpus.validation,
            reply_tokens=corpus.reply_tokens,
            by_kind=dict(sorted(Counter(reply.kind for reply in corpus.replies).items())),
            lengths=[len(reply.tokens) for reply in corpus.replies],
            draft_vocab_size=len(vocabulary.kept),
            coverage=vocabulary.coverage,
            covered=vocabulary.covered,
            padded=vocabulary.padded,
            held_out=sets,
            sha256=corpus.sha256,
            greedy=corpus.greedy,
        )
        run.add_inputs(corpus=corpus.sha256, **{f"held_out_{name}": facts["sha256"] for name, facts in sets.items()})
        run.merge_metrics(
            {
                "corpus": {
                    "samples": summary.samples,
                    "reply_tokens": summary.reply_tokens,
                    "coverage": summary.coverage,
                    "draft_vocab_size": summary.draft_vocab_size,
                }
            }
        )
        return summary
