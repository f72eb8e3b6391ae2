"""Rows of stored states as numbers: plain dtypes, and 8 bits times their scales (`eagle3lab states shrink`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle3lab.core.safetensors_header import Header, HeaderError, map_tensor, widen

READ = ("BF16", "F16", "F32", "I8")


def states(header: Header, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start to stop of `aux` or `last`, float32.

    Raises:
        HeaderError: another dtype or shape, or 8 bits without their scales.
    """
    entry = header.tensors[name]
    if entry.dtype not in READ or len(entry.shape) != 2:
        text = f"{name} is {entry.dtype} {list(entry.shape)}"
        raise HeaderError("structure", text, rule="states are [rows, width] in " + ", ".join(READ))
    values = widen(entry, map_tensor(header, name)[start:stop]).astype(np.float32)
    if entry.dtype != "I8":
        return values
    scales = scales_of(header, name)[start:stop]
    with np.errstate(all="ignore"):  # damaged scales are told as rows that are not finite
        return (values.reshape(len(values), scales.shape[1], -1) * scales[:, :, None]).reshape(values.shape)


def scales_of(header: Header, name: str) -> np.ndarray:
    """Scales [rows, blocks] of states in 8 bits; `HeaderError` when there are none that fit."""
    entry, scale = header.tensors[name], header.tensors.get(f"{name}_scale")
    fits = scale is not None and scale.dtype == "F32" and len(scale.shape) == 2 and scale.shape[0] == entry.shape[0]
    if scale is None or not fits or not scale.shape[1] or entry.shape[1] % scale.shape[1]:
        raise HeaderError("structure", f"{name} is in 8 bits and {name}_scale does not fit it")
    return map_tensor(header, f"{name}_scale")


def stored(header: Header, name: str, start: int, stop: int) -> Iterator[bytes]:
    """The same rows as their bytes, a row in 8 bits with its scales: equal bytes are equal states."""
    rows = map_tensor(header, name)
    scales = scales_of(header, name) if header.tensors[name].dtype == "I8" else None
    for place in range(start, stop):
        row = np.ascontiguousarray(rows[place]).tobytes()
        yield row if scales is None else row + np.ascontiguousarray(scales[place]).tobytes()
