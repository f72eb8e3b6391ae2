"""Which tensor is `fc`, how it lies in the file, and where its point blocks are.

Axes: logical fc is [R, C] = [out, in], C = P * Ht; column block p holds what capture point p feeds, in ascending point
order. Files also hold it transposed, or cut over tensor-parallel ranks; `FcLayout.tiles` hides both.
`fc.weight` is also the name of a target head in one trainer, so a name is never trusted without its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3lab.core.errors import CheckpointError, UsageError
from eagle3lab.inspection.formats import WEIGHT_FORMATS, to_float32
from eagle3lab.inspection.tensorfile import Checkpoint, Tensor

PREFIXES = ("module.", "_orig_mod.", "base_model.", "draft_model.", "draft.", "eagle_module.", "eagle.", "model.")
MOST_POINTS = 8
"""A quotient of the two sides above this is not taken for the number of points (heads of 20 x hidden exist)."""

_ROLES = (
    ("fc_norm", ("fc_norm.", "aux_norm", "input_norm.weight")),
    ("embedding", ("embed_tokens.weight",)),
    ("head", ("lm_head.weight",)),
    ("vocabulary map", ("d2t", "t2d", "draft_id_to_target_id")),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_")),
    ("mlp", ("gate_proj", "up_proj", "down_proj", "gate_up_proj")),
    ("norm", ("norm.weight", "layernorm.weight", "hidden_norm.weight")),
)


@dataclass(frozen=True)
class Part:
    """A stored piece of fc and the logical position of its first entry."""

    tensor: Tensor
    row: int = 0
    column: int = 0


@dataclass
class FcLayout:
    """fc as it lies in its files.

    shape: logical (R, C). transposed: the files hold [C, R]. parts: pieces that tile the matrix.
    points: one name a column block. widths: columns of each block. scale: float32 factors of a scaled 8-bit format,
    a scalar, [R, 1] or one a square block of `scale_block` columns; None when the stored values are the weights.
    """

    name: str
    fmt: str
    shape: tuple[int, int]
    parts: list[Part]
    transposed: bool = False
    points: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    scale: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        """First column of every block, and the end of the last."""
        return [0, *np.cumsum(self.widths).tolist()]

    def storage_tiles(self, entries: int = 1 << 19) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
        """(block, logical rows, logical columns, stored bits) of about `entries` numbers each.

        The bits keep their storage orientation: [rows, columns], or [columns, rows] when `transposed`. A tile lies in
        one column block and one part.
        """
        starts = self.starts
        for part in self.parts:
            raw = part.tensor.raw()
            rows, columns = (raw.shape[1], raw.shape[0]) if self.transposed else raw.shape
            for block in range(len(self.widths)):
                low = max(starts[block], part.column) - part.column
                high = min(starts[block + 1], part.column + columns) - part.column
                if low >= high:
                    continue
                step = max(1, entries // (rows if self.transposed else high - low))
                first, last = (low, high) if self.transposed else (0, rows)
                for begin in range(first, last, step):
                    end = min(begin + step, last)
                    if self.transposed:
                        where = slice(part.row, part.row + rows), slice(part.column + begin, part.column + end)
                        yield block, *where, raw[begin:end]
                    else:
                        where = slice(part.row + begin, part.row + end), slice(part.column + low, part.column + high)
                        yield block, *where, raw[begin:end, low:high]

    def tiles(self, entries: int = 1 << 19) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
        """As `storage_tiles`, with float32 weights in logical orientation [rows, columns], scale applied."""
        for block, rows, columns, raw in self.storage_tiles(entries):
            yield block, rows, columns, self.weights(rows, columns, raw)

    def column_tiles(self, width: int = 512) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
        """As `tiles`, with tiles of full height and at most `width` columns."""
        rows, starts = slice(0, self.shape[0]), self.starts
        for block in range(len(self.widths)):
            for low in range(starts[block], starts[block + 1], width):
                columns = slice(low, min(low + width, starts[block + 1]))
                yield block, rows, columns, self.region(rows, columns)

    def region(self, rows: slice, columns: slice) -> np.ndarray:
        """float32 weights [rows, columns] of any region, scale applied."""
        if len(self.parts) == 1:
            raw = self.parts[0].tensor.raw()
            return self.weights(rows, columns, raw[columns, rows] if self.transposed else raw[rows, columns])
        out = np.zeros((rows.stop - rows.start, columns.stop - columns.start), dtype=np.float32)
        for part in self.parts:
            raw = part.tensor.raw()
            height, width = (raw.shape[1], raw.shape[0]) if self.transposed else raw.shape
            top, bottom = max(rows.start, part.row), min(rows.stop, part.row + height)
            left, right = max(columns.start, part.column), min(columns.stop, part.column + width)
            if top >= bottom or left >= right:
                continue
            r, c = slice(top - part.row, bottom - part.row), slice(left - part.column, right - part.column)
            values = self.weights(slice(top, bottom), slice(left, right), raw[c, r] if self.transposed else raw[r, c])
            out[top - rows.start : bottom - rows.start, left - columns.start : right - columns.start] = values
        return out

    def weights(self, rows: slice, columns: slice, raw: np.ndarray) -> np.ndarray:
        """float32 weights in logical orientation of one storage tile."""
        values = to_float32(raw, self.fmt)
        values = values.T if self.transposed else values
        return values if self.scale is None else values * self.scale_of(rows, columns)

    def scale_of(self, rows: slice, columns: slice) -> np.ndarray:
        """Factors of a region, broadcastable to it."""
        if self.scale is None or self.scale.ndim == 0:
            return np.ones((), dtype=np.float32) if self.scale is None else self.scale
        if self.scale.shape[1] == 1:
            return self.scale[rows]
        r, c = (-(-n // m) for n, m in zip(self.shape, self.scale.shape, strict=True))
        return self.scale[np.ix_(np.arange(rows.start, rows.stop) // r, np.arange(columns.start, columns.stop) // c)]


def bare_name(name: str) -> str:
    """`name` without wrapper prefixes (`module.model.fc.weight` -> `fc.weight`)."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name[len(prefix) :]
    return name


