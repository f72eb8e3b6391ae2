"""`eagle3lab serve`: plan, preflight, start, wait, check what the server says of itself, stop everything."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import ProfileError, ServerError, UsageError
from eagle3lab.core.paths import cache_folder, repository
from eagle3lab.doctor.checks.launch import NAMED_EAGLE3
from eagle3lab.doctor.checks.probe import probe_lines
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.render import headline
from eagle3lab.doctor.run import Inputs, collect, diagnose
from eagle3lab.points import written
from eagle3lab.steps.plan import drafter_shape
from eagle3lab.targets.engine import READY_SECONDS, EngineServer, check_report, request_json
from eagle3lab.targets.fetch import TARGET_MANIFEST, fetched_folder
from eagle3lab.targets.launch import (
    base_arguments,
    capture_arguments,
    check_arguments,
    command,
    drafter_arguments,
    expected_report,
    probe_arguments,
)
from eagle3lab.targets.plan import GIB, Fit, fit, parse_memory
from eagle3lab.targets.profiles import Profile, load_profile
from eagle3lab.targets.shapes import target_shape

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Set for the engine unless the caller's environment says otherwise: nothing is downloaded by surprise."""


@dataclass(frozen=True)
class Launch:
    """A launch line that passed preflight. `promised` is what `/server_info` must repeat.

    `probed`: the line holds the probe's hook, so the log will tell of the drafter.
    """

    arguments: list[str]
    python: str
    port: int
    promised: dict[str, Any]
    notes: list[str]
    probed: bool = False

    @property
    def exit_code(self) -> int:
        """0: a refused launch never gets this far."""
        return 0

    @property
    def command(self) -> list[str]:
        """The whole command, one word an item."""
        return command(self.arguments, python=self.python)

    def as_json(self) -> dict[str, Any]:
        """The command, its words, and what the server has to report."""
        line = shlex.join(self.command)
        return {"command": line, "arguments": self.arguments, "promised": self.promised, "notes": self.notes}

    def as_text(self) -> str:
        """The line alone can be pasted into a shell: notes are comments."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.command)])


def prepare(
    *,
    profile: str = "kimi-k2.5",
    model_path: str | None = None,
    draft: str | None = None,
    algorithm: str = "EAGLE3",
    steps: int | None = None,
    gpus: int | None = None,
    gpu_memory: str | None = None,
    context: int | None = None,
    port: int = 30000,
    python: str = "python3",
    exchange: Path | None = None,
    probe: bool = False,
    extra: Sequence[str] = (),
) -> Launch:
    """Build the launch line and run every check that costs no GPU.

    Args:
        draft: drafter folder or hub id; None serves the target alone.
        algorithm: `--speculative-algorithm`, used with a drafter. steps: drafted tokens a step, default of the profile.
        gpu_memory: of one GPU, such as `96GiB`; sets memory fraction and context.
        exchange: serve for capture, with the hook that shares this folder with `eagle3lab capture --server`.
        probe: with a drafter, add the hook whose report `serve(probe=True)` and `doctor --log` read.
        python: interpreter of the engine. extra: more options, which win over those built here.

    Raises:
        ServerError: the plan or the preflight refuses. UsageError: an option that SGLang does not have.
    """
    chosen = load_profile(profile)
    _refuse_numbers(gpus=gpus, context=context, steps=steps, port=port)
    if model_path is not None and not model_path.strip():
        raise UsageError("--model-path is empty", rule="a folder, or a hub id")
    if steps is not None and draft is None:
        raise UsageError(f"--steps {steps} without --draft", rule="a target that is served alone drafts nothing")
    path = model_path or _weights(chosen)
    if path is None:
        raise ProfileError(f"profile '{profile}' names no model to serve", fix="eagle3lab serve --model-path FOLDER")
    ranks = gpus or (chosen.serve or {}).get("tensor_parallel", 1)
    room = _room(chosen, ranks, gpu_memory, context, served=draft is not None)
    arguments = base_arguments(chosen, model_path=path, ranks=ranks, port=port, room=room, context=context)
    if draft is not None:
        drafted = steps or chosen.draft_tokens
        arguments += drafter_arguments(draft, steps=drafted, algorithm=algorithm)
    if exchange is not None:
        arguments += _capture(chosen, exchange, draft)
    probed = probe and draft is not None
    if probe and draft is not None:
        arguments += probe_arguments(str(Path(draft).absolute()) if Path(draft).is_dir() else draft)
    arguments += extra
    judge = check_arguments(arguments, python=python)
    notes = [f"arguments checked by {judge}", *_notes(chosen, room, draft, path)]
    promised = expected_report(arguments)
    _refuse_by_name(draft, promised)
    report = preflight(command(arguments, python=python), chosen, path, draft)
    notes += [f"{finding.severity}: {finding.message}" for finding in report.findings if finding.severity == "warning"]
    if probed:
        notes.append("the probe's hook: this package on the server's PYTHONPATH; its report: doctor --log FILE")
    return Launch(arguments, python, port, promised, notes, probed)


def _weights(profile: Profile) -> str | None:
    """The very weights that the profile's drafters are trained on once they are fetched, else their name on the hub."""
    folder = fetched_folder(profile)
    return str(folder) if (folder / TARGET_MANIFEST).is_file() else profile.source.hub_id


