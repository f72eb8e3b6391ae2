"""SGLang launch lines: built from a profile and a plan, and checked before anything is started."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import ServerError, UsageError, closest, nearest
from eagle3lab.targets.plan import Fit
from eagle3lab.targets.profiles import Profile

MODULE = "sglang.launch_server"
OPTIONS_FILE = Path(__file__).with_name("sglang_options.json")
CONTEXT_STEP = 1024
"""Contexts are rounded down to a multiple of this many tokens, so that one request never needs the last page."""
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")
"""Hooks are never called by a replayed graph (SGLang 0.5.23)."""
REPORTED = {
    "--model-path": "model_path",
    "--tp-size": "tp_size",
    "--context-length": "context_length",
    "--speculative-algorithm": "speculative_algorithm",
    "--speculative-draft-model-path": "speculative_draft_model_path",
    "--speculative-num-steps": "speculative_num_steps",
    "--speculative-eagle-topk": "speculative_eagle_topk",
    "--speculative-num-draft-tokens": "speculative_num_draft_tokens",
    "--enable-return-aux-hidden-states": "enable_return_aux_hidden_states",
    "--return-aux-hidden-state-layer-ids": "return_aux_hidden_state_layer_ids",
    "--disable-radix-cache": "disable_radix_cache",
}
"""Option -> field of the server's own `/server_info` that must repeat it."""


def base_arguments(
    profile: Profile, *, model_path: str, ranks: int, port: int, room: Fit | None, context: int | None
) -> list[str]:
    """Words after `-m sglang.launch_server` for a plain server on the loopback interface.

    Args:
        room: the plan of one GPU; sets the memory fraction and, without `context`, the context length. None leaves
            both to SGLang.
    """
    words = ["--model-path", model_path, "--tp-size", str(ranks), "--host", "127.0.0.1", "--port", str(port)]
    if profile.trust_remote_code:
        words.append("--trust-remote-code")
    if room is not None:
        words += ["--mem-fraction-static", f"{room.mem_fraction:.3f}"]
        context = context or room.context(profile.model.context) // CONTEXT_STEP * CONTEXT_STEP
        if not room.graphs:
            words += ["--chunked-prefill-size", str(room.prefill_chunk), *NO_GRAPHS]
    if context:
        words += ["--context-length", str(context)]
    for name, value in (profile.serve or {}).get("arguments", {}).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def drafter_arguments(draft: str, *, steps: int, algorithm: str = "EAGLE3") -> list[str]:
    """Speculative decoding with a chain of `steps` drafts; top-k 1 fixes draft tokens to steps + 1."""
    chain = (
        ("--speculative-num-steps", steps),
        ("--speculative-eagle-topk", 1),
        ("--speculative-num-draft-tokens", steps + 1),
    )
    words = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    return words + [str(word) for pair in chain for word in pair]


def capture_arguments(layer_ids: Sequence[int], hook: Mapping[str, Any], *, logits_processor: str) -> list[str]:
    """Draft-free capture of aux states with a forward hook on the logits processor.

    EAGLE3 without a draft path is right here: with aux capture enabled the algorithm resets to none and the target is
    loaded once. Radix cache and CUDA graphs are off, because both hide rows from the hook.

    Args:
        layer_ids: as this target's family needs them (`eagle3lab.points.written`).
        hook: config of `eagle3lab.capture.sglang_hook:create`.
        logits_processor: pattern on module names; a loaded drafter has a logits processor of its own.
    """
    factory = "eagle3lab.capture.sglang_hook:create"
    hooks = [{"name": "eagle3lab", "target_modules": [logits_processor], "hook_factory": factory, "config": dict(hook)}]
    words = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    words += ["--return-aux-hidden-state-layer-ids", *(str(i) for i in layer_ids), "--disable-radix-cache"]
    return [*words, *NO_GRAPHS, "--forward-hooks", json.dumps(hooks)]


def probe_arguments(draft: str) -> list[str]:
    """The hook that reports what the drafter gets and has loaded (`eagle3lab.capture.sglang_probe`).

    Graphs are off because a replayed graph calls no hook: for a look, not for production.

    Args:
        draft: the drafter's folder as the server sees it, whose files are compared with what is loaded.
    """
    hook = {
        "name": "eagle3lab-probe",
        "target_modules": ["fc", "*.fc", "logits_processor", "*.logits_processor"],
        "hook_factory": "eagle3lab.capture.sglang_probe:create",
        "config": {"draft": draft},
    }
    return [*NO_GRAPHS, "--forward-hooks", json.dumps([hook])]


def command(arguments: Sequence[str], *, python: str) -> list[str]:
    """The whole command line."""
    return [python, "-m", MODULE, *arguments]


