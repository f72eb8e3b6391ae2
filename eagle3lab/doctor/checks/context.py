"""Positions: what the draft's table holds, what is served, what was trained."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.readers.launch import parse_args, speculative_config
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import LLAMA_DEFAULTS, draft_of, target_of, whole

_RULE = (
    "positions count from 0: a prompt of L tokens uses 0..L-1, draft step s uses L+s-1, and all must be below "
    "max_position_embeddings"
)


def served_context(facts: Facts) -> tuple[int | None, bool]:
    """(tokens of context that are served, whether the launch line names them)."""
    if not facts.get("launch_args"):
        return None, False
    launch = parse_args(facts["launch_args"])
    named = launch.context("context-length") or launch.context("max-model-len")
    if named and named > 0:
        return named, True
    target = target_of(facts)
    return (target.max_positions if target else None), False


@check(
    code="context-table",
    title="draft context shorter than what is served",
    reads=("launch_args|prompt_tokens", "draft_config"),
    also=("launch_args", "prompt_tokens", "draft_steps", "trained_max_length", "target", "target_config"),
    rule=_RULE,
    fix="raise max_position_embeddings, or serve with a shorter --context-length",
    symptom="errors or rubbish drafts once a sequence passes the table",
)
def context_table(facts: Facts) -> Iterator[Finding]:
    """Compare the draft's table with the served context; count the prompts that leave it."""
    draft = draft_of(facts)
    table, left_out = draft.size("max_position_embeddings"), ""
    served, named = served_context(facts)
    complete = all(draft.layer.get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    if table is None and complete and draft.config.get("architectures") and draft.layer.get("model_type") == "llama":
        table, left_out = (
            LLAMA_DEFAULTS["max_position_embeddings"],
            ", which transformers takes when the key is missing",
        )
    if table is None:
        if draft.config.get("architectures") and served:
            yield info(
                "max_position_embeddings", "max_position_embeddings is not written: the draft's table is unknown"
            )
        return
    trained = whole(facts.get("trained_max_length"))
    steps = whole(facts.get("draft_steps")) or _steps(facts)
    prompts = [n for n in map(whole, _prompts(facts)) if n is not None]
    past = {
        "in_prefill": sum(length > table for length in prompts),
        "at_first_draft": sum(length + 1 > table for length in prompts),
        f"within_{_word(steps)}_draft_steps": sum(length + steps > table for length in prompts),
    }
    if served and served > table:
        where = "--context-length" if named else "the target's max_position_embeddings, no --context-length is given"
        proof = f"; accuracy beyond the trained {trained} tokens is unproven" if trained else ""
        counted = f"; of {len(prompts)} prompts {past['at_first_draft']} leave it at the first draft" if prompts else ""
        yield error(
            "max_position_embeddings",
            f"max_position_embeddings of the draft is {table}{left_out}, {served} are served ({where}){counted}",
            actual=table,
            fix=f"raise max_position_embeddings to {served}{proof}",
            draft=table,
            served=served,
            trained=trained,
            past_the_table=past,
        )
    elif any(past.values()):
        tell = warning if served else error
        within = f"within_{_word(steps)}_draft_steps"
        later = f", {past[within]} within {_word(steps)} draft steps" if steps > 1 else ""
        yield tell(
            "max_position_embeddings",
            f"prompts leave the draft's table of {table} positions: {past['in_prefill']} in prefill, "
            f"{past['at_first_draft']} at the first draft step{later}",
            actual=table,
            draft=table,
            past_the_table=past,
        )
    else:
        text = f"the draft's table holds {table} positions" + (f", {served} are served" if served else "")
        yield info("max_position_embeddings", text, draft=table, served=served, past_the_table=past)


def _prompts(facts: Facts) -> list[object]:
    given = facts.get("prompt_tokens")
    return given if isinstance(given, list) else [] if given is None else [given]


def _steps(facts: Facts) -> int:
    if not facts.get("launch_args"):
        return 1
    launch = parse_args(facts["launch_args"])
    steps = launch.number("speculative-num-steps") or whole(speculative_config(launch).get("num_speculative_tokens"))
    return steps or 1


def _word(steps: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}.get(steps, str(steps))


@check(
    code="context-trained",
    title="declared positions against the trained length",
    reads=("trained_max_length", "draft_config"),
    also=("launch_args", "target", "target_config"),
    rule="a draft is proven only up to the length that it was trained on",
    fix="train on longer samples, or measure acceptance at the served length",
    symptom="acceptance falls with the length of the context",
)
def context_trained(facts: Facts) -> Iterator[Finding]:
    """Positions that are declared and served, but were never trained."""
    table, trained = draft_of(facts).size("max_position_embeddings"), whole(facts["trained_max_length"])
    served, _ = served_context(facts)
    if not table or not trained or trained < 1:
        return
    if trained > table:
        yield error(
            "max_position_embeddings",
            f"trained on {trained} tokens with a table of {table} positions",
            actual=table,
            fix=f"raise max_position_embeddings to {trained}",
            declared=table,
            trained=trained,
        )
        return
    used = min(table, served) if served else table
    if used > trained:
        ratio = table / trained
        yield warning(
            "max_position_embeddings",
            f"declared {table}, trained {trained}: {ratio:g} times the trained length",
            actual=table,
            declared=table,
            trained=trained,
            served=served,
            ratio=round(ratio, 4),
        )
