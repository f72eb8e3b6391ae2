"""Singular values of fc and of its blocks: edges, outliers, stable and effective rank, without forming them all.

The matrix is used only through y = W (W^T x), one pass over its tiles for all blocks and probes together, so memory
stays at a few vectors. Golub-Kahan-Lanczos with full reorthogonalisation from several random probes gives

- the largest singular value: a rigorous lower bound (the Ritz value), and an upper bound that fails with probability
  below `FAILURE` (Kuczynski and Wozniakowski 1992, theorem 4.2);
- outliers above the Marchenko-Pastur edge: every counted Ritz value has an eigenvalue within its residual norm;
- effective rank and density by stochastic Lanczos quadrature, with the spread over probes as its error.

`exact_spectrum` forms the Gram matrix in float64 and takes all eigenvalues.

An initial draw fills the bulk between the edges whatever its family; a full-rank update only widens it. No outliers
does not mean untrained: an update shows outliers only if it is concentrated in few directions (`detection_limit`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError

Tiles = Callable[[], Iterable[tuple[int, slice, slice, np.ndarray]]]

STEPS, PROBES = 48, 6
FAILURE = 1e-3
"""Probability that the printed upper bound of the largest singular value is too small."""
TRACY_WIDOM = 3.27
"""99.9 % point of the Tracy-Widom law for real matrices, in its own scale."""
EXACT_LIMIT_BYTES = 2 * 1024**3
"""Largest Gram matrix that `exact_spectrum` forms."""


@dataclass(frozen=True)
class Edges:
    """Marchenko-Pastur edges of an [m, n] matrix of independent entries with `std`, as singular values.

    margin: Tracy-Widom allowance of the upper edge. detection_limit: std * (m n)^(1/4), the size below which a single
    added direction stays inside the bulk (Baik, Ben Arous, Peche).
    """

    low: float
    high: float
    margin: float
    detection_limit: float


def edges(shape: tuple[int, int], std: float) -> Edges:
    """Edges for a matrix of `shape`, entries of standard deviation `std`."""
    m, n = shape
    root_m, root_n = math.sqrt(m), math.sqrt(n)
    high = std * (root_m + root_n)
    scale = std**2 * (root_m + root_n) * (1 / root_m + 1 / root_n) ** (1 / 3)  # of the largest eigenvalue
    margin = math.sqrt(high**2 + TRACY_WIDOM * scale) - high
    return Edges(std * abs(root_n - root_m), high, margin, std * (m * n) ** 0.25)


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of one block (point `all`: the matrix). Singular values, not eigenvalues.

    largest, largest_upper: bounds of the largest. smallest: an upper bound of the smallest (exact: the value).
    outliers: singular values above the edge, descending; outliers_complete: False when there may be more.
    stable_rank: |W|_F^2 / largest^2, as an interval from the bounds. effective_rank: exp(entropy of the squared
    singular values), effective_rank_se: its error. nodes, weights: density as quadrature (exact: every value, equal
    weights). residual: largest error bound of a printed outlier, in singular values.
    """

    point: str
    shape: tuple[int, int]
    std: float
    edges: Edges
    largest: float
    largest_upper: float
    smallest: float
    outliers: list[float]
    outliers_complete: bool
    stable_rank: tuple[float, float]
    effective_rank: float
    effective_rank_se: float
    nodes: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    residual: float = 0.0
    exact: bool = False
    steps: int = 0

    def line(self) -> str:
        """One evidence line."""
        count = f"{len(self.outliers)}" if self.outliers_complete else f"at least {len(self.outliers)}"
        top = f"{self.largest:.4f}" if self.exact else f"{self.largest:.4f} to {self.largest_upper:.4f}"
        low, high = self.stable_rank
        stable = f"{high:,.0f}" if self.exact else f"{low:,.0f} to {high:,.0f}"
        return (
            f"spectrum, {self.point}: largest singular value {top}, edge of independent entries {self.edges.high:.4f}, "
            f"{count} outliers, stable rank {stable}, effective rank {self.effective_rank:,.0f}"
        )

    def to_json(self) -> dict[str, Any]:
        """All but the quadrature nodes."""
        return {key: value for key, value in vars(self).items() if key not in ("nodes", "weights")}


