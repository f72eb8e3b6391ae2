"""`eagle3lab capture --replies FILE`: states for replies that a served target wrote, into a folder of your choice.

Three ways to run the target, one result: in this process, split over the processes that `torchrun` started, or in an
SGLang server that carries the capture hook (`--server`, `--exchange`). An interrupted capture goes on where it stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3lab.capture.manifest import StatesManifest
from eagle3lab.capture.ranks import shared_sink
from eagle3lab.capture.served import capture_served, head_weight
from eagle3lab.capture.shards import bytes_per_token
from eagle3lab.capture.store import Store, StoreWriter
from eagle3lab.capture.transformers_engine import capture, plan_shards
from eagle3lab.core.errors import CorpusError, FetchError, UsageError
from eagle3lab.core.files import folder_lock, read_json, require_space
from eagle3lab.core.hashes import sha256_bytes, sha256_file, sha256_json
from eagle3lab.core.precision import compute_type
from eagle3lab.corpus.chat import Reasoning, Rendered, render_reply
from eagle3lab.corpus.regenerate import Answer, read_answers, settings_path
from eagle3lab.points import written
from eagle3lab.steps.options import require
from eagle3lab.steps.output import table
from eagle3lab.targets import ranks
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.model import COMPUTE_TYPES, load_target
from eagle3lab.targets.profiles import Profile, load_profile

LAST: dict[str, Literal["post_norm", "pre_norm"]] = {"post": "post_norm", "pre": "pre_norm"}
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class CapturedReplies:
    """The finished folder; `agreement` by shard of a served capture, `shares` when the target was split."""

    folder: Path
    samples: int
    tokens: int
    width: int
    bytes: int
    agreement: dict[int, float]
    shares: list[ranks.RankShare]

    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """Counts, and how well the states predict their text where that was looked at."""
        return {
            "states": str(self.folder),
            "samples": self.samples,
            "tokens": self.tokens,
            "width": self.width,
            "bytes": self.bytes,
            "next_token_agreement_by_shard": list(self.agreement.values()) or None,
            "ranks": [
                {"rank": s.rank, "device": s.device, "parameters": s.parameters, "bytes": s.bytes} for s in self.shares
            ],
        }

    def as_text(self) -> str:
        """Two lines, and the table of ranks."""
        lines = [
            f"states: {self.folder}",
            f"{self.samples} samples, {self.tokens} tokens, {self.width} numbers a token, {self.bytes / 1e6:.0f} MB",
        ]
        if self.agreement:
            low, high = min(self.agreement.values()), max(self.agreement.values())
            lines.append(f"next-token agreement by shard: {low:.2f} to {high:.2f}")
        if len(self.shares) > 1:
            rows = [[s.rank, s.device, f"{s.parameters / 1e6:.1f} M", f"{s.bytes / 1e6:.0f} MB"] for s in self.shares]
            lines.append(table(["rank", "device", "parameters", "bytes"], rows))
        return "\n".join(lines)


def capture_replies(
    profile: str,
    replies: Path,
    out: Path,
    *,
    target: Path | None = None,
    server: str | None = None,
    exchange: Path | None = None,
    concurrency: int = 32,
    dtype: str | None = None,
    last: str = "post",
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] = print,
) -> CapturedReplies | None:
    """Render replies with the target's own tokenizer and template, and capture their states.

    Args:
        replies: file of `eagle3lab regenerate`. out: folder of states, new or of an interrupted capture.
        target: local folder of the target; None = where `eagle3lab fetch` put it.
        server: URL of an SGLang that was started with the capture hook. exchange: the hook's exchange folder.
        dtype: type to compute in; None = the profile's where this processor is faster in it, else float32.
        last: the last state after (`post`) or before (`pre`) the target's final norm; a server gives it after.

    Returns:
        None on ranks other than 0: there is one result, and one who prints it.
    """
    if (server is None) != (exchange is None):
        raise UsageError("--server and --exchange belong together", rule="the hook writes, the client sends")
    if last not in LAST:
        raise UsageError(f"--last {last}", rule="post (after the target's final norm) or pre (before it)")
    if last == "pre" and server is not None:
        raise UsageError(
            "--last pre with --server",
            rule="an SGLang server hands its last state out after the final norm",
            fix="leave --server out, or capture with --last post",
        )
    if server is not None and dtype is not None:
        raise UsageError(f"--dtype {dtype} with --server", rule="the server computes in the type it was started with")
    require(
        ("--dtype", dtype, dtype is None or dtype in COMPUTE_TYPES, f"one of {', '.join(COMPUTE_TYPES)}"),
        ("--concurrency", concurrency, concurrency >= 1, "1 or more"),
    )
    chosen = load_profile(profile)
    folder = target or fetched_folder(chosen)
    if not (folder / "config.json").is_file():
        raise FetchError(f"no target in {folder}", fix=f"eagle3lab fetch --profile {profile}, or --target FOLDER")
    tokenizer = _tokenizer(folder, chosen)
    answers = read_answers(replies)  # a file of another command is told before its settings are missed
    settings = read_json(settings_path(replies))
    samples = render_all(tokenizer, chosen, answers, settings)
    lengths = [len(sample.input_ids) for sample in samples]
    shards = plan_shards(lengths)
    several = server is None and ranks.launched()
    leader = not several or ranks.join() == 0
    computed = chosen.model.dtype if server is not None else compute_type("auto", chosen.model.dtype)
    engine = {"engine": "transformers" if server is None else "sglang", "compute": dtype or computed}
    if several:
        engine["ranks"] = str(ranks.size())
    manifest = _manifest(chosen, folder, tokenizer, samples, settings, len(shards), engine, LAST[last])
    shares: list[ranks.RankShare] = []
    rates: dict[int, float] = {}

    def done(tokens: int) -> None:
        if progress is not None and leader:
            progress(tokens, sum(lengths))

    def open_writer() -> StoreWriter:
        writer = StoreWriter(out, manifest, note=note)
        tokens = sum(lengths[sample] for index in writer.pending() for sample in shards[index])
        require_space(out, tokens * bytes_per_token(len(manifest.points), manifest.hidden_size), "captured states")
        return writer

    with contextlib.ExitStack() as stack:
        if leader:
            stack.enter_context(folder_lock(out, note=note))
        if server is not None and exchange is not None:
            rates = capture_served(
                samples,
                open_writer(),
                shards,
                server=server.rstrip("/"),
                exchange=exchange,
                concurrency=concurrency,
                head=head_weight(folder),
                progress=done,
                note=note,
            )
        else:
            sink = shared_sink(open_writer)
            load = ranks.load_split if several else load_target
            loaded = load(folder, dtype=engine["compute"], trust_remote_code=chosen.trust_remote_code)
            shares = ranks.rank_table(loaded)
            capture(loaded, samples, sink, shards, progress=done)
    ranks.leave()
    if not leader:
        return None
    store = Store(out, points=chosen.model.points)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    found = store.manifest
    return CapturedReplies(out, found.samples, found.tokens, found.width, size, rates, shares)


def render_all(tokenizer: Any, profile: Profile, answers: list[Answer], settings: dict[str, Any]) -> list[Rendered]:
    """Conversations of a file of replies, by the target's template; a cut reply has no end token.

    Raises:
        CorpusError: no reply, or a profile without chat turns.
    """
    chat = profile.chat
    if chat is None:
        raise CorpusError(f"profile '{profile.name}' has no [chat] section", rule="replies are chat turns")
    if not answers:
        raise CorpusError("the file holds no reply", fix="eagle3lab regenerate")
    block = Reasoning(chat.think_open, chat.think_close) if chat.think_open and chat.think_close else None
    system = [{"role": "system", "content": settings["system"]}] if settings.get("system") else []
    return [
        render_reply(
            tokenizer,
            [*system, {"role": "user", "content": answer.prompt}],
            answer.reply,
            reasoning=answer.reasoning,
            turn_end=chat.turn_end if answer.finish == "stop" else None,
            block=block,
            sample=answer.id,
            **(settings.get("template") or {}),
        )
        for answer in answers
    ]


def _manifest(
    profile: Profile,
    folder: Path,
    tokenizer: Any,
    samples: list[Rendered],
    settings: dict[str, Any],
    shards: int,
    engine: dict[str, str],
    last: Literal["post_norm", "pre_norm"],
) -> StatesManifest:
    shape = profile.model
    ids = written(shape.points, blocks=shape.blocks, engine="sglang", family=shape.family)[0].ids
    file = next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise FetchError(f"no tokenizer in {folder}", rule="one of " + ", ".join(TOKENIZER_FILES))
    return StatesManifest(
        target_id=shape.id,
        target_weight_sha256=weight_hash(folder),
        tokenizer_sha256=sha256_file(file),
        template_sha256=sha256_bytes(str(getattr(tokenizer, "chat_template", "")).encode()),
        points=shape.points,
        points_checkpoint=list(ids),
        blocks=shape.blocks,
        family=shape.family,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        last=last,
        engine=engine["engine"],
        engine_arguments={name: value for name, value in engine.items() if name != "engine"},
        corpus_sha256=sha256_json([[sample.input_ids, sample.loss_mask] for sample in samples]),
        greedy=settings["temperature"] == 0,
        seed=settings["seed"],
        planned_shards=shards,
    )


def _tokenizer(folder: Path, profile: Profile) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=profile.trust_remote_code
    )
