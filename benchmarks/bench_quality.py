"""What moves accept length: one training a change, each with the same work, judged on the same held-back conversations.

    python benchmarks/bench_quality.py [--arms base,lr-6e-3] [--operations 12] [--threads 1]
        [--json benchmarks/results/quality-smollm2.json]

The data are 560 conversations of the embedded target. Judged by teacher-forced replay along the decode path (k = 3) on
300 other conversations that no arm trains on. Work is counted in TFLOP that have to be computed
(`eagle3lab.training.estimate.step_flops`), so an arm whose step costs twice as much gets half the steps; the measured
seconds stand beside it. Differences to `base` are paired by conversation, 95 % bootstrap; that interval covers the
choice of conversations only, `seed-1` shows what another seed does. The states of all points are made once, in memory.
Results are added to the JSON file; an arm that stands there with the same settings is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3lab.acceptance.controls import replay_counts
from eagle3lab.acceptance.counts import AcceptanceCounts, total
from eagle3lab.acceptance.intervals import compare
from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.shards import Sample
from eagle3lab.capture.transformers_engine import capture_in_memory
from eagle3lab.core.files import write_json
from eagle3lab.core.paths import data_folder
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.build import Corpus, build_corpus
from eagle3lab.corpus.replies import load_replies
from eagle3lab.drafter.init import build_drafter
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.runs.presets import find_preset
from eagle3lab.steps.capture import states_manifest
from eagle3lab.steps.train import draft_config
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.training.estimate import step_flops
from eagle3lab.training.trainer import Trainer, TrainSettings

HERE = Path(__file__).resolve().parent
TRAINED, JUDGED = 560, 300
K = 3


@dataclass(frozen=True)
class Arm:
    """One change. settings: of `TrainSettings`; start: of `build_drafter`; points: None = the profile's.

    wide: MLP rows as a multiple of the target's block, the added ones with a zero output. all_tokens: prompts are
    supervised too.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    start: dict[str, str] = field(default_factory=dict)
    points: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    wide: int = 1
    all_tokens: bool = False


FEW = {"head_rows": 1536, "full_head_share": 0.1, "ttt_steps": 2}
KEPT = {"train_lm_head": False, "full_head_share": 0.0}
ARMS = {
    "base": Arm(),
    "head-rows": Arm(settings={"head_rows": 1536, "full_head_share": 0.1}),
    "head-rows-always": Arm(settings={"head_rows": 1536, "full_head_share": 0.0}),
    "head-rows-vocab-16384": Arm(settings={"head_rows": 1536, "full_head_share": 0.1}, draft_vocab_size=16384),
    "head-rows-K-2": Arm(settings=FEW),
    "feature-10": Arm(settings={**FEW, "feature_weight": 10.0}),
    "head-kept": Arm(settings={**FEW, **KEPT}),
    "head-kept-feature-3": Arm(settings={**FEW, **KEPT, "feature_weight": 3.0}),
    "head-kept-feature-10": Arm(settings={**FEW, **KEPT, "feature_weight": 10.0}),
    "head-kept-feature-30": Arm(settings={**FEW, **KEPT, "feature_weight": 30.0}),
    "points-2-15-29": Arm(points=(2, 15, 29)),
    "wide-mlp-2x": Arm(wide=2),
    "prompts-too": Arm(all_tokens=True),
    "loss-lk": Arm(settings={"loss": "lk"}),
    "vocab-16384": Arm(draft_vocab_size=16384),
    "lr-6e-3": Arm(settings={"learning_rate": 6e-3}),
    "seed-1": Arm(settings={"seed": 1}),
    "points-9-19-29": Arm(points=(9, 19, 29)),
    "K-5": Arm(settings={"ttt_steps": 5}),
    "K-2": Arm(settings={"ttt_steps": 2}),
    "K-1": Arm(settings={"ttt_steps": 1}),
    "loss-tv": Arm(settings={"loss": "tv"}),
    "fc-kaiming": Arm(start={"fc": "kaiming-uniform"}),
    "block-fresh": Arm(start={"block": "fresh"}),
    "head-fresh": Arm(start={"head": "fresh"}),
    "convention-speculators": Arm(settings={"convention": "speculators"}),
    "convention-specforge": Arm(settings={"convention": "specforge"}),
    "points-1-15-28": Arm(points=(1, 15, 28)),
    "vocab-4096": Arm(draft_vocab_size=4096),
    "lr-1.5e-3": Arm(settings={"learning_rate": 1.5e-3}),
}


