"""What notebook 01 shows: the target answers, and how its residual stream grows on the way to the capture points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3lab.corpus.chat import render_prompt
from eagle3lab.runs.directory import Run
from eagle3lab.steps.fetch import TargetSummary, fetch_for
from eagle3lab.targets.profiles import load_profile

if TYPE_CHECKING:
    from eagle3lab.targets.ranks import RankShare

QUESTION = "Explain in two sentences why the sky is blue."


@dataclass(frozen=True, slots=True)
class TargetLook:
    """A target that was loaded and asked once.

    Attributes:
        target: folder, id and weight hash.
        parameters: numbers in the model; a tied head is counted once.
        question, answer: one greedy exchange; `ended` says whether the target ended by itself.
        norms: [n] median L2 norm over tokens of `resid_pre[i]`, for the exchange above, the first token left out
            (its norm is a known outlier of decoder models and would hide the rest).
        points: capture points of the profile.
        shares: how the target lies over the processes, one row each.
        random: its weights are random numbers; what it writes means nothing.
    """

    target: TargetSummary
    parameters: int
    blocks: int
    hidden_size: int
    vocab_size: int
    question: str
    answer: str
    ended: bool
    norms: list[float]
    points: list[int]
    shares: list[RankShare]
    random: bool

    @property
    def loaded(self) -> list[tuple[object, ...]]:
        """Rows of rank, device, parameters, bytes."""
        return [(one.rank, one.device, f"{one.parameters:,}", f"{one.bytes:,}") for one in self.shares]


def look_at_target(run: Run, *, question: str = QUESTION, max_new_tokens: int = 48) -> TargetLook:
    """Fetch the target if it is absent, load it, let it answer `question`, and measure its residual stream."""
    import torch

    from eagle3lab.targets.generate import generate
    from eagle3lab.targets.model import load_target
    from eagle3lab.targets.ranks import rank_table

    summary = fetch_for(run)
    profile = load_profile(run.manifest.profile)
    # float32 like the measured decoding: on many CPUs a bfloat16 product with one row is several times slower.
    target = load_target(summary.folder, dtype="float32", trust_remote_code=profile.trust_remote_code)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": question}])
    reply = generate(target, [prompt], max_new_tokens=max_new_tokens, batch=1)[0]
    ids = torch.tensor([[*prompt, *reply.tokens]])
    _, states = target.states(ids, points=list(range(target.blocks)))
    norms = [float(torch.linalg.vector_norm(state[0, 1:].float(), dim=-1).median()) for state in states]
    return TargetLook(
        target=summary,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        blocks=target.blocks,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        question=question,
        answer=target.tokenizer.decode(reply.tokens, skip_special_tokens=True).strip(),
        ended=reply.ended,
        norms=norms,
        points=list(profile.model.points),
        shares=rank_table(target),
        random=profile.random_weights,
    )
