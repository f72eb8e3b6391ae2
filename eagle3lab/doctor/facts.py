"""Facts: what is known of the user's artefacts, under the names of tests/cases/data/README.md. Checks see nothing else.

Readers of real artefacts and `--facts FILE` produce the same facts. A value of the wrong type (`draft_config: 3`) is a
finding, not a crash, and the fact counts as absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3lab.core.errors import UsageError, nearest
from eagle3lab.core.safetensors_header import Header
from eagle3lab.doctor.findings import Finding, could_not, error

_MAPPING, _LIST, _NUMBER, _TEXT = (dict,), (list,), (int, float), (str,)
_ANY: tuple[type, ...] = (dict, list, int, float, str, bool)

VOCABULARY: dict[str, tuple[type, ...]] = {
    # what is started, and with what
    "launch_args": (list, str),
    "env": _MAPPING,
    "command": _TEXT,
    "serve_with": _TEXT,
    "tensor_parallel": _NUMBER,
    # configs and weights
    "target": _MAPPING,
    "target_config": _MAPPING,
    "target_headers": _MAPPING,
    "draft_config": _MAPPING,
    "draft_config_ids": _LIST,
    "draft_headers": _MAPPING,
    "source_config": _MAPPING,
    "converted_config": _MAPPING,
    "configs": _LIST,
    "target_embed_tokens": _MAPPING,
    "draft_embed_tokens": _MAPPING,
    "trained_max_length": _NUMBER,
    "draft_steps": _NUMBER,
    "prompt_tokens": _ANY,
    # vocabulary map
    "d2t": _LIST,
    "t2d": _LIST,
    "t2d_true_ids": _LIST,
    "tensors": _MAPPING,
    "side_files": _MAPPING,
    "token_counts": _MAPPING,
    "corpus_distinct_tokens": _NUMBER,
    "draft_vocab_size": _NUMBER,
    "vocab_size": _NUMBER,
    "built_map": _MAPPING,
    "cached_map": _MAPPING,
    "asked": _MAPPING,
    "logits_width": _NUMBER,
    # captured states
    "states_manifest_resid_pre": _LIST,
    "width": _NUMBER,
    "shards": _LIST,
    "tokens": _LIST,
    "hidden_rows": _NUMBER,
    "completion_tokens": _NUMBER,
    "head": _ANY,
    "state_rows_argmax": _LIST,
    "next_token_agreement_by_shard": _LIST,
    "rows_compared": _NUMBER,
    "cosine_to_batch_1": _LIST,
    "threshold": _NUMBER,
    "dtype": _TEXT,
    "shape": _LIST,
    "points": _ANY,
    "H": _NUMBER,
    "loss_mask": _LIST,
    "dtype_before": _TEXT,
    "dtype_after": _TEXT,
    "value": _NUMBER,
    "conversations": _NUMBER,
    "tokens_each": _NUMBER,
    "with_last": (bool,),
    "disk_free_bytes": _NUMBER,
    "one_conversation_per_shard": (bool,),
    # training data and runs
    "text": _TEXT,
    "tokenizer": _ANY,
    "template": _TEXT,
    "assistant_header": _TEXT,
    "policy": _TEXT,
    "max_length": _NUMBER,
    "samples_supervised_tokens": _LIST,
    "ids": _LIST,
    "grad_norm_by_place": _MAPPING,
    "after_fix": _MAPPING,
    "run": _MAPPING,
    "log_lr": _LIST,
    "resume_with": _MAPPING,
    "losses_straight": _LIST,
    "losses_resumed": _LIST,
    "loss_over_all_positions": _NUMBER,
    "loss_over_masked_positions": _NUMBER,
    "masked_share": _NUMBER,
    "samples": _NUMBER,
    # acceptance
    "joint_rates": _LIST,
    "steps": _NUMBER,
    "topk": _NUMBER,
    "draft_tokens": _NUMBER,
    "verify_steps": _NUMBER,
    "correct_drafts": _NUMBER,
    "meta_info": _MAPPING,
    "log": _TEXT,
    "drafts": _NUMBER,
    "drafted": _NUMBER,
    "accepted": _NUMBER,
    "per_depth": _LIST,
    "meaning": _TEXT,
    "acceptance_vector": _LIST,
    "accept_length": _ANY,
    "a": _ANY,
    "b": _ANY,
    # files
    "plan": _MAPPING,
    "file": _MAPPING,
    "files": _MAPPING,
    "index": _MAPPING,
    "tensor": _MAPPING,
    "save": _TEXT,
    "safetensors": _ANY,
    "bytes_hex": _TEXT,
    "header_text": _TEXT,
    "declared": _LIST,
    "data_bytes": _NUMBER,
    "values": _LIST,
    # notebooks
    "notebook": _MAPPING,
    "parameters": _MAPPING,
    "installed_kernels": _LIST,
    "limit_s": _NUMBER,
    "runner": _TEXT,
    "used_as": _TEXT,
    # what readers add for artefacts that hold several of the above (checks/*.py tell the layout)
    "acceptance": _MAPPING,
    "answers": _LIST,
    "server": _MAPPING,
    "states": _MAPPING,
    "shard_states": _MAPPING,
    "corpus": _MAPPING,
    "curve": _LIST,
    "held_out": _LIST,
    "status": _MAPPING,
    "fc_trajectory": _LIST,
    "weight_files": _MAPPING,
    "notebooks": _MAPPING,
    # remarks of the writer, also the recipe that describes contents
    "note": _TEXT,
    "recipe": _TEXT,
    "recipe_for_larger_sizes": _TEXT,
    "rule": _TEXT,
}
"""Legal fact names and the types they may have; None is legal for each and means "known to be absent"."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: `sglang`, `vllm` (V1 runner) or `vllm-v2`; version None is the one the rules were read in."""

    name: str
    version: str | None = None

    @property
    def label(self) -> str:
        """`sglang 0.5.23`-like text for messages."""
        return f"{self.name} {self.version}" if self.version else self.name


