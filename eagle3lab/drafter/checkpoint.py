"""Write and read a drafter in the layout that SGLang and vLLM load.

One folder serves both engines: SGLang reads only the nested id list, vLLM prefers the top-level one, and for a
Llama-like target the two lists differ on purpose (see `eagle3lab.points`); the config says so itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lab.core.errors import CheckpointError
from eagle3lab.core.files import atomic_write, write_json
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.model import Eagle3Drafter
from eagle3lab.points import captured, written

WEIGHTS = "model.safetensors"
RECORD = "eagle3lab_training.json"
"""Beside the checkpoint: how the drafter started and was trained (init recipe, seed, hash of the initial fc)."""


def engine_config(config: DraftConfig) -> dict[str, Any]:
    """`config.json` for SGLang and vLLM."""
    if config.architecture != "llama":
        raise CheckpointError(f"architecture '{config.architecture}'", rule="this layout holds Llama-class drafters")
    place = {"blocks": config.target_blocks, "family": config.target_family}
    nested = _ids(config, "sglang", place)
    top = _ids(config, "vllm", place)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.points),
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "rope_parameters": {**(config.rope_scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": top,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": nested,
            "norm_before_fc": config.norm_before_fc,
        },
        "eagle3lab": {
            "resid_pre": config.points,
            "target_blocks": config.target_blocks,
            "target_family": config.target_family,
            "ids_note": "SGLang reads the nested list and vLLM the top-level one; both capture resid_pre "
            f"{config.points} of a {config.target_family} target, so the lists may differ on purpose",
        },
    }


def _ids(config: DraftConfig, engine: str, place: dict[str, Any]) -> list[int]:
    """The list to write for one engine, checked by converting it back."""
    ids = written(config.points, engine=engine, **place)[0].ids
    if captured(ids, engine=engine, **place).resid_pre != config.points:
        raise CheckpointError(f"points {config.points} cannot be written for {engine}", rule="ids must convert back")
    return list(ids)


def save_drafter(
    drafter: Eagle3Drafter, folder: Path, *, dtype: torch.dtype = torch.bfloat16, record: dict[str, Any]
) -> None:
    """Write `config.json`, `model.safetensors` and the training record.

    Args:
        dtype: of the weights on disk; d2t is int64, t2d bool.
        record: written to `eagle3lab_training.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        if name in ("d2t", "t2d") and drafter.config.draft_vocab_size == drafter.config.vocab_size:
            continue  # equal vocabularies need no map, and an engine warns about one
        tensors[name] = (tensor if name in ("d2t", "t2d") else tensor.to(dtype)).detach().contiguous().cpu()
    config = engine_config(drafter.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    atomic_write(folder / WEIGHTS, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    write_json(folder / RECORD, record)
    write_json(folder / "config.json", config)


def read_config(folder: Path) -> DraftConfig:
    """`DraftConfig` of a checkpoint in this layout, written by this lab or by another trainer.

    Raises:
        CheckpointError: no config, not JSON, or a size that is missing.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no config.json in {folder}", rule="a drafter is a folder with config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    ours = raw.get("eagle3lab", {})
    eagle = raw.get("eagle_config") or {}
    missing = [
        name for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if name not in raw
    ]
    if missing:
        raise CheckpointError(f"{path} has no {', '.join(missing)}", rule="sizes are not guessed")
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    blocks, family = ours.get("target_blocks"), ours.get("target_family")
    points = ours.get("resid_pre")
    if points is None:
        raise CheckpointError(
            f"{path} does not say which target its points belong to",
            rule="checkpoints of other trainers need a target",
            fix="pass --target DIR, or convert it: eagle3lab convert",
        )
    return DraftConfig(
        hidden_size=raw["hidden_size"],
        target_hidden_size=raw.get("target_hidden_size") or raw["hidden_size"],
        points=points,
        target_blocks=blocks,
        target_family=family,
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=raw.get("rope_scaling"),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def load_drafter(folder: Path, embedding: Tensor, *, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """Read a drafter; every tensor must be there, with its shape, and none may be left over.

    Args:
        embedding: the target's embedding weight [V, H].

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, all named.
    """
    config = read_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} cannot be read ({error})", fix=f"eagle3lab doctor --draft {folder}"
        ) from error
    drafter = Eagle3Drafter(config, embedding.detach().to(dtype), tensors.get("d2t"))
    own = drafter.state_dict()
    if config.draft_vocab_size == config.vocab_size:
        tensors = {"d2t": own["d2t"], "t2d": own["t2d"], **tensors}
    tensors.pop("embed_tokens.weight", None)  # the engines use the target's
    tensors.setdefault("t2d", own["t2d"])
    problems = [f"{name} missing" for name in sorted(own.keys() - tensors.keys())]
    problems += [f"{name} unknown" for name in sorted(tensors.keys() - own.keys())]
    problems += [
        f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if tensors[name].shape != own[name].shape
    ]
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}", fix=f"eagle3lab doctor --draft {folder}")
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval().requires_grad_(False)