def spectrum(
    tiles: Tiles, shape: tuple[int, int], widths: list[int], points: list[str], *,
    steps: int = STEPS, probes: int = PROBES, seed: int = 0,
) -> list[Spectrum]:  # fmt: skip
    """Spectra of the matrix (first) and of every block that is not zero throughout.

    Args:
        tiles: yields (block, rows, columns, float32 [rows, columns]) once over the matrix.
        shape: [R, C]; widths: columns of each block; points: their names.
        steps, probes: Lanczos steps, random starts of each.
    """
    rows = shape[0]
    steps = min(steps, rows)
    unit = _unit(tiles)
    groups = [list(range(len(widths))), *([b] for b in range(len(widths)))] if len(widths) > 1 else [[0]]
    names = ["all", *points] if len(widths) > 1 else ["all"]
    members = [[i for i, group in enumerate(groups) if b in group] for b in range(len(widths))]
    rng = np.random.default_rng(seed)
    runs = [_Lanczos(rng.standard_normal((rows, probes)), steps) for _ in groups]
    square = np.zeros(len(widths))
    total, count = np.zeros(len(widths)), np.zeros(len(widths))
    for step in range(steps):
        images = [np.zeros((rows, probes)) for _ in groups]
        # A block belongs to the whole and to itself: both go through one product side by side.
        inputs = [np.hstack([runs[i].current for i in members[b]]).astype(np.float32) for b in range(len(widths))]
        for block, values in _by_columns(tiles, rows, unit):
            if step == 0:
                square[block] += float(np.square(values).sum(dtype=np.float64))
                total[block] += float(values.sum(dtype=np.float64))
                count[block] += values.size
            product = values @ (values.T @ inputs[block])
            for i, part in zip(members[block], np.split(product, len(members[block]), axis=1), strict=True):
                images[i] += part
        for run, image in zip(runs, images, strict=True):
            run.advance(image)
    found = []
    for name, group, run in zip(names, groups, runs, strict=True):
        n = sum(widths[b] for b in group)
        energy = float(square[group].sum())
        if energy == 0:
            continue  # a block of zeros has no spectrum
        mean = float(total[group].sum() / count[group].sum())
        std = math.sqrt(max(0.0, energy / float(count[group].sum()) - mean**2))
        found.append(_in_units(_summary(name, (rows, n), energy, std, run, probes), unit))
    return found


def _unit(tiles: Tiles) -> float:
    """Power of two near the largest magnitude: in its units squares and sums neither overflow nor vanish."""
    largest = max((float(np.abs(values).max(initial=0.0)) for _, _, _, values in tiles()), default=0.0)
    return 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0


def _by_columns(tiles: Tiles, rows: int, unit: float) -> Iterator[tuple[int, np.ndarray]]:
    """(block, values [R, columns] in units) of every tile: W (W^T x) needs all rows of a column before it goes on."""
    for block, at_rows, _, values in tiles():
        if at_rows.stop - at_rows.start != rows:
            raise ValueError("spectrum needs tiles of full height")
        yield block, values if unit == 1.0 else values * np.float32(1 / unit)


def _in_units(found: Spectrum, unit: float) -> Spectrum:
    """Singular values back in the matrix's own scale; ranks have none."""
    limits = {key: value * unit for key, value in vars(found.edges).items()}
    scaled = ("std", "largest", "largest_upper", "smallest", "residual", "nodes")
    return replace(
        found, edges=Edges(**limits), outliers=[value * unit for value in found.outliers],
        **{name: getattr(found, name) * unit for name in scaled},
    )  # fmt: skip


