"""What the launch line asks for, against the draft that it loads. Rules read in SGLang 0.5.23 and vLLM 0.33.0."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

from eagle3lab.acceptance.sources import SIMULATE, simulated_by
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.inventory import NOT_EAGLE
from eagle3lab.doctor.readers.launch import Launch, environment, parse_args, speculative_config
from eagle3lab.doctor.readers.shell import UNKNOWN
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.tensor_names import strip_prefix
from eagle3lab.doctor.views import Draft, draft_of, target_of, whole

ALGORITHMS = ("DFLASH", "UNO", "DSPARK", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM", "NEXTN")
"""Names that SGLang 0.5.23 takes, in any case (speculative/spec_info)."""
ALIAS = {"NEXTN": "EAGLE"}
NEEDS_DRAFT = ("EAGLE3", "EAGLE", "STANDALONE", "DFLASH")
CAPTURE_METHODS = ("EAGLE3", "DFLASH", "DSPARK")
"""Algorithms that name what a capture without a draft returns (SGLang's validation_hook)."""
_GUESSES = {"eagle": "eagle-", "eagle3": "eagle3"}
"""Method and the part of a path that stands for it, in vLLM's order (config/speculative.py)."""
NAMED_EAGLE3 = re.compile(r"eagle[-_.]?3(?![\d.]*b)", re.IGNORECASE)
"""In the name of a draft; eagle-3b is a size."""
SYNTHETIC_KEYS = ("synthetic_acceptance_length", "synthetic_acceptance_rates")
"""What vLLM's synthetic acceptance is to come to; exactly one of the two is given."""
MTP_FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5", "longcat_flash")
"""Targets whose own checkpoint can hold a next-token block, so EAGLE without a draft path may be meant."""


def eagle3_evidence(facts: Facts, draft: Draft) -> tuple[list[str], int | None, int | None]:
    """(what says that the draft is EAGLE-3, input width of fc, width of one state).

    fc over two widths with no other sign is EAGLE-1/2 (one embedding, one state), not EAGLE-3.
    """
    target = target_of(facts)
    state = draft.target_hidden(target)
    names = {strip_prefix(name): entry for name, entry in facts.mapping("draft_headers").items()}
    entry = names.get("fc.weight")
    shape = entry[1] if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) else []
    fc_in = whole(shape[1]) if len(shape) == 2 else None
    signs: list[str] = []
    if fc_in and state and fc_in % state == 0 and fc_in // state >= 3:
        signs.append(f"fc reads {fc_in} = {fc_in // state} x {state}")
    if draft.eagle3_class:
        signs.append(f"architectures {draft.architecture or draft.config.get('speculators_model_type')}")
    if draft.nested_ids or draft.top_ids:
        signs.append("layer ids in config.json")
    signs += [name for name in ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight") if name in names]
    if fc_in is None and signs and state:
        fc_in = draft.states * state
    return signs, fc_in, state


def _named_eagle3(facts: Facts, path: Any) -> bool:
    """Whether nothing but its name is known of a draft, and that says EAGLE-3."""
    return not (facts.has("draft_config") or facts.has("draft_headers")) and bool(NAMED_EAGLE3.search(str(path or "")))


@check(
    code="launch-algorithm",
    title="speculative algorithm against the draft",
    reads=("launch_args",),
    also=("draft_config", "draft_headers", "target", "target_config"),
    rule="an EAGLE-3 draft needs EAGLE3 (vLLM: method eagle3); EAGLE and its alias NEXTN feed it one state and skip fc",
    fix="--speculative-algorithm EAGLE3",
    symptom="the server starts, text is right, nothing is logged, accept length is 1.00",
)
def algorithm(facts: Facts) -> Iterator[Finding]:
    """The algorithm in force is the last one written; aliases and unknown names are told."""
    launch = parse_args(facts["launch_args"])
    if facts.engine_names() == ("sglang",):
        yield from _sglang_algorithm(facts, launch)
    else:
        yield from _vllm_method(facts, launch)


def _sglang_algorithm(facts: Facts, launch: Launch) -> Iterator[Finding]:
    flag = "--speculative-algorithm"
    given = launch.value("speculative-algorithm")
    draft = draft_of(facts)
    if given is None:
        if launch.value("speculative-draft-model-path"):
            yield warning(
                flag,
                f"{flag} is not given: the draft path alone starts no speculation",
                fix=f"{flag} EAGLE3",
                given=None,
                needed="EAGLE3",
            )
        return
    if UNKNOWN.search(given):
        return  # said when it was read
    name = given.upper()
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(name, ALGORITHMS, n=3, cutoff=0.6)
        # EAGLE4 is as close to EAGLE as to EAGLE3; the longer one is what a user with an EAGLE-3 draft means
        near = max(close, key=lambda item: (difflib.SequenceMatcher(None, name, item).ratio(), len(item)), default=None)
        near = "EAGLE3" if near == "EAGLE" else near
        hint = f", nearest {near}" if near else ""
        text = f"{flag} {given} is unknown{hint}; legal: {', '.join(ALGORITHMS)}"
        yield error(flag, text, actual=given, given=given, legal=list(ALGORITHMS), nearest=near)
        return
    effective = ALIAS.get(name, name)
    if launch.times["speculative-algorithm"] > 1:
        text = f"{flag} is given {launch.times['speculative-algorithm']} times, the last one is used: {effective}"
        yield info(flag, text, actual=given, effective_algorithm=effective)
    signs, fc_in, state = eagle3_evidence(facts, draft)
    if effective == "EAGLE3" and facts.has("draft_config") and _is_eagle2(draft, signs, fc_in, state):
        yield error(
            flag,
            f"{flag} {given} with an EAGLE-1/2 draft: fc reads {fc_in} = 2 x {state}, EAGLE3 feeds it 3 x {state}",
            actual=given,
            fix=f"{flag} EAGLE",
            given=given,
            needed="EAGLE",
            fc_in=fc_in,
            target_hidden=state,
        )
    elif effective == "EAGLE3" and _is_older_class(draft, signs):
        yield _older_class(flag, f"{flag} {given}", draft, f"{flag} EAGLE")
    path = launch.value("speculative-draft-model-path")
    if effective == "EAGLE" and _named_eagle3(facts, path):
        yield _by_name(flag, f"{flag} {given}", path, f"{flag} EAGLE3")
    if effective in NOT_EAGLE and all(sign.startswith("fc reads") for sign in signs):
        signs = []  # DFlash's fc is as wide
    if effective != "EAGLE3" and signs and not launch.has("enable-return-aux-hidden-states"):
        yield error(
            flag,
            _wrong_algorithm(given, effective, fc_in, state, signs),
            actual=given,
            given=given,
            resolves_to=effective,
            effective_algorithm=effective,
            needed="EAGLE3",
            fc_in=fc_in,
            target_hidden=state,
            aux_states=fc_in // state if fc_in and state else draft.states,
            accept_length_expected=1.0,
            evidence=signs,
        )
    elif launch.times["speculative-algorithm"] == 1:
        if effective == "EAGLE3" and launch.has("speculative-token-map"):
            text = "--speculative-token-map is ignored under EAGLE3: the draft's own d2t is used"
            yield info("--speculative-token-map", text, actual=launch.value("speculative-token-map"))
        yield info(flag, f"algorithm in force: {effective}", actual=given, effective_algorithm=effective)


def _by_name(subject: str, asked: str, path: Any, fix: str) -> Finding:
    text = f"{asked} with a draft named {path}, which was not read: an EAGLE-3 draft needs EAGLE3, or fc is skipped"
    return warning(subject, text, actual=str(path), fix=f"{fix}; --draft FOLDER to be sure", needed="EAGLE3")


def _wrong_algorithm(given: str, effective: str, fc_in: int | None, state: int | None, signs: list[str]) -> str:
    alias = f" (an alias of {effective})" if effective != given.upper() else ""
    start = f"--speculative-algorithm {given}{alias} with an EAGLE-3 draft"
    if effective not in ("EAGLE", "FROZEN_KV_MTP"):
        width = f": fc reads {fc_in} = {fc_in // state} x {state}" if fc_in and state and fc_in % state == 0 else ""
        return f"{start}{width}, and {effective} does not run one; EAGLE3 is needed"
    if fc_in and state and fc_in % state == 0:
        return (
            f"{start}: fc reads {fc_in} = {fc_in // state} x {state}, {effective} hands it one {state}-wide state, "
            "so fc is skipped and acceptance is zero; EAGLE3 is needed"
        )
    return f"{start} ({signs[0]}): aux states are not captured and fc is skipped; EAGLE3 is needed"


def _is_eagle2(draft: Draft, signs: list[str], fc_in: int | None, state: int | None) -> bool:
    return not signs and bool(fc_in and state) and fc_in == 2 * (state or 0) and draft.architecture is not None


def _is_older_class(draft: Draft, signs: list[str]) -> bool:
    """Whether nothing but the class is known of the draft, and it is one of EAGLE-1/2."""
    named = (draft.architecture or "").lower()
    return not signs and "eagle" in named and "eagle3" not in named


def _older_class(subject: str, asked: str, draft: Draft, fix: str) -> Finding:
    text = f"{asked} with a draft of class {draft.architecture}, which is EAGLE-1/2: EAGLE3 feeds it three states"
    return warning(subject, text, actual=draft.architecture, fix=fix, needed="EAGLE", architecture=draft.architecture)


def _vllm_method(facts: Facts, launch: Launch) -> Iterator[Finding]:
    config = speculative_config(launch)
    draft = draft_of(facts)
    signs, fc_in, state = eagle3_evidence(facts, draft)
    text = launch.value("speculative-config")
    if text and not _json_object(text) and not UNKNOWN.search(text):
        yield error(
            "--speculative-config",
            f"{text[:80]!r} is no JSON object: vLLM does not start",
            actual=text[:80],
            fix='--speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
        )
    if config:
        yield from _vllm_effective(config, draft, signs, fc_in, state, _named_eagle3(facts, config.get("model")))


def _vllm_effective(
    config: dict[str, Any], draft: Draft, signs: list[str], fc_in: int | None, state: int | None, named: bool
) -> Iterator[Finding]:
    """The method that is given or that vLLM guesses, against the draft."""
    subject, model = "--speculative-config", str(config.get("model", ""))
    method = str(config["method"]).lower() if config.get("method") is not None else guessed_method(model)
    if UNKNOWN.search(method or model):
        return  # said when it was read
    guessed = config.get("method") is None
    said = f"method {config.get('method')}"
    if guessed:
        said = f"method is not given and becomes {method} ({model!r} contains '{_GUESSES.get(method or '', '')}')"
    fix = '--speculative-config \'{"method": "eagle3", ...}\''
    given = None if guessed else str(config["method"])
    width: dict[str, Any] = {"fc_in": fc_in, "target_hidden": state}
    reads = f": fc reads {fc_in} = {fc_in // state} x {state}" if fc_in and state else ""
    if method == "eagle" and named:
        yield _by_name(subject, said, model, fix)
    elif signs and method is None:
        text = f"method is not given and the draft path {model!r} does not contain 'eagle3', from which it is guessed"
        yield warning(subject, text, fix=fix, given=None, needed="eagle3")
    elif signs and method != "eagle3":
        text = f"{said} with an EAGLE-3 draft{reads}; method eagle3 is needed"
        yield error(subject, text, actual=method, fix=fix, given=given, needed="eagle3", **width)
    elif method == "eagle3" and _is_eagle2(draft, signs, fc_in, state):
        text = f"{said} with an EAGLE-1/2 draft{reads}, eagle3 feeds it 3 x {state}; method eagle is needed"
        fix = fix.replace("eagle3", "eagle")
        yield error(subject, text, actual=method, fix=fix, given=given, needed="eagle", **width)
    elif method == "eagle3" and _is_older_class(draft, signs):
        yield _older_class(subject, said, draft, fix.replace("eagle3", "eagle"))


def guessed_method(model: str) -> str | None:
    """The method that vLLM takes from a draft's path when none is given; it looks for `eagle-` first."""
    return next((method for method, part in _GUESSES.items() if part in model.lower()), None)


def _json_object(text: str) -> bool:
    """Whether vLLM takes the text for a speculative config; null and None stand for none."""
    try:
        return text == "None" or isinstance(json.loads(text), (dict, type(None)))
    except (ValueError, RecursionError):
        return False


@check(
    code="launch-draft-path",
    title="speculation without anything to draft with",
    reads=("launch_args",),
    also=("target", "target_config", "draft_config"),
    rule="EAGLE3 needs --speculative-draft-model-path (vLLM: model in its speculative config); capture without a draft "
    "needs --enable-return-aux-hidden-states",
    fix="--speculative-draft-model-path DRAFT",
    symptom="the target is loaded a second time as its own draft, then the server fails",
)
def draft_path(facts: Facts) -> Iterator[Finding]:
    """A draft path is missing, or is there where none may be."""
    launch = parse_args(facts["launch_args"])
    if facts.engine_names() != ("sglang",):
        yield from _vllm_model(facts, launch)
        return
    flag = "--speculative-draft-model-path"
    named = (launch.value("speculative-algorithm") or "").upper()
    effective = ALIAS.get(named, named)
    path = launch.value("speculative-draft-model-path")
    capture = launch.has("enable-return-aux-hidden-states")
    if capture and path:
        yield error(
            flag,
            f"--enable-return-aux-hidden-states and {flag} exclude each other",
            actual=path,
            fix=f"drop {flag} to capture, or --enable-return-aux-hidden-states to serve",
        )
    if capture and not path and named in CAPTURE_METHODS:  # else SGLang stops, which capture-flags tells
        yield info("speculation", "aux capture without a draft: speculation is off", speculation="off")
    if not capture and not path and effective in NEEDS_DRAFT:
        target = target_of(facts)
        unsaid = target is not None and target.predicts_next is None and target.family in MTP_FAMILIES
        own = unsaid or bool(target and target.predicts_next)
        if effective == "EAGLE" and (own or target is None or target.family is None):
            yield info(flag, f"{named} without {flag}: right only if the target holds its own next-token block")
            return
        yield error(
            flag,
            f"{flag} is missing with {named}: the target is loaded a second time as its draft, then the server fails",
            given=None,
            algorithm=effective,
            effect="the target is loaded a second time, then the server fails",
        )


def vllm_draft_asked(facts: Facts, launch: Launch) -> bool:
    """Whether vLLM is to load an EAGLE draft that its config has to name, with all flags in sight.

    A checkpoint in the speculators format that is served itself brings model and steps along.
    """
    config = speculative_config(launch)
    words = [*launch.words, launch.value("model-path") or ""]
    served = " ".join(words[words.index("serve") + 1 :] if "serve" in words else words[-1:]).lower()
    own = "speculator" in served or "eagle" in served or draft_of(facts).speculators
    return config.get("method") in ("eagle", "eagle3") and launch.complete() and not own


def _vllm_model(facts: Facts, launch: Launch) -> Iterator[Finding]:
    config = speculative_config(launch)
    if vllm_draft_asked(facts, launch) and config.get("model") is None:
        yield error(
            "--speculative-config",
            f"method {config['method']} without model: vLLM does not start",
            fix='--speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
            given=None,
        )


@check(
    code="launch-draft-attention",
    title="attention backend that the draft inherits",
    reads=("launch_args", "draft_config"),
    also=("target", "target_config"),
    rule="a Llama-class (MHA) draft cannot run under an MLA attention backend",
    fix="--speculative-draft-attention-backend trtllm_mha",
    symptom="an error in the draft's first forward pass, or wrong attention",
)
def draft_attention(facts: Facts) -> Iterator[Finding]:
    """The draft takes the target's backend unless its own is named."""
    launch, draft = parse_args(facts["launch_args"]), draft_of(facts)
    own = launch.value("speculative-draft-attention-backend")
    base = launch.value("attention-backend")  # for what neither of the other two is given
    both = [launch.value(f"{phase}-attention-backend") or base for phase in ("decode", "prefill")]
    inherited = [value for value in both if value and _for_mla(value)]
    backend = own if own is not None else (inherited[0] if inherited else None)
    if not draft.config.get("architectures") or draft.mla or backend is None or not _for_mla(backend):
        return
    if not launch.value("speculative-draft-model-path"):
        return
    suggest = "trtllm_mha" if "trtllm" in backend.lower() else "fa3, flashinfer or trtllm_mha"
    flag = "--speculative-draft-attention-backend"
    said = f"no {flag}: the mha draft inherits {backend}" if own is None else f"{flag} {own} for an mha draft"
    yield warning(
        flag,
        f"{said}, which is for MLA; use {suggest}",
        actual=own,
        fix=f"{flag} {suggest.split(',')[0]}",
        draft_attention="mha",
        inherited=backend,
        suggest=suggest,
    )


def _for_mla(backend: str) -> bool:
    """Whether an attention backend of SGLang computes latent attention only."""
    return "mla" in backend.lower() or backend.lower() in ("nsa", "dsa")


@check(
    code="env-simulated-acceptance",
    title="acceptance simulated by the server",
    reads=("env|launch_args",),
    also=("env", "launch_args", "command"),
    rule="SGLANG_SIMULATE_ACC_LEN above 0 makes SGLang invent acceptance, rejection_sample_method synthetic vLLM; "
    "measuring needs neither",
    fix="unset SGLANG_SIMULATE_ACC_LEN",
    symptom="accept length is exactly the number that was set, whatever the draft is",
)
def simulated_acceptance(facts: Facts) -> Iterator[Finding]:
    """Only a value above 0 switches SGLang's on; _METHOD and _TOKEN_MODE only shape the fake. SGL_... is SGLANG_...."""
    yield from _synthetic(facts)
    name, raw = simulated_by(environment(facts)) or ("", "")
    if raw == "":
        return
    if "sglang" not in facts.engine_names():
        yield info(name, f"{name}={raw} is set, and only SGLang reads it", actual=raw)
        return
    if UNKNOWN.search(raw):
        yield info(name, f"{name} is set to what the launch line does not settle ({raw[:80]})", actual=raw)
        return
    try:
        value = float(raw)
    except ValueError:
        yield warning(name, f"{name}={raw} is not a number", actual=raw)
        return
    read_as = "" if name == SIMULATE else f" (read as {SIMULATE})"
    if value > 0:
        yield error(
            name,
            f"{name}={raw}{read_as}: acceptance numbers are invented by the server ({value} each step), not measured",
            actual=raw,
            fix=f"unset {name}",
            value=value,
            effect="acceptance numbers are invented by the server",
            refuse=True,
        )
    else:
        yield info(name, f"{name}={raw} is off", actual=raw, refuse=False)


def _synthetic(facts: Facts) -> Iterator[Finding]:
    """vLLM's own way: its rejection sampler draws from given rates, whatever was drafted."""
    name = "rejection_sample_method"
    config = speculative_config(parse_args(facts["launch_args"])) if facts.get("launch_args") else {}
    if config.get(name) != "synthetic":
        return
    given = {key: config[key] for key in SYNTHETIC_KEYS if config.get(key) is not None}
    shown = ", ".join(f"{key} {str(value)[:60]}" for key, value in given.items()) or "no rates given"
    yield error(
        name,
        f"{name} synthetic ({shown}): acceptance numbers are invented by the server, not measured",
        actual="synthetic",
        fix=f"drop {name} and synthetic_* from --speculative-config",
        value=next(iter(given.values()), None),
        effect="acceptance numbers are invented by the server",
        refuse=True,
    )
