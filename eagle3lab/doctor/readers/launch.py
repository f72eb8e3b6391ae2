"""Launch lines of SGLang and vLLM in any spelling: one parser for `--launch`, launch files and `launch_args`.

`--flag value`, `--flag=value`, repeated flags (the last one wins, as in argparse), abbreviated flags, vLLM's `-sc`,
`-sc.key value` and `--spec-method`, shell scripts with variables and other commands around the server's, and YAML or
JSON config files of the same flags. Only the text is read and nothing is executed: a variable is known when the text
itself sets it.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import UsageError
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers import shell
from eagle3lab.doctor.readers.bounded import ReadError, parse_json, parse_yaml, read_text
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
_ENV = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SPECULATIVE = re.compile(r"--speculative|--spec[-_](method|model|tokens)\b|-sc(?=[.=]|$)")
_MODEL = re.compile(r"--model")
_LISTED = re.compile(r"\s*(?:CMD|ENTRYPOINT)?\s*(\[\s*\".*\])\s*", re.DOTALL)
"""A launch line as a JSON list of words, as in a Dockerfile."""
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
    """Parse `launch_args`: a list of words, or one text."""
    words = split_words(args) if isinstance(args, str) else [str(word) for word in args or []]
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


def split_words(text: str) -> list[str]:
    """Words of the server's command in a shell text, the assignments before it first."""
    return _server(text)[0]


def _server(text: str) -> tuple[list[str], int]:
    """(words of the server's command with the assignments before it, how many other servers the text starts).

    The server is the last command with speculative and model flags, else with either, else the whole text.
    """
    try:
        found = shell.commands(text)
        for line in list(found):
            for option, word in itertools.pairwise(line):
                if re.fullmatch(r"-\w*c", option):  # bash -lc "python3 -m sglang.launch_server ..."
                    found += shell.commands(word)
    except shell.TooLong as error:
        raise ReadError(f"the launch line comes to {error}, variables put in", rule="a launch line is short") from error
    except ValueError as error:
        raise ReadError(f"the launch line has an open quote ({error})", rule="quotes come in pairs") from error
    for flags in ((_SPECULATIVE, _MODEL), (_SPECULATIVE,), (_MODEL,)):
        servers = [n for n, line in enumerate(found) if all(any(map(flag.match, line)) for flag in flags)]
        if servers:
            before = [word for line in found[: servers[-1]] for word in _settings(line)]
            unset = {name for line in found[: servers[-1]] if line[0] == "unset" for name in line[1:]}
            kept = [word for word in before if word.partition("=")[0] not in unset]
            return kept + found[servers[-1]], len(servers) - 1
    return [word for line in found for word in line], 0


def _settings(line: list[str]) -> list[str]:
    """The assignments of a command that is nothing but assignments, or `export` of them."""
    words = line[1:] if line[0] == "export" else line
    return words if all(_ENV.match(word) for word in words) else []


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
    """`--launch`: a launch line, or the path of a shell script or of a YAML or JSON file with the flags."""
    path = Path(value)
    is_path = "\n" not in value and " " not in value.strip() and not value.startswith("-")
    is_path = is_path and not _LISTED.fullmatch(value)
    try:
        if is_path:
            path = existing(value, "--launch")
            text, source = read_text(path), str(path)
        else:
            text, source = value, "--launch"
        if is_path and path.suffix.lower() in (".yaml", ".yml", ".json"):
            parsed = parse_json(text, source).value if path.suffix.lower() == ".json" else parse_yaml(text, source)
            args, env = _from_config(parsed, source)
        elif listed := _LISTED.fullmatch(text):
            args, env = _from_config(parse_json(listed[1], source).value, source)
        else:
            words, others = _server(text)
            args, env = _from_command(words)
            if others:
                facts.could_not(f"{others} more launch lines in {source}", "one server is checked, the last one",
                                fix="give each launch line by itself")  # fmt: skip
    except ReadError as error:
        facts.broken("launch line", error.what, fix="correct the launch line")
        return
    if not any(word.startswith("-") for word in args):
        raise UsageError(f"no flags in {source}", rule="a launch line has --flags", fix="paste the whole command")
    facts.put("launch_args", args, source)
    if unknown := sorted({word for word in args if shell.UNKNOWN.search(word)}):
        facts.could_not(f"{', '.join(unknown)[:120]} in {source}", "nothing in the text says what it stands for",
                        fix="paste the command as it is run: set -x prints it")  # fmt: skip
    named = parse_args(args).value("config")
    if named:
        facts.could_not(f"the flags in {named[:120]}", "a launch line is read, not the files that it names",
                        fix=f"eagle3lab doctor --launch {named[:120]}")  # fmt: skip
    if env:
        facts.put("env", {**facts.mapping("env"), **env}, source)