LARGEST_FLOAT = 3.5e38
"""A little above what float32 and bf16 hold: what overflows in them can still be given."""
ENGINES = ("sglang", "vllm", "vllm-v2")


def parse_engine(text: str) -> Engine:
    """`sglang`, `vllm@0.33.0`, ...; an unknown name is a `UsageError`."""
    name, _, version = text.strip().lower().partition("@")
    if name not in ENGINES:
        raise UsageError(f"unknown engine {text!r}", rule=nearest(name, ENGINES), fix="--engine sglang")
    if version and not re.match(r"v?\d+\.\d+", version):
        raise UsageError(
            f"unreadable engine version {version!r}", rule="a release such as 0.5.23", fix=f"--engine {name}"
        )
    return Engine(name, version or None)


@dataclass
class Facts(Mapping[str, Any]):
    """Facts by name, where each came from, and what could not be read.

    Fields:
        values: name -> value; a name with value None is known to be absent.
        sources: name -> path or flag that the value came from.
        engines: the engines to judge for. chosen: the user (or a launch line) named the engine.
        either_runner: a launch line named vLLM and nothing says which of its two runners serves.
        remarks: findings of the readers (a broken config.json, an artefact that could not be read).
        draft_files: headers of the draft's files, set by readers only, for checks that sample contents.
        tensors: name -> where a big matrix lies, set by readers only; the fact holds its dtype and shape.
    """

    values: dict[str, Any] = field(default_factory=dict)  # type: ignore[assignment]  # a field, not Mapping.values()
    sources: dict[str, str] = field(default_factory=dict)
    engines: tuple[Engine, ...] = (Engine("sglang"), Engine("vllm"))
    chosen: bool = False
    either_runner: bool = False
    remarks: list[Finding] = field(default_factory=list)
    tensors: dict[str, tuple[Header, str]] = field(default_factory=dict)
    draft_files: list[Header] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def has(self, name: str) -> bool:
        """Whether the fact was given (None counts: known to be absent)."""
        return name in self.values

    def put(self, name: str, value: Any, source: str) -> None:
        """Add a fact. A name outside the vocabulary is a `UsageError`, a value of the wrong type a remark."""
        legal = VOCABULARY.get(name, _MAPPING if name.endswith("_headers") else ())
        if not legal:
            raise UsageError(f"unknown fact {name!r} in {source}", rule=nearest(name, VOCABULARY), fix="rename it")
        right = isinstance(value, legal) and (bool in legal or not isinstance(value, bool))
        wrong = ""
        if value is not None and not right:
            wanted = " or ".join(kind.__name__ for kind in legal)
            wrong = f"{name} is a {type(value).__name__}, needed: {wanted}"
        elif (huge := _huge_number(value)) is not None:
            wrong = f"{name} holds the number {huge:.3g}, which no artefact can hold"
        if wrong:
            self.remarks.append(
                Finding(
                    severity="error",
                    code="fact-type",
                    subject=name,
                    message=wrong,
                    rule="every fact has the type of tests/cases/data/README.md and numbers below 3.5e38",
                    fix=f"correct {name} in {source}",
                )
            )
            return
        self.values[name] = value
        self.sources[name] = source

    def could_not(self, what: str, why: str, *, fix: str = "") -> None:
        """Remember that an artefact was given and could not be read: it is said, never skipped."""
        remark = could_not(what, why, fix=fix)
        self.remarks.append(
            Finding(
                severity="info",
                code="not-checked",
                subject=what,
                message=remark.message,
                rule="what was given is checked, or the report says why not",
                fix=fix,
                evidence=remark.evidence,
            )
        )

    def also_read(self, what: str, path: str, named_by: str) -> None:
        """Remember that an artefact was read that no flag gave."""
        self.remarks.append(
            Finding(
                severity="info",
                code="also-read",
                subject=path,
                message=f"{named_by} names this {what}, so it is read too",
                rule=f"--{what} counts over it",
                evidence={"path": path},
            )
        )

    def broken(self, what: str, why: str, *, fix: str = "", actual: Any = None) -> None:
        """Remember that an artefact is damaged: an error finding."""
        self.remarks.append(
            Finding(
                severity="error",
                code="artefact-broken",
                subject=what,
                message=why if why.startswith(what) else f"{what}: {why}",
                actual=actual,
                rule="an artefact can be read whole",
                fix=fix or f"write {what} again",
                evidence=error("", "", reason=why).evidence,
            )
        )

    def mapping(self, name: str) -> dict[str, Any]:
        """The fact as a mapping; {} when absent."""
        value = self.values.get(name)
        return value if isinstance(value, dict) else {}

    def engine_names(self) -> tuple[str, ...]:
        """Names of the engines that are judged."""
        return tuple(engine.name for engine in self.engines)


def _huge_number(value: Any) -> float | None:
    """A finite number beyond int64 or float32 anywhere inside, so that no check has to guard its arithmetic."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, int) and abs(item) >= 2**63:
            return float(min(abs(item), 10**300))
        elif isinstance(item, float) and math.isfinite(item) and abs(item) > LARGEST_FLOAT:
            return item
    return None
