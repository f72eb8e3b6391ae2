"""The hook that asks a running SGLang what its drafter really gets and really loaded.

    --forward-hooks '[{"name": "eagle3lab-probe", "target_modules": ["fc", "*.fc", "logits_processor", ...],
                       "hook_factory": "eagle3lab.capture.sglang_probe:create", "config": {"draft": "FOLDER"}}]'

SGLang 0.5.23 runs the factory once for the target and once for the draft, on every rank, after graph capture. On its
first forward with rows each model prints one line `eagle3lab probe: {...}` into the server's log, which
`eagle3lab doctor --log` and `serve --probe` read. The draft's line says whether `fc` ran before its logits processor,
how wide its input was, and how the loaded fc, lm_head and d2t compare with the files in FOLDER.

It needs torch and safetensors alone. It never raises: an exception in a hook ends the engine.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

PREFIX = "eagle3lab probe: "
STATES, HEAD, BATCH, AUX = 1, 2, 3, 4
"""Places of the positional arguments of a logits processor."""
ROWS = 4096
"""Rows that are converted at a time: sums run in float64."""
KNOWN = {"fc": ("fc.weight", "model.fc.weight"), "lm_head": ("lm_head.weight",), "d2t": ("d2t", "model.d2t")}
"""Names under which SGLang 0.5.23 loads each tensor. Any other name is dropped without a word."""
ENDINGS = {"fc": "fc.weight", "lm_head": "lm_head.weight", "d2t": "d2t"}


def create(config: Mapping[str, Any]) -> Callable[..., None]:
    """Hook factory. config: `draft`, the drafter's folder as the server sees it; without it nothing is compared."""
    draft = config.get("draft")
    return Probe(Path(draft) if draft else None)