class Remembered:
    """States of every point in memory; a view of it gives those of some (`States`)."""

    live = False

    def __init__(self, samples: dict[int, Sample], manifest: StatesManifest) -> None:
        self.samples, self.manifest, self.all_tokens = samples, manifest, False
        self.columns: list[int] = []

    def view(self, points: tuple[int, ...], all_tokens: bool) -> Remembered:
        """The same samples with the states of `points` only."""
        made = Remembered(self.samples, self.manifest.model_copy(update={"points": list(points)}))
        made.columns = [self.manifest.points.index(point) for point in points]
        made.all_tokens = all_tokens
        return made

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample, size = self.samples[index], self.manifest.hidden_size
        aux = torch.cat([sample.aux[:, c * size : (c + 1) * size] for c in self.columns], -1)
        return Sample(index, sample.input_ids, self.loss_mask(index), aux, sample.last)

    def length(self, index: int) -> int:
        """Tokens of sample `index`."""
        return len(self.samples[index].input_ids)

    def input_ids(self, index: int) -> torch.Tensor:
        """int64 [T] of sample `index`."""
        return self.samples[index].input_ids

    def loss_mask(self, index: int) -> torch.Tensor:
        """bool [T] of sample `index`."""
        mask = self.samples[index].loss_mask
        return torch.ones_like(mask) if self.all_tokens else mask


def load(profile: Profile) -> tuple[Target, Corpus, Corpus]:
    """The target, the corpus that is trained on, and one that has JUDGED conversations more."""
    target = load_target(fetched_folder(profile), dtype=compute_type("auto", profile.model.dtype))
    end = target.tokenizer.convert_tokens_to_ids(profile.chat.turn_end)
    weights = weight_hash(fetched_folder(profile))
    replies = load_replies(data_folder() / "replies", target.tokenizer, weight_sha256=weights, eos_id=end)
    sizes = (TRAINED, TRAINED + JUDGED)
    small, large = (build_corpus(target.tokenizer, replies, samples=size, greedy=True) for size in sizes)
    return target, small, large


def remember(target: Target, profile: Profile, corpus: Corpus) -> Remembered:
    """States of all points that an arm reads."""
    points = sorted({point for arm in ARMS.values() for point in (arm.points or profile.model.points)})
    compute = compute_type("auto", profile.model.dtype)
    manifest = states_manifest(profile, corpus, target.tokenizer, 1, 0, compute).model_copy(update={"points": points})
    trained = [corpus.samples[number] for number in corpus.train]
    return Remembered(dict(enumerate(capture_in_memory(target, trained, points))), manifest)


def widen(drafter: Eagle3Drafter, times: int, seed: int) -> None:
    """Give the MLP `times` as many rows; the function stays what it was."""
    mlp, generator = drafter.midlayer.mlp, torch.Generator().manual_seed(seed)
    rows, size = mlp.gate_proj.weight.shape
    for name in ("gate_proj", "up_proj"):
        old = getattr(mlp, name).weight.detach()
        more = torch.randn((times - 1) * rows, size, generator=generator) * old.std()
        getattr(mlp, name).weight = torch.nn.Parameter(torch.cat([old, more]))
    old = mlp.down_proj.weight.detach()
    mlp.down_proj.weight = torch.nn.Parameter(torch.cat([old, old.new_zeros(size, (times - 1) * rows)], 1))
    drafter.config = drafter.config.model_copy(update={"intermediate_size": times * rows})