def _refuse_numbers(*, port: int, **others: int | None) -> None:
    """`UsageError` for a number that no server has: 0 would be taken for "not given"."""
    for name, value in others.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}", rule="1 or more")
    if not 1 <= port <= 65535:
        raise UsageError(f"--port {port}", rule="1 to 65535")


def preflight(words: Sequence[str], profile: Profile, model_path: str, draft: str | None) -> Report:
    """The doctor's checks over the launch line, the environment and the local folders. `ServerError` on any error."""
    local = {"draft": draft, "target": model_path}
    folders: dict[str, Any] = {flag: place for flag, place in local.items() if place and Path(place).is_dir()}
    facts = collect(Inputs(launch=shlex.join(words), engine="sglang", **folders))
    environment = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "CUDA_VISIBLE"))}
    if environment:
        facts.put("env", environment, "environment")
    if "target" not in folders:
        shape = profile.model
        known = {"blocks": shape.blocks, "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
        facts.put("target", {**known, "family": shape.family}, f"profile {profile.name}")
    report = diagnose(facts)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        faults = "; ".join(finding.message for finding in errors)
        raise ServerError(f"preflight refuses the launch: {faults}", fix=errors[0].fix)
    return report


def _refuse_by_name(draft: str | None, promised: dict[str, Any]) -> None:
    """A drafter that is not here to be inspected still says EAGLE-3 in its name; plain EAGLE would bypass its fc."""
    algorithm = str(promised.get("speculative_algorithm", ""))
    if draft is not None and NAMED_EAGLE3.search(draft) and algorithm in ("EAGLE", "NEXTN"):
        raise ServerError(
            f"preflight refuses the launch: algorithm {algorithm} with the EAGLE-3 drafter {draft}",
            rule="EAGLE hands fc one state instead of three, fc is skipped and acceptance is zero",
            fix="--algorithm EAGLE3",
        )


def serve(
    launch: Launch,
    *,
    probe: bool = False,
    log: Path | None = None,
    ready_seconds: float = READY_SECONDS,
    note: Callable[[str], None] | None = None,
) -> int:
    """Start the launch line, wait, compare the server's own report, then stay until it ends or Ctrl-C.

    Args:
        probe: after the comparison generate one token, tell what the probe's hook saw, stop everything and return.

    Returns:
        0 after a probe without an error or when the server ended well; 1 when the probe found an error or did not
        report, or the server ended with an error of its own.

    Raises:
        ServerError: it did not start, is not ready in time, or does not run what was asked.
    """
    say = note or (lambda line: print(line, file=sys.stderr, flush=True))
    path = log or cache_folder() / "logs" / f"serve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{launch.port}.log"
    env = {name: value for name, value in OFFLINE.items() if name not in os.environ} | importable()
    say(f"log: {path}")
    before = path.stat().st_size if path.is_file() else 0
    with EngineServer(launch.command, port=launch.port, log=path, env=env, note=say) as server:
        seconds = server.wait_ready(timeout=ready_seconds)
        unknown = check_report(request_json(f"{server.url}/server_info"), launch.promised)
        if unknown:
            say("the server does not report: " + ", ".join(unknown))
        compared = f"{len(launch.promised) - len(unknown)} settings compared"
        say(f"ready after {seconds:.0f} s at {server.url}, runs what was asked ({compared})")
        if probe:
            ask = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            answer = request_json(f"{server.url}/generate", ask, timeout=120)
            code = _tell_probe(_since(path, before), say) if launch.probed else 0
            say(f"one token: {answer.get('text')!r}; stopping")
            return code
        return 1 if server.wait() else 0


def _since(path: Path, size: int) -> str:
    """What was logged after the first `size` bytes: a log file may hold an earlier start."""
    with path.open("rb") as handle:
        handle.seek(size)
        return handle.read().decode(errors="replace")


def _tell_probe(log: str, say: Callable[[str], None]) -> int:
    """The findings of the probe's lines; 1 when there is an error, or no line of the drafter at all."""
    if not probe_lines(log, "draft"):
        say("could not check the drafter because the probe's hook did not report; read the log")
    facts = Facts()
    facts.put("log", log, "the server's log")
    findings = [finding for finding in diagnose(facts).findings if finding.code.startswith("probe-")]
    for finding in findings:
        say(f"{finding.severity}: {headline(finding)}")
    return 0 if probe_lines(log, "draft") and all(finding.severity != "error" for finding in findings) else 1


def importable() -> dict[str, str]:
    """PYTHONPATH with which the engine's interpreter finds this package, whose hook runs inside it.

    Empty when the package is installed and not a checkout: its neighbours there must not shadow the engine's own.
    """
    root = repository()
    if root.name == "site-packages":
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(root), *([before] if before else [])])}


