"""From one scan of fc to labels: which measurements are needed, and what they decide together.

Order: entries that are no numbers, then constants, then each live block against every family, then which blocks, rows
or columns moved. A recorded or supplied family is a prior: it names the start where the weights cannot, and is
contradicted where they can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3lab.inspection.distribution import Distribution, distribution, fit
from eagle3lab.inspection.energy import Update, implied_updates
from eagle3lab.inspection.families import Family
from eagle3lab.inspection.passthrough import NAME as PASS_THROUGH
from eagle3lab.inspection.passthrough import PassThrough, find_pass_through
from eagle3lab.inspection.quantisation import Quantisation, find_quantisation
from eagle3lab.inspection.report import Verdict
from eagle3lab.inspection.scan import Scan
from eagle3lab.inspection.structure import Structure, find_structure, shown
from eagle3lab.inspection.touched import Outside, Touched, count_outside, touched_bounded, touched_unbounded
from eagle3lab.inspection.verdict import FEWEST, BlockFinding, bound_of, judge_block

EVIDENCE_INDICES = 2000
"""Longest list of row or column numbers that `where` carries in full."""

SMALLEST_SIZE = 0.003
"""Smallest relative update that the fit resolves; below it only the fact of a change is printed."""


@dataclass
class Judgement:
    """Measurements behind a verdict. Absent ones (None) were not needed or could not be made."""

    verdict: Verdict
    home: Family | None = None
    blocks: dict[str, BlockFinding] = field(default_factory=dict)
    pooled: Distribution | None = None
    updates: list[Update] = field(default_factory=list)
    structure: Structure | None = None
    quantisation: Quantisation | None = None
    outside: Outside | None = None
    touched: Touched | None = None
    pass_through: PassThrough | None = None


@dataclass
class _Case:
    """Labels, evidence and places while they are collected."""

    labels: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    where: dict[str, list[Any]] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        return Verdict(self.labels, self.evidence, self.where)


def judge(scan: Scan, known: list[Family], *, prior: str | None = None, prior_from: str = "") -> Judgement:
    """Decide the labels of a scanned fc.

    Args:
        known: families to test, of the matrix's shape.
        prior: name of the family that a record or the user gives; `prior_from` says who, for the evidence.
    """
    case = _Case()
    pooled = distribution(scan)
    if _dead(scan, pooled, case):
        return Judgement(case.verdict(), pooled=pooled)
    structure = find_structure(scan)
    passing = find_pass_through(scan)
    if passing is not None:
        _judge_pass_through(passing, case)
        case.evidence += structure.lines()
        return Judgement(case.verdict(), pooled=pooled, structure=structure, pass_through=passing)
    result = Judgement(case.verdict(), pooled=pooled, structure=structure, quantisation=find_quantisation(scan))
    if repeated := structure.repeated(scan.shape[0]):
        case.labels.append("INIT-UNKNOWN")
        case.evidence += [f"{repeated} of {scan.shape[0]} rows are identical: no initial draw", *structure.lines()]
        return result
    live = _dead_blocks(scan, case)
    quantised = bool(result.quantisation and any("32 bits" not in sign for sign in result.quantisation.signs))
    for b in live:
        found = distribution(scan, b, dead=False)
        result.blocks[scan.layout.points[b]] = judge_block(found, known, scan.fmt, scan.scale, quantised=quantised)
    result.home = _home(result.blocks, known, prior, prior_from, case)
    _judge_live(scan, live, result, case, quantised)
    case.evidence += structure.lines()
    if result.quantisation:
        case.evidence += [f"quantisation: {sign}" for sign in result.quantisation.signs]
    result.verdict = case.verdict()
    return result


def _dead(scan: Scan, pooled: Distribution, case: _Case) -> bool:
    """Non-finite or constant as a whole: nothing else is worth measuring."""
    m = scan.pooled_moments()
    if m.nan or m.inf:
        row, column = first_bad(scan)
        case.labels.append("DEAD")
        case.evidence.append(f"{m.nan:,} NaN and {m.inf:,} infinite entries, the first at row {row}, column {column}")
        case.where["not_finite"] = [row, column]
    elif m.constant:
        case.labels.append("DEAD")
        case.evidence.append(f"every entry is {m.low:g}")
    return bool(case.labels)


def _dead_blocks(scan: Scan, case: _Case) -> list[int]:
    """Blocks that are not constant; constant ones are labelled."""
    live = []
    for b, point in enumerate(scan.layout.points):
        m = scan.block_moments(b)
        if m.constant:
            case.labels.append(f"DEAD({point})")
            case.evidence.append(f"{point}: every entry is {m.low:g}, so fc passes on nothing of this point")
            case.where.setdefault("dead_points", []).append(point)
        else:
            live.append(b)
    return live


def first_bad(scan: Scan) -> tuple[int, int]:
    """(row, column) of the first entry, in reading order of the file, that is not a finite number."""
    for _, rows, columns, values in scan.layout.tiles():
        bad = np.argwhere(~np.isfinite(values))
        if bad.size:
            return rows.start + int(bad[0, 0]), columns.start + int(bad[0, 1])
    return -1, -1


def _judge_pass_through(found: PassThrough, case: _Case) -> None:
    diagonal = ", ".join(f"{d:.4g}" if d else "none" for d in found.diagonal)
    case.evidence.append(f"block diagonals: {diagonal}; std of all other entries {found.off_std:.2e}")
    if found.untouched:
        case.labels.append(f"AT-INIT({PASS_THROUGH})")
        case.evidence.append(found.reason)
    else:
        case.labels.append(f"MOVED-FROM-INIT({found.change:.3g})")
        case.evidence.append(f"norm of the change over the norm of the identity it started as: {found.change:.3g}")


def _home(
    blocks: dict[str, BlockFinding], known: list[Family], prior: str | None, prior_from: str, case: _Case
) -> Family | None:
    """The family that fc started from: seen in a block at init, else in a block that fits, else the prior."""
    seen = [f.best for kind in ("init", "moved") for f in blocks.values() if f.kind == kind and f.best]
    named = next((family for family in known if family.name == prior), None)
    if seen:
        fits = [f.name for finding in blocks.values() for f in finding.families]
        if named is not None and named.name in fits:
            return named
        if prior is not None:
            case.evidence.append(f"{prior_from} says {prior}, the weights fit {seen[0].name}")
        return seen[0]
    if named is not None:
        case.evidence.append(f"start taken from {prior_from} ({prior}): the weights alone do not show it")
    elif prior is not None:
        case.evidence.append(f"{prior_from} says {prior}, the weights show no sign of it")
    return named


def _judge_live(scan: Scan, live: list[int], result: Judgement, case: _Case, quantised: bool) -> None:
    points = scan.layout.points
    home = result.home
    if not live:
        return
    if home is None:
        fits = result.blocks[points[live[0]]].fits.values()
        case.labels.append("INIT-UNKNOWN")
        if not fits:
            case.evidence.append(f"a block of fewer than {FEWEST} live entries fits every family")
            return
        nearest = min(fits, key=lambda f: f.fitted)
        m = scan.pooled_moments()
        case.evidence.append(
            f"no family fits: std {m.std:.7f}, excess kurtosis {m.kurtosis:.3f}; nearest is {nearest.family.name} "
            f"(std ratio {nearest.std_ratio:.3f}, distance {nearest.fitted:.3f})"
        )
        case.evidence.append("a family not in the list, or training that left no trace of the start, look alike here")
        return
    at_init = [b for b in live if result.blocks[points[b]].kind == "init"]
    others = [b for b in live if b not in at_init]
    result.updates = implied_updates(scan, home)
    bound = bound_of(home, scan.fmt, scan.scale, quantised=quantised)
    if math.isfinite(bound) and others and not quantised:
        result.outside = count_outside(scan.layout, bound)
        result.touched = touched_bounded(scan, result.outside, home, others)
    elif not quantised and home.kind == "normal":
        result.touched = touched_unbounded(scan, home)
    touched = result.touched or Touched()
    if not touched and not others:
        best = [result.blocks[points[b]].best for b in at_init]
        names = dict.fromkeys(family.name for family in best if family)
        case.labels += [f"AT-INIT({name})" for name in names]
        _init_evidence(result, bound, case, quantised)
    elif touched:
        _partly_lines(scan, touched, case)
        _moved_evidence(scan, result, home, others, case)
    elif at_init:
        moved = [points[b] for b in others]
        case.labels.append(f"PARTLY-TRAINED({', '.join(moved)})")
        case.where["points"] = moved
        case.evidence.append(f"untouched ({home.name}): {', '.join(points[b] for b in at_init)}")
        _moved_evidence(scan, result, home, others, case)
    else:
        size = _size(scan, home)
        shown_size = f"{size:.3g}" if size >= SMALLEST_SIZE else f"<{SMALLEST_SIZE}"
        case.labels.append(f"MOVED-FROM-INIT({shown_size})")
        _moved_evidence(scan, result, home, others, case)


def _size(scan: Scan, home: Family) -> float:
    """RMS of the change over the start's: by std where it grew, by the fitted shrink where it fell."""
    pooled = distribution(scan, dead=False)
    excess = (pooled.moments.std / home.std) ** 2 - 1
    found = fit(home, pooled)
    return math.sqrt(excess) if excess > 0 and found.shrink == 1.0 else found.moved


