"""`eagle3lab capture`: the target's states at the profile's points, for every conversation of the corpus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.shards import bytes_per_token
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.capture.transformers_engine import capture, plan_shards
from eagle3lab.core.files import folder_lock, require_space
from eagle3lab.core.hashes import sha256_bytes, sha256_file, sha256_json
from eagle3lab.core.paths import cache_folder
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.build import Corpus
from eagle3lab.points import written
from eagle3lab.runs.directory import Run
from eagle3lab.steps.corpus import corpus_for, load_tokenizer
from eagle3lab.targets.fetch import fetched_folder, target_id, weight_hash
from eagle3lab.targets.model import load_target
from eagle3lab.targets.profiles import Profile, load_profile


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What was captured.

    Attributes:
        bytes: of all shards; width: P*H.
        captured_tokens, seconds: of this call; 0 tokens when the states were there already.
        norms: point -> [sampled tokens] L2 norm of the state entering that block; key -1 is the last state.
    """

    folder: Path
    samples: int
    tokens: int
    width: int
    bytes: int
    captured_tokens: int
    seconds: float
    norms: dict[int, list[float]]

    @property
    def tokens_per_second(self) -> float | None:
        """None when nothing had to be captured."""
        return self.captured_tokens / self.seconds if self.captured_tokens else None


def states_manifest(
    profile: Profile, corpus: Corpus, tokenizer: object, shards: int, seed: int, compute: str
) -> StatesManifest:
    """Everything that determines the captured numbers; compute: type that the forwards run in."""
    folder = fetched_folder(profile)
    written_ids = written(
        profile.model.points, blocks=profile.model.blocks, engine="sglang", family=profile.model.family
    )
    return StatesManifest(
        target_id=target_id(folder) or profile.model.id,
        target_weight_sha256=weight_hash(folder),
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        template_sha256=sha256_bytes(str(getattr(tokenizer, "chat_template", "")).encode()),
        points=profile.model.points,
        points_checkpoint=list(written_ids[0].ids),
        blocks=profile.model.blocks,
        family=profile.model.family,
        hidden_size=profile.model.hidden_size,
        dtype=profile.model.dtype,
        last="post_norm",
        engine="transformers",
        engine_arguments={"compute": compute},
        corpus_sha256=corpus.sha256,
        greedy=corpus.greedy,
        seed=seed,
        planned_shards=shards,
    )


def planned_states(
    run: Run, profile: Profile, corpus: Corpus, tokenizer: object
) -> tuple[StatesManifest, Path, list[list[int]]]:
    """Manifest, folder and shards of a corpus's states, captured or not: these inputs decide all three."""
    shards = plan_shards([len(sample.input_ids) for sample in corpus.samples])
    # Nothing here is random: runs that differ in their seed alone read the same states, captured once.
    compute = compute_type(run.preset.precision, profile.model.dtype)
    manifest = states_manifest(profile, corpus, tokenizer, len(shards), seed=0, compute=compute)
    return manifest, cache_folder() / "states" / sha256_json(manifest.identity())[:16], shards


def capture_states(
    run: Run, *, progress: Callable[[int, int], None] | None = None, note: Callable[[str], None] = print
) -> CaptureSummary:
    """Capture the run's corpus into the cache, once; an interrupted capture goes on where it stopped.

    Args:
        progress: called with (tokens captured, tokens in all). note: receives one line per thing that it met.
    """
    with run.recording("capture"):
        profile = load_profile(run.manifest.profile)
        tokenizer = load_tokenizer(run.manifest.profile)
        corpus = corpus_for(run, tokenizer)
        lengths = [len(sample.input_ids) for sample in corpus.samples]
        manifest, folder, shards = planned_states(run, profile, corpus, tokenizer)
        compute = manifest.engine_arguments["compute"]
        run.require_inputs(target=manifest.target_weight_sha256, corpus=corpus.sha256)
        started, done = time.monotonic(), 0

        def captured(tokens: int) -> None:
            nonlocal done
            done = tokens
            if progress is not None:
                progress(tokens, sum(lengths))

        with folder_lock(folder, note=note):
            writer = StoreWriter(folder, manifest, note=note)
            if pending := writer.pending():
                tokens = sum(lengths[sample] for index in pending for sample in shards[index])
                require_space(
                    folder, tokens * bytes_per_token(len(manifest.points), manifest.hidden_size), "captured states"
                )
                target = load_target(fetched_folder(profile), dtype=compute)
                capture(target, corpus.samples, writer, shards, progress=captured)
        seconds = time.monotonic() - started
        store = Store(folder, points=profile.model.points)
        (run.path / "states").write_text(str(folder) + "\n", encoding="utf-8")
        run.add_inputs(states=sha256_json([shard.sha256 for shard in store.manifest.shards]))
        summary = CaptureSummary(
            folder,
            store.manifest.samples,
            store.manifest.tokens,
            store.manifest.width,
            sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            done,
            seconds,
            _norms(store),
        )
        run.merge_metrics(
            {
                "capture": {
                    "samples": summary.samples,
                    "tokens": summary.tokens,
                    "compute": compute,
                    "width": summary.width,
                    "bytes": summary.bytes,
                }
            },
            timing={"capture_seconds": seconds, "capture_tokens_per_second": summary.tokens_per_second},
        )
        return summary


def states_folder(run: Run) -> Path:
    """Where the states of a run lie."""
    run.require("capture")
    return Path((run.path / "states").read_text(encoding="utf-8").strip())


def _norms(store: Store, samples: int = 32) -> dict[int, list[float]]:
    """L2 norms of a sample of states per point, for the figure: residual norms grow with depth."""
    size, points = store.manifest.hidden_size, store.manifest.points
    norms: dict[int, list[float]] = {point: [] for point in [*points, -1]}
    for index in range(0, len(store), max(1, len(store) // samples)):
        sample = store[index]
        for place, point in enumerate(points):
            part = sample.aux[:, place * size : (place + 1) * size].float()
            norms[point] += torch.linalg.vector_norm(part, dim=-1).tolist()
        norms[-1] += torch.linalg.vector_norm(sample.last.float(), dim=-1).tolist()
    return norms
