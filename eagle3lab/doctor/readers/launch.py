"""Launch lines of SGLang and vLLM in any spelling: one parser for `--launch`, launch files and `launch_args`.

`--flag value`, `--flag=value`, repeated flags (the last one wins, as in argparse), abbreviated flags, vLLM's `-sc`,
`-sc.key value` and `--spec-method`, shell scripts with variables and other commands around the server's, and files
that hold them (readers/launch_files.py). Only the text is read and nothing is executed: a variable is known when the
text itself sets it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers import shell
from eagle3lab.doctor.readers.bounded import ReadError, read_text
from eagle3lab.doctor.readers.command import Server, server
from eagle3lab.doctor.readers.launch_files import listed, server_of
from eagle3lab.doctor.run import existing

ALIASES = {
    "model": "model-path",
    "tp-size": "tp",
    "tensor-parallel-size": "tp",
    "pp-size": "pp",
    "pipeline-parallel-size": "pp",
    "speculative-draft-model": "speculative-draft-model-path",
    "speculative-algo": "speculative-algorithm",
    "sc": "speculative-config",
}
SHORT = ("-sc", "-tp", "-pp", "-dp")
"""Options of vLLM with one dash; every other word with one dash is taken for a value."""
SPEC_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
"""vLLM's flags for one key of its speculative config (engine/arg_utils.py), and the key."""
KNOWN = (
    "model-path",
    "tp",
    "pp",
    "speculative-algorithm",
    "speculative-draft-model-path",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
    "speculative-token-map",
    "speculative-attention-mode",
    "speculative-draft-attention-backend",
    "speculative-config",
    *SPEC_FLAGS,
    "enable-return-aux-hidden-states",
    "return-aux-hidden-state-layer-ids",
    "enable-return-hidden-states",
    "return-hidden-states-mode",
    "chunked-prefill-size",
    "disable-radix-cache",
    "context-length",
    "max-model-len",
    "attention-backend",
    "prefill-attention-backend",
    "decode-attention-backend",
    "forward-hooks",
    "no-enable-prefix-caching",
    "enable-prefix-caching",
    "enable-chunked-prefill",
    "no-enable-chunked-prefill",
    "kv-transfer-config",
    "config",
)
"""Flags that some check reads; an unambiguous abbreviation of one of them is understood (argparse allows it)."""
KNOWN_FLAGS = frozenset(KNOWN)
_MORE = re.compile(r"\$[{(]?(\w*(ARG|OPT|FLAG|EXTRA|PARAM|SPEC)\w*|[@*]|\w+\[)", re.IGNORECASE)
_SUFFIXES = {
    "context-length": {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30},
    "max-model-len": {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
}
"""Suffixes of a context length: SGLang 0.5.23's --context-length, vLLM 0.33.0's --max-model-len; both tell case."""


@dataclass(frozen=True)
class Launch:
    """A parsed launch line.

    Fields:
        flags: canonical flag name without dashes -> the values of its last occurrence, in order ([] for a switch).
        spelt: canonical name -> the flag as written, last occurrence.
        times: canonical name -> how often it was written. words: all words that are not flags or their values.
    """

    flags: dict[str, list[str]]
    spelt: dict[str, str]
    times: dict[str, int]
    words: tuple[str, ...]

    def has(self, flag: str) -> bool:
        """Whether the flag was written."""
        return flag in self.flags

    def value(self, flag: str) -> str | None:
        """First value of the flag's last occurrence; None when absent or a bare switch."""
        values = self.flags.get(flag)
        return values[0] if values else None

    def number(self, flag: str) -> int | None:
        """The flag's value as a whole number; None when absent or not one."""
        try:
            return int(str(self.value(flag)))
        except ValueError:
            return None

    def complete(self) -> bool:
        """Whether all flags are in sight: no `--config` file, no `$EXTRA_ARGS` whose text is not known."""
        spare = [word for values in self.flags.values() for word in values[1:] if shell.UNKNOWN.search(word)]
        words = [*self.words, *(word for values in self.flags.values() for word in values)]
        return not (self.has("config") or spare or any(_MORE.match(word) for word in words))

    def context(self, flag: str) -> int | None:
        """`--context-length` or `--max-model-len` in tokens, 128k too; None when absent or no number of tokens."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([A-Za-z]{1,2})\s*", self.value(flag) or "", re.ASCII)
        if match is None:
            return self.number(flag)
        times = _SUFFIXES[flag].get(match[2])
        if times is None or ("." in match[1] and times % 1000):
            return None  # 1.5Ki is refused by both
        return int(Decimal(match[1]) * times)


def canonical(flag: str) -> str:
    """`--speculative_algo` -> `speculative-algorithm`; an unknown flag stays as it is (without dashes).

    Of vLLM's dotted flags what stands in front of the dot is looked up: `-sc.model` -> `speculative-config.model`.
    """
    name, dot, key = flag.lstrip("-").replace("_", "-").lower().partition(".")
    name = ALIASES.get(name, name)
    longer = [] if name in KNOWN or len(name) < 4 else [known for known in KNOWN if known.startswith(name)]
    return (longer[0] if len(longer) == 1 else name) + dot + key


def parse_args(args: Any) -> Launch:
    """Parse `launch_args`: a list of words, or one text; of a script or of `bash -c` the server's command."""
    words = server(args).words
    flags: dict[str, list[str]] = {}
    spelt: dict[str, str] = {}
    times: dict[str, int] = {}
    loose: list[str] = []
    current: str | None = None
    for word in words:
        if (word.startswith("--") and len(word) > 2) or re.split("[.=]", word, maxsplit=1)[0] in SHORT:
            flag, equals, value = word.partition("=")
            current = canonical(flag)
            flags[current] = [value] if equals else []
            spelt[current] = flag
            times[current] = times.get(current, 0) + 1
            if equals:
                current = None
        elif current is not None:
            flags[current].append(word)
        else:
            loose.append(word)
    return Launch(flags, spelt, times, tuple(loose))


def engine_of(args: Any) -> str:
    """`vllm` when the words name vLLM or its speculative config, else `sglang`."""
    launch = parse_args(args)
    vllm_flags = {"speculative-config", "max-model-len", "no-enable-prefix-caching", "kv-transfer-config", *SPEC_FLAGS}
    words = [*launch.words, *(value for values in launch.flags.values() for value in values)]  # behind docker's flags
    if any(re.fullmatch(r"sglang(\.[\w.]+)?", word) for word in words):
        return "sglang"
    named = any(re.search(r"(^|/)vllm(\.|/vllm-openai|$)|^vllm/", word) for word in launch.words)
    named = named or any(re.match(r"vllm(\.entrypoints|/vllm-openai|$)", word) for word in words)
    dotted = any(flag.startswith("speculative-config.") for flag in launch.flags)
    return "vllm" if named or dotted or vllm_flags & launch.flags.keys() else "sglang"


def speculative_config(launch: Launch) -> dict[str, Any]:
    """vLLM's speculative config as a mapping; {} when absent.

    `--speculative-config '{...}'`; keys given as `--speculative-config.key value` replace all of it, as in vLLM's
    parser; `--spec-method`, `--spec-model` and `--spec-tokens` add their key.
    """
    found: dict[str, Any] = {}
    for flag, values in launch.flags.items():
        if flag.startswith("speculative-config.") and values:
            key, _, below = flag.removeprefix("speculative-config.").replace("-", "_").partition(".")
            value = values[0].split(",") if flag.endswith("+") else _typed(values[0])
            outer = found.get(key)
            nested = {**(outer if isinstance(outer, dict) else {}), below: value}
            found[key.removesuffix("+")] = nested if below else value
    if not found:
        parsed = _typed(launch.value("speculative-config") or "")
        found = {str(key).replace("-", "_"): value for key, value in parsed.items()} if isinstance(parsed, dict) else {}
    for flag, key in SPEC_FLAGS.items():
        text = launch.value(flag)
        if text is not None:
            found[key] = _typed(text) if key == "num_speculative_tokens" else text
    return found


def _typed(text: str) -> Any:
    """A dotted value as vLLM reads it: JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read(value: str, facts: Facts) -> None:
    """`--launch`: a launch line, or the path of a script, a Dockerfile, a unit or a YAML or JSON file that holds it."""
    is_path = "\n" not in value and " " not in value.strip() and not value.startswith("-") and not listed(value)
    source, suffix = "--launch", ""
    try:
        if is_path:
            path = existing(value, "--launch")
            text, source, suffix = read_text(path), str(path), path.suffix.lower()
        else:
            text = value
        found = server_of(text, source, suffix)
    except ReadError as error:
        facts.broken("launch line", error.what, fix="correct the launch line")
        return
    flags = any(word.startswith("-") for word in found.words)
    if not flags and not is_path:
        raise UsageError(f"no flags in {source}", rule="a launch line has --flags", fix="paste the whole command")
    if not found.found and not (flags and KNOWN_FLAGS & parse_args(found.words).flags.keys()):
        facts.could_not(source, "no server command found", fix="paste the server's command as it is run")
        return
    facts.put("launch_args", found.words, source)
    remark(facts, found, source)
    env = {name: one for name, one in found.seen(facts.mapping("env")).items() if one is not None}
    if env or facts.has("env"):
        facts.put("env", env, source)


def remark(facts: Facts, found: Server, source: str) -> None:
    """Say what of a launch line is not judged: other servers, words that the text does not settle, its config file."""
    if found.cut:
        why = f"the line before {found.cut[:80]} does not end with a backslash, as the others do: a shell ends the "
        why += "command there (a comment line in between and a blank behind the backslash do the same)"
        facts.broken("launch line", why, fix="end every line of the command but the last one with a backslash")
    if found.others:
        facts.could_not(f"{found.others} more launch lines in {source}", "one server is checked, the last one",
                        fix="give each launch line by itself")  # fmt: skip
    if unknown := sorted({word for word in found.words if shell.UNKNOWN.search(word)}):
        facts.could_not(f"{', '.join(unknown)[:120]} in {source}", "nothing in the text says what it stands for",
                        fix="paste the command as it is run: set -x prints it")  # fmt: skip
    named = parse_args(found.words).value("config")
    if named:
        facts.could_not(f"the flags in {named[:120]}", "a launch line is read, not the files that it names",
                        fix=f"eagle3lab doctor --launch {named[:120]}")  # fmt: skip


def follow(facts: Facts) -> None:
    """Read the draft and the target that the launch line names, where they lie on this disk; they are said.

    The engine would load just these; what was given by another flag counts over them.
    """
    from eagle3lab.doctor.readers.checkpoint import read_draft, read_target

    args = facts.get("launch_args")
    launch = parse_args(args)
    draft, target = named_paths(launch, engine_of(args))
    for path, kind, reader in ((draft, "draft", read_draft), (target, "target", read_target)):
        if facts.has(f"{kind}_config") or facts.has(f"{kind}_headers") or not path or shell.UNKNOWN.search(path):
            continue
        folder = Path(path).expanduser()
        try:
            there = (folder / "config.json").is_file()
        except (OSError, ValueError):
            there = False
        if there:
            facts.also_read(kind, str(folder), "the launch line")
            reader(str(folder), facts)


def named_paths(launch: Launch, engine: str) -> tuple[str | None, str | None]:
    """(draft, target) as the launch line names them: paths or names on a hub; None where it names none."""
    if engine == "sglang":
        return launch.value("speculative-draft-model-path"), launch.value("model-path")
    model = speculative_config(launch).get("model")
    behind = launch.words[launch.words.index("serve") + 1 :] if "serve" in launch.words else ()
    return (str(model) if model is not None else None), launch.value("model-path") or next(iter(behind), None)


def environment(facts: Facts) -> dict[str, Any]:
    """Variables that the server sees: those given, and over them the ones that the launch line sets or takes away."""
    env = server(facts.get("launch_args")).seen(facts.mapping("env"))
    return {name: value for name, value in env.items() if value is not None}