class Probe:
    """One model on one rank: notes the first input of `fc`, reports at the first call of the logits processor."""

    def __init__(self, draft: Path | None) -> None:
        self.draft = draft
        self._fc: dict[str, Any] | None = None
        self._done = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """See the module; returns None, so that the output stays what it is."""
        if self._done:
            return
        try:
            if len(args) <= BATCH:
                if self._fc is None and args and isinstance(args[0], Tensor) and len(args[0]):
                    self._fc = _input(args[0])
            elif len(args[STATES]):  # an idle rank passes no rows
                self._done = True
                self._report(module, args)
        except Exception as error:
            self._done = True
            _say({"part": "failed", "rank": _rank(), "error": f"{type(error).__name__}: {error}"[:300]})

    def _report(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        owner = _owner(module)
        trunk = getattr(owner, "model", owner)
        fc = getattr(trunk, "fc", None)
        line: dict[str, Any] = {"rank": _rank(), "class": type(owner).__name__, "states": _input(args[STATES])}
        if isinstance(fc, nn.Module):
            given = getattr(getattr(args[BATCH], "spec_info", None), "hidden_states", None)
            loaded = {
                "fc": getattr(fc, "weight", None),
                "lm_head": getattr(args[HEAD], "weight", None),
                "d2t": _offsets(getattr(owner, "hot_token_id", None)),
            }
            line |= {
                "part": "draft",
                "given": _input(given) if isinstance(given, Tensor) else None,
                "fc": {"called": self._fc is not None, **(self._fc or {})},
                "weights": {
                    name: compare(name, tensor, self.draft, _span(args[HEAD]) if name == "lm_head" else None)
                    for name, tensor in loaded.items()
                },
            }
        else:
            aux = args[AUX] if len(args) > AUX else None
            parts = list(aux) if isinstance(aux, list | tuple) else [] if aux is None else [aux]
            points = getattr(trunk, "layers_to_capture", None)
            line |= {
                "part": "target",
                "aux": [_input(part) for part in parts],
                "captures": [int(point) for point in points] if isinstance(points, list | tuple) else None,
            }
        _say(line)


def compare(
    name: str, loaded: Tensor | None, folder: Path | None, span: tuple[int, int] | None = None
) -> dict[str, Any]:
    """A loaded tensor beside the one in the drafter's folder.

    Args:
        name: fc, lm_head or d2t. loaded: [rows, ...]; None when the model holds none.
        span: first and last-but-one row of the file that this rank's rows stand for; None: ranks hold equal parts.

    Returns:
        `loaded` and `file`, each with shape, dtype, mean, std and sha256 (of the file: the rank's rows, in the loaded
        dtype), `equal` (None: not compared, `why` says so) and `max_difference`.
    """
    found: dict[str, Any] = {"loaded": None if loaded is None else describe(loaded), "file": None, "equal": None}
    if folder is None:
        return found | {"why": "the probe was given no drafter folder"}
    place = _find(folder, name)
    if place is None:
        return found | {"why": f"the folder's safetensors hold no {ENDINGS[name]}"}
    path, key = place
    with safe_open(path, framework="pt") as file:
        whole = file.get_slice(key)
        shape = list(whole.get_shape())
        found["file"] = {"name": key, "shape": shape, "known": key in KNOWN[name]}
        if loaded is None:
            return found | {"why": "the model holds none"}
        rows = _rows(list(loaded.shape), shape, span)
        if rows is None:
            return found | {"equal": False, "why": "another shape"}
        # SGLang pads the rows of a head; those behind the file's stand for nothing.
        own = loaded.detach()[: rows[1] - rows[0]].cpu()
        theirs = whole[rows[0] : rows[1]].to(own.dtype)
    found["file"] |= describe(theirs) | {"shape": shape, "rows": list(rows)}
    found["loaded"] |= {"sha256": digest(own)}
    found["equal"] = found["loaded"]["sha256"] == found["file"]["sha256"]
    if not found["equal"]:
        parts = zip(own.split(ROWS), theirs.split(ROWS), strict=True)
        found["max_difference"] = _number(max(float((a.double() - b.double()).abs().max()) for a, b in parts))
    return found


def describe(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype, mean, standard deviation (both over all values, in float64) and sha256 of the bytes."""
    host = tensor.detach().cpu()
    count = max(host.numel(), 1)
    mean = sum(float(part.double().sum()) for part in host.split(ROWS)) / count
    spread = sum(float((part.double() - mean).square().sum()) for part in host.split(ROWS)) / count
    return {
        "shape": list(host.shape),
        "dtype": str(host.dtype).removeprefix("torch."),
        "mean": _number(mean),
        "std": _number(math.sqrt(spread)),
        "sha256": digest(host),
    }


def digest(tensor: Tensor) -> str:
    """sha256 of a host tensor's bytes in row order."""
    found = hashlib.sha256()
    for part in tensor.split(ROWS):
        found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _rows(loaded: list[int], file: list[int], span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows of the file that the loaded tensor stands for; None when it cannot stand for any."""
    if loaded[1:] != file[1:] or not loaded or not file:
        return None
    if loaded[0] == file[0]:
        return 0, file[0]
    if span is not None:
        first, stop = span
        fits = 0 <= first < stop <= file[0] and stop - first <= loaded[0]
        # The padding of one head is shorter than its rows; many more rows are another head.
        return span if fits and loaded[0] <= 2 * (stop - first) else None
    if loaded[0] and file[0] % loaded[0] == 0:
        first = _rank() % (file[0] // loaded[0]) * loaded[0]
        return first, first + loaded[0]
    return None


def _span(head: Any) -> tuple[int, int] | None:
    """Vocabulary rows of this rank's head, padding left out."""
    indices = getattr(head, "shard_indices", None)
    first, stop = (getattr(indices, f"org_vocab_{end}_index", None) for end in ("start", "end"))
    return None if first is None or stop is None else (int(first), int(stop))


def _find(folder: Path, name: str) -> tuple[Path, str] | None:
    """File and key of a tensor: under a name that SGLang loads, else under one that only ends like it."""
    ending = ENDINGS[name].split(".")
    found: list[tuple[Path, str]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(path, key) for key in list(file.keys()) if key.split(".")[-len(ending) :] == ending]
    known = [place for place in found if place[1] in KNOWN[name]]
    return next(iter(known or found), None)


def _owner(module: nn.Module) -> nn.Module:
    """The model whose forward is calling this logits processor: a hook is handed the part, not the whole."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(child is module for child in owner.children()):
            return owner
        frame = frame.f_back
    raise LookupError("no caller of the logits processor holds it")


def _offsets(ids: Any) -> Tensor | None:
    """d2t as files hold it: SGLang keeps target ids, files the distance from the draft id."""
    if not isinstance(ids, Tensor):
        return None
    host = ids.detach().to("cpu", torch.int64)
    return host - torch.arange(len(host))


def _input(tensor: Tensor) -> dict[str, Any]:
    return {"rows": len(tensor), "width": tensor.shape[-1], "dtype": str(tensor.dtype).removeprefix("torch.")}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rank() -> int:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0


def _say(line: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(line, allow_nan=False), flush=True)