def _capture(profile: Profile, exchange: Path, draft: str | None) -> list[str]:
    if draft is not None:
        raise UsageError("--exchange with --draft", rule="states are captured from the target alone")
    shape = profile.model
    ids = written(shape.points, blocks=shape.blocks, engine="sglang", family=shape.family)[0].ids
    hook = {"exchange": str(exchange.absolute())}
    return capture_arguments(ids, hook, logits_processor="*logits_processor")


def _room(profile: Profile, ranks: int, gpu_memory: str | None, context: int | None, *, served: bool) -> Fit | None:
    if gpu_memory is None:
        return None
    if profile.config is None:
        raise ProfileError(f"profile '{profile.name}' has no [config] to plan with", fix="leave --gpu-memory out")
    drafter = drafter_shape(profile) if served else None
    room = fit(target_shape(profile.config), ranks, parse_memory(gpu_memory), context=context, drafter=drafter)
    if room.verdict == "refused":
        raise ServerError(f"{profile.name} does not fit: {room.reason}", fix=f"eagle3lab plan --profile {profile.name}")
    return room


def _notes(profile: Profile, room: Fit | None, draft: str | None, model_path: str) -> list[str]:
    notes = []
    if room is None:
        notes.append("memory fraction and context are left to SGLang; --gpu-memory 96GiB sets them")
    else:
        notes.append(f"KV pool {room.kv_pool / GIB:.1f} GiB a rank = {room.kv_tokens} tokens")
        if room.reason:
            notes.append(f"tight: {room.reason}")
    if profile.trust_remote_code:
        notes.append(f"profile '{profile.name}' turns trust_remote_code on: the model folder's code runs in the engine")
    if not Path(model_path).is_dir():
        notes.append(f"{model_path} is no local folder: the engine looks in the hub cache, offline")
    if draft is not None and not Path(draft).is_dir():
        notes.append(f"{draft} is no local folder: the drafter's weights are not inspected")
    return notes
