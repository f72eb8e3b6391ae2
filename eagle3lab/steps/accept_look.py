"""What notebook 05 shows beside its figures: tables by kind and prompt, where drafts are lost, drafters compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3lab.runs.summary import interval, number, percent
from eagle3lab.steps.figures import by_length
from eagle3lab.steps.show import markdown_table, show_html

if TYPE_CHECKING:
    from eagle3lab.steps.accept import AcceptSummary

ENDS = 3
"""Prompts shown from each end of the ranking."""
CUT = 70
COMPARED = {
    "lookup": "n-gram look-up",
    "untrained": "untrained drafter",
    "fc_zeroed": "this drafter, fc zeroed",
    "fc_points_shuffled": "this drafter, fc columns moved by a point",
    "other": "the run's own drafter",
}


def headline(found: AcceptSummary) -> str:
    """Accept length with its interval, before anything else."""
    if found.meaningless:
        return f"**Accept length: {found.meaningless}.**"
    return "\n\n".join(
        f"**Accept length on {result.name}: {number(result.metrics['accept_length'])} "
        f"{interval(result.metrics['accept_length_interval'])}** (bonus token in; greedy chains of {found.k}, "
        f"{result.metrics['counts']['verify_steps']} verify steps on {result.metrics['prompts']} prompts; 95% "
        f"bootstrap interval over prompts)"
        for result in found.sets.values()
    )


def kinds_table(found: AcceptSummary) -> str:
    """Accept length by set and kind of prompt."""
    rows = []
    for result in found.sets.values():
        for kind, one in result.metrics["kinds"].items():
            prompts = sum(1 for prompt in result.prompts if prompt.kind == kind)
            length = f"{number(one['accept_length'])} {interval(one['accept_length_interval'])}"
            rows.append(
                [result.name, kind, prompts, one["counts"]["verify_steps"], length, percent(one["accept_rate"])]
            )
    return markdown_table(["set", "kind", "prompts", "verify steps", "accept length", "accept rate"], rows)


def prompts_table(found: AcceptSummary) -> str:
    """The worst and the best prompts of every set by accept length."""
    rows = []
    for result in found.sets.values():
        ranked = by_length(result)
        ends = ranked if len(ranked) <= 2 * ENDS else [*ranked[:ENDS], *ranked[-ENDS:]]
        for index in ends:
            counts = result.replies[index].counts("", found.k)
            text = " ".join(result.prompts[index].prompt.split())
            text = text if len(text) <= CUT else text[:CUT].rstrip() + " ..."
            rows.append(
                [result.name, number(counts.accept_length), counts.verify_steps, result.prompts[index].kind, text]
            )
    return markdown_table(["set", "accept length", "verify steps", "kind", "prompt"], rows)


def lost_table(found: AcceptSummary) -> str:
    """Where chains end: judged and kept drafts by the sort of place, and each sort's share of all refusals."""
    rows = []
    for result in found.sets.values():
        lost = result.metrics.get("lost") or []
        refused = sum(row["refused"] for row in lost)
        for row in lost:
            kept = percent(row["kept"] / row["judged"]) if row["judged"] else None
            share = percent(row["refused"] / refused) if refused else None
            rows.append([result.name, row["sort"], row["judged"], kept, share])
    if not rows:
        return "Not measured: no replies were replayed (`control_prompts` is 0)."
    return markdown_table(["set", "place", "drafts judged", "kept", "share of all refusals"], rows)


def comparison_table(found: AcceptSummary) -> str:
    """This drafter against others on the same replies, with the interval of the difference, paired by prompt."""
    rows = []
    for result in found.sets.values():
        for name, one in result.metrics.get("compared", {}).items():
            change = f"{one['difference']:+.2f} {interval(one['interval'])}"
            pair = [number(one["b"]), number(one["a"])]
            rows.append([result.name, COMPARED.get(name, name), one["prompts"], *pair, change])
    head = ["set", "against", "prompts", "this drafter", "the other", "difference"]
    return markdown_table(head, rows)


def browse(found: AcceptSummary) -> None:
    """Step through replies by hand (best and worst of every set first), and the first of them as a table."""
    from IPython.display import display

    from eagle3lab.widgets.generation import Generation, generation_widget, static_twin

    shown = []
    for result in found.sets.values():
        ranked = by_length(result)
        for index in [*reversed(ranked[-ENDS:]), *(i for i in ranked[:ENDS] if i not in ranked[-ENDS:])]:
            length = number(result.replies[index].counts("", found.k).accept_length)
            prompt = result.prompts[index]
            shown.append(
                Generation(f"{length} {result.name} {prompt.id}", prompt.prompt, result.replies[index], found.decode)
            )
    if shown:
        display(generation_widget(shown))
        show_html(static_twin(shown[0]))
