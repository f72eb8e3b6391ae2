"""Results of the notebooks in words. Every number comes from the run; a number that is not there is said to be so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3lab.runs.summary import interval, measured_sets, number, percent, same_text

if TYPE_CHECKING:
    from eagle3lab.runs.directory import Run
    from eagle3lab.steps.accept import AcceptSummary
    from eagle3lab.steps.capture import CaptureSummary
    from eagle3lab.steps.corpus import CorpusSummary
    from eagle3lab.steps.fc import FcLook
    from eagle3lab.steps.look import TargetLook
    from eagle3lab.steps.train import TrainSummary


def target(look: TargetLook) -> str:
    """Result of notebook 01."""
    first, growth = look.norms[0], look.norms[look.points[-1]] / look.norms[look.points[0]]
    ended = "ended by itself" if look.ended else "was cut at the limit"
    loudest = "deepest" if growth > 1 else "shallowest"
    answers = "answers with random text, as random weights must" if look.random else "answers"
    return (
        f"**Result.** {look.target.id} is here ({look.parameters / 1e6:.0f} M parameters, {look.blocks} blocks of "
        f"width {look.hidden_size}, {look.vocab_size:,} tokens) and {answers}; its reply {ended}. The residual stream "
        f"starts at a median norm of {first:.3g}; from the first capture point to the last it changes by a factor of "
        f"{growth:.3g}, so a drafter that merely added the points would hear the {loudest} one most. Weights "
        f"`{look.target.weight_sha256[:12]}`."
    )


def corpus(found: CorpusSummary) -> str:
    """Result of the first half of notebook 02."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.by_kind.items())
    sets = ", ".join(f"{name} ({facts['prompts']} prompts)" for name, facts in found.held_out.items())
    padded = "" if not found.padded else f" ({found.padded} of them never occur and only fill it up)"
    return (
        f"{found.samples} conversations to train on and {found.validation} held back for the curve ({kinds}), with "
        f"{found.reply_tokens:,} reply tokens, all written by the target. The draft vocabulary keeps "
        f"{found.draft_vocab_size:,} tokens{padded} and covers {percent(found.coverage)} of the reply tokens: nothing "
        f"outside it can ever be accepted. Evaluation sets that training never sees: {sets}."
    )


def capture(found: CaptureSummary) -> str:
    """Result of notebook 02."""
    speed = found.tokens_per_second
    made = "were there already" if speed is None else f"were captured at {speed:,.0f} tokens/s"
    return (
        f"**Result.** {found.samples} samples, {found.tokens:,} tokens {made}: {found.bytes / 1e6:,.0f} MB, "
        f"{found.width:,} numbers a token for fc (and the last state for the teacher). Padding is not among them."
    )


def training(found: TrainSummary) -> str:
    """Result of notebook 03."""
    first, last = found.history[0], found.history[-1]
    right = ", ".join(percent(value) for value in last["accuracy_by_step"])
    parts = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in found.parameters.items() if count)
    text = (
        f"**Result.** {last['step']} optimiser steps in {found.seconds:.0f} s "
        f"({last['tokens_per_second']:.0f} tokens/s at the end; {parts}). The loss went from {first['loss']:.2f} to "
        f"{last['loss']:.2f}; by TTT step the drafter now predicts {right} of the training tokens, words outside its "
        f"vocabulary counted as misses."
    )
    if found.held_out:
        start, end = found.held_out[0], found.held_out[-1]
        text += (
            f" Replayed on conversations it never saw, the accept length went from "
            f"{number(start['simulated_accept_length'])} to {number(end['simulated_accept_length'])} "
            f"({end['accepted']} drafts accepted in {end['chains']} chains); notebook 05 measures it by real decoding."
        )
    if found.truncated:
        text += " The training was cut short: these are the numbers of an unfinished drafter."
    return text


def fc(look: FcLook) -> str:
    """Result of notebook 04: the inspection's own sentence and the evidence behind it."""
    lines = [f"**Result.** {look.found.sentence}.", ""]
    lines += [f"- {line}" for line in look.found.verdict.evidence]
    return "\n".join(lines)


def acceptance(found: AcceptSummary, run: Run) -> str:
    """Result of notebook 05."""
    metrics = run.metrics()
    if note := metrics.get("meaningless"):
        return f"**Result.** {note}. What counts here: {same_text(metrics)}."
    lines = []
    for one in measured_sets({"headline": "own", "sets": {name: r.metrics for name, r in found.sets.items()}}):
        controls = ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in one.controls.items())
        same = "the text equals plain greedy decoding token for token"
        if not one.lossless:
            same = f"{one.differences} replies differ from plain greedy decoding at near-ties of the target"
        lines.append(
            f"On **{one.name}** the accept length is **{number(one.accept_length)}** {interval(one.interval)} "
            f"({one.accepted} of {one.proposed} drafts accepted in {one.verify_steps} verify steps, k = {one.k}, "
            f"greedy; without repeated 4-grams {number(one.without_repeats)}, n-gram look-up {number(one.lookup)}); "
            f"{same}. Controls: {controls or 'not measured'}."
        )
    speed = found.speed
    lines.append(
        f"At batch 1 in {speed['dtype']} the target alone writes {speed['plain_tokens_per_second']:.1f} tokens/s, "
        f"with the drafter {speed['speculative_tokens_per_second']:.1f} on this machine."
    )
    return "**Result.** " + "\n\n".join(lines)
