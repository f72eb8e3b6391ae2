"""What a server log says about the speculation that is really running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor.checks.acceptance import BARELY, LOOK_AT, LOOK_WITH, judged
from eagle3lab.doctor.checks.launch import ALIAS
from eagle3lab.doctor.checks.launch import algorithm as launch_algorithm
from eagle3lab.doctor.facts import Engine, Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.readers.launch import parse_args, speculative_config
from eagle3lab.doctor.readers.shell import UNKNOWN
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.serverlog import ServerLog, read_log
from eagle3lab.doctor.views import draft_of

GEMMA_DRAFTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
"""Drafts for which SGLang makes FROZEN_KV_MTP of EAGLE and NEXTN."""


@check(
    code="log-acceptance",
    title="acceptance lines of a server log",
    reads=("log",),
    rule="1.00 < accept length <= draft steps + 1, rate up to 1; a line is a mean over its log interval, not a count",
    fix=LOOK_WITH,
    symptom="every line says accept len: 1.00",
)
def acceptance(facts: Facts) -> Iterator[Finding]:
    """Exactly 1.00 on every line means that no draft was ever right."""
    log = read_log(str(facts.get("log") or ""))
    if log.simulated is not None:
        text = f"SGLANG_SIMULATE_ACC_LEN={log.simulated:g}: the acceptance in this log is invented by the server"
        yield error("log", text, actual=log.simulated, fix="unset SGLANG_SIMULATE_ACC_LEN", refuse=True)
    elif log.renamed:
        text = "SGL_SIMULATE_ACC_LEN is set: above 0 the acceptance in this log is invented by the server"
        yield warning("log", text, fix="unset SGL_SIMULATE_ACC_LEN")
    if log.synthetic is not None:
        text = f"{log.synthetic}: the acceptance in this log is invented by the server"
        fix = "drop rejection_sample_method and synthetic_* from --speculative-config"
        yield error("log", text, actual=log.synthetic, fix=fix, refuse=True)
    if log.impossible is not None:
        yield error("log", log.impossible, fix="read the log again, from one server and without edits")
    elif log.counts is not None:
        yield judged(log.counts, "log")
    elif (reading := _impossible(log)) is not None:
        yield reading
    elif log.gauges:
        yield _gauges(log)
    elif log.engine is not None:
        text = "acceptance is unknown: the log holds no acceptance line"
        yield info("log", text, accept_length=None, accept_rate=None, reasons=["speculation off", "no decode yet"])
    elif str(facts.get("log") or "").strip():
        text = "acceptance is unknown: no line of SGLang or vLLM that is known is in the log"
        yield info("log", text, accept_length=None, accept_rate=None, reasons=["another program's log"])


def _impossible(log: ServerLog) -> Finding | None:
    """The first reading that no server can have had; lines are printed with two digits."""
    launch = parse_args(list(log.launch))
    steps, most = launch.number("speculative-num-steps"), None
    eagle = (log.algorithm or "").upper() in ("EAGLE", "EAGLE3")  # others draft more tokens than steps
    if steps is not None and steps >= 1 and eagle and launch.value("speculative-adaptive") != "True":
        most = steps + 1
    for one in log.gauges:
        length, rate = one.accept_length, one.accept_rate
        what, value = "", length
        if length < 1:
            what = f"accept len is {length:g}, the least is 1.00: the bonus token is in it"
        elif most is not None and length > most + 0.005:
            what = f"accept len is {length:g}, the most of {steps} draft steps is {most}"
        elif rate is not None and not 0 <= rate <= 1:
            what, value = f"accept rate is {rate:g}, a share lies between 0 and 1", rate
        if what:
            return error("log", f"line {one.line}: {what}", actual=value, fix="read the log again, without edits")
    return None


def _gauges(log: ServerLog) -> Finding:
    lengths = [one.accept_length for one in log.gauges]
    rates = [one.accept_rate for one in log.gauges if one.accept_rate is not None]
    mean = sum(lengths) / len(lengths)
    evidence: dict[str, Any] = {
        "accept_length": mean,
        "accept_rate": sum(rates) / len(rates) if rates else None,
        "lowest": min(lengths),
        "highest": max(lengths),
        "lines": len(lengths),
        "first_line": log.gauges[0].line,
    }
    if max(lengths) <= 1.0:
        text = f"accept length is exactly {mean:.2f}: no draft was ever right ({len(lengths)} log lines)"
        return error("log", f"{text}; look at {', '.join(LOOK_AT)}", actual=mean, look_at=LOOK_AT, **evidence)
    if mean <= BARELY:
        text = f"accept length {mean:.3g} is barely above 1.00 ({len(lengths)} log lines)"
        return warning("log", f"{text}; look at {', '.join(LOOK_AT)}", actual=mean, look_at=LOOK_AT, **evidence)
    each = "one forward pass" if log.interval == 1 else f"a mean over up to {log.interval} forward passes"
    each = "a mean over its log interval" if log.engine == "vllm" else each
    text = f"accept length {min(lengths):g} to {max(lengths):g} in {len(lengths)} log lines, each {each}"
    return info("log", text, **evidence)


@check(
    code="log-algorithm",
    title="algorithm in force according to the log",
    reads=("log",),
    also=("launch_args", "draft_config", "draft_headers", "target", "target_config"),
    rule="the log's settings are the ones in force; an EAGLE-3 draft needs EAGLE3",
    fix="restart the server with --speculative-algorithm EAGLE3",
    symptom="the server starts, text is right, nothing is logged, accept length is 1.00",
)
def in_force(facts: Facts) -> Iterator[Finding]:
    """The printed settings against the draft, and against the launch line when there is one."""
    log = read_log(str(facts.get("log") or ""))
    if log.off:
        yield from _off(facts, log)
    if log.algorithm is None:
        return
    ids = None if log.layer_ids is None else list(log.layer_ids)
    said = "" if ids is None else f", layer ids {ids}"
    yield info("log", f"algorithm in force: {log.algorithm}{said}", algorithm=log.algorithm, layer_ids=ids)
    if not facts.has("launch_args"):
        words = list(log.launch) if log.engine == "sglang" else _vllm_words(log)
        derived = Facts({**facts.values, "launch_args": words}, facts.sources, (Engine(str(log.engine)),), True)
        yield from (finding for finding in launch_algorithm(derived) if finding.severity != "info")  # told above
        return
    asked = parse_args(facts["launch_args"]).value("speculative-algorithm")
    if log.engine == "sglang" and asked and not _same(facts, asked, log.algorithm):
        text = f"the launch line asks for {asked}, the log says {log.algorithm}"
        yield error("log", text, actual=log.algorithm, asked=asked, fix="restart the server, or read the right log")


def _off(facts: Facts, log: ServerLog) -> Iterator[Finding]:
    """Speculation is off: nothing to say where none was asked for, by a plain server or one that returns aux states."""
    tell = warning
    if facts.has("launch_args"):
        launch = parse_args(facts["launch_args"])
        path = launch.value("speculative-draft-model-path")
        asked = path or launch.value("speculative-algorithm") or speculative_config(launch)
        if not asked and not launch.complete():
            tell = info  # whether some was asked for is out of sight
        elif not asked or (launch.has("enable-return-aux-hidden-states") and not path):
            return
    elif log.capture:
        return
    yield tell("log", "the log says that speculation is off", actual=None, algorithm=None)


def _same(facts: Facts, asked: str, printed: str) -> bool:
    """Whether SGLang prints the second name when the first is asked for; what the text does not settle is."""
    asked, printed = ALIAS.get(asked.upper(), asked.upper()), ALIAS.get(printed.upper(), printed.upper())
    draft = draft_of(facts).architecture
    promoted = asked == "EAGLE" and printed == "FROZEN_KV_MTP" and (draft is None or draft in GEMMA_DRAFTS)
    return asked == printed or promoted or UNKNOWN.search(asked) is not None


def _vllm_words(log: ServerLog) -> list[str]:
    return ["--speculative-config.method", str(log.algorithm), "--speculative-config.model", "DRAFT"]


@check(
    code="log-weights",
    title="weights that the loader dropped or did not find",
    reads=("log",),
    rule="every tensor of the draft is loaded, and every parameter comes from the file",
    fix="eagle3lab doctor --draft DRAFT lists the names that the engine knows",
    symptom="random parameters: accept length near 1.00",
)
def weights(facts: Facts) -> Iterator[Finding]:
    """Names of the log, at most a few in the message and all in the evidence."""
    log = read_log(str(facts.get("log") or ""))
    if log.dropped:
        text = f"{len(log.dropped)} tensors dropped by the loader: {_few(log.dropped)}"
        yield error("log", text, actual=len(log.dropped), dropped=list(log.dropped))
    if log.missing:
        text = f"{len(log.missing)} parameters not initialised from the checkpoint: {_few(log.missing)}"
        yield error("log", text, actual=len(log.missing), missing=list(log.missing))
    if log.hook_unmatched:
        yield warning("log", "a forward hook matched no module, so it never ran", fix="correct its target_modules")


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
