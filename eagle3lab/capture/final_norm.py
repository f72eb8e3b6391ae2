"""The target's final norm, applied to last states that were captured before it.

From before to after is one formula and one rounding; the other way does not exist, because the norm throws the scale
of every state away.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lab.core.errors import StoreError
from eagle3lab.points import family_of
from eagle3lab.targets.config import read_config, text_config
from eagle3lab.targets.norms import PLAIN

NAMES = (
    "model.norm.weight",
    "language_model.model.norm.weight",
    "model.language_model.norm.weight",
    "norm.weight",
)


@dataclass(frozen=True)
class FinalNorm:
    """x / rms(x) * weight. weight: float32 [H]."""

    weight: Tensor
    eps: float

    def __call__(self, last: Tensor) -> Tensor:
        """States [T, H] before the norm -> after it, computed in float32 and rounded once, to the type of `last`."""
        if last.shape[-1] != len(self.weight):
            raise StoreError(
                f"last states are {last.shape[-1]} wide", rule=f"the target's final norm is {len(self.weight)} wide"
            )
        wide = last.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(last.dtype)


def read_final_norm(target: Path) -> FinalNorm:
    """The final norm of the target in a folder; only this one tensor is read.

    Raises:
        ProfileError: no config.json. StoreError: another kind of norm, or no weight under a known name.
    """
    config = read_config(target)
    family = family_of(config)
    if family not in PLAIN:
        kind = config.get("model_type", "unknown")
        raise StoreError(
            f"{target}: the final norm of model_type '{kind}' is not known to be x / rms(x) * weight",
            rule="it is applied for " + ", ".join(PLAIN),
            fix="eagle3lab capture with the last state after the norm",
        )
    eps = text_config(config).get("rms_norm_eps")
    if not isinstance(eps, float):
        raise StoreError(f"{target}: rms_norm_eps is {eps!r}", rule="the final norm needs it")
    for path, name in _places(target):
        try:
            with safe_open(path, framework="pt") as handle:
                if name in handle.keys():  # noqa: SIM118  (not a dict)
                    return FinalNorm(handle.get_tensor(name).float(), eps)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path} cannot be read ({error})", rule="the final norm is in there") from error
    raise StoreError(f"{target} has no final norm", rule="one of " + ", ".join(NAMES))


def _places(target: Path) -> list[tuple[Path, str]]:
    index = target / "model.safetensors.index.json"
    if not index.is_file():
        return [(path, name) for path in sorted(target.glob("*.safetensors")) for name in NAMES]
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [(target / Path(places[name]).name, name) for name in NAMES if name in places]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{index} has no readable weight_map ({error})") from error
