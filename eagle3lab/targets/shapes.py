"""Parameter counts, stored bytes and KV bytes of a target, from its config.json alone (no weights, no torch).

Counts follow the modules that transformers builds for DeepSeek-V3-like decoders (MLA, routed experts) and for
Llama/Qwen-like ones (grouped heads, dense or routed). Stored bits follow `quantization_config`: which linear layers it
covers is decided module by module with its own ignore list, and scales are counted.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3lab.core.errors import ProfileError
from eagle3lab.targets.config import text_config

DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class Linear:
    """`count` equal linear layers of one block (or of the head), `parameters` in all of them together."""

    name: str
    kind: str
    parameters: int
    replicated: bool = False
    """True when every tensor-parallel rank holds all of it (MLA's down-projections, the router, norms)."""
    quantisable: bool = True


@dataclass(frozen=True)
class Part:
    """All weights of one kind: parameters, stored bytes, and how much of it every rank holds in full."""

    kind: str
    parameters: int
    stored_bytes: float
    replicated_bytes: float


@dataclass(frozen=True)
class TargetShape:
    """What memory and disk plans need of a target.

    kv_values_per_token: numbers cached a token over all blocks. kv_heads: heads that tensor parallelism can divide;
    None for MLA, whose latent is kept whole on every rank.
    """

    blocks: int
    hidden_size: int
    vocab_size: int
    attention_heads: int
    context: int | None
    parts: tuple[Part, ...]
    kv_values_per_token: int
    kv_heads: int | None
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the text model."""
        return sum(part.parameters for part in self.parts)

    @property
    def stored_bytes(self) -> float:
        """Bytes of its weights on disk and in GPU memory, scales included."""
        return sum(part.stored_bytes for part in self.parts)

    @property
    def replicated_bytes(self) -> float:
        """Bytes that tensor parallelism does not divide."""
        return sum(part.replicated_bytes for part in self.parts)

    def kv_bytes_per_token(self, ranks: int, bytes_per_value: int = 2) -> int:
        """KV-cache bytes a token on each of `ranks` tensor-parallel ranks."""
        if self.kv_heads is None:
            return self.kv_values_per_token * bytes_per_value
        per_head = self.kv_values_per_token // self.kv_heads
        return per_head * max(1, -(-self.kv_heads // ranks)) * bytes_per_value


def target_shape(config: dict[str, Any]) -> TargetShape:
    """Read a whole config.json (nested `text_config` or flat).

    Raises:
        ProfileError: a missing or unusable key, or a quantisation whose size is not known; the message names it.
    """
    text = text_config(config)
    read = _Reader(text)
    quantisation = text.get("quantization_config") or config.get("quantization_config")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16")
    base_bits = DTYPE_BITS.get(dtype)
    if base_bits is None:
        raise ProfileError(f"config: dtype '{dtype}'", rule="known: " + ", ".join(DTYPE_BITS))
    scheme = _Quantisation(quantisation)
    totals: dict[str, list[float]] = {}
    for linear in _linears(read, config):
        bits = scheme.bits(linear.name) if linear.quantisable else None
        stored = linear.parameters * (base_bits if bits is None else bits) / 8
        total = totals.setdefault(linear.kind, [0, 0.0, 0.0])
        total[0] += linear.parameters
        total[1] += stored
        total[2] += stored if linear.replicated else 0.0
    parts = tuple(Part(kind, int(n), stored, whole) for kind, (n, stored, whole) in totals.items())
    mla = "kv_lora_rank" in text
    blocks = read("num_hidden_layers")
    kv_heads = None if mla else read("num_key_value_heads", read("num_attention_heads"))
    per_block = read("kv_lora_rank") + read("qk_rope_head_dim") if kv_heads is None else 2 * kv_heads * _head_dim(read)
    notes = [scheme.note] if scheme.note else []
    if isinstance(config.get("vision_config"), Mapping):
        notes.append("the vision tower is not counted (text config alone)")
    if isinstance(quantisation, Mapping) and quantisation.get("kv_cache_scheme"):
        notes.append("the checkpoint carries a quantised KV scheme; KV is planned at 2 bytes a number")
    return TargetShape(
        blocks=blocks,
        hidden_size=read("hidden_size"),
        vocab_size=read("vocab_size"),
        attention_heads=read("num_attention_heads"),
        context=None if text.get("max_position_embeddings") is None else read("max_position_embeddings"),
        parts=parts,
        kv_values_per_token=blocks * per_block,
        kv_heads=kv_heads,
        notes=tuple(notes),
    )


_AT_LEAST_ONE = (
    *("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank"),
)
_LARGEST, _MOST_BLOCKS = 2**31, 10_000
"""Above these a number is a slip of the pen: counting block by block would never end."""


class _Reader:
    """Whole numbers of a config, with the key named when one is missing."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self.text = text

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.text.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ProfileError(f"config: {key} is {value!r}", rule="a whole number, needed to count weights")
        if value < (key in _AT_LEAST_ONE) or value > (_MOST_BLOCKS if key == "num_hidden_layers" else _LARGEST):
            raise ProfileError(f"config: {key} is {value}", rule="a size that a model can have")
        return value

    def first(self, *keys: str) -> int:
        """The first of `keys` that is present, else 0."""
        return next((self(key) for key in keys if self.text.get(key) is not None), 0)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ProfileError(f"config: {key} is {value!r}", rule="true or false")
    return bool(value)


def _head_dim(read: _Reader) -> int:
    return read("head_dim", read("hidden_size") // read("num_attention_heads"))


def _linears(read: _Reader, config: Mapping[str, Any]) -> Iterator[Linear]:
    """Every weight of the decoder, block by block, under the module names of its checkpoint."""
    hidden, vocab = read("hidden_size"), read("vocab_size")
    yield Linear("model.embed_tokens", "embeddings and head", vocab * hidden, quantisable=False)
    if not (_flag(read.text, "tie_word_embeddings") or _flag(config, "tie_word_embeddings")):
        # Quantisers leave the output head alone unless they are told otherwise.
        yield Linear("lm_head", "embeddings and head", vocab * hidden, quantisable=False)
    for block in range(read("num_hidden_layers")):
        prefix = f"model.layers.{block}"
        yield from _attention(read, prefix, hidden)
        yield from _mlp(read, prefix, block, hidden)
        yield Linear(f"{prefix}.norms", "router and norms", 2 * hidden, replicated=True, quantisable=False)
    yield Linear("model.norm", "router and norms", hidden, replicated=True, quantisable=False)


def _attention(read: _Reader, prefix: str, hidden: int) -> Iterator[Linear]:
    heads, name = read("num_attention_heads"), f"{prefix}.self_attn"
    if "kv_lora_rank" in read.text:
        latent, rope, nope = read("kv_lora_rank"), read("qk_rope_head_dim"), read("qk_nope_head_dim")
        value, query = read("v_head_dim"), read("q_lora_rank", 0)
        if query:
            yield Linear(f"{name}.q_a_proj", "attention", hidden * query, replicated=True)
            yield Linear(f"{name}.q_b_proj", "attention", query * heads * (nope + rope))
        else:
            yield Linear(f"{name}.q_proj", "attention", hidden * heads * (nope + rope))
        yield Linear(f"{name}.kv_a_proj_with_mqa", "attention", hidden * (latent + rope), replicated=True)
        yield Linear(f"{name}.kv_b_proj", "attention", latent * heads * (nope + value))
        yield Linear(f"{name}.o_proj", "attention", heads * value * hidden)
        return
    head, kv_heads = _head_dim(read), read("num_key_value_heads", heads)
    yield Linear(f"{name}.q_proj", "attention", hidden * heads * head)
    yield Linear(f"{name}.k_proj", "attention", hidden * kv_heads * head)
    yield Linear(f"{name}.v_proj", "attention", hidden * kv_heads * head)
    yield Linear(f"{name}.o_proj", "attention", heads * head * hidden)


def _mlp(read: _Reader, prefix: str, block: int, hidden: int) -> Iterator[Linear]:
    experts = read.first("n_routed_experts", "num_experts", "num_local_experts")
    every = read.first("moe_layer_freq", "decoder_sparse_step") or 1
    routed = experts and block >= read("first_k_dense_replace", 0) and block % every == 0
    only = read.text.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise ProfileError(f"config: mlp_only_layers is {only!r}", rule="a list of blocks")
    if not routed or block in only:
        yield Linear(f"{prefix}.mlp.gate_proj", "dense mlp", 3 * hidden * read("intermediate_size"))
        return
    width = read.first("moe_intermediate_size", "intermediate_size")
    yield Linear(f"{prefix}.mlp.experts.0.gate_proj", "routed experts", experts * 3 * hidden * width)
    yield Linear(f"{prefix}.mlp.gate", "router and norms", hidden * experts, replicated=True, quantisable=False)
    if shared := read("n_shared_experts", 0):
        yield Linear(f"{prefix}.mlp.shared_experts.gate_proj", "shared experts", shared * 3 * hidden * width)


class _Quantisation:
    """Stored bits a weight of a `quantization_config`, or None where a module keeps the model's dtype."""

    def __init__(self, config: Any) -> None:
        self.ignore: list[str] = []
        self.stored: float | None = None
        self.note = ""
        if config is None:
            return
        if not isinstance(config, Mapping):
            raise ProfileError(f"config: quantization_config is {config!r}", rule="an object")
        try:
            self.stored = _stored_bits(config)
            for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
                self.ignore += [str(pattern) for pattern in config.get(key) or ()]
        except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise ProfileError(f"config: quantization_config has an unusable value ({error})") from error
        self.note = f"quantised linear layers take {self.stored:.4g} bits a weight, scales included"

    def bits(self, name: str) -> float | None:
        """Bits of module `name`; ignore patterns may carry the prefix of a multimodal wrapper."""
        if self.stored is None or any(_covers(pattern, name) for pattern in self.ignore):
            return None
        return self.stored


def _covers(pattern: str, name: str) -> bool:
    for candidate in (name, f"language_model.{name}"):
        if pattern.startswith("re:"):
            if re.match(pattern[3:], candidate):
                return True
        elif fnmatch.fnmatchcase(candidate, pattern) or candidate.startswith(f"{pattern}."):
            return True
    return False


def _stored_bits(config: Mapping[str, Any]) -> float:
    method = str(config.get("quant_method", "unknown"))
    block = config.get("weight_block_size")
    if method == "fp8":
        return 8 + (32 / (block[0] * block[1]) if block else 0)
    if method == "mxfp4":
        return 4 + 8 / 32
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
        bits, size = weights.get("num_bits"), weights.get("group_size")
        # A group's scale is bf16 for integers (compressed-tensors) and fp8 for NVFP4.
        scale = 8 if config.get("quant_algo") == "NVFP4" else 16
        if isinstance(bits, int):
            return bits + (scale / size if size and size > 0 else 0)
    bits, size = config.get("bits"), config.get("group_size")
    if method in ("gptq", "awq") and isinstance(bits, int):
        return bits + ((16 + bits) / size if size and size > 0 else 0)
    raise ProfileError(
        f"config: the size of quantization_config '{method}' is unknown",
        rule="known: fp8, mxfp4, gptq, awq, and config_groups with num_bits",
    )