def _from_config(parsed: Any, source: str) -> tuple[list[str], dict[str, str]]:
    """Flags of a config file: `{flag: value}` (true is a switch, false leaves it out), or a list of words.

    A container's `command` and `args` (compose, Kubernetes) are found wherever they stand in the file.
    """
    if isinstance(parsed, list) and all(isinstance(word, (str, int, float)) for word in parsed):
        return [str(word) for word in parsed], {}
    if (inner := _container(parsed)) is not None:
        return inner
    if not isinstance(parsed, dict):
        raise ReadError(f"{source} holds a {type(parsed).__name__}", rule="flags and values")
    words: list[str] = []
    for key, value in parsed.items():
        if value is None or value is False:
            continue
        words.append("--" + str(key).lstrip("-"))
        if value is not True:
            items = value if isinstance(value, list) else [value]
            words += [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
    return words, {}


def _container(parsed: Any) -> tuple[list[str], dict[str, str]] | None:
    """(words, variables) of the first container whose command or args hold a flag of a model server; None without."""
    stack = [parsed]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            words: list[str] = []
            for key in ("entrypoint", "command", "args"):
                value = item.get(key)
                words += split_words(value) if isinstance(value, str) else []
                for word in value if isinstance(value, list) else ():
                    script = isinstance(word, str) and words and re.fullmatch(r"-\w*c", words[-1])
                    words += split_words(word) if script else [str(word)]
            if any(_MODEL.match(word) or _SPECULATIVE.match(word) for word in words):
                return words, _variables(item.get("environment", item.get("env")))
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            stack.extend(reversed(item))
    return None


def _variables(given: Any) -> dict[str, str]:
    """`{A: b}`, `["A=b"]` or `[{name: A, value: b}]` as a mapping."""
    if isinstance(given, dict):
        return {str(name): str(value) for name, value in given.items()}
    found: dict[str, str] = {}
    for item in given if isinstance(given, list) else []:
        if isinstance(item, dict) and "name" in item:
            found[str(item["name"])] = str(item.get("value", ""))
        elif isinstance(item, str) and "=" in item:
            name, _, value = item.partition("=")
            found[name] = value
    return found


def _from_command(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that holds a speculative or model flag, and the variables set in front of it or exported before."""
    env: dict[str, str] = {}
    kept: list[str] = []
    for word in words:
        if not kept and word == "export":
            continue
        if _ENV.match(word) and not any(w.startswith("--") for w in kept):
            name, _, text = word.partition("=")
            env[name] = text
        else:
            kept.append(word)
    return kept, env


def read_env(value: str, facts: Facts) -> None:
    """`--env FILE`: `NAME=value` lines (`env > FILE`, `.env`, `export NAME=value`) or a YAML or JSON mapping."""
    path = existing(value, "--env")
    try:
        text = read_text(path)
        parsed = (
            parse_env(text) if path.suffix.lower() not in (".yaml", ".yml", ".json") else parse_yaml(text, str(path))
        )
        if not isinstance(parsed, dict):
            raise ReadError(f"{path} holds a {type(parsed).__name__}", rule="NAME=value lines")
    except ReadError as error:
        facts.broken(str(path), error.what, fix=f"env > {path}")
        return
    if not parsed:
        facts.could_not(str(path), "it holds no NAME=value line", fix=f"env > {path}")
    facts.put("env", {str(name): item for name, item in parsed.items()}, str(path))


def parse_env(text: str) -> dict[str, str]:
    """`NAME=value` lines as a mapping; quotes around a value and `export` are dropped, other lines are left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip().removeprefix("export ").strip()
        if _ENV.match(line):
            name, _, item = line.partition("=")
            if item.lstrip()[:1] not in ("'", '"'):
                item = re.sub(r"\s#.*", "", item)  # a comment, as dotenv files have it
            found[name] = item.strip().strip("'\"")
    return found
