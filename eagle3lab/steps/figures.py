"""Figures of the notebooks: what a step returned, put into the form that `eagle3lab.plots` draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.acceptance.anatomy import steps_of
from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.intervals import ratio_interval
from eagle3lab.plots import acceptance, resources, states, tokens, training, weights
from eagle3lab.plots.publish import Plot, Published
from eagle3lab.steps.preflight import Preflight
from eagle3lab.steps.show import say

if TYPE_CHECKING:
    from eagle3lab.steps.accept import AcceptSummary, SetResult
    from eagle3lab.steps.capture import CaptureSummary
    from eagle3lab.steps.case_decode import Case
    from eagle3lab.steps.corpus import CorpusSummary
    from eagle3lab.steps.fc import FcLook
    from eagle3lab.steps.look import TargetLook
    from eagle3lab.steps.train import TrainSummary

CONTROL_NAMES = {
    "fc_zeroed": "fc zeroed",
    "fc_points_shuffled": "fc columns moved by a point",
    "untrained": "untrained drafter",
}

SHARES = {"p05": 0.05, "median": 0.5, "p95": 0.95}
"""Quantiles of the token norms in the figure of the captured states."""


def needs(found: Preflight) -> Plot:
    """Disk and memory: needed and there."""
    return resources.needed_and_there(found.needs)


def residual(look: TargetLook) -> Plot:
    """Residual stream by depth with the capture points."""
    return states.residual_by_depth(look.norms, look.points)


def kinds(corpus: CorpusSummary) -> Plot:
    """Training conversations by kind of prompt."""
    rows = [{"kind": kind, "samples": count} for kind, count in corpus.by_kind.items()]
    return resources.bars(rows, name="kind", value="samples", title="Conversations by kind", unit="conversations")


def captured(summary: CaptureSummary, lengths: list[int]) -> Plot:
    """Norms at the capture points, and lengths of the samples.

    Args:
        lengths: tokens of each reply.
    """
    rows = []
    for point, norms in summary.norms.items():
        ordered = sorted(norms)
        pick = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}
        rows.append({"point": "last" if point == -1 else str(point), **pick})
    return states.capture_norms(rows, lengths)


def trained(summary: TrainSummary) -> Plot:
    """Training curves."""
    return training.training_curves(summary.history, summary.held_out)


def fc_distribution(look: FcLook) -> Plot:
    """Weights of fc by capture point, beside the initialisation that the verdict speaks of."""
    return weights.weight_distribution(look.densities)


def publish_way(look: FcLook, folder: Path) -> Published | None:
    """Write and return the figure of fc's way through its training; say so when there are no snapshots of it."""
    if not look.way:
        say("This checkpoint brings no snapshots of `fc` from its training, so there is no way to draw.")
        return None
    return training.fc_trajectory(look.way).publish(folder, "04_way")


def positions(summary: AcceptSummary) -> Plot:
    """Joint and conditional acceptance by position for every set, with intervals over prompts."""
    rows = [row for result in summary.sets.values() for row in position_rows(result)]
    return acceptance.accept_by_position(rows)


def position_rows(result: SetResult) -> list[dict[str, Any]]:
    """One row a draft position of one set: joint and conditional acceptance with 95 % bootstrap intervals."""
    return counts_rows(result.name, AcceptanceCounts.from_json(result.metrics))


def by_flag(case: Case) -> Plot:
    """Joint and conditional acceptance by position, one line a flag that the drafter was served under."""
    parts = [counts_rows(f"served as {flag}", one.counts) for flag, one in case.served.items()]
    return acceptance.accept_by_position([row for part in parts for row in part])


def counts_rows(name: str, counts: AcceptanceCounts) -> list[dict[str, Any]]:
    """The same from counts; `name` is what the figure's line is called."""
    each = [(one.verify_steps, *(one.at_least or ())) for one in counts.per_prompt]
    rows = []
    for position in range(1, (counts.depth or 0) + 1):
        row: dict[str, Any] = {"set": name, "position": position}
        for key, before in (("joint", 0), ("conditional", position - 1)):
            value = getattr(counts, key)
            interval = ratio_interval([(one[position], one[before]) for one in each if len(one) > position])
            row[key] = None if value is None else value[position - 1]
            row[f"{key}_low"], row[f"{key}_high"] = interval or (None, None)
        rows.append(row)
    return rows


def lengths(summary: AcceptSummary) -> Plot:
    """Accept lengths of the sets, of the look-up and the controls, and by kind of prompt."""
    rows = [row for result in summary.sets.values() for row in length_rows(result)]
    return acceptance.accept_lengths(rows)


def length_rows(result: SetResult) -> list[dict[str, Any]]:
    """Accept length of one set, then without repeats, its baseline, its controls, its kinds."""
    metrics = result.metrics
    rows = [_length(result.name, metrics, "drafter")]
    without = {"accept_length": metrics["repeats"]["accept_length_without"]}
    rows.append(_length(f"{result.name}, repeats left out", without, "drafter"))
    if len(metrics["kinds"]) > 1:
        rows += [_length(f"{result.name}: {kind}", one, "kind") for kind, one in metrics["kinds"].items()]
    rows.append(_length(f"{result.name}: n-gram look-up", metrics["lookup"], "baseline"))
    rows += [
        _length(f"{result.name}: {CONTROL_NAMES.get(name, name)}", one, "control")
        for name, one in metrics["controls"].items()
    ]
    return rows


def _length(name: str, metrics: dict[str, Any], group: str) -> dict[str, Any]:
    low, high = metrics.get("accept_length_interval") or (None, None)
    return {"name": name, "accept_length": metrics.get("accept_length"), "low": low, "high": high, "group": group}


def coloured(summary: AcceptSummary) -> str:
    """HTML of the best and the worst reply of every set by accept length, coloured by who wrote each token."""
    shown = []
    for result in summary.sets.values():
        ranked = by_length(result)
        for name, index in [("worst", i) for i in ranked[:1]] + [("best", i) for i in ranked[1:][-1:]]:
            length = result.replies[index].counts("", summary.k).accept_length
            shown.append(coloured_reply(summary, result, index, f"{name} of {result.name}, accept length {length:.2f}"))
    return tokens.coloured_html(shown)


def coloured_reply(summary: AcceptSummary, result: SetResult, index: int, note: str = "") -> tokens.ColouredReply:
    """One reply with the origin of every token, and every refused draft before the token that came in its place."""
    reply, decode = result.replies[index], summary.decode
    parts = [(decode(reply.tokens[:1]), 0)]
    for step in steps_of(reply):
        parts += [(decode([token]), number) for number, token in enumerate(step.drafts[: step.kept], 1)]
        if step.bonus is not None:
            if step.kept < len(step.drafts):
                parts.append((decode([step.drafts[step.kept]]), tokens.REFUSED))
            parts.append((decode([step.bonus]), 0))
    return tokens.ColouredReply(result.prompts[index].prompt, parts, note)


def by_length(result: SetResult) -> list[int]:
    """Places of the replies with a verify step, by accept length from the worst; equal ones in their order."""
    judged = [i for i, reply in enumerate(result.replies) if reply.accepted]
    return sorted(judged, key=lambda i: sum(result.replies[i].accepted) / len(result.replies[i].accepted))
