"""Options of the launch line that the engine's own parser refuses. SGLang 0.5.23's are stored, vLLM 0.33.0's were read.

Only what stands behind the server's name is judged: options in front of it are docker's or srun's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from eagle3lab.core.errors import closest, nearest
from eagle3lab.doctor.checks.launch import SYNTHETIC_KEYS
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.readers.command import server, server_at
from eagle3lab.doctor.readers.launch import SPEC_FLAGS, Launch, parse_args, speculative_config
from eagle3lab.doctor.readers.shell import UNKNOWN
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import real, whole
from eagle3lab.targets.launch import nearest_option, stored_option

ALIKE = 0.92
"""A flag this much like a known one is that one misspelt; another unknown one may be of another release."""
COUNTS = (
    *("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens", "tp", "pp", "dp", "dp-size"),
    *("nnodes", "max-running-requests", "max-num-seqs", "decode-log-interval"),
)
"""Options of which there is at least 1 (canonical names of the reader)."""
FRACTIONS = ("mem-fraction-static", "gpu-memory-utilization")
VLLM_FLAGS = (
    *("speculative-config", "max-model-len", "enable-prefix-caching", "no-enable-prefix-caching"),
    *("enable-chunked-prefill", "no-enable-chunked-prefill", "kv-transfer-config", "tensor-parallel-size"),
    *("pipeline-parallel-size", "gpu-memory-utilization", *SPEC_FLAGS),
)
"""vLLM's options that decide about a drafter; its list is not stored, so that only these are told when misspelt."""
VLLM_REMOVED = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "speculative-max-model-len": "max_model_len",
    "ngram-prompt-lookup-max": "prompt_lookup_max",
    "ngram-prompt-lookup-min": "prompt_lookup_min",
}
"""Options of vLLM before 0.9 and the keys of --speculative-config that took their place."""
VLLM_METHODS = (
    *("eagle3", "eagle", "ngram", "medusa", "mlp_speculator", "draft_model", "suffix", "custom_class", "mtp"),
    *("extract_hidden_states", "ngram_gpu", "dflash", "dspark"),
)
"""Values of `method`, lower case only; every name that ends in _mtp is one too."""
REJECTION_METHODS = ("standard", "synthetic", "block")
"""Values of `rejection_sample_method`; what synthetic does is told by env-simulated-acceptance."""
VLLM_KEYS = (
    *("enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size", "quantization"),
    *("tensor_parallel_size", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "revision"),
    *("code_revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch", "disable_eagle_block_drop"),
    *("use_local_argmax_reduction", "use_heterogeneous_vocab", "prompt_lookup_max", "prompt_lookup_min"),
    *("parallel_drafting", "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("draft_load_config", "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    *("enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk", "draft_model_config"),
)
"""Keys of vLLM's speculative config; another one is refused."""

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\uff0d"
"""Characters that word processors and web pages put where two hyphens were typed."""
_INVISIBLE = re.compile("[\u00a0\u00ad\u2007\u200b-\u200f\u202f\u2060\u3000\ufeff]")
"""Blanks that no shell takes for one, and characters without a width."""
_ONE_WORD = re.compile(r"(--[A-Za-z][\w.-]*)\s+(\S.*)", re.DOTALL | re.ASCII)
_TAKE_VALUE = (
    "speculative-config",
    "kv-transfer-config",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    *SPEC_FLAGS,
)
"""vLLM's options that end in a usage message without a value."""


@check(
    code="launch-options",
    title="options that the engine does not take",
    reads=("launch_args",),
    rule="options and values are those of sglang 0.5.23's parser and of vLLM 0.33.0's speculative config",
    fix="correct the option",
    symptom="the server ends at once with a usage message",
)
def options(facts: Facts) -> Iterator[Finding]:
    """Misspelt flags with the nearest known one, and values of another type or below what there can be."""
    words = _behind_server(facts["launch_args"])
    behind = parse_args(words)
    launch = behind if behind.flags else parse_args(facts["launch_args"])
    yield from _pasted(words)
    if facts.engine_names() == ("sglang",):
        yield from _sglang_flags(behind)
        yield from _sglang_counts(behind)
        yield from _numbers(launch, "context-length")
        yield from _sglang_types(launch)
    else:
        yield from _vllm_flags(behind)
        yield from _numbers(launch, "max-model-len")
        yield from _given_twice(launch)
        yield from _vllm_config(speculative_config(launch))


def _behind_server(args: Any) -> list[str]:
    """The words behind the server's name; [] when another program stands in front of the flags."""
    words = server(args).words
    named = server_at(words)
    if named is not None:
        return words[named + 1 :]
    first = next((n for n, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    return words[first:] if words[first:] and words[first].startswith("-") else []


def _pasted(words: list[str]) -> Iterator[Finding]:
    """What is no option although it looks like one: a dash that is none, one dash, a flag and its value in one word."""
    for word in dict.fromkeys(words):
        name = word.lstrip("-" + _DASHES).partition("=")[0]
        flag = f"--{name}"
        if (
            word[:1]
            and (word[0] in _DASHES or word[:2] in [f"-{dash}" for dash in _DASHES])
            and re.match(r"[a-z]", name)
        ):
            text = f"{word[:60]!r} begins with {_named(word)}, which makes no option: two hyphens are needed"
            yield error(flag, text, actual=word[:60], fix=f"write {flag}")
        elif re.match(r"-[a-z][a-z-]{4}", word) and _known(name):
            yield error(flag, f"-{name} has one hyphen: two are needed", actual=word[:60], fix=f"write {flag}")
        elif one := _ONE_WORD.match(word):
            text = f"{word[:60]!r} is one word: the engine takes {one[1]} and its value apart"
            yield error(
                one[1], text, actual=word[:60], fix=f"make it two words, {one[1]} and {one[2][:40]}, without quotes"
            )
        elif re.match(r"\s+--[a-z]", word, re.ASCII):
            flag = word.split()[0]
            text = f"{word[:60]!r} begins with a blank (a backslash in a text without line breaks?) and is no option"
            yield error(flag, text, actual=word[:60], fix=f"write {flag} without the blank and the backslash before it")
        if odd := _INVISIBLE.search(word):
            tell = error if "--" in word else warning
            text = f"{word[:60]!r} holds the invisible character {_named(odd[0])}"
            yield tell(word[:60], text, actual=word[:60], fix=f"type it anew: {_INVISIBLE.sub(' ', word)[:60]}")


def _known(name: str) -> bool:
    """Whether `name` behind two hyphens is an option of SGLang, or one of vLLM's that decide about a drafter."""
    return name in VLLM_FLAGS or stored_option(f"--{name}") is not None


def _named(text: str) -> str:
    """`U+2014 EM DASH` of the first character that is not ASCII."""
    odd = next(letter for letter in text if not letter.isascii())
    return f"U+{ord(odd):04X} {unicodedata.name(odd, 'without a name')}"


def _sglang_counts(launch: Launch) -> Iterator[Finding]:
    """Options with more or fewer values than argparse takes behind them."""
    for name, values in launch.flags.items():
        written = launch.spelt[name]
        option = stored_option(written.replace("_", "-"))
        if option is None or any(map(UNKNOWN.search, values)):
            continue
        takes = option["takes"]
        if takes == "none" and values:
            text = f"{written} is a switch and takes no value, given: {values[0][:40]!r}"
            yield error(written, text, actual=values[0][:40], fix=f"write {written} alone, or leave it out")
        elif takes == "one" and not values and name not in (*COUNTS, *FRACTIONS, "context-length"):
            yield error(written, f"{written} has no value", fix=f"write its value behind {written}")
        elif takes in ("one", "optional") and len(values) > 1 and values[1].lstrip()[:1] not in ("-", *_DASHES):
            text = f"{written} takes one value, {values[1][:40]!r} is left over"
            yield error(
                written, text, actual=values[1][:40], fix=f"quote the value of {written}, or drop {values[1][:40]}"
            )


def _sglang_flags(launch: Launch) -> Iterator[Finding]:
    for written in launch.spelt.values():
        flag = written.replace("_", "-")
        if UNKNOWN.search(flag) or re.search(r"\s", flag):
            continue
        if stored_option(flag) is not None:
            if flag != written:  # argparse takes no underscores; vLLM's own parser does
                text = f"{written} is no option of sglang 0.5.23: dashes, no underscores"
                yield error(written, text, actual=written, fix=f"write {flag}", nearest=flag)
            continue
        near, alike = nearest_option(flag)
        text = f"{written} is no option of sglang 0.5.23; did you mean {near}?"
        if alike >= ALIKE:
            yield error(written, text, actual=written, fix=near, nearest=near)
        elif flag.startswith("--speculative"):
            yield warning(written, text, actual=written, fix=near, nearest=near)
        else:
            yield info(written, f"{written} is no option of sglang 0.5.23, or is short for several", actual=written)


def _sglang_types(launch: Launch) -> Iterator[Finding]:
    for name, values in launch.flags.items():
        option = stored_option(launch.spelt[name].replace("_", "-"))
        if option is None or not values or UNKNOWN.search(values[0]):
            continue
        kind, choices = option.get("type"), [str(choice) for choice in option.get("choices") or ()]
        value = launch.number(name) if kind == "int" else real(_number(values[0]))
        if kind and value is None and name not in (*COUNTS, *FRACTIONS):
            yield _wrong(launch, name, "a whole number" if kind == "int" else "a number")
        elif choices and values[0] not in choices:
            text = f"{launch.spelt[name]} is {values[0]!r}, which sglang 0.5.23 does not take; "
            yield warning(launch.spelt[name], text + nearest(values[0], choices), actual=values[0])


def _numbers(launch: Launch, length: str) -> Iterator[Finding]:
    """Counts, fractions and the context length that is called `length`."""
    for name, values in launch.flags.items():
        if values and UNKNOWN.search(values[0]):
            continue
        value = launch.number(name)
        if name in COUNTS and (value is None or value < 1):
            yield _wrong(launch, name, "a whole number of 1 or more")
        elif name in FRACTIONS and not 0 < (real(_number(launch.value(name))) or 0) <= 1:
            yield _wrong(launch, name, "a share above 0 and up to 1")
        elif name == length and (launch.context(name) or 0) < 1:
            automatic = name == "max-model-len" and (launch.value(name) or "").lower() in ("-1", "auto")
            if not automatic:
                yield _wrong(launch, name, "tokens, also as 128k; case counts")


def _wrong(launch: Launch, name: str, needed: str) -> Finding:
    flag, given = launch.spelt[name], launch.value(name)
    said = f"is {given!r}" if given is not None else "has no value"
    return error(flag, f"{flag} {said}, needed: {needed}", actual=given, fix=f"correct {flag}", given=given)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _vllm_flags(launch: Launch) -> Iterator[Finding]:
    for name, written in launch.spelt.items():
        if name in _TAKE_VALUE and not launch.flags[name]:
            yield error(written, f"{written} has no value", fix=f"write its value behind {written}")
        if re.search(r"\s", written):
            continue
        flag, _, rest = written.lstrip("-").replace("_", "-").partition(".")
        if flag in VLLM_REMOVED:
            key = VLLM_REMOVED[flag]
            text = f"{written} is no option of vLLM any more: {key} of --speculative-config took its place"
            yield error(written, text, actual=written, fix=f"--speculative-config '{{\"{key}\": ...}}'", nearest=key)
            continue
        near = _nearest(flag, VLLM_FLAGS)
        if near is not None and near != flag and not near.startswith(flag):
            full = f"--{near}.{rest}" if rest else f"--{near}"
            text = f"{written} is no option of vLLM; did you mean {full}?"
            yield error(written, text, actual=written, fix=full, nearest=full)


def _given_twice(launch: Launch) -> Iterator[Finding]:
    without = replace(launch, flags={name: v for name, v in launch.flags.items() if name not in SPEC_FLAGS})
    for flag, key in SPEC_FLAGS.items():
        if launch.value(flag) is not None and key in speculative_config(without):
            text = f"--{flag} beside {key} in --speculative-config: vLLM takes one of them"
            yield error(f"--{flag}", text, actual=launch.value(flag), fix=f"drop --{flag}")


def _vllm_config(config: dict[str, Any]) -> Iterator[Finding]:
    subject = "--speculative-config"
    for key in config:
        name = key.replace("-", "_")
        if name not in VLLM_KEYS and not UNKNOWN.search(key):
            near = _nearest(name, VLLM_KEYS)
            tell, hint = (warning, "") if near is None else (error, f"; did you mean {near}?")
            yield tell(subject, f"{key!r} is no key of vLLM's speculative config{hint}", actual=key, nearest=near)
    method = config.get("method")
    if isinstance(method, str) and not (method in VLLM_METHODS or method.endswith("_mtp") or UNKNOWN.search(method)):
        near = _nearest(method.lower().replace("-", ""), VLLM_METHODS, 0.7)
        tell, hint = (warning, "") if near is None else (error, f"; did you mean {near!r}?")
        yield tell(subject, f"method {method!r} is none that vLLM knows{hint}", actual=method, fix=f"method {near}")
    elif method is not None and not isinstance(method, str):
        yield error(subject, f"method is {method!r}, needed: a name such as 'eagle3'", actual=method)
    yield from _rejection(config)
    steps = config.get("num_speculative_tokens")
    steps = 1 if steps is None else steps
    if isinstance(steps, str) and not UNKNOWN.search(steps):
        steps = _number(steps)
    if not isinstance(steps, str) and (whole(steps) or 0) < 1:
        given = config["num_speculative_tokens"]
        text = f"num_speculative_tokens is {given!r}, needed: a whole number of 1 or more"
        yield error(subject, text, actual=given, fix='"num_speculative_tokens": 3')


def _rejection(config: dict[str, Any]) -> Iterator[Finding]:
    """vLLM's rejection_sample_method, and the rates that belong to `synthetic` alone."""
    subject, method = "--speculative-config", config.get("rejection_sample_method", "standard")
    rates = [key for key in SYNTHETIC_KEYS if config.get(key) is not None]
    if method not in REJECTION_METHODS and not UNKNOWN.search(str(method)):
        text = f"rejection_sample_method is {method!r}, vLLM takes {', '.join(REJECTION_METHODS)}"
        yield error(subject, text, actual=method, fix="drop rejection_sample_method")
    elif method in ("standard", "block") and rates:
        text = f"{rates[0]} without rejection_sample_method synthetic: vLLM does not start"
        yield error(subject, text, actual=config[rates[0]], fix=f"drop {', '.join(rates)}")


def _nearest(name: str, known: Iterable[str], alike: float = ALIKE) -> str | None:
    """The known name that `name` most probably misspells; None when nothing is that much alike."""
    best, ratio = closest(name, known)
    return best if ratio >= alike else None
