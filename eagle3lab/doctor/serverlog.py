"""What a server log tells: engine, algorithm in force, layer ids, dropped keys, acceptance. No findings in here.

SGLang 0.5.23 prints its settings as `server_args={'name': 'value', ...}`, older ones as `ServerArgs(name='value')`,
vLLM as `speculative_config=SpeculativeConfig(method='eagle3', ...)` or `non-default args: {...}`. Lines are cut at
`LINE_LIMIT` characters; a log is text from outside and nothing in it is trusted to be short or well formed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3lab.acceptance.counts import AcceptanceCounts
from eagle3lab.acceptance.sources import (
    GAUGE_INTERVAL,
    Gauge,
    from_vllm_log,
    gauges_from_sglang_log,
    gauges_from_vllm_log,
    without_escapes,
)
from eagle3lab.core.errors import AcceptanceError

LINE_LIMIT = 40_000
KEY_LIMIT = 200
STATEMENT_LINES = 1000
"""Lines over which one print of the settings may be spread."""
OPEN_LIMIT = 50
"""Prints without an end after which no more are put together: a log with so many was cut."""

_SETTING = r"""(?<![\w.]){name}['"]?\s*[=:]\s*(?:'([^']*)'|"([^"]*)"|([\w./:+-]+))"""
_FLAGS = (
    *("model_path", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps"),
    *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_token_map", "attention_backend"),
    *("speculative_draft_attention_backend", "speculative_adaptive", "context_length", "decode_log_interval"),
    "enable_return_aux_hidden_states",
)
_SETTINGS = {name: re.compile(_SETTING.format(name=name)) for name in _FLAGS}
_VLLM_CONFIG = re.compile(r"speculative_config['\"]?\s*[=:]\s*(SpeculativeConfig\([^)]*\)|\{[^}]*\}|None)")
_VLLM_METHOD = re.compile(r"(?<!\w)(?:spec_)?method['\"]?\s*[=:]\s*['\"]?([\w-]+)")
_PRINTED = re.compile(r"ServerArgs\(|(?:server_args|speculative_config|non-default args)['\"]?\s*[=:]\s*[\w.]*[({]")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_LAYERS = re.compile(
    r"(?:aux(?:iliary)?[ _](?:hidden[ _]states?[ _])?layers?|layer_ids)[^\[(\d\n]{0,60}[\[(]\s*(\d+(?:\s*,\s*\d+)*)",
    re.IGNORECASE,
)
_TENSOR = r"['\"]?(\w[\w-]*(?:\.[\w-]+)+)['\"]?"
_DROPPED = (
    re.compile(rf"[Pp]arameter {_TENSOR} not found in (?:params_dict|the model)"),
    re.compile(
        r"(?:[Uu]nexpected|[Uu]nused|[Ss]kipp(?:ed|ing)) (?:unexpected |unused |checkpoint )?"
        rf"(?:keys?|weights?|parameters?|tensors?)(?:\(s\)|\b)(?:[^:\[{{\n]{{0,80}}[:\[{{])?[\s:\[{{(]*{_TENSOR}"
    ),
    re.compile(rf"no module or parameter named {_TENSOR}"),
)
_NO_TENSOR = re.compile(
    r"\.(?:safetensors|bin|pt|pth|gguf|json|py|txt|log|ya?ml)$|^[\d.]+$|^v\d|rotary_emb|inv_freq|(?:cos|sin)_cached"
)
"""Names with a dot that are a file's or a release's, and of tables that every engine works out itself."""
_REST = re.compile(rf"\s*,\s*{_TENSOR}")
_MISSING = re.compile(r"weights? (?:were|are) not initialized from (?:the )?checkpoints?:?\s*\{?([^}\n]{0,4000})")
_NO_HOOK = re.compile(r"[Nn]o (?:modules?|match)[^\n]{0,40}hook|hook[^\n]{0,60}(?:matched|matches) (?:no|nothing|0)")
_SYNTHETIC = re.compile(r"rejection_sample_method['\"\\]*[\s=:]+['\"\\]*synthetic\b")
_RATES = re.compile(r"(synthetic_acceptance_(?:length|rates))[+'\"\\]*[\s=:]+['\"\\]*(\[[^\]]{0,200}\]|\d[\d.,]*)")
_SIMULATED = re.compile(r"SGL(?:ANG)?_SIMULATE_ACC_LEN['\"]?\s*[=:]\s*['\"]?(\d+(?:\.\d+)?|\.\d+)")
_RENAMED = re.compile(r"variable SGL_SIMULATE_ACC_LEN is deprecated")
"""SGLang tells so at its start, and does not tell the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLog:
    """Facts of one log.

    Fields:
        engine: sglang, vllm, or None when the log does not tell.
        launch: the settings in force as launch words; () when the log does not print them.
        algorithm: as printed; None when it prints none. off: the log says that there is no speculation.
        layer_ids: ids that the engine says it captures, None when it does not say.
        dropped, missing: parameter names that the loader dropped or left uninitialised.
        gauges: readings; vLLM's are those without counts. counts: vLLM's, None without any.
        impossible: why they cannot be.
        hook_unmatched: a hook matched no module.
        simulated: SGLANG_SIMULATE_ACC_LEN (SGL_... is its older name) above 0 as printed, else None.
        renamed: the older name is set, to what is not said. capture: aux states are returned to clients.
        synthetic: vLLM's rejection_sample_method synthetic with its rates, as printed, else None.
        interval: forward passes between two of SGLang's lines, as printed, else its default.
    """

    engine: str | None
    launch: tuple[str, ...]
    algorithm: str | None
    off: bool
    layer_ids: tuple[int, ...] | None
    dropped: tuple[str, ...]
    missing: tuple[str, ...]
    gauges: tuple[Gauge, ...]
    counts: AcceptanceCounts | None
    impossible: str | None
    hook_unmatched: bool
    simulated: float | None
    interval: int = GAUGE_INTERVAL
    synthetic: str | None = None
    renamed: bool = False
    capture: bool = False


def read_log(text: str) -> ServerLog:
    """Parse a whole log; see `ServerLog`."""
    lines = [line[:LINE_LIMIT] for line in without_escapes(text).splitlines()]
    short = "\n".join(lines)
    printed = _statements(lines)
    settings = _sglang_settings(printed)
    method = _vllm_method(printed)
    vllm = method is not None or "SpecDecoding metrics" in short
    sglang = bool(settings) or "Decode batch" in short
    layers = [match for line in lines if (match := _LAYERS.search(line)) and "Args(" not in line]
    simulated = [float(value) for value in _SIMULATED.findall(short) if float(value) > 0]
    named = settings.get("speculative_algorithm") if sglang else method
    every = settings.get("decode_log_interval", "")
    counts, impossible = None, None
    try:
        counts = from_vllm_log(short)
    except AcceptanceError as error:
        impossible = error.what
    return ServerLog(
        engine="sglang" if sglang else "vllm" if vllm else None,
        launch=tuple(_words(settings)),
        algorithm=None if named in (None, "None", "null") else named,
        off=named in ("None", "null"),
        layer_ids=tuple(int(number) for number in layers[-1][1].split(",")) if layers else None,
        dropped=tuple(dict.fromkeys(_dropped(lines)))[:KEY_LIMIT],
        missing=tuple(dict.fromkeys(_missing(lines)))[:KEY_LIMIT],
        gauges=tuple(gauges_from_sglang_log(short) or gauges_from_vllm_log(short)),
        counts=counts,
        impossible=impossible,
        hook_unmatched=any(_NO_HOOK.search(line) for line in lines if "hook" in line.lower()),
        simulated=simulated[-1] if simulated else None,
        interval=int(every) if re.fullmatch(r"[1-9]\d{0,8}", every, re.ASCII) else GAUGE_INTERVAL,
        synthetic=_synthetic(printed),
        renamed=_RENAMED.search(short) is not None,
        capture=settings.get("enable_return_aux_hidden_states") == "True",
    )


def _statements(lines: list[str]) -> list[str]:
    """The lines, a print of settings that is spread over several (a pretty-printer, a narrow terminal) as one.

    A print whose brackets never close stays as it is, and so does one that is cut at `LINE_LIMIT`.
    """
    found, at, unclosed = [], 0, 0
    while at < len(lines):
        taken = [lines[at]]
        depth = _depth(lines[at]) if unclosed < OPEN_LIMIT and _PRINTED.search(lines[at]) else 0
        while depth > 0 and at + len(taken) < len(lines) and len(taken) < STATEMENT_LINES:
            taken.append(lines[at + len(taken)])
            depth += _depth(taken[-1])
        if depth > 0:
            taken, unclosed = taken[:1], unclosed + 1
        joined = taken[0]
        for line in taken[1:]:
            joined += line if joined[-1:].isalnum() or joined[-1:] == "_" else "\n" + line
        found.append(joined[:LINE_LIMIT])
        at += len(taken)
    return found


def _depth(line: str) -> int:
    """Brackets that a line opens and does not close; those within quotes do not count."""
    bare = _QUOTED.sub("", line)
    return sum(bare.count(mark) for mark in "([{") - sum(bare.count(mark) for mark in ")]}")


def _sglang_settings(lines: list[str]) -> dict[str, str]:
    """Settings of the last line that prints ServerArgs."""
    for line in reversed(lines):
        if "ServerArgs(" in line or "server_args" in line:
            hits = {name: pattern.search(line) for name, pattern in _SETTINGS.items()}
            found = {
                name: next(group for group in hit.groups() if group is not None) for name, hit in hits.items() if hit
            }
            if found:
                return found
    return {}


def _words(settings: dict[str, str]) -> Iterator[str]:
    for name, value in settings.items():
        if value not in ("None", "null", "", "False"):
            yield "--" + name.replace("_", "-")
            yield value


def _vllm_method(lines: list[str]) -> str | None:
    """Method of the last printed speculative config; "None" when it is printed as None, None when it is not printed."""
    flags = None
    for line in reversed(lines):
        if "non-default args" in line and "spec_method" in line:  # --spec-method; the engine prints its config later
            flags = flags or _VLLM_METHOD.search(line)
        match = _VLLM_CONFIG.search(line) if "speculative_config" in line else None
        if match and match[1] == "None":
            return "None"
        method = _VLLM_METHOD.search(match[1]) if match else None
        if method:
            return method[1]
    return flags[1] if flags else None


def _synthetic(lines: list[str]) -> str | None:
    """What the last printed config says of synthetic acceptance; None when it is not asked for."""
    for line in reversed(lines):
        if _SYNTHETIC.search(line) and ("speculative" in line or "-sc" in line):
            rates = _RATES.search(line)
            return "rejection_sample_method synthetic" + (f", {rates[1]} {rates[2]}" if rates else "")
    return None


def _dropped(lines: list[str]) -> Iterator[str]:
    """Names of dropped tensors, of a list every one."""
    for line in lines:
        for pattern in _DROPPED:
            match = pattern.search(line)
            while match:
                if not _NO_TENSOR.search(match[1]):
                    yield match[1]
                match = _REST.match(line, match.end())


def _missing(lines: list[str]) -> Iterator[str]:
    for line in lines:
        match = _MISSING.search(line)
        if match:
            yield from re.findall(r"[\w.]+\.[\w.]+", match[1])
