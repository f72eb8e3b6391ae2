"""Write and read a drafter as a module. Layouts, names and config are in `layouts`, `layouts_write`, `layouts_read`.

One folder serves both engines: SGLang reads only the nested id list, vLLM prefers the top-level one, and for a
Llama-like target the two lists differ on purpose (see `eagle3lab.points`); the config says so itself.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3lab.core.errors import CheckpointError
from eagle3lab.core.files import atomic_write, write_json
from eagle3lab.drafter.checkpoint_files import WEIGHTS, StoredTensor, headers_of, stored_tensors
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.convert import RECORD
from eagle3lab.drafter.layouts import (
    EMBEDDING,
    MAPS,
    Layout,
    limits,
    map_problem,
    name_in,
    refuse_limits,
    tensor_problems,
)
from eagle3lab.drafter.layouts_read import parse_config
from eagle3lab.drafter.layouts_write import write_config
from eagle3lab.drafter.model import Eagle3Drafter


def save_drafter(
    drafter: Eagle3Drafter,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    record: dict[str, Any],
    layout: Layout | None = None,
) -> None:
    """Write `config.json`, `model.safetensors` and the training record.

    Args:
        dtype: of the weights on disk; d2t is int64, t2d bool.
        record: written to `eagle3lab_training.json`.
        layout: refuse what this layout cannot hold. None writes the form that SGLang and vLLM share and *warns* of
            what SGLang would ignore: a finished training is not thrown away for it.

    Raises:
        CheckpointError: something that `layout` cannot hold.
        PointsError: points that an engine cannot capture.
    """
    config = drafter.config
    if layout is not None:
        refuse_limits(config, layout)
    elif reasons := limits(config, "sglang"):
        warnings.warn(f"{folder}: not for SGLang: {'; '.join(reasons)}", stacklevel=2)
    form = layout or "sglang"
    folder.mkdir(parents=True, exist_ok=True)
    equal = config.draft_vocab_size == config.vocab_size
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        if name in MAPS and equal and form != "specforge":
            continue  # equal vocabularies need no map, and vLLM refuses one
        kept = tensor if name in MAPS else tensor.to(dtype)
        tensors[name_in(form, name, config.architecture)] = kept.detach().contiguous().cpu()
    written = write_config(config, form, dtype=str(dtype).removeprefix("torch."))
    atomic_write(folder / WEIGHTS, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    write_json(folder / RECORD, record)
    write_json(folder / "config.json", written)


def read_config(
    folder: Path, *, target: Path | None = None, family: str | None = None, blocks: int | None = None
) -> DraftConfig:
    """`DraftConfig` of a checkpoint in any layout, written by this lab or by another trainer.

    Args:
        target, family, blocks: the target that the ids belong to, where the checkpoint does not record it.

    Raises:
        CheckpointError: no config, not JSON, a size that is missing, or ids whose target is unknown.
    """
    return parse_config(folder, target=target, family=family, blocks=blocks).config


def load_drafter(
    folder: Path,
    embedding: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    target: Path | None = None,
    family: str | None = None,
    blocks: int | None = None,
) -> Eagle3Drafter:
    """Read a drafter in any layout; every tensor must be there, with its shape, and none may be left over.

    Args:
        embedding: the target's embedding weight [V, H].
        target, family, blocks: see `read_config`.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, all named.
    """
    config = read_config(folder, target=target, family=family, blocks=blocks)
    stored = stored_tensors(folder)
    if problems := tensor_problems(config, headers_of(stored)):
        raise CheckpointError(f"{folder}: {'; '.join(problems)}", fix=f"eagle3lab doctor --draft {folder}")
    if config.target_hidden_size != config.hidden_size:
        embedding = _own_embedding(folder, stored)
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{folder} is for a target of vocabulary {config.vocab_size} and width {config.hidden_size}",
            rule=f"this target's embedding is {list(embedding.shape)}",
        )
    tensors: dict[str, Tensor] = {}
    for name, item in stored.items():
        if name == EMBEDDING:
            continue  # the engines use the target's, or it is the embedding already
        tensors[name] = _tensor(folder, item)
    maps = {name: tensors.pop(name) for name in MAPS if name in tensors}
    d2t = maps.get("d2t")
    if d2t is not None:
        t2d = maps["t2d"].numpy() if "t2d" in maps else None
        if problem := map_problem(config, d2t.numpy(), t2d):
            raise CheckpointError(
                f"{folder}: {problem}", rule="d2t[i] = target id - i", fix=f"eagle3lab doctor {folder}"
            )
        d2t = d2t.to(torch.int64)
    drafter = Eagle3Drafter(config, embedding.detach().to(dtype), d2t)
    drafter.load_state_dict(tensors | {name: getattr(drafter, name) for name in MAPS})
    return drafter.to(dtype).eval().requires_grad_(False)


def _tensor(folder: Path, item: StoredTensor) -> Tensor:
    try:
        with safe_open(item.path, framework="pt") as handle:
            return handle.get_tensor(item.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{item.path} cannot be read ({error})", fix=f"eagle3lab doctor --draft {folder}"
        ) from error


def _own_embedding(folder: Path, stored: dict[str, StoredTensor]) -> Tensor:
    """The drafter's own embedding: a target of another width cannot lend its own (SGLang leaves it random then)."""
    if EMBEDDING not in stored:
        raise CheckpointError(
            f"{folder} has no {EMBEDDING} and its width is not the target's", rule="then the drafter needs its own"
        )
    return _tensor(folder, stored[EMBEDDING])