def _init_evidence(result: Judgement, bound: float, case: _Case, quantised: bool) -> None:
    for point, finding in result.blocks.items():
        if finding.best is None:
            continue
        best = finding.fits[finding.best.name]
        cells = f", distance {best.distance:.4f} (sampling alone {best.noise:.4f})" if not quantised else ""
        case.evidence.append(f"{point}: std over {best.family.name}'s {best.std_ratio:.5f}{cells}")
    if math.isfinite(bound):
        case.evidence.append(f"no entry above {bound:.8f}, the largest magnitude of an untouched draw")
    alike = [f.name for f in next(iter(result.blocks.values())).families[1:]]
    if alike:
        case.evidence.append(f"also passes: {', '.join(alike)}")


def _moved_evidence(scan: Scan, result: Judgement, home: Family, others: list[int], case: _Case) -> None:
    sizes = {update.point: update for update in result.updates}
    for b in others:
        point = scan.layout.points[b]
        finding, update = result.blocks[point], sizes[point]
        low, high = update.interval
        case.evidence.append(
            f"{point}: not at {home.name}: {finding.failed.get(home.name, 'it passes')}; update / start by std "
            f"{update.by_std:.3f} [{low:.3f}, {high:.3f}]"
        )
        if (found := finding.fits.get(home.name)) and found.shrink < 1:
            case.evidence.append(f"{point}: an edge at {found.shrink:.3f} of the start's: weight decay or averaging")


def _partly_lines(scan: Scan, touched: Touched, case: _Case) -> None:
    parts = []
    for axis, items, size in (("rows", touched.rows, scan.shape[0]), ("columns", touched.columns, scan.shape[1])):
        if not items:
            continue
        parts.append(f"{axis}: {len(items)} of {size}")
        rule = (
            "every one has entries an untouched draw cannot have" if touched.exact else "at least these: by mean square"
        )
        case.evidence.append(f"reached {axis} ({rule}): {shown(items)}")
        case.where[axis] = items if len(items) <= EVIDENCE_INDICES else items[:EVIDENCE_INDICES]
        case.where[f"{axis}_count"] = [len(items)]
    case.labels.append(f"PARTLY-TRAINED({'; '.join(parts)})")