def role_of(name: str, shape: Sequence[int]) -> str:
    """What a tensor is for, by its name; `other` when no rule knows it."""
    bare = bare_name(name)
    if bare in ("fc.weight", "fc"):
        return "fc" if len(shape) == 2 else "other"
    if "scale" in bare.rsplit(".", 1)[-1]:
        return "scale"
    return next((role for role, marks in _ROLES if any(mark in bare for mark in marks)), "other")


def config_widths(config: dict[str, Any] | None) -> tuple[int | None, int | None, int | None]:
    """(draft hidden R, target hidden Ht, points P) that a drafter's config states; None where it does not."""
    if not config:
        return None, None, None
    inner = config.get("transformer_layer_config")
    inner = inner if isinstance(inner, dict) else {}
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    hidden = _positive(inner.get("hidden_size")) or _positive(config.get("hidden_size"))
    target = _positive(config.get("target_hidden_size")) or hidden
    key = "eagle_aux_hidden_state_layer_ids"
    ids = nested.get(key) or config.get(key)
    points = len(ids) if isinstance(ids, list) and ids else _positive(config.get("num_aux_hidden_states"))
    return hidden, target, points


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def find_fc(checkpoint: Checkpoint, *, points: Sequence[str] | None = None, tensor: str | None = None) -> FcLayout:
    """Find fc under any layout name and cut it into point blocks.

    Args:
        points: names of the blocks in ascending order; their number fixes P.
        tensor: take this tensor, whatever its name.

    Raises:
        CheckpointError: there is no fc, its format is unknown, or its width is not a multiple of the number of points.
    """
    if points and len(set(points)) < len(points):
        raise UsageError(f"points {', '.join(points)}", rule="every block has a name of its own")
    if points and all(str(point).removeprefix("-").isdecimal() for point in points):
        numbers = [int(point) for point in points]
        if numbers != sorted(numbers) or numbers[0] < 0:
            raise UsageError(f"points {', '.join(points)}", rule="0 or more and ascending, as fc's columns are")
    name = tensor or _pick(checkpoint)
    parts = checkpoint.parts(name)
    first = parts[0]
    if len(first.shape) != 2 or first.size == 0 or first.dtype not in WEIGHT_FORMATS:
        formats = ", ".join(sorted(WEIGHT_FORMATS))
        raise CheckpointError(f"{name} is {first.dtype} {list(first.shape)}", rule=f"a matrix of {formats} is needed")
    notes = list(checkpoint.notes)
    hidden, target, config_points = config_widths(checkpoint.config)
    count = len(points) if points else config_points
    expected = (hidden, target * count) if hidden and target and count else None
    stored, placed = _join(parts, expected, notes)
    rows, columns = stored
    transposed = stored != expected and (
        stored[::-1] == expected or (rows > columns and rows % columns == 0 and rows // columns <= MOST_POINTS)
    )
    if transposed:
        notes.append("layout: transposed ([in, out] in the file, read as [out, in])")
        placed = [Part(part.tensor, row=part.column, column=part.row) for part in placed]
        rows, columns = columns, rows
    if expected and (rows, columns) != expected:
        note = _shard_note((rows, columns), expected)
        if points and (note is None or (rows, columns) == (hidden, (target or 0) * (config_points or 0))):
            _refuse_other_count(name, columns, target or 0, points)
        asks = "the named points ask" if points else "config.json asks"
        has = f"the file has {[rows, columns]}: blocks are cut from the file's shape"
        notes.append(note or f"{asks} for {list(expected)}, {has}")
    width_points = columns // rows if columns % rows == 0 and columns // rows <= MOST_POINTS else None
    count = count or width_points or (3 if columns % 3 == 0 else 1)
    if columns % count:
        raise CheckpointError(
            f"{name} has {columns} columns and {count} points", rule="columns = points x hidden size of the target",
            fix="name the blocks that the checkpoint was trained with: --points A,B,C",
        )  # fmt: skip
    names = [str(point) for point in points or _recorded_points(checkpoint.config, count)]
    layout = FcLayout(name, first.dtype, (rows, columns), placed, transposed, names, [columns // count] * count)
    layout.scale = _scale(checkpoint, layout)
    layout.notes = [note for note in notes if note]
    return layout


def _refuse_other_count(name: str, columns: int, target: int, points: Sequence[str]) -> None:
    """Raise where fc has whole blocks of the target's hidden size, and another number of them than there are names."""
    if target and columns % target == 0 and columns != target * len(points):
        raise CheckpointError(
            f"{name} has {columns} columns = {columns // target} points x {target}, {len(points)} are named",
            rule="columns = points x hidden size of the target",
            fix=f"name {columns // target} blocks: --points A,B,C",
        )


def _recorded_points(config: dict[str, Any] | None, count: int) -> list[Any]:
    """`resid_pre` indices that our own checkpoints record, else low, mid, high."""
    ours = config.get("eagle3lab") if config else None
    recorded = ours.get("resid_pre") if isinstance(ours, dict) else None
    if isinstance(recorded, list) and len(recorded) == count:
        return recorded
    return ["low", "mid", "high"] if count == 3 else [f"point{i}" for i in range(count)]


def _pick(checkpoint: Checkpoint) -> str:
    matrices = [t for t in checkpoint if len(t.shape) == 2 and t.size and t.dtype in WEIGHT_FORMATS]
    named = [t for t in matrices if role_of(t.name, t.shape) == "fc"]
    if good := [t for t in named if _fusion_shape(t, checkpoint.config)]:
        return good[0].name
    shaped = [t for t in matrices if role_of(t.name, t.shape) == "other" and max(t.shape) == 3 * min(t.shape)]
    if not named and len(shaped) == 1:
        checkpoint.notes.append(f"no tensor is called fc.weight; {shaped[0].name} is taken for it by its shape")
        return shaped[0].name
    called = [t for t in checkpoint if role_of(t.name, t.shape) == "fc"]
    shown = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in (called or list(checkpoint))[:4])
    raise CheckpointError(
        f"no fusion weight in {checkpoint.path} (found: {shown})",
        rule=f"fc.weight is [hidden, points x hidden] of {', '.join(sorted(WEIGHT_FORMATS))}; a [vocabulary, hidden] "
        "matrix of that name is a target head",
        fix="name it: --tensor NAME",
    )


def _fusion_shape(tensor: Tensor, config: dict[str, Any] | None) -> bool:
    rows, columns = tensor.shape
    hidden, _, _ = config_widths(config)
    vocabulary = config.get("vocab_size") if config else None
    if vocabulary and rows == vocabulary != hidden:
        return False
    large, small = max(rows, columns), max(1, min(rows, columns))
    return bool(hidden and hidden in (rows, columns)) or large / small <= 3 * MOST_POINTS


def _join(
    parts: list[Tensor], expected: tuple[int, int] | None, notes: list[str]
) -> tuple[tuple[int, int], list[Part]]:
    """Place parts of the same name: replicated, or cut along rows or columns."""
    shape: tuple[int, int] = (parts[0].shape[0], parts[0].shape[1])
    if len(parts) == 1:
        return shape, [Part(parts[0])]
    if any(tuple(part.shape) != shape or part.dtype != parts[0].dtype for part in parts):
        raise CheckpointError(
            f"{parts[0].name} is in {len(parts)} files with shapes {sorted({part.shape for part in parts})}",
            rule="tensor-parallel shards have one shape", fix="give one .safetensors file",
        )  # fmt: skip
    along_rows, along_columns = (shape[0] * len(parts), shape[1]), (shape[0], shape[1] * len(parts))

    def fits(joined: tuple[int, int]) -> bool:
        if expected:
            return joined in (expected, expected[::-1])
        return max(joined) % min(joined) == 0 and max(joined) // min(joined) == 3

    if fits(shape):
        notes.append(f"layout: {len(parts)} files carry {parts[0].name} whole, the first is read")
        return shape, [Part(parts[0])]
    for joined, axis in ((along_rows, "rows"), (along_columns, "columns")):
        if fits(joined):
            notes.append(f"layout: joined from {len(parts)} tensor-parallel shards along {axis}")
            rows = axis == "rows"
            return joined, [
                Part(part, row=i * shape[0] if rows else 0, column=0 if rows else i * shape[1])
                for i, part in enumerate(parts)
            ]
    notes.append(f"layout: {len(parts)} files carry {parts[0].name} and do not join to [H, 3H], only the first is read")
    return shape, [Part(parts[0])]


def _shard_note(shape: tuple[int, int], expected: tuple[int, int]) -> str | None:
    for axis, name in enumerate(("rows", "columns")):
        if shape[1 - axis] == expected[1 - axis] and expected[axis] % shape[axis] == 0:
            return f"layout: one tensor-parallel shard of {expected[axis] // shape[axis]} along {name}, not all of fc"
    return None


def _scale(checkpoint: Checkpoint, layout: FcLayout) -> np.ndarray | None:
    """Factors beside an 8-bit fc (`fc.weight_scale`, or `fc.weight_scale_inv`, which multiplies too), as float32."""
    if not layout.fmt.startswith("F8_"):
        return None
    name = next((layout.name + s for s in ("_scale", "_scale_inv") if layout.name + s in checkpoint.tensors), None)
    if name is None:
        layout.notes.append("8-bit values without a scale tensor: statistics are of the stored values")
        return None
    tensor = checkpoint[name]
    factors = to_float32(np.array(tensor.raw()), tensor.dtype)
    if factors.size == 1:
        return factors.reshape(()).astype(np.float32)
    by_row = factors.size == layout.shape[0]
    if layout.transposed or not (by_row or factors.ndim == 2):
        raise CheckpointError(f"{name} is {list(tensor.shape)}", rule="one factor, one a row, or one a square block")
    return factors.reshape(-1, 1) if by_row else factors