def train(
    arm: Arm, operations: float, target: Target, profile: Profile, corpora: tuple[Corpus, Corpus], states: Remembered
) -> dict[str, Any]:
    """One arm: its drafter's counts on the judged conversations."""
    preset = find_preset("default")
    small, large = corpora
    points = arm.points or tuple(profile.model.points)
    view = states.view(points, arm.all_tokens)
    settings = TrainSettings(
        **{
            "steps": 10**6,
            "batch_tokens": preset.batch_tokens,
            "ttt_steps": K,
            "learning_rate": preset.learning_rate,
            "log_every": 50,
            "precision": "fp32" if target.dtype == torch.float32 else "bf16",
            "stuck_after": 0,
            **arm.settings,
        }
    )
    vocabulary = small.vocabulary(target.vocab_size, arm.draft_vocab_size or preset.draft_vocab_size)
    config = draft_config(profile, target, len(vocabulary.kept)).model_copy(update={"points": list(points)})
    drafter, _ = build_drafter(config, target, torch.from_numpy(vocabulary.kept), seed=settings.seed, **arm.start)
    if arm.wide > 1:
        widen(drafter, arm.wide, settings.seed)
    train_on, judge_on = list(small.train), list(large.train)[len(small.train) :]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trainer(drafter, target, view, train_on, [], settings, Path(folder))
        shares = [trial.reader(step) for step in range(24)]
        depth, head_trained = settings.ttt_steps, settings.train_lm_head
        some, every = (
            statistics.mean(
                step_flops(drafter, s.batch, s.bare, depth, rows(s), head_trained=head_trained) for s in shares
            )
            for rows in (lambda s: None if s.rows is None else len(s.rows), lambda s: None)
        )
        full = settings.full_head_share if settings.head_rows else 1.0
        cost = full * every + (1 - full) * some
        settings = dataclasses.replace(settings, steps=round(operations * 1e12 / cost))
        trainer = Trainer(drafter, target, view, train_on, [], settings, Path(folder), note=lambda _: None)
        begun = time.monotonic()
        trainer.run()
        seconds = time.monotonic() - begun
    names = [large.replies[i].id for i in judge_on]
    judged = states.view(points, False)
    counts = replay_counts(drafter, [judged[i] for i in judge_on], names, K)
    return {
        "steps": settings.steps,
        "seconds": round(seconds, 1),
        "coverage": vocabulary.coverage,
        "accepted": [one.accepted for one in counts.per_prompt],
        "verify_steps": [one.verify_steps for one in counts.per_prompt],
    }


def counts_of(row: dict[str, Any]) -> AcceptanceCounts:
    """The counts of an arm, by conversation."""
    pairs = enumerate(zip(row["verify_steps"], row["accepted"], strict=True))
    return total(AcceptanceCounts(verify_steps=steps, accepted=kept, prompt=str(n)) for n, (steps, kept) in pairs)


def main() -> None:
    """Parse words, train what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--operations", type=float, default=12, help="TFLOP of one training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "quality-smollm2.json")
    words = parser.parse_args()
    if unknown := [name for name in words.arms.split(",") if name not in ARMS]:
        parser.error(f"unknown arm {unknown[0]!r}: one of {', '.join(ARMS)}")
    torch.set_num_threads(words.threads)
    profile = load_profile("smollm2")
    target, small, large = load(profile)
    begun = time.monotonic()
    states = remember(target, profile, large)
    print(f"states of {len(states)} conversations in {time.monotonic() - begun:.0f} s", flush=True)
    found = json.loads(words.json.read_text()) if words.json.exists() else {}
    for name in dict.fromkeys(["base", *words.arms.split(",")]):
        asked = {"operations": words.operations, **dataclasses.asdict(ARMS[name]), "corpus": large.sha256}
        asked = json.loads(json.dumps(asked))
        if found.get(name, {}).get("asked") != asked:
            found[name] = {
                "asked": asked,
                **train(ARMS[name], words.operations, target, profile, (small, large), states),
            }
            write_json(words.json, found)
        tell(name, found)


def tell(name: str, found: dict[str, Any]) -> None:
    """One line: accept length and its paired difference to `base`."""
    row = found[name]
    base, mine = (counts_of(found[one]) for one in ("base", name))
    text = f"{name:24s} {row['steps']:5d} steps {row['seconds']:6.0f} s  {mine.accept_length:.3f} ({mine.verify_steps})"
    if name != "base":
        difference = compare(base, mine)
        low, high = difference.interval
        text += f"  {difference.difference:+.3f} [{low:+.3f}, {high:+.3f}]"
    print(text, flush=True)


if __name__ == "__main__":
    main()
