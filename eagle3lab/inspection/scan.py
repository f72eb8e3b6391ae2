"""One pass over fc: histograms per block, and per-row and per-column sums, from which the whole battery is computed.

Each tile is read once, turned to float32 in cache and reduced along both axes. The pooled statistics come
from exact histograms in float64; the row and column maps are float32 sums over a tile, added up in float64, and carry
a relative error of about 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eagle3lab.inspection.formats import TABLE_FORMATS, bfloat16_bits, grid, to_float32
from eagle3lab.inspection.layout import FcLayout
from eagle3lab.inspection.moments import Moments, PowerSums, histogram_moments

_POWERS = (1, 2, 4)


@dataclass
class AxisSums:
    """Sums along one axis: per row and block [R, P], or per column [C]. Power sums are float64.

    first, second, fourth: sums of w, w^2, w^4. peak: largest magnitude (NaN-free only where all entries are finite).
    """

    first: np.ndarray
    second: np.ndarray
    fourth: np.ndarray
    peak: np.ndarray
    count: np.ndarray

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> AxisSums:
        """Empty sums."""
        return cls(*(np.zeros(shape, dtype=kind) for kind in (*[np.float64] * 4, np.int64)))

    def add(self, at: tuple[slice, ...] | slice, sums: list[np.ndarray], peak: np.ndarray, count: int) -> None:
        """Add one tile's sums at `at`."""
        for target, value in zip((self.first, self.second, self.fourth), sums, strict=True):
            target[at] += value
        self.peak[at] = np.maximum(self.peak[at], peak)
        self.count[at] += count

    def std(self) -> np.ndarray:
        """Standard deviation about the own mean."""
        mean = self.first / self.count
        with np.errstate(invalid="ignore", over="ignore"):  # squares of weights above 1e19 leave float32: unknown
            return np.sqrt(np.maximum(self.second / self.count - mean**2, 0.0))

    def kurtosis(self) -> np.ndarray:
        """Raw fourth moment over the squared second, about zero (uniform 1.8, Gaussian 3); NaN for zero rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.fourth * self.count / self.second**2


@dataclass
class Scan:
    """What one pass over fc found.

    layout: where it came from. grid_fmt: format of the histogram cells (wide formats are binned to bfloat16).
    histograms: int64 [P, bits]. rows: sums [R, P]. columns: sums [C]. wide: power sums a block for 32- and 64-bit
    weights or row-scaled ones. diagonal: float32 [P, min(R, width)], the entries w[i, start_p + i].
    narrow_entries: entries of a float32 matrix that are exact bfloat16 values.
    """

    layout: FcLayout
    grid_fmt: str
    histograms: np.ndarray
    rows: AxisSums
    columns: AxisSums
    wide: list[PowerSums] = field(default_factory=list)
    scale: float = 1.0
    diagonal: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    narrow_entries: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Logical [R, C]."""
        return self.layout.shape

    @property
    def exact(self) -> bool:
        """The histogram holds every value exactly."""
        return not self.wide

    @property
    def fmt(self) -> str:
        """Format whose rounding the values show: BF16 for a 32-bit file of bfloat16 values."""
        upcast = self.layout.fmt == "F32" and self.narrow_entries == self.shape[0] * self.shape[1]
        return "BF16" if upcast else self.layout.fmt

    def block_moments(self, block: int) -> Moments:
        """Moments of one point block."""
        if self.wide:
            return self.wide[block].moments()
        return histogram_moments(self.histograms[block], self.grid_fmt, self.scale)

    def block_sums(self, block: int | None = None) -> PowerSums:
        """Power sums of a block, or of all of them, of a wide format."""
        if block is not None:
            return self.wide[block]
        total = PowerSums()
        for part in self.wide:
            total.merge(part)
        return total

    def pooled_moments(self) -> Moments:
        """Moments of the whole matrix."""
        if self.wide:
            return self.block_sums().moments()
        return histogram_moments(self.histograms.sum(axis=0), self.grid_fmt, self.scale)

    def cells(self, block: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(values, counts) over the ascending finite grid, of a block or pooled; values carry the scale."""
        g = grid(self.grid_fmt)
        histogram = self.histograms.sum(axis=0) if block is None else self.histograms[block]
        return g.values * self.scale, g.counts(histogram)


def _empty(layout: FcLayout) -> Scan:
    rows, columns = layout.shape
    points = len(layout.widths)
    table = layout.fmt in TABLE_FORMATS and (layout.scale is None or layout.scale.ndim == 0)
    fmt = layout.fmt if table else "BF16"
    return Scan(
        layout=layout, grid_fmt=fmt, histograms=np.zeros((points, 256 if fmt.startswith("F8") else 65536), np.int64),
        rows=AxisSums.zeros((rows, points)), columns=AxisSums.zeros((columns,)),
        wide=[] if table else [PowerSums() for _ in range(points)],
        scale=float(layout.scale) if table and layout.scale is not None else 1.0,
        diagonal=np.zeros((points, min(rows, max(layout.widths))), dtype=np.float32),
    )  # fmt: skip


def scan_fc(layout: FcLayout) -> Scan:
    """Scan fc in one pass over the mapped file.

    One thread: bincount holds the interpreter lock, and two threads were not faster on a full-size matrix.
    """
    scan = _empty(layout)
    for block, rows, columns, raw in layout.storage_tiles():
        if scan.wide:
            values = np.ascontiguousarray(layout.weights(rows, columns, raw))
            stored = values.T if layout.transposed else values
            scan.wide[block].add(_float64(layout, rows, columns, raw, stored))
            bits = bfloat16_bits(stored)
            if layout.fmt == "F32" and layout.scale is None:
                scan.narrow_entries += int(np.count_nonzero((raw.view(np.uint32) & 0xFFFF) == 0))
        else:
            bits = np.ascontiguousarray(raw)
            stored = to_float32(bits, layout.fmt)
            if layout.scale is not None:
                stored = stored * np.float32(layout.scale)
        scan.histograms[block] += np.bincount(bits.ravel(), minlength=scan.histograms.shape[1])
        _diagonal(scan, block, rows, columns, stored)
        with np.errstate(over="ignore", invalid="ignore"):
            _axis_sums(scan, block, rows, columns, np.array(stored))
    return scan


def _float64(layout: FcLayout, rows: slice, columns: slice, raw: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """float64 weights are added in full; all other wide ones are exact in float32."""
    return raw if layout.fmt == "F64" and layout.scale is None else stored


def _axis_sums(scan: Scan, block: int, rows: slice, columns: slice, power: np.ndarray) -> None:
    """Sums of one tile in storage orientation; `power` is overwritten."""
    first, second = power.shape  # storage axes
    peak = np.abs(power)
    peaks = peak.max(axis=1), peak.max(axis=0)
    sums: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for _ in _POWERS:
        # Not a product with ones: BLAS starts its threads for each small tile, which is slower on a busy machine.
        sums[0].append(power.sum(axis=1))
        sums[1].append(power.sum(axis=0))
        power *= power
    row_axis = 1 if scan.layout.transposed else 0
    counts = (second, first)
    scan.rows.add((rows, slice(block, block + 1)), [s[:, None] for s in sums[row_axis]],
                  peaks[row_axis][:, None], counts[row_axis])  # fmt: skip
    scan.columns.add(columns, sums[1 - row_axis], peaks[1 - row_axis], counts[1 - row_axis])


def _diagonal(scan: Scan, block: int, rows: slice, columns: slice, stored: np.ndarray) -> None:
    start = scan.layout.starts[block]
    low = max(rows.start, columns.start - start)
    high = min(rows.stop, columns.stop - start, scan.diagonal.shape[1])
    if low < high:
        i = np.arange(low, high)
        r, c = i - rows.start, i + start - columns.start
        scan.diagonal[block, low:high] = stored[c, r] if scan.layout.transposed else stored[r, c]
