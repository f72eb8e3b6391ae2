"""The commands `eagle3lab accept replay|decode|served`; as in `cli.py`, heavy imports stand inside their command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
accept_app = typer.Typer(help="How many drafted tokens the target accepts, in three ways.", no_args_is_help=True)

GateOption = Annotated[
    float | None, typer.Option("--min-accept-length", help="Exit 1 unless the interval's lower end reaches it.")
]
ProfileOption = Annotated[str, typer.Option(help="Target profile: a name, or a TOML file.")]
TargetOption = Annotated[Path | None, typer.Option(help="Target folder, instead of the profile's.")]


@accept_app.command("replay")
def accept_replay(
    states: Annotated[Path, typer.Option(help="Folder of captured hidden states.")],
    draft: Annotated[Path, typer.Option(help="Drafter folder.")],
    profile: ProfileOption = "smollm2",
    target: TargetOption = None,
    steps: Annotated[int, typer.Option(help="Drafted tokens a chain (k).")] = 3,
    temperature: Annotated[float | None, typer.Option(help="Expected acceptance sum(min(p, q)) at it.")] = None,
    samples: Annotated[str | None, typer.Option(help="A:B, samples to use: -48: takes the last 48.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 | bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    min_accept_length: GateOption = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """From captured states alone, without decoding."""
    from eagle3lab.cli import finish
    from eagle3lab.steps import accept_replay as step

    outcome = step.replay(
        states,
        draft,
        profile=profile,
        target=target,
        steps=steps,
        temperature=temperature,
        samples=samples,
        dtype=dtype,
        device=device,
        gate=min_accept_length,
        seed=seed,
    )
    finish(outcome, json_output)


@accept_app.command("decode")
def accept_decode(
    draft: Annotated[Path, typer.Option(help="Drafter folder.")],
    profile: ProfileOption = "smollm2",
    target: TargetOption = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts (JSONL); default is a held-out set.")] = None,
    held_out: Annotated[str, typer.Option("--set", help="Held-out set: own | fresh | humaneval")] = "fresh",
    limit: Annotated[int | None, typer.Option(help="Use so many prompts.")] = None,
    steps: Annotated[int, typer.Option(help="Draft steps (k).")] = 3,
    tree: Annotated[str | None, typer.Option(help="Static tree: children by level, such as 4,2,1.")] = None,
    topk: Annotated[int, typer.Option(help="Above 1: dynamic tree (EAGLE-2).")] = 1,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens of a dynamic tree, the current one counted.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampler and bootstrap.")] = 0,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 | bfloat16 | float16")] = "float32",
    min_accept_length: GateOption = None,
    json_output: JsonFlag = False,
) -> None:
    """By speculative decoding in this process; greedy text is compared with plain decoding."""
    from eagle3lab.cli import finish
    from eagle3lab.steps import accept_decode as step

    outcome = step.decode(
        draft,
        profile=profile,
        target=target,
        prompts=prompts,
        held_out_set=held_out,
        limit=limit,
        drafting=step.Drafting(steps, None if tree is None else step.parse_widths(tree), topk, draft_tokens),
        temperature=temperature,
        seed=seed,
        batch=batch,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        gate=min_accept_length,
        progress=lambda what, tokens: typer.echo(f"{what}: {tokens} tokens", err=True),
    )
    finish(outcome, json_output)


@accept_app.command("served")
def accept_served(
    url: Annotated[str, typer.Argument(help="Running SGLang or vLLM server: http://host:port.")],
    prompts: Annotated[Path, typer.Option(help="Prompts (JSONL): ours, HumanEval, GSM8K or MT-bench style.")],
    algorithm: Annotated[str, typer.Option(help="What the server must report; none = no drafter.")] = "EAGLE3",
    engine: Annotated[str | None, typer.Option(help="sglang | vllm; default: ask the server.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Server of the same target without a drafter.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text as it stands, without a chat template.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="The target's tokenizer; SGLang needs it for chat.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once, 1 to 64.")] = 8,
    retries: Annotated[int, typer.Option(help="Further attempts of a request that failed.")] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 600.0,
    resume: Annotated[Path | None, typer.Option(help="File of finished requests; used again, it goes on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write result, replies and server facts as JSON.")] = None,
    min_accept_length: GateOption = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """From a running server's own counters, with speed and text beside a baseline."""
    from eagle3lab.acceptance.served import Effort
    from eagle3lab.cli import finish
    from eagle3lab.steps import accept_served as step

    def show(role: str, done: int, of: int, failed: int) -> None:
        typer.echo(f"{role}: {done} of {of} prompts" + (f", {failed} failed" if failed else ""), err=True)

    outcome = step.served(
        url,
        prompts,
        algorithm=algorithm,
        engine=engine,
        baseline=baseline,
        limit=limit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        raw=raw,
        tokenizer=tokenizer,
        effort=Effort(concurrency, retries),
        timeout=timeout,
        resume=resume,
        out=out,
        gate=min_accept_length,
        seed=seed,
        progress=show,
    )
    finish(outcome, json_output)
