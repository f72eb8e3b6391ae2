"""A training run and its continuation: what a checkpoint holds, and whether the curve goes on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import items, mapping, real, same_setting, whole

PARTS = ("weights", "optimizer", "scheduler", "rng", "sampler")
"""What an exact resume needs, under the names of the case files."""
ORDER_KEYS = ("data_seed", "seed", "sampler_seed", "shuffle_seed", "shuffle")
DATA_KEYS = ("data", "data_sha256", "corpus", "corpus_sha256", "states", "states_sha256", "points", "convention")
LAYOUT_KEYS = ("world_size", "data_parallel", "tensor_parallel", "gradient_accumulation", "batch_tokens", "batch_size")
_WORD = r"(?:^|_)(?:{})(?:_|$)"
_DATA = re.compile(_WORD.format("data|datasets?|corpus|states|layers?|resid|points|prompts"))
_LAYOUT = re.compile(_WORD.format("world|ranks|gpus|n?nodes|nproc|parallel|dp|tp|accumulation|batch"))
_BESIDE = re.compile(
    _WORD.format(
        "output|run|log|logging|logger|wandb|tensorboard|report|host|hostname|port|save|resume|workers|device|eval"
    )
    + "|^(?:checkpoint|ckpt)(?:_|$)|_every$"
)
"""Settings whose names are none of the above: what is fed, how it is dealt out, and what lies beside the training."""
ACCUMULATION_KEYS = ("gradient_accumulation", "gradient_accumulation_steps", "accumulation_steps")
GROWN = 10
"""Times the first standard deviation of fc beyond which it did not keep its size."""
REAL_LOSS = 0.1
"""A loss behind a 0 that shows that the training was not over."""
STEP_NAMES = ("step", "global_step", "iteration", "iter")
RATE_NAMES = ("lr", "learning_rate", "rate", "train/lr", "train/learning_rate")
"""Keys of a log row that is a mapping."""
SAME_LOSS = 1e-6
"""Relative: losses printed with six digits and equal beyond are the same run."""


@check(
    code="resume-complete",
    title="parts of a checkpoint that resume needs",
    reads=("run",),
    rule="exact resume needs weights, optimizer, scheduler at the run's step, generators and sampler position",
    fix="write a full checkpoint, or start again from the weights and call it a new run",
    symptom="the loss jumps at the first resumed step",
)
def complete(facts: Facts) -> Iterator[Finding]:
    """A fresh run (step 0) has nothing to restore."""
    run = mapping(facts.get("run"))
    step = whole(run.get("step"))
    if step is None and run.get("step") is not None:
        text = f"step is {str(run['step'])[:40]!r}, needed: a whole number"
        yield error("run", text, actual=str(run["step"])[:40], fix="correct it")
    if not step or not any(part in run for part in PARTS):
        return
    missing = [part for part in PARTS if not run.get(part)]
    scheduler = mapping(run.get("scheduler"))
    at = whole(scheduler.get("last_step", scheduler.get("last_epoch"))) if scheduler else None
    taken = whole(mapping(run.get("optimizer")).get("step"))
    # A step of the run may be a micro-step: the scheduler and the optimiser then make one of several.
    each = next((n for key in ACCUMULATION_KEYS if (n := whole(run.get(key)))), 1)
    apart, behind = (one is not None and all(abs(one * n - step) > n for n in {1, each}) for one in (at, taken))
    if not missing and not apart and not behind:
        yield info("run", f"step {step} can be resumed exactly", step=step)
        return
    parts = [f"{', '.join(missing)} missing"] if missing else []
    parts += [f"the scheduler stands at step {at}, the run at {step}"] if apart else []
    parts += [f"the optimizer stands at step {taken}, the run at {step}"] if behind else []
    text = f"cannot be resumed exactly: {'; '.join(parts)}"
    yield error("run", text, actual=missing, missing=missing, step_in_scheduler=at, step=step)


@check(
    code="resume-learning-rate",
    title="learning rate across a resume",
    reads=("log_lr",),
    also=("run",),
    rule="the schedule goes on: the first resumed step has the rate that the schedule gives it",
    fix="restore the scheduler's state",
    symptom="learning rate 0 or back at its peak after the resume",
)
def learning_rate(facts: Facts) -> Iterator[Finding]:
    """A jump is a change by a factor 2, or by 5 % where the rate moved far less before, that no slope announced.

    The first resumed step is the run's step + 1, or the run's step itself where a log counts from 0.
    """
    written, wrong = rates_by_step(facts.get("log_lr") or [])
    if wrong:
        text = f"log_lr holds {wrong[0]}, needed: rows of a step and a rate, both numbers"
        yield error("log_lr", text, actual=wrong[0], fix="correct it", rows=wrong[:20])
    known = sorted(set(written))
    run = mapping(facts.get("run"))
    step = whole(run.get("step"))
    if step == 0 or len(known) < 2:
        return
    for (before_at, before), (at, after) in pairwise(written):
        if step is not None and at <= 1 < step <= before_at + 1:
            text = f"learning rate jumps back to the start of its schedule: step {before_at} is followed by step {at}"
            yield error("learning rate", text, actual=after, at=at, before=before, after=after)
            return
    saved = [other for other in map(whole, items(run.get("checkpoint_steps"))) if other]
    slope: float | None = None
    for (before_at, before), (at, after) in pairwise(known):
        if at == before_at:
            continue
        new_slope = (after - before) / (at - before_at)
        counted_from_0 = at == step and (slope is not None or at < known[-1][0])
        resumed = step is None or before_at <= step < at or counted_from_0
        steady = slope is not None and abs(new_slope) <= 5 * abs(slope)
        far = before > 0 and (after < before / 2 or after > before * 2)
        far = far or (slope is not None and step is not None and abs(after - before) > 0.05 * before > 0)
        far = far or (slope is not None and before == 0 < after)  # the schedule had ended
        if not resumed:  # an earlier resume, at a checkpoint that is still there
            earlier = any(before_at <= other < at for other in saved)
            resumed, far = earlier, before > 0 and (after < before / 2 or after > before * 2)
        if resumed and far and not steady and (step is not None or after == 0):
            text = f"learning rate jumps at step {at}: {before:g} to {after:g}"
            yield error("learning rate", text, actual=after, at=at, before=before, after=after)
        slope = new_slope


def rates_by_step(rows: Sequence[Any]) -> tuple[list[tuple[int, float]], list[str]]:
    """(step, rate) of every row, a list or a mapping of the two, and the first thing of each row that is no number.

    A rate that is null is unknown and left out.
    """
    written: list[tuple[int, float]] = []
    wrong: list[str] = []
    for row in rows:
        named = {str(key).lower(): value for key, value in mapping(row).items()}
        pair = row[:2] if isinstance(row, list) else [_named(named, STEP_NAMES), _named(named, RATE_NAMES)]
        step, rate = (whole(pair[0]), real(pair[1])) if len(pair) == 2 else (None, None)
        if step is not None and rate is not None:
            written.append((step, rate))
        elif len(pair) < 2 or not isinstance(row, (list, Mapping)):
            wrong.append(repr(row)[:60])
        elif step is None or pair[1] is not None:
            wrong.append(repr(pair[1] if step is not None else pair[0] if pair[0] is not None else row)[:60])
    return written, wrong


def _named(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if name in row), None)


@check(
    code="resume-settings",
    title="settings of the resume against the saved ones",
    reads=("resume_with", "run"),
    rule="same data, order and points; another world size changes how samples are dealt out",
    fix="resume with the saved settings, or start a new run",
)
def settings(facts: Facts) -> Iterator[Finding]:
    """Every setting that both sides name and that differs."""
    run, now = mapping(facts.get("run")), mapping(facts.get("resume_with"))
    for key in now:
        if key in run and not same_setting(run[key], now[key]):
            yield from _differs(str(key), run[key], now[key])
    unknown = [str(key) for key in now if key not in run]
    if unknown:
        text = f"could not check {', '.join(unknown)[:120]} because the checkpoint does not tell"
        yield info("resume_with", text, unknown=unknown[:20])


def _differs(key: str, saved: Any, now: Any) -> Iterator[Finding]:
    shown, name = f"saved {str(saved)[:40]}, now {str(now)[:40]}", key.lower().replace("-", "_")
    beside, layout = _BESIDE.search(name), _LAYOUT.search(name)
    if key in ORDER_KEYS:
        text = f"sample order differs: {key} {shown}"
        yield error(key, text, actual=now, fix=f"resume with {key} {saved}", saved_seed=saved, now=now)
    elif key in DATA_KEYS or (_DATA.search(name) and not beside and not layout):
        yield error(key, f"{key} changed: {shown}", actual=now, saved=saved, now=now)
    elif key in LAYOUT_KEYS or layout:
        text = f"sharding changed: {key} {shown}; samples are dealt out anew"
        yield warning(key, text, actual=now, saved=saved, now=now)
    elif beside:
        yield info(key, f"{key} changed: {shown}; it is no part of the training", saved=saved, now=now)
    else:
        yield warning(key, f"{key} changed: {shown}", actual=now, saved=saved, now=now)


@check(
    code="resume-losses",
    title="resumed losses against a straight run",
    reads=("losses_straight", "losses_resumed"),
    rule="an exact resume repeats the straight run's losses",
    fix="restore optimizer, scheduler, generators and sampler position",
)
def losses(facts: Facts) -> Iterator[Finding]:
    """The first step at which the two differ."""
    for name in ("losses_straight", "losses_resumed"):
        given = facts.get(name) or []
        if wrong := [
            value for value in given if value is not None and not isinstance(value, float) and real(value) is None
        ]:
            yield error(
                name, f"{name} holds {str(wrong[0])[:40]!r}, needed: numbers", actual=wrong[0], fix="correct it"
            )
            return
        if not given:
            yield could_not("the resumed losses", f"{name} holds none")
            return
    straight = [real(value) for value in facts["losses_straight"]]
    resumed = [real(value) for value in facts["losses_resumed"]]
    both = zip(facts["losses_straight"], facts["losses_resumed"], strict=False)
    nowhere = next((step for step, pair in enumerate(both, 1) if all(map(_not_finite, pair))), None)
    if nowhere is not None:
        text = f"the loss is not finite at step {nowhere} of both runs: nothing after it can be compared"
        yield error("losses", text, actual="nan", fix="lower the learning rate and train both again", at=nowhere)
        return
    for step, (one, other) in enumerate(zip(straight, resumed, strict=False), 1):
        if one == other or (one is not None and other is not None and abs(one - other) <= SAME_LOSS * abs(one)):
            continue
        said = ["not finite" if value is None else f"{value:g}" for value in (one, other)]
        text = f"resumed run leaves the straight run at step {step}: {said[0]} against {said[1]}"
        yield error(
            "losses", text, actual=other, straight=one, resumed=other, first_difference_at_step=step, equal=False
        )
        return
    count = min(len(straight), len(resumed))
    if count > 1 and all(value == 0 for value in straight[:count]):
        text = f"all {count} losses of both runs are 0: most likely 0 supervised tokens"
        yield error("losses", text, actual=0.0, fix="eagle3lab doctor --corpus FILE --tokenizer DIR", supervised=0)
        return
    yield info("losses", f"{count} losses are equal", equal=True, compared=count)


def _not_finite(value: Any) -> bool:
    """NaN or infinity; null is unknown."""
    return isinstance(value, float) and not math.isfinite(value)


@check(
    code="loss-average",
    title="losses on different averages",
    reads=("loss_over_all_positions", "loss_over_masked_positions"),
    also=("masked_share",),
    rule="a loss is printed with its denominator: all positions, or the supervised ones",
    fix="print both averages; compare trainers by per-step accuracy under one denominator",
)
def averages(facts: Facts) -> Iterator[Finding]:
    """The ratio of the two averages is 1 / share of supervised positions."""
    everywhere, masked = real(facts.get("loss_over_all_positions")), real(facts.get("loss_over_masked_positions"))
    share = real(facts.get("masked_share"))
    for name in ("loss_over_all_positions", "loss_over_masked_positions", "masked_share"):
        if _not_finite(facts.get(name)):
            yield error(name, f"{name} is not finite", actual="nan", fix="look for rows without a supervised token")
    if share is not None and not 0 <= share <= 1:
        yield error("masked_share", f"masked_share is {share:g}, a share lies between 0 and 1", actual=share)
        return
    if everywhere is None or masked is None:
        return
    if share == 0 or (masked == 0 and everywhere == 0):
        text = f"loss {masked:g} over supervised positions: 0 supervised tokens have no loss"
        yield error("loss", text, actual=masked, fix="eagle3lab doctor --corpus FILE --tokenizer DIR", supervised=0)
        return
    ratio = masked / everywhere if everywhere else None
    evidence: dict[str, Any] = {"all": everywhere, "masked": masked, "ratio": ratio, "masked_share": share}
    if ratio is not None and abs(ratio - 1) < 1e-3:
        yield info("loss", f"both averages are {masked:g}", **evidence)
        return
    explained = ratio is not None and share and abs(ratio * share - 1) < 0.05
    why = f", as the supervised share {share:g} explains" if explained else ""
    text = f"print both averages: {everywhere:g} over all positions, {masked:g} over supervised ones{why}"
    yield warning("loss", text, **evidence)


@check(
    code="run-status",
    title="how the run ended",
    reads=("status",),
    rule="numbers are read from a run whose notebooks and steps all ended ok",
    fix="eagle3lab run --resume RUN",
)
def status(facts: Facts) -> Iterator[Finding]:
    """status.json: every notebook and step with its state, and whether a time limit cut the run short."""
    if mapping(facts.get("status")).get("truncated") is True:
        text = "the run is truncated (--max-minutes was over): what is missing was not measured"
        yield warning("status", text, actual=True, truncated=True)
    if not any(mapping(mapping(facts.get("status")).get(group)) for group in ("notebooks", "steps")):
        yield could_not("how the run ended", "its status names no notebook and no step")
    for group in ("notebooks", "steps"):
        for name, raw in mapping(mapping(facts.get("status")).get(group)).items():
            entry: Mapping[str, Any] = mapping(raw)
            state = entry.get("status", raw)
            cells, ran = whole(entry.get("cells")), whole(entry.get("ran"))
            if state == "ok" and cells is not None and ran is not None and ran < cells:
                text = f"{str(name)[:80]} is said to be ok, and {ran} of its {cells} cells ran"
                yield error(str(name)[:80], text, actual=ran, needed=cells)
            if state in ("ok", None) or isinstance(state, Mapping):
                continue
            if state == "running":
                yield info(str(name)[:80], f"{str(name)[:80]} is running, or its process is gone")
                continue
            cell = entry.get("failing_cell")
            where = f", cell {cell} of {entry.get('cells')}" if cell else ""
            why = f": {str(entry['error'])[:160]}" if entry.get("error") else ""
            text = f"{str(name)[:80]} ended {str(state)[:20]}{where}{why}"
            yield error(str(name)[:80], text, actual=str(state)[:20], failing_cell=cell)


@check(
    code="run-curve",
    title="loss curve and gradient of a training",
    reads=("curve",),
    also=("held_out", "accept_length"),
    rule="the loss is finite and falls, and held-out accept length rises with training accuracy",
    fix="eagle3lab doctor --states STATES; lower the learning rate; look at the mask by position",
    symptom="a drafter as good as its first step",
)
def curve(facts: Facts) -> Iterator[Finding]:
    """Rows of `metrics.json` or of a JSON-lines log: {"step", "loss", "gradient_norm", "accuracy_by_step"}."""
    rows = [mapping(row) for row in facts.get("curve") or []]
    losses_seen = [(whole(row.get("step")), row.get("loss")) for row in rows if "loss" in row]
    if not losses_seen:
        named = ", ".join(str(key)[:40] for key in list(rows[0])[:6]) if rows and rows[0] else "none"
        yield could_not(
            "the loss curve", f"no row has the key loss (keys: {named})", fix="name the columns step and loss"
        )
    if wrong := next(((step, loss) for step, loss in losses_seen if isinstance(loss, (str, bool, list, dict))), None):
        yield error("loss", f"the loss at step {wrong[0]} is {str(wrong[1])[:40]!r}, needed: a number", actual=wrong[1])
        return
    yield from _impossible(rows, facts)
    bad = next((step for step, loss in losses_seen if real(loss) is None), None)
    if any(real(loss) is None for _, loss in losses_seen):
        yield error("loss", f"the loss is not finite at step {bad}", actual="nan", step=bad)
        return
    values = [real(loss) or 0.0 for _, loss in losses_seen]
    yield from _zero_losses(losses_seen, values)
    yield from _odd_rows(rows)
    norms = [norm for row in rows if (norm := real(row.get("gradient_norm"))) is not None]
    if len(norms) >= 2 and max(norms) == 0:
        yield error("gradient", "the gradient is 0 at every step: nothing is trained", actual=0.0)
    if len(values) >= 10:
        start, end = sum(values[:3]) / 3, sum(values[-3:]) / 3
        if start > 0 and end > 0.98 * start:
            text = f"the loss never leaves its start: {start:.4g} to {end:.4g} in {len(values)} log rows"
            yield error("loss", text, actual=end, start=start, end=end)
    yield from _accuracy(rows, facts)


def _odd_rows(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """A gradient that is not finite, and a loss below 0. In the first tenth of the rows a loss scale may still move."""
    bad = [place for place, row in enumerate(rows) if _not_finite(row.get("gradient_norm"))]
    late = [place for place in bad if place >= len(rows) / 10 or place == len(rows) - 1]
    if late:
        first = rows[late[0]].get("step")
        text = f"the gradient is not finite in {len(bad)} of {len(rows)} log rows, first at step {first}"
        told = error if late[-1] == len(rows) - 1 else warning
        yield told("gradient", text, actual="nan", fix="lower the learning rate; eagle3lab doctor --states STATES")
    below = next(
        ((row.get("step"), loss) for row in rows if (loss := real(row.get("loss"))) is not None and loss < 0), None
    )
    if below:
        text = f"the loss is {below[1]:g} at step {below[0]}: no cross-entropy or divergence is negative"
        yield warning("loss", text, actual=below[1], fix="say which loss this is, or read the log again")


def _zero_losses(losses_seen: list[tuple[int | None, Any]], values: list[float]) -> Iterator[Finding]:
    """A loss of exactly 0 has no token behind it: a target that is no certainty cannot be met without any loss."""
    zeros = [index for index, value in enumerate(values) if value == 0]
    fix = "eagle3lab doctor --corpus FILE --tokenizer DIR"
    if values and len(zeros) == len(values):
        told = error if len(values) > 1 else warning
        text = f"the loss is 0 at every step ({len(values)} log rows): most likely 0 supervised tokens"
        yield told("loss", text, actual=0.0, fix=fix, supervised=0, look_at=["loss mask", "chat template"])
    elif zeros and max(values[zeros[0] :]) > REAL_LOSS:
        at, later = losses_seen[zeros[0]][0], max(values[zeros[0] :])
        text = f"the loss is 0 in {len(zeros)} of {len(values)} log rows, first at step {at}, and {later:.3g} later: "
        text += "most likely batches without a supervised token"
        yield warning("loss", text, actual=0.0, fix=fix)


def _impossible(rows: list[Mapping[str, Any]], facts: Facts) -> Iterator[Finding]:
    """Values that no training can have printed: the first of each kind."""
    found: dict[str, tuple[Any, Any, str]] = {}
    for row in rows:
        norm, by_step = real(row.get("gradient_norm")), row.get("accuracy_by_step")
        if norm is not None and norm < 0:
            found.setdefault("gradient_norm", (row.get("step"), norm, "a norm is not negative"))
        for share in by_step if isinstance(by_step, list) else ():
            if (value := real(share)) is not None and not 0 <= value <= 1:
                found.setdefault("accuracy_by_step", (row.get("step"), value, "a share lies between 0 and 1"))
    for row in map(mapping, facts.get("held_out") or []):
        length = real(row.get("simulated_accept_length"))
        if _not_finite(row.get("simulated_accept_length")):
            nan = row["simulated_accept_length"]
            found.setdefault("simulated_accept_length", (row.get("step"), nan, "a length is finite"))
        if length is not None and length < 1:
            why = "the least accept length is 1.00: the bonus token is in it"
            found.setdefault("simulated_accept_length", (row.get("step"), length, why))
    for name, (step, value, why) in found.items():
        yield error(name, f"{name} is {value:g} at step {step}: {why}", actual=value, fix="read the log again")


def _accuracy(rows: list[Mapping[str, Any]], facts: Facts) -> Iterator[Finding]:
    """First-step training accuracy against held-out accept length: far apart means another input at serving."""
    by_step = rows[-1].get("accuracy_by_step") if rows else None
    first = real(by_step[0]) if isinstance(by_step, list) and by_step else None
    held = facts.get("held_out") or []
    length = real(mapping(held[-1]).get("simulated_accept_length")) if held else real(facts.get("accept_length"))
    if first is None or length is None or not 0 <= first <= 1:
        return
    if first >= 0.3 and length < 1 + first / 3:
        text = f"training accuracy {first:.2f} at the first step, accept length only {length:.3g}"
        yield warning("accept_length", f"{text}: what is served is not what was trained", actual=length, accuracy=first)


@check(
    code="run-fc",
    title="fc during training",
    reads=("fc_trajectory",),
    rule="fc moves away from its start and keeps its size",
    fix="eagle3lab inspect DRAFTER; look for requires_grad on fc and at the learning rate",
    symptom="a drafter that never uses the target's states",
)
def fc_moves(facts: Facts) -> Iterator[Finding]:
    """Frozen: bit-equal at the end. Collapsed: a quarter of the first standard deviation or less; grown: ten times."""
    rows = [mapping(row) for row in facts.get("fc_trajectory") or []]
    if len(rows) < 2:
        return
    first, last = real(rows[0].get("std")), real(rows[-1].get("std"))
    moved, steps = real(rows[-1].get("moved")), f"steps {rows[0].get('step')} to {rows[-1].get('step')}"
    if first is None or last is None:
        yield error("fc", f"fc is not finite within {steps}", actual="nan")
    elif moved == 0:
        yield error("fc", f"fc is frozen: bit-equal at {steps}", actual=0.0, moved=0.0)
    elif first > 0 and last <= first / 4:
        text = f"fc collapsed: standard deviation {first:.4g} to {last:.4g} over {steps}"
        yield error("fc", text, actual=last, first=first, last=last)
    elif first > 0 and last >= GROWN * first:
        text = f"fc grew {last / first:.3g} times: standard deviation {first:.4g} to {last:.4g} over {steps}"
        yield warning("fc", text, actual=last, first=first, last=last, moved=moved)
    else:
        far = "unknown" if moved is None else f"{100 * moved:.3g} %"
        yield info("fc", f"fc moved {far} of its size over {steps}", moved=moved, first=first, last=last)
