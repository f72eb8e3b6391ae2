"""Signs that weights passed through fewer bits than their format has.

Three independent signs: few different values (a comb), the same within rows or square tiles (one scale each), and low
mantissa bits that are never set. A 16-bit file of continuous weights shows thousands of values and half its last bits
set. Numbers of values are compared with what as many continuous weights of the same coarse distribution would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eagle3lab.inspection.distribution import SPAN, Distribution, distribution
from eagle3lab.inspection.formats import TABLE_FORMATS, bfloat16_bits, value_table
from eagle3lab.inspection.scan import Scan
from eagle3lab.inspection.structure import gather

COMB = 260
"""Different values that an 8-bit format can show (255 or 256, a few more after rounding to 16 bits)."""
TILE = 128
"""Side of the square tiles that block-scaled 8-bit formats share a scale over."""
SAMPLES = 48


@dataclass(frozen=True)
class Quantisation:
    """distinct: different finite values. per_row, per_tile: median number of different values in a row and in a square
    tile, beside the number expected without quantisation. odd_mantissas: share of normal numbers whose last mantissa
    bit is set (half when continuous). spare_bits: mantissa bits that are zero in every value. signs: in words, empty
    when nothing speaks for quantisation."""

    distinct: int
    per_row: float
    per_row_expected: float
    per_tile: float
    per_tile_expected: float
    odd_mantissas: float
    spare_bits: int
    top_binade: float
    signs: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.signs)


def find_quantisation(scan: Scan) -> Quantisation:
    """Look for quantisation in a scanned fc."""
    histogram = scan.histograms.sum(axis=0)
    table = value_table(scan.grid_fmt)
    used = (histogram > 0) & np.isfinite(table) & (table != 0)
    n = int(histogram[used].sum())
    found = distribution(scan)
    smooth = _smooth(found)
    distinct = found.distinct()
    bits = np.flatnonzero(used)
    odd = float(histogram[bits[bits & 1 == 1]].sum() / n) if n else float("nan")
    mantissa = 7 if scan.grid_fmt == "BF16" else 10
    union = int(np.bitwise_or.reduce(bits)) & ((1 << mantissa) - 1) if n and scan.grid_fmt in ("BF16", "F16") else None
    spare = 0 if union is None else mantissa if union == 0 else (union & -union).bit_length() - 1
    rows, tiles = _row_distinct(scan), _tile_distinct(scan)
    expected = [float((1 - np.exp(-size * smooth)).sum()) for size in (scan.shape[1], tiles[1])]
    top = _top_binade(table[used], histogram[used])
    result = Quantisation(distinct, rows, expected[0], tiles[0], expected[1], odd, spare, top)
    result.signs.extend(_signs(scan, result, n))
    return result


def _smooth(found: Distribution) -> np.ndarray:
    """Share [G] of each cell if the weights were continuous: each coarse bin spread evenly over the cells in it."""
    bins = found.bins()
    share = bins.counts / max(1, bins.counts.sum())
    span = SPAN * found.moments.std
    edges, cells = (np.clip(e, -span, span) for e in (bins.edges, found.edges))
    density = np.divide(share, np.diff(edges), out=np.zeros_like(share), where=np.diff(edges) > 0)
    cumulative = np.concatenate(([0.0], np.cumsum(density * np.diff(edges))))
    return np.diff(np.interp(cells, edges, cumulative))


def _signs(scan: Scan, q: Quantisation, n: int) -> list[str]:
    signs = []
    if scan.layout.fmt.startswith("F8"):
        signs.append(f"stored as {scan.layout.fmt}")
    elif 1 < q.distinct <= COMB and n > 20 * q.distinct:
        kind = _comb_kind(scan)
        signs.append(f"{q.distinct} different values in {n:,} entries: {kind}")
    elif 1 < q.per_row <= COMB and q.per_row < 0.6 * q.per_row_expected:
        signs.append(
            f"about {q.per_row:.0f} different values in a row ({q.per_row_expected:.0f} expected): 8 bits with a scale "
            "a row"
        )
    elif 1 < q.per_tile <= COMB and q.per_tile < 0.6 * q.per_tile_expected:
        signs.append(
            f"about {q.per_tile:.0f} different values in a {TILE} x {TILE} tile ({q.per_tile_expected:.0f} expected): "
            "8 bits with a scale a tile"
        )
    if q.spare_bits and n:
        signs.append(f"the last {q.spare_bits} mantissa bits are zero in every value")
    if scan.layout.fmt == "F32" and scan.narrow_entries == scan.shape[0] * scan.shape[1]:
        signs.append("stored in 32 bits, every value is a bfloat16 number")
    return signs


def _comb_kind(scan: Scan) -> str:
    values, counts = scan.cells()
    comb = np.abs(values[counts > 0])
    comb = np.unique(comb[comb > 0])
    if len(comb) < 8:
        return f"at most {int(np.ceil(np.log2(2 * len(comb) + 1)))} bits"
    steps = comb / comb[0]
    if np.allclose(steps, np.round(steps), rtol=2**-7) and steps[-1] < 200:
        return "evenly spaced, an 8-bit integer with one scale"
    for fmt, top in (("F8_E4M3", 448.0), ("F8_E5M2", 57344.0)):
        codes = value_table(fmt)
        codes = np.unique(np.abs(codes[np.isfinite(codes)]))
        scaled = comb / comb[-1] * top
        nearest = codes[np.clip(np.searchsorted(codes, scaled), 1, len(codes) - 1)]
        below = codes[np.clip(np.searchsorted(codes, scaled), 1, len(codes) - 1) - 1]
        closest = np.where(np.abs(nearest - scaled) < np.abs(below - scaled), nearest, below)
        large = scaled > top / 256
        if np.all(np.abs(closest - scaled)[large] <= 2**-7 * scaled[large]):
            return f"the grid of float8 {fmt[3:].lower()} with one scale"
    return "an 8-bit comb"


def _top_binade(values: np.ndarray, counts: np.ndarray) -> float:
    """Share of entries in the binade of the largest magnitude (43 % for a fresh uniform at fan_in 21504)."""
    if not values.size:
        return float("nan")
    exponent = np.floor(np.log2(np.abs(values)))
    return float(counts[exponent == exponent.max()].sum() / counts.sum())


def _row_distinct(scan: Scan) -> float:
    """Median number of different values in a row, from rows spread over the matrix."""
    rows = np.unique(np.linspace(0, scan.shape[0] - 1, SAMPLES).astype(np.int64))
    return float(np.median([len(np.unique(bfloat16_bits(row))) for row in gather(scan.layout, rows, axis=0)]))


def _tile_distinct(scan: Scan) -> tuple[float, int]:
    """Median number of different values in aligned square tiles, and the entries of one."""
    layout = scan.layout
    height, width = min(TILE, layout.shape[0]), min(TILE, layout.shape[1])
    found = []
    for part in layout.parts[:1]:
        raw = part.tensor.raw()
        for r in np.linspace(0, max(0, raw.shape[0] // height - 1), 4).astype(int):
            for c in np.linspace(0, max(0, raw.shape[1] // width - 1), 4).astype(int):
                tile = raw[r * height : (r + 1) * height, c * width : (c + 1) * width]
                found.append(len(np.unique(_tile_bits(scan, tile))))
    return float(np.median(found)), height * width


def _tile_bits(scan: Scan, tile: np.ndarray) -> np.ndarray:
    return tile if scan.layout.fmt in TABLE_FORMATS else bfloat16_bits(np.asarray(tile, dtype=np.float32))
