"""Embedding, final norm and head of a target from its safetensors files: replay needs no more of it than that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lab.core.errors import FetchError
from eagle3lab.core.precision import compute_type
from eagle3lab.drafter.checkpoint_files import weight_files
from eagle3lab.targets.config import read_config, text_config

PREFIXES = ("", "language_model.", "model.language_model.")
"""Where a language model sits in a plain or a multimodal checkpoint."""
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


ROWS = 16384
"""Of the head widened at a time where the processor is slow in its own type."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """embedding [V, H], norm [H], head [V, H] in their stored type, and the norm's epsilon."""

    embedding: Tensor
    norm: Tensor
    head: Tensor
    eps: float

    def to(self, device: str) -> TargetEnds:
        """The same on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("embedding", "norm", "head")})

    def logits(self, last: Tensor, *, pre_norm: bool = False) -> Tensor:
        """float32 logits [n, V] of last states [n, H], normed here when they were stored before the final norm."""
        if pre_norm:
            wide = last.float()
            last = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        stored = str(self.head.dtype).removeprefix("torch.")
        if compute_type("auto", stored, self.head.device.type) == stored:
            return (last.to(self.head.dtype) @ self.head.T).float()
        return torch.cat([last.float() @ rows.float().T for rows in self.head.split(ROWS)], -1)


def read_target_ends(folder: Path) -> TargetEnds:
    """Read the three tensors; a tied head is the embedding.

    Raises:
        FetchError: a tensor is not there or cannot be read.
    """
    config = text_config(read_config(folder))
    places: dict[str, Path] = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as handle:
                places |= dict.fromkeys(handle.keys(), path)
        embedding, norm = _tensor(folder, places, EMBEDDING), _tensor(folder, places, NORM)
        head = _tensor(folder, places, HEAD, tied=embedding if config.get("tie_word_embeddings") else None)
    except (OSError, SafetensorError) as error:
        raise FetchError(f"{folder} cannot be read ({error})", rule="a target is a folder of safetensors") from error
    return TargetEnds(embedding, norm, head, float(config.get("rms_norm_eps", 1e-6)))


def _tensor(folder: Path, places: dict[str, Path], name: str, *, tied: Tensor | None = None) -> Tensor:
    inner = name.removeprefix("model.")
    known = [prefix + name for prefix in PREFIXES] + [f"model.language_model.{inner}"]
    found = next((candidate for candidate in known if candidate in places), None)
    if found is None:
        if tied is not None:
            return tied
        raise FetchError(f"{folder} has no {name}", rule=f"looked for {', '.join(known)}")
    with safe_open(places[found], framework="pt") as handle:
        stored: Tensor = handle.get_tensor(found)
        return stored
