"""Checkpoints that a training goes on from exactly: `checkpoints/step-000120/`, whole or absent.

    *.safetensors   weights, optimiser state, random generators of every rank, the window of numbers not yet told
    state.json      step, schedule, sampler position, rows so far, what decided the training, and the files' sizes

One rank writes one file; several write through torch.distributed.checkpoint in its safetensors form, each the parts it
holds. Either is read by any number of ranks. Nothing is unpickled. A folder is filled under a temporary name and then
renamed; the newest `KEEP` and the best on held-out samples stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3lab.core.errors import RunError, TrainingError
from eagle3lab.core.files import fsync_folder, read_json, require_space, write_json
from eagle3lab.training.distributed import World, local

FOLDER = "checkpoints"
STATE = "state.json"
WEIGHTS = "model.safetensors"
KEEP = 3
MAY_DIFFER = ("world_size", "shards")
"""What a resume may change: the numbers then agree with the uninterrupted run's to rounding, not to the bit."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk. `state` is its `state.json`."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.state["run"]["step"])


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Tensor, world: World
) -> dict[str, Tensor]:
    """Everything of a training that is a tensor, by name; spread tensors stay spread."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors[f"rng.cpu.{world.rank}"] = torch.get_rng_state()
    if world.device.type == "cuda":
        tensors[f"rng.cuda.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    if len(window):
        tensors["window"] = window
    return tensors


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], world: World) -> None:
    """Write `folder/checkpoints/step-NNNNNN` and remove what is no longer kept. Every rank must call it.

    Args:
        state: must hold `run`, and `best` with a `step` when there is a best one.

    Raises:
        DiskError: too little space; the checkpoints before it stay good.
    """
    root = folder / FOLDER
    final = root / f"step-{step:06d}"
    temporary = root / f".{final.name}.part"

    def begin() -> None:
        for leftover in root.glob(".*.part"):  # of a killed writer
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        size = sum(local(t).numel() * t.element_size() for t in tensors.values()) * world.shards
        require_space(root, size, f"checkpoint of step {step}")

    world.lead(begin)
    _write_tensors(temporary, tensors, world)
    world.meet()

    def publish() -> None:
        sizes = {file.name: file.stat().st_size for file in temporary.glob("*.safetensors")}
        write_json(temporary / STATE, {**state, "files": sizes})
        fsync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync_folder(root)
        _prune(root, state.get("best"))

    world.lead(publish)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    if world.size == 1:
        path = folder / WEIGHTS
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save({name: value.detach() for name, value in tensors.items()}, storage_writer=writer)


def _prune(root: Path, best: Mapping[str, Any] | None) -> None:
    kept = [path for _, path in _folders(root)][-KEEP:]
    for step, path in _folders(root):
        if path not in kept and step != (best or {}).get("step"):
            (path / STATE).unlink(missing_ok=True)  # first, so that a half-removed one is not taken for whole
            shutil.rmtree(path, ignore_errors=True)


def _folders(root: Path) -> list[tuple[int, Path]]:
    found = [(re.fullmatch(r"step-(\d{6,})", path.name), path) for path in root.glob("step-*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def read(path: Path) -> Checkpoint:
    """A checkpoint, if it is whole.

    Raises:
        TrainingError: no state, or a file that is missing or of another size (named).
    """
    try:
        state = read_json(path / STATE)
    except RunError as error:
        raise TrainingError(f"{path} is no whole checkpoint ({error.what})") from error
    for name, size in state["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise TrainingError(
                f"{path / name} has {'no bytes' if found is None else f'{found} bytes'}", rule=f"{size} were written"
            )
    return Checkpoint(path, state)


def newest(folder: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint under `folder`, or None. Damaged ones are named to `note` and passed over."""
    for _, path in reversed(_folders(folder / FOLDER)):
        try:
            return read(path)
        except TrainingError as error:
            note(f"{error.what}: passed over")
    return None


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Tensor:
    """Put weights, optimiser state and this rank's generators back; returns the window. Every rank must call it.

    Raises:
        TrainingError: a file that cannot be read, or tensors of another shape.
    """
    names = checkpoint.state["tensors"]
    parameters = dict(model.named_parameters())
    wanted: dict[str, Tensor] = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    for name, shape in names.items():
        if name.startswith("optimizer."):
            owner = parameters[name.removeprefix("optimizer.").rpartition(".")[0]]
            same = list(owner.shape) == shape
            wanted[name] = torch.zeros_like(owner) if same else torch.zeros(shape, device=owner.device)
            wanted[name].requires_grad_(False)
    generators = [f"rng.{kind}.{world.rank}" for kind in ("cpu", world.device.type)]
    for name in {*generators, "window"} & set(names):
        wanted[name] = torch.zeros(names[name], dtype=torch.float64 if name == "window" else torch.uint8)
    try:
        _read_tensors(checkpoint.path, wanted, world)
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{checkpoint.path} cannot be read ({str(error).splitlines()[0]})", fix=f"rm -r {checkpoint.path}"
        ) from error
    for name, parameter in parameters.items():
        start = f"optimizer.{name}."
        optimizer.state[parameter] = {
            key.removeprefix(start): value for key, value in wanted.items() if key.startswith(start)
        }
    if generators[0] in wanted:
        torch.set_rng_state(wanted[generators[0]])
    if world.device.type == "cuda" and generators[1] in wanted:
        torch.cuda.set_rng_state(wanted[generators[1]], world.device)
    return wanted.get("window", torch.zeros(0, dtype=torch.float64))


