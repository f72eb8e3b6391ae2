"""The commands `regenerate` and `capture`; as in `cli.py`, heavy imports stand inside their command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def capture(
    run_directory: Annotated[str | None, typer.Option("--run", help="Run directory; none = a new run.")] = None,
    profile: Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")] = "smollm2",
    preset: Annotated[str, typer.Option(help="quick | default | long, of a new run.")] = "default",
    replies: Annotated[Path | None, typer.Option(help="File of `eagle3lab regenerate`, instead of a run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of states, with --replies.")] = None,
    target: Annotated[Path | None, typer.Option(help="Target folder, with --replies; none = the fetched one.")] = None,
    server: Annotated[str | None, typer.Option(help="SGLang with the capture hook, with --replies.")] = None,
    exchange: Annotated[Path | None, typer.Option(help="The hook's exchange folder.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight, with --server.")] = 32,
    dtype: Annotated[str | None, typer.Option(help="Type to compute in, with --replies.")] = None,
    last: Annotated[
        str | None, typer.Option(help="Last state after (post) or before (pre) the final norm, with --replies.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Capture the target's states: of a run's corpus, or of a file of replies. An interrupted capture goes on."""
    from eagle3lab.cli import finish
    from eagle3lab.core.errors import UsageError

    note = lambda line: typer.echo(line, err=True)  # noqa: E731
    if replies is None:
        given = {"--out": out, "--target": target, "--server": server, "--exchange": exchange, "--dtype": dtype,
                 "--last": last}  # fmt: skip
        if named := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(named)} without --replies", rule="a run knows its own target and folder")
        from eagle3lab.steps import verbs

        finish(verbs.capture(run_directory, profile, preset, note=note), json_output)
    if out is None or run_directory is not None:
        raise UsageError("--replies goes into a folder of its own", rule="--replies FILE --out FOLDER, without --run")
    from eagle3lab.steps import capture_replies as step
    from eagle3lab.steps.corpus_build import progress_line

    say = progress_line(note, every=20_000)
    outcome = step.capture_replies(
        profile,
        replies,
        out,
        target=target,
        server=server,
        exchange=exchange,
        concurrency=concurrency,
        dtype=dtype,
        last=last or "post",
        progress=lambda tokens, total: say(f"captured (of {total})", tokens),
        note=note,
    )
    if outcome is not None:  # None: another rank prints the result
        finish(outcome, json_output)


def regenerate(
    server: Annotated[str, typer.Option(help="URL of an OpenAI-style server that runs the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with `prompt`, and `id` and `kind` if you like.")],
    out: Annotated[Path, typer.Option(help="File of replies; the same command continues it.")],
    model: Annotated[str | None, typer.Option(help="The target's name on the server; default is its first.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy. Recorded beside the replies.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest reply.")] = 2048,
    seed: Annotated[int, typer.Option(help="Sent with each request.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 32,
    retries: Annotated[int, typer.Option(help="Repetitions of one request.")] = 5,
    thinking: Annotated[bool | None, typer.Option(help="For the chat template; default is the template's own.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Let a served target answer prompts: a drafter learns the target's own words."""
    from eagle3lab.cli import finish
    from eagle3lab.steps import regenerate as step

    # Progress goes to stderr, so that --json leaves the result alone on stdout.
    def progress(done: int, total: int) -> None:
        if done == total or done % 100 == 0:
            typer.echo(f"{done} of {total} replies", err=True)

    outcome = step.regenerate_file(
        server=server,
        prompts=prompts,
        out=out,
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        concurrency=concurrency,
        retries=retries,
        thinking=thinking,
        progress=progress,
        note=lambda line: typer.echo(line, err=True),
    )
    finish(outcome, json_output)


states_app = typer.Typer(help="Copy captured states: to and from a URL, or in 8 bits.", no_args_is_help=True)


@states_app.command("push")
def states_push(
    folder: Annotated[Path, typer.Argument(help="Folder of finished states.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to, such as s3://bucket/states.")],
) -> None:
    """Copy finished states to a URL, shard by shard; what is there already is not moved again."""
    from eagle3lab.capture.remote import push

    typer.echo(f"{push(folder, url, note=lambda line: typer.echo(line, err=True))} shards moved to {url}")


@states_app.command("pull")
def states_pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where from.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the states.")],
) -> None:
    """Copy states from a URL; every shard is hashed when it has arrived."""
    from eagle3lab.capture.remote import pull

    typer.echo(f"{pull(url, folder, note=lambda line: typer.echo(line, err=True))} shards moved to {folder}")


@states_app.command("shrink")
def states_shrink(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of finished states.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New folder, in 8 bits.")],
    draft: Annotated[Path | None, typer.Option(help="Drafter, replayed on both: what the rounding costs.")] = None,
    profile: Annotated[str, typer.Option(help="Target profile of the drafter.")] = "smollm2",
    target: Annotated[Path | None, typer.Option(help="Target folder, instead of the profile's.")] = None,
    steps: Annotated[int, typer.Option(help="Drafted tokens a chain (k).")] = 3,
    samples: Annotated[str | None, typer.Option(help="A:B, samples to replay; default all.")] = None,
) -> None:
    """Round states to 8 bits, one scale a row and point; print the error, and with --draft the cost in acceptance."""
    from eagle3lab.steps.shrink import shrink_states

    lines = shrink_states(
        source, destination, draft=draft, profile=profile, target=target, steps=steps, samples=samples
    )
    typer.echo("\n".join(lines))
