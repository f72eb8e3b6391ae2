"""The command line. A command parses its words and calls one step; every heavy import stands inside its command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from eagle3lab import __version__, cli_states, cli_sweep
from eagle3lab.cli_accept import accept_app
from eagle3lab.core.errors import Eagle3LabError

if TYPE_CHECKING:
    from eagle3lab.steps.output import Outcome

INTERRUPTED = 130
BAD_USAGE = 2

app = typer.Typer(
    name="eagle3lab",
    help="A lab for EAGLE-3 drafters: capture, train, inspect fc, measure acceptance, find out why it is zero.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"eagle3lab {__version__}")
        raise typer.Exit


def finish(outcome: Outcome, as_json: bool) -> NoReturn:
    """Print the outcome of a step and leave with its exit code. The last line of every command."""
    typer.echo(json.dumps(outcome.as_json(), indent=2, allow_nan=False) if as_json else outcome.as_text())
    raise typer.Exit(outcome.exit_code)


@app.command()
def points(
    engine: Annotated[str, typer.Option(help="sglang | vllm | vllm-v2 | specforge | speculators")],
    blocks: Annotated[int | None, typer.Option(help="Decoder blocks n of the target.")] = None,
    ids: Annotated[str | None, typer.Option(help="Layer ids as written for the engine: 2,30,58 or none.")] = None,
    resid_pre: Annotated[str | None, typer.Option(help="Capture points; answers which list to write.")] = None,
    family: Annotated[str | None, typer.Option(help="Model family of the target: kimi_k25, llama, ...")] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; its config.json names the family.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Engine release, such as 0.5.23.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Convert layer ids to the hidden states that an engine really captures, and back."""
    from eagle3lab.core.errors import UsageError
    from eagle3lab.steps import points as step

    if (ids is None) == (resid_pre is None):
        raise UsageError("one question at a time", rule="give either --ids A,B,C|none or --resid-pre A,B,C")
    wanted = step.parse_ids(resid_pre, "--resid-pre")
    if resid_pre is not None and wanted is None:
        raise UsageError(f"--resid-pre {resid_pre!r}", rule="integers with commas, such as 2,30,58")
    outcome = step.points(
        engine=engine,
        blocks=blocks,
        ids=step.parse_ids(ids, "--ids"),
        resid_pre=wanted,
        family=family,
        target=target,
        version=engine_version,
    )
    finish(outcome, json_output)