def _read_tensors(path: Path, wanted: dict[str, Tensor], world: World) -> None:
    """Fill the tensors of `wanted` in place."""
    if world.size == 1 and (path / WEIGHTS).is_file():
        stored = load_file(path / WEIGHTS)
        for name, target in wanted.items():
            if target.shape != stored[name].shape:
                raise ValueError(f"{name} is {list(stored[name].shape)}, {list(target.shape)} is needed")
            target.copy_(stored[name])
        return
    import torch.distributed.checkpoint as dcp

    with _quiet():
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=world.size == 1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        yield


def shapes(tensors: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    """Name -> whole shape, with the generators of every rank."""
    known = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in [name for name in known if name.startswith("rng.")]:
        kind = name.rpartition(".")[0]
        known |= {f"{kind}.{rank}": known[name] for rank in range(world.size)}
    return known


def require_same(checkpoint: Checkpoint, now: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Compare what decided the saved training with what would decide its continuation.

    Another number of ranks is noted: samples are dealt out anew, sums are rounded otherwise. Anything else refuses.

    Raises:
        TrainingError: everything that changed, saved and now.
    """
    saved = checkpoint.state["run"]
    changed = {name: (saved.get(name), value) for name, value in now.items() if not _same(saved.get(name), value)}
    told = [f"{name} was {_short(old)}, now {_short(new)}" for name, (old, new) in changed.items()]
    if refused := [line for line, name in zip(told, changed, strict=True) if name not in MAY_DIFFER]:
        raise TrainingError(
            f"{checkpoint.path} was written with other inputs: {', '.join(refused)}",
            rule="a resume keeps data, order, points and settings",
            fix=f"go on with those, or rm -r {checkpoint.path.parent} to start again",
        )
    for line in told:
        note(f"resume: {line}; samples are dealt out anew, the curve goes on to rounding")


def _same(saved: Any, now: Any) -> bool:
    """Equal; of two mappings (shard -> hash) the common part, because a capture may have grown meanwhile."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return all(saved[name] == now[name] for name in saved.keys() & now.keys())
    return saved == now


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load_weights(folder: Path, step: int, model: nn.Module) -> bool:
    """Put the weights of one checkpoint into a plain module; False when it is not there (step 0 never is)."""
    path = folder / FOLDER / f"step-{step:06d}"
    if not path.is_dir():
        return False
    wanted = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    _read_tensors(read(path).path, wanted, World())
    return True


def remove(folder: Path) -> None:
    """Remove all checkpoints: the training is finished."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
