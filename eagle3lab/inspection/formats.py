"""Number formats of weight files: stored bits to values without torch, and the grid of values a format can hold.

numpy knows no bfloat16 and no float8, so both are read as unsigned integers. A format of at most 16 bits has at most
65,536 different values: a table of them turns a histogram of bit patterns into exact float64 statistics.

Layouts: bfloat16 = top half of float32. F8_E4M3 is the "FN" kind (no infinity, 0x7f and 0xff are NaN, maximum 448),
F8_E5M2 is the IEEE kind. Source: safetensors format description and the OCP 8-bit floating point specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

STORAGE: dict[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<u2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip
"""safetensors dtype -> numpy dtype of the stored bits. What is not here is listed by name and never decoded."""

TABLE_FORMATS = frozenset({"BF16", "F16", "F8_E4M3", "F8_E5M2"})
"""Formats whose every value fits in a table."""

WEIGHT_FORMATS = TABLE_FORMATS | {"F32", "F64"}
"""Formats that hold weights (the others hold ids, masks and scales)."""


def _float8(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> np.ndarray:
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if infinities:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return sign * value


@lru_cache
def value_table(fmt: str) -> np.ndarray:
    """float64 value of every bit pattern of `fmt` (one of `TABLE_FORMATS`), indexed by the pattern."""
    if fmt == "BF16":
        with np.errstate(invalid="ignore"):  # signalling NaN patterns
            table = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    elif fmt == "F16":
        with np.errstate(invalid="ignore"):
            table = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    elif fmt == "F8_E4M3":
        table = _float8(4, 3, infinities=False)
    elif fmt == "F8_E5M2":
        table = _float8(5, 2, infinities=True)
    else:
        raise ValueError(f"{fmt} has no value table")
    table.setflags(write=False)
    return table


@lru_cache
def _table32(fmt: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        table = value_table(fmt).astype(np.float32)
    table.setflags(write=False)
    return table


def to_float32(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Values of stored bits as float32, any shape. Exact for every format of at most 32 bits."""
    if fmt == "BF16":
        return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    if fmt == "F16":
        return raw.view(np.float16).astype(np.float32)
    if fmt in TABLE_FORMATS:
        return _table32(fmt)[raw]
    with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite for every engine
        return np.asarray(raw, dtype=np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns (uint16) of float32 values rounded to bfloat16, ties to even, NaN kept a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


@dataclass(frozen=True)
class Grid:
    """The finite values of a format in ascending order, zero once, with the cell of reals that rounds to each.

    `values` [G] and `edges` [G + 1] are float64; `edges[i], edges[i+1]` bound cell i; the outer edges are infinite.
    `order` [bits] maps a bit pattern to its cell, -1 for NaN and infinities.
    """

    fmt: str
    values: np.ndarray
    edges: np.ndarray
    order: np.ndarray

    def counts(self, histogram: np.ndarray) -> np.ndarray:
        """Cell counts int64 [G] of a histogram over bit patterns; non-finite patterns are left out."""
        finite = self.order >= 0
        return np.bincount(self.order[finite], weights=histogram[finite], minlength=len(self.values)).astype(np.int64)


@lru_cache
def grid(fmt: str) -> Grid:
    """Grid of a table format. Wider formats are binned to the bfloat16 grid by the caller."""
    table = value_table(fmt)
    finite = np.isfinite(table)
    values, inverse = np.unique(table[finite], return_inverse=True)  # +0.0 == -0.0: one cell
    order = np.full(len(table), -1, dtype=np.int64)
    order[finite] = inverse
    edges = np.concatenate(([-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]))
    return Grid(fmt=fmt, values=values, edges=edges, order=order)