@app.command()
def inspect(
    checkpoint: Annotated[Path | None, typer.Argument(help="Drafter folder or .safetensors file.")] = None,
    points: Annotated[str | None, typer.Option(help="Names of fc's column blocks, ascending: 2,30,58.")] = None,
    tensor: Annotated[str | None, typer.Option(help="Name of the matrix, when it is not fc.weight.")] = None,
    init: Annotated[str | None, typer.Option(help="Family that fc started from, where it is known.")] = None,
    states: Annotated[Path | None, typer.Option(help="Captured states: what fc does to them, and USEFUL.")] = None,
    against: Annotated[Path | None, typer.Option(help="Checkpoint whose fc is compared.")] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder; vocabulary rows are compared with its.")] = None,
    spectrum: Annotated[bool, typer.Option("--spectrum", help="Singular values by Lanczos, with bounds.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="All singular values (minutes at Kimi size).")] = False,
    require: Annotated[list[str] | None, typer.Option(help="Exit 1 unless the verdict has this label.")] = None,
    shape: Annotated[str | None, typer.Option(help="No file, two numbers: 7168x21504 with --mean and --std.")] = None,
    mean: Annotated[str | None, typer.Option(help="Reported mean of fc.weight.")] = None,
    std: Annotated[str | None, typer.Option(help="Reported std of fc.weight.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Is fc dead, untouched or trained? Statistics, evidence and a verdict."""
    from eagle3lab.core.errors import UsageError
    from eagle3lab.steps import inspect as step

    numbers = (shape, mean, std)
    if (checkpoint is None) == all(value is None for value in numbers) or (checkpoint is None and None in numbers):
        raise UsageError("one question at a time", rule="give a checkpoint, or --shape RxC --mean M --std S")
    if checkpoint is None:
        finish(step.number_pair(shape or "", mean or "", std or ""), json_output)
    outcome = step.inspect(
        checkpoint,
        require=require or (),
        points=None if points is None else [name.strip() for name in points.split(",")],
        tensor=tensor,
        init=init,
        states=states,
        against=against,
        target=target,
        spectrum="exact" if exact else "fast" if spectrum else "none",
    )
    finish(outcome, json_output)


def _refuse_empty(context: typer.Context) -> None:
    """An option that is given with nothing behind it, as `--launch "$UNSET"`, is not the same as one left out."""
    from eagle3lab.core.errors import UsageError

    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if context.params.get(option.name or "") == "" and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option.opts[0]} is empty", rule="an option has a value", fix=f"leave {option.opts[0]} out"
            )


@app.command()
def doctor(
    context: typer.Context,
    paths: Annotated[list[str] | None, typer.Argument(help="Artefacts of any kind, told apart by content.")] = None,
    draft: Annotated[str, typer.Option(help="Drafter folder, config.json or safetensors file.")] = "",
    target: Annotated[str, typer.Option(help="Target folder or config.json.")] = "",
    launch: Annotated[str, typer.Option(help="Launch line, or a file that holds it.")] = "",
    states: Annotated[str, typer.Option(help="Folder of captured hidden states.")] = "",
    run_dir: Annotated[str, typer.Option("--run", help="Run directory.")] = "",
    notebooks: Annotated[str, typer.Option(help="Folder of notebooks, or one notebook.")] = "",
    server: Annotated[str, typer.Option(help="URL of a running SGLang or vLLM.")] = "",
    log: Annotated[str, typer.Option(help="Server log.")] = "",
    env: Annotated[str, typer.Option(help="File of NAME=value lines.")] = "",
    acceptance: Annotated[str, typer.Option(help="Acceptance counts (JSON).")] = "",
    corpus: Annotated[str, typer.Option(help="Training data (JSONL).")] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder of the tokenizer, for --corpus.")] = "",
    facts: Annotated[str, typer.Option(help="Facts by name (YAML or JSON).")] = "",
    engine: Annotated[str, typer.Option(help="sglang | vllm | vllm-v2, with @VERSION; default: both engines.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on a warning too.")] = False,
    explain: Annotated[str, typer.Option(help="Print what one check looks for, and stop.")] = "",
    json_output: JsonFlag = False,
) -> None:
    """Why is acceptance zero? Name the fault, the evidence and the fix."""
    from eagle3lab.doctor.run import Inputs
    from eagle3lab.steps import doctor as step

    _refuse_empty(context)
    if explain:
        typer.echo(step.explain_code(explain))
        return
    artefacts = Inputs(
        draft=draft, target=target, launch=launch, states=states, run=run_dir, notebooks=notebooks, server=server,
        log=log, env=env, acceptance=acceptance, corpus=corpus, tokenizer=tokenizer, facts=facts, engine=engine,
        paths=tuple(paths or ()),
    )  # fmt: skip
    finish(step.doctor(artefacts, strict=strict), json_output)


@app.command()
def plan(
    profile: Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")] = "smollm2",
    target: Annotated[Path | None, typer.Option(help="Model folder, read instead of the profile's numbers.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs = tensor-parallel size.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 96GiB.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that one request must have.")] = None,
    samples: Annotated[int | None, typer.Option(help="Conversations to capture.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Mean tokens a conversation.")] = None,
    with_drafter: Annotated[bool, typer.Option("--with-drafter", help="Count a served drafter too.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Say what fits: GPU memory and context, disk for states, memory to train."""
    from eagle3lab.steps import plan as step

    outcome = step.plan(
        profile=profile,
        target=target,
        gpus=gpus,
        gpu_memory=gpu_memory,
        context=context,
        samples=samples,
        tokens=tokens,
        with_drafter=with_drafter,
    )
    finish(outcome, json_output)


@app.command()
def serve(
    profile: Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")] = "kimi-k2.5",
    model_path: Annotated[str | None, typer.Option(help="Model folder; default is the profile's hub id.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafter folder; without it the target is served alone.")] = None,
    algorithm: Annotated[str, typer.Option(help="Speculative algorithm, used with --draft.")] = "EAGLE3",
    steps: Annotated[int | None, typer.Option(help="Drafted tokens a step.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs = tensor-parallel size.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU; sets fraction and context.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that one request may have.")] = None,
    port: Annotated[int, typer.Option(help="Loopback port.")] = 30000,
    python: Annotated[str, typer.Option(help="Interpreter of the engine's environment.")] = "python3",
    exchange: Annotated[Path | None, typer.Option(help="Serve for capture; folder shared with the hook.")] = None,
    log: Annotated[Path | None, typer.Option(help="File for the server's output.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the launch line and start nothing.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Start, look at the drafter, stop.")] = False,
    json_output: JsonFlag = False,
    extra: Annotated[list[str] | None, typer.Argument(help="More SGLang options, after --.")] = None,
) -> None:
    """Start the target's server on this machine, check that it runs what was asked, stop it with Ctrl-C."""
    from eagle3lab.steps import serve as step

    launch = step.prepare(
        profile=profile,
        model_path=model_path,
        draft=draft,
        algorithm=algorithm,
        steps=steps,
        gpus=gpus,
        gpu_memory=gpu_memory,
        context=context,
        port=port,
        python=python,
        exchange=exchange,
        probe=probe,
        extra=extra or (),
    )
    if dry_run:
        finish(launch, json_output)
    raise typer.Exit(step.serve(launch, probe=probe, log=log))


@app.command()
def fetch(
    profile: Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")] = "smollm2",
    source: Annotated[
        str | None, typer.Option(help="Model folder, or a name in the hub's cache, to take as the target from now on.")
    ] = None,
) -> None:
    """Bring the target of a profile onto this machine, once; its hash is pinned."""
    from eagle3lab.steps import fetch as step

    typer.echo(f"target: {step.fetch_target(profile, source, note=typer.echo)}")


@app.command("run")
def run_lab(
    profile: Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")] = "smollm2",
    preset: Annotated[str, typer.Option(help="quick | default | long")] = "default",
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help="NAME=VALUE: seed, draft, or an amount of the preset.")
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop cleanly after so many minutes.")] = None,
    resume: Annotated[str | None, typer.Option(help="Finish this run directory instead of a new one.")] = None,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate", help="Let the target write its replies anew when the shipped ones are not its own."
        ),
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Run the whole lab: capture, train, inspect, measure acceptance, and write the report."""
    from eagle3lab.steps import run as step

    # With --json, stdout carries the result alone.
    note = (lambda line: typer.echo(line, err=True)) if json_output else typer.echo
    outcome = step.run_lab(
        profile=profile,
        preset=preset,
        assignments=parameter or [],
        max_minutes=max_minutes,
        resume=resume,
        regenerate=regenerate,
        note=note,
    )
    finish(outcome, json_output)


app.command()(cli_sweep.sweep)
app.command()(cli_states.capture)
app.command()(cli_states.regenerate)
app.add_typer(cli_states.states_app, name="states")


@app.command()
def train(
    run_directory: Annotated[str | None, typer.Option("--run", help="Run directory; none = a new run.")] = None,
    profile: Annotated[str, typer.Option(help="Target profile of a new run.")] = "smollm2",
    preset: Annotated[str, typer.Option(help="quick | default | long, of a new run.")] = "default",
    convention: Annotated[
        str | None, typer.Option(help="Loss mask of a new run: served | specforge | speculators; none = the preset's.")
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="Stop cleanly after so many minutes of training.")] = None,
    online: Annotated[bool, typer.Option("--online", help="The target makes the states in this job, no disk.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Train while another process still captures.")] = False,
    shards: Annotated[int, typer.Option(help="Under torchrun: ranks that share one copy of the drafter.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory a rank may still take, such as 8GiB.")] = None,
    matrix_rate: Annotated[float | None, typer.Option(help="Operations/s for utilisation; none = measured.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files beside the drafter.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Train the drafter of a run, capturing its states first when they are missing. Several ranks: torchrun."""
    from eagle3lab.core.errors import UsageError
    from eagle3lab.steps import verbs
    from eagle3lab.targets.plan import parse_memory
    from eagle3lab.training.trainer import Watching

    if online and follow:
        raise UsageError("--online with --follow", rule="states are made here, or by another process")
    outcome = verbs.train(
        run_directory,
        profile,
        preset,
        convention=convention,
        max_minutes=max_minutes,
        note=lambda line: typer.echo(line, err=True),
        source="online" if online else "followed" if follow else "stored",
        shards=shards,
        watching=Watching(matrix_rate, None if memory is None else parse_memory(memory), tensorboard),
    )
    if outcome is not None:  # None: another rank prints the result
        finish(outcome, json_output)


corpus_app = typer.Typer(help="Make a corpus of the target's own replies.", no_args_is_help=True)
app.add_typer(corpus_app, name="corpus")


@corpus_app.command("build")
def corpus_build(
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts; none = this project's training prompts.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Target profile.")] = "smollm2",
    own: Annotated[int, typer.Option(help="Also ask the target for so many prompts of its own.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply.")] = 128,
    compute: Annotated[str, typer.Option(help="float32 | bfloat16")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the replies; none = the cache.")] = None,
) -> None:
    """Let the target answer prompts itself; the replies are what its drafter learns from."""
    from eagle3lab.steps import corpus_build as step

    folder = step.build_replies(
        profile, prompts, own=own, temperature=temperature, max_new_tokens=max_new_tokens, compute=compute, seed=seed,
        out=out, progress=step.progress_line(lambda line: typer.echo(line, err=True)),
    )  # fmt: skip
    typer.echo(f"replies: {folder}")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Drafter folder, or folder of captured states.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New folder.")],
    to: Annotated[str, typer.Option(help="sglang | vllm | speculators | specforge")],
    target: Annotated[Path | None, typer.Option(help="Target folder: what the ids mean, and its final norm.")] = None,
    family: Annotated[str | None, typer.Option(help="Model family of the target, without its folder.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Decoder blocks of the target, without its folder.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Name of the target in a speculators config.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Write a drafter, or captured states, in another layout; refuse what the other side would drop."""
    from eagle3lab.steps import convert as step

    outcome = step.convert(source, destination, to=to, target=target, family=family, blocks=blocks, verifier=verifier)
    finish(outcome, json_output)


@app.command()
def report(
    run_directory: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or its name under runs/.")],
    json_output: JsonFlag = False,
) -> None:
    """Write report.html of a run again: one file that opens offline."""
    from eagle3lab.runs.directory import Run
    from eagle3lab.steps import report as step

    finish(step.report(Run.open(run_directory)), json_output)


app.add_typer(accept_app, name="accept")

runs_app = typer.Typer(help="List and prune run directories.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")


@runs_app.command("list")
def runs_list(json_output: JsonFlag = False) -> None:
    """Every run, newest first: how far it came and what it measured."""
    from eagle3lab.steps import runs as step

    finish(step.list_runs(), json_output)


@runs_app.command("prune")
def runs_prune(
    keep: Annotated[int, typer.Option(help="Keep the newest so many.")] = 10,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only runs that did not end well.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove; without it they are only named.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Remove old run directories. A run that is being worked on is never touched."""
    from eagle3lab.steps import runs as step

    finish(step.prune_runs(keep=keep, unfinished=unfinished, yes=yes), json_output)


# Typer wraps click, or carries its own copy in later releases; the base of its usage errors is found by name in both.
_ClickError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code: errors are one line on stderr, never a traceback."""
    try:
        code = int(app(arguments, standalone_mode=False) or 0)
    except Eagle3LabError as error:
        _complain(str(error))
        return error.exit_code
    except _ClickError as error:
        if message := error.format_message():  # type: ignore[attr-defined]  # empty when no command was given: help was shown
            _complain(f"{message}; next: eagle3lab --help")
        return BAD_USAGE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "eagle3lab"):
            raise  # a fault of this package, not of the installation
        _complain(f"this command needs {package}, which is not installed; next: pip install 'eagle3lab[lab]'")
        return BAD_USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left: keep the interpreter from complaining again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if code == INTERRUPTED:
        _complain("interrupted")
    return code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


def _complain(message: str) -> None:
    typer.echo("eagle3lab: " + " ".join(message.split()), err=True)


if __name__ == "__main__":
    main()