def expected_report(arguments: Sequence[str]) -> dict[str, Any]:
    """Fields of `/server_info` that these arguments promise. The last occurrence of an option counts."""
    promised: dict[str, Any] = {}
    for name, values in _parse(arguments):
        if (found := REPORTED.get(name)) is None:
            continue
        kind = _options()[name]
        typed = [int(value) if kind.get("type") == "int" else value for value in values]
        promised[found] = True if kind["takes"] == "none" else typed if kind["takes"] == "many" else typed[0]
    if promised.get("enable_return_aux_hidden_states"):
        promised.pop("speculative_algorithm", None)  # it resets itself to none
    context = promised.get("context_length", "")
    if not context.isdecimal():
        promised.pop("context_length", None)  # SGLang also takes 128k and the like, and reports a number
    else:
        promised["context_length"] = int(context)
    return promised


def check_arguments(arguments: Sequence[str], *, python: str | None = None) -> str:
    """Refuse unknown options and impossible values; returns who judged them.

    SGLang's own parser is asked where `python` can import it; else the options of release 0.5.23 are compared, as
    stored in `sglang_options.json`. Neither loads a model nor touches a GPU.

    Raises:
        UsageError: with the option and, for an unknown one, the nearest name.
    """
    _check_stored(arguments)
    if python is not None and (version := _ask_sglang(python, arguments)):
        return f"sglang {version}'s own parser"
    return "the stored options of sglang 0.5.23 (sglang is not installed here)"


def stored_option(flag: str) -> dict[str, Any] | None:
    """What SGLang 0.5.23 takes behind `--flag` (also shortened): `takes`, and `type` and `choices` where it has them.

    None for a flag that it does not know, or that is short for several.
    """
    try:
        return _options()[_full_name(flag)]
    except UsageError:
        return None


def nearest_option(flag: str) -> tuple[str, float]:
    """(the spelling of SGLang 0.5.23 that is nearest to `flag`, how alike they are from 0 to 1)."""
    return closest(flag.lower(), _spellings())


def _check_stored(arguments: Sequence[str]) -> None:
    for name, values in _parse(arguments):
        kind = _options()[name]
        takes = kind["takes"]
        counts = {"none": (0, 0), "one": (1, 1), "optional": (0, 1), "many": (0, 10**6)}[takes]
        if not counts[0] <= len(values) <= counts[1]:
            rule = {"none": "it takes no value", "one": "it takes one value"}.get(takes, "it takes at most one value")
            raise UsageError(f"launch option {name} has {len(values)} values {values}", rule=rule)
        for value in values:
            if "type" in kind and not _is_number(value, kind["type"]):
                raise UsageError(f"launch option {name} {value!r}", rule=f"{kind['type']} (sglang 0.5.23)")
            if kind.get("choices") and value not in [str(choice) for choice in kind["choices"]]:
                raise UsageError(f"launch option {name} {value!r}", rule=nearest(value, map(str, kind["choices"])))


def _ask_sglang(python: str, arguments: Sequence[str]) -> str | None:
    """Version of the sglang that parsed the arguments; None where it is not installed."""
    script = (
        "import importlib.util as u, sys\n"
        "if u.find_spec('sglang') is None: sys.exit(77)\n"
        "import sglang\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "prepare_server_args(sys.argv[1:])\n"
        "print('parsed by', sglang.__version__)\n"
    )
    try:
        done = subprocess.run(
            [python, "-c", script, *arguments], capture_output=True, text=True, timeout=300, check=False
        )
    except OSError as error:
        raise UsageError(
            f"--python {python} cannot be run ({error.strerror})", rule="the engine's interpreter"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(
            f"sglang's parser in {python} gave no answer in 300 s", fix=f"{python} -m sglang.launch_server -h"
        ) from error
    if done.returncode == 77:
        return None
    if done.returncode != 0 or "parsed by" not in done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServerError(f"sglang refuses the launch arguments: {last}", fix="eagle3lab serve --dry-run")
    return done.stdout.split()[-1]


@functools.cache
def _options() -> dict[str, dict[str, Any]]:
    return json.loads(OPTIONS_FILE.read_text(encoding="utf-8"))["options"]


@functools.cache
def _spellings() -> dict[str, str]:
    return {alias: name for name, kind in _options().items() for alias in (name, *kind.get("aliases", ()))}


def _parse(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(full option name, its values) in order; prefixes are completed as argparse does."""
    parsed: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            parsed.append((_full_name(flag), [value] if equals else []))
        elif parsed:
            parsed[-1][1].append(word)
        else:
            raise UsageError(f"launch argument '{word}'", rule="launch arguments begin with an --option")
    return parsed


def _full_name(flag: str) -> str:
    spellings = _spellings()
    if flag in spellings:
        return spellings[flag]
    longer = {name for spelling, name in spellings.items() if spelling.startswith(flag)}
    if len(longer) == 1:
        return longer.pop()
    if longer:
        raise UsageError(f"launch option '{flag}' is ambiguous", rule="could be " + ", ".join(sorted(longer)[:5]))
    raise UsageError(f"unknown launch option '{flag}' (sglang 0.5.23)", rule=nearest(flag, spellings))


def _is_number(value: str, kind: str) -> bool:
    try:
        int(value) if kind == "int" else float(value)
    except ValueError:
        return False
    return True