class _Lanczos:
    """Lanczos on W W^T from several starts at once, each fully reorthogonalised against its own basis."""

    def __init__(self, start: np.ndarray, steps: int) -> None:
        size, probes = start.shape
        self.basis = np.zeros((steps + 1, size, probes))
        self.basis[0] = start / np.linalg.norm(start, axis=0)
        self.alpha, self.beta = np.zeros((steps, probes)), np.zeros((steps, probes))
        self.step = 0

    @property
    def current(self) -> np.ndarray:
        """Vectors [R, probes] that the operator is applied to next."""
        return self.basis[self.step]

    def advance(self, image: np.ndarray) -> None:
        """Take W W^T times the current vectors."""
        k = self.step
        self.alpha[k] = np.einsum("rp,rp->p", self.basis[k], image)
        for _ in range(2):
            known = np.einsum("krp,rp->kp", self.basis[: k + 1], image)
            image = image - np.einsum("krp,kp->rp", self.basis[: k + 1], known)
        self.beta[k] = np.linalg.norm(image, axis=0)
        safe = np.where(self.beta[k] > 1e-12 * np.abs(self.alpha[0]) + 1e-300, self.beta[k], np.inf)
        self.basis[k + 1] = image / safe
        self.step += 1

    def ritz(self, probe: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(eigenvalues ascending, quadrature weights, residual norms) of one start."""
        k = self.step
        # An exhausted Krylov space (beta 0) ends the recurrence: what follows is zero and would add false zeros.
        stop = np.flatnonzero(self.basis[1 : k + 1, :, probe].any(axis=1) == 0)
        k = int(stop[0]) + 1 if stop.size else k
        off = self.beta[: k - 1, probe]
        values, vectors = np.linalg.eigh(np.diag(self.alpha[:k, probe]) + np.diag(off, 1) + np.diag(off, -1))
        return values, vectors[0] ** 2, self.beta[k - 1, probe] * np.abs(vectors[-1])


def upper_factor(size: int, steps: int, probes: int) -> float:
    """theta_max times this bounds the largest eigenvalue, but for probability `FAILURE`.

    Kuczynski and Wozniakowski: P(theta < (1 - e) lambda) <= 1.648 sqrt(n) exp(-sqrt(e) (2k - 1)) for one random start;
    all of `probes` independent starts must miss.
    """
    single = FAILURE ** (1 / probes)
    root = math.log(1.648 * math.sqrt(size) / single) / (2 * steps - 1)
    return 1 / (1 - min(root**2, 0.99))


def _summary(name: str, shape: tuple[int, int], energy: float, std: float, run: _Lanczos, probes: int) -> Spectrum:
    limits = edges(shape, std)
    each = [run.ritz(p) for p in range(probes)]
    values = np.concatenate([v for v, _, _ in each])
    weights = np.concatenate([w for _, w, _ in each]) / probes
    top = float(values.max())
    upper = top * upper_factor(shape[0], run.step, probes)
    threshold = (limits.high + limits.margin) ** 2
    outliers, residual, complete = _outliers(each, threshold, run.step)
    nodes = np.sqrt(np.maximum(values, 0.0))
    entropies = [_entropy(v, w, energy) for v, w, _ in each]
    effective = math.exp(float(np.mean(entropies)))
    spread = float(np.std(entropies, ddof=1)) / math.sqrt(probes) if probes > 1 else math.nan
    return Spectrum(
        point=name, shape=shape, std=std, edges=limits, largest=math.sqrt(top), largest_upper=math.sqrt(upper),
        smallest=float(math.sqrt(max(0.0, values.min()))), outliers=outliers, outliers_complete=complete,
        stable_rank=(energy / upper, energy / top), effective_rank=effective,
        effective_rank_se=effective * spread,
        nodes=nodes, weights=weights, residual=residual, steps=run.step,
    )  # fmt: skip


def _outliers(
    each: list[tuple[np.ndarray, np.ndarray, np.ndarray]], threshold: float, steps: int
) -> tuple[list[float], float, bool]:
    """Singular values above the threshold: the start that found most of them with the smallest residual.

    A Ritz value counts when it stays above the threshold even less its residual norm.
    """
    best: tuple[int, float, np.ndarray, np.ndarray] | None = None
    for values, _, residuals in each:
        above = values - residuals > threshold
        worst = float(residuals[above].max()) if above.any() else 0.0
        if best is None or (int(above.sum()), -worst) > (best[0], -best[1]):
            best = (int(above.sum()), worst, values[above], residuals[above])
    count, _, values, residuals = best if best else (0, 0.0, np.zeros(0), np.zeros(0))
    found = np.sqrt(values)[::-1].tolist()
    error = max((r / (2 * math.sqrt(v)) for v, r in zip(values, residuals, strict=True)), default=0.0)
    settled = all(int((v > threshold).sum()) == count for v, _, _ in each)
    return found, error, settled and count <= steps // 3


def _entropy(values: np.ndarray, weights: np.ndarray, energy: float) -> float:
    """Entropy of lambda / energy from one start's quadrature.

    -sum (l/E) log(l/E) = log E - (sum l log l) / (sum l). Both sums are estimated from the same start: their errors
    cancel in the ratio, and sum l is known exactly.
    """
    positive = np.maximum(values, 0.0)
    logs = np.log(np.where(positive > 0, positive, 1.0))
    return math.log(energy) - float((weights * positive * logs).sum() / (weights * positive).sum())


def exact_spectrum(tiles: Tiles, shape: tuple[int, int], widths: list[int], points: list[str]) -> list[Spectrum]:
    """All singular values, by the float64 Gram matrix of every block that is not zero throughout, and of the sum.

    Raises:
        UsageError: the Gram matrix would take more than `EXACT_LIMIT_BYTES`.
    """
    rows = shape[0]
    if rows * rows * 8 > EXACT_LIMIT_BYTES:
        raise UsageError(f"--exact with {rows} rows", rule=f"at most {int((EXACT_LIMIT_BYTES / 8) ** 0.5)} rows")
    pooled, found, unit = np.zeros((rows, rows)), [], _unit(tiles)
    sums = np.zeros((len(widths), 2))
    gram, current = np.zeros((rows, rows)), 0

    def close(block: int) -> None:
        pooled.__iadd__(gram)
        if len(widths) > 1 and gram.any():
            found.append(_exact(points[block], (rows, widths[block]), gram, *sums[block]))
        gram.fill(0.0)

    for block, values in _by_columns(tiles, rows, unit):
        if block != current:
            close(current)
            current = block
        wide = values.astype(np.float64)
        gram += wide @ wide.T
        sums[block] += wide.sum(), values.size
    close(current)
    if not pooled.any():
        return []
    return [_in_units(one, unit) for one in (_exact("all", shape, pooled, *sums.sum(axis=0)), *found)]


def _exact(name: str, shape: tuple[int, int], gram: np.ndarray, total: float, count: float) -> Spectrum:
    values = np.linalg.eigvalsh(gram)
    values = np.maximum(values, 0.0)
    energy = float(values.sum())
    std = math.sqrt(max(0.0, energy / count - (total / count) ** 2))
    limits = edges(shape, std)
    singular = np.sqrt(values)
    above = singular[singular > limits.high + limits.margin][::-1]
    share = values[values > 0] / energy
    stable = energy / float(values.max())
    return Spectrum(
        point=name, shape=shape, std=std, edges=limits, largest=float(singular[-1]), largest_upper=float(singular[-1]),
        smallest=float(singular[0]), outliers=above.tolist(), outliers_complete=True, stable_rank=(stable, stable),
        effective_rank=math.exp(-float((share * np.log(share)).sum())), effective_rank_se=0.0, nodes=singular,
        weights=np.full(len(singular), 1 / len(singular)), exact=True,
    )  # fmt: skip
