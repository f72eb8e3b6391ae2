"""Shapes: fc against the captured width, the first attention against two widths, the rest against config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.inventory import Inventory, is_other_method, take
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import LLAMA_DEFAULTS, draft_of, target_of

_ROWS_OF = {"hidden_size": "norm.weight", "intermediate_size": "midlayer.mlp.gate_proj.weight", "vocab_size": "t2d"}
"""A tensor with as many rows as a size says."""
_ALSO = ("draft_config", "target", "target_config")


@check(
    code="width-fc",
    title="columns of fc against states x width",
    reads=("draft_headers",),
    also=(*_ALSO, "draft_config_ids"),
    rule="fc.weight is [draft hidden, states x target hidden]",
    fix="export the draft with the fc that it was trained with, and write its ids and target_hidden_size",
    symptom="a shape error when the model is loaded, or at the first forward pass",
)
def width_fc(facts: Facts) -> Iterator[Finding]:
    """Wrong width of one state, or another number of states than ids."""
    inventory, draft, target = take(facts), draft_of(facts), target_of(facts)
    shape = inventory.shape("fc.weight") if inventory else None
    if inventory is None or shape is None or is_other_method(facts, inventory.headers):
        return
    if len(shape) != 2 or 0 in shape:
        if inventory.whole:
            text = f"fc.weight is {shape}: no matrix of [draft hidden, states x target hidden]"
            yield error("fc.weight", text, actual=shape, shape=shape)
        return
    rows, fc_in = shape
    hidden, state = draft.hidden, draft.target_hidden(target)
    ids = draft.nested_ids or draft.given_ids
    states = draft.states
    told: dict[str, Any] = {
        "fc_in": fc_in,
        "shape": shape,
        "aux": states,
        "target_hidden": state,
        "draft_hidden": hidden,
    }
    if hidden and rows != hidden:
        turned = " (transposed)" if state and [fc_in, rows] == [hidden, states * state] else ""
        text = f"fc.weight is {shape}{turned}: {rows} rows, hidden_size is {hidden}"
        yield error("fc.weight", text, actual=shape, **told, needed=hidden, rows=rows)
        return
    if not state:
        return
    explicit = draft.config.get("target_hidden_size") is not None  # null: vLLM's speculators reader leaves it out
    if not explicit and hidden and target and target.hidden and target.hidden != hidden:
        tell = warning if fc_in == states * target.hidden else error
        yield tell(
            "target_hidden_size",
            f"target_hidden_size must be {target.hidden}: fc reads {fc_in} = {states} x {target.hidden}, "
            f"without it {states} x {hidden} are expected; embeddings cannot be shared",
            actual=None,
            fix=f'"target_hidden_size": {target.hidden} in config.json',
            **told,
            needed=states * target.hidden,
            embeddings_can_be_shared=False,
        )
        return
    if explicit and target and target.hidden and state != target.hidden:
        yield error(
            "target_hidden_size",
            f"target_hidden_size is {state}, the target's hidden_size is {target.hidden}",
            actual=state,
            needed=target.hidden,
        )
    if fc_in != states * state:
        holds = fc_in // state if fc_in % state == 0 else None
        holding = f", it holds {holds} states" if holds is not None else ""
        counted = f"{len(ids)} ids" if ids else f"{states} states"
        yield error(
            "fc.weight",
            f"fc.weight reads {fc_in} columns, needed {states * state} = {states} x {state}{holding} for {counted}",
            actual=shape,
            fix=f'"num_aux_hidden_states": {holds} in config.json' if holds == len(draft.top_ids or []) else "",
            **told,
            needed=states * state,
            rule=f"{states} x {state}",
            holds=holds,
            ids=len(ids) if ids else states,
        )
    elif states != 3 and states > 1:
        yield info(
            "fc.weight",
            f"{states} states: older engines expect exactly 3",
            **told,
            ids=states,
        )
    else:
        yield info("fc.weight", f"fc reads {fc_in} = {states} x {state}", **told)


@check(
    code="width-attention",
    title="first attention reads embedding and state",
    reads=("draft_config", "draft_headers"),
    also=("target", "target_config"),
    rule="q, k and v read 2 x hidden_size columns: the embedding first, then the state",
    fix="this is not an EAGLE-3 layer; export the draft again",
    symptom="a shape error when the model is loaded",
)
def width_attention(facts: Facts) -> Iterator[Finding]:
    """Columns of the projections that read both halves."""
    inventory, draft = take(facts), draft_of(facts)
    hidden = draft.hidden
    if inventory is None or not hidden or is_other_method(facts, inventory.headers):
        return
    for part in names.READS_BOTH:
        name = f"midlayer.self_attn.{part}.weight"
        shape = inventory.shape(name)
        if shape and len(shape) == 2 and shape[1] != 2 * hidden:
            yield error(
                inventory.file_name(name),
                f"{inventory.file_name(name)} reads {shape[1]} columns, needed {2 * hidden} = 2 x {hidden}: "
                "embedding and state",
                actual=shape,
                cause="width-attention",
                columns=shape[1],
                needed=2 * hidden,
                rule=f"2 x {hidden}: embedding and state",
            )


@check(
    code="width-others",
    title="shapes of all other tensors against config.json",
    reads=("draft_config", "draft_headers"),
    also=("target", "target_config"),
    rule="every shape follows from hidden_size, heads, head_dim, intermediate_size and vocab_size",
    fix="correct config.json, or export the draft again",
    symptom="a shape error when the model is loaded",
)
def width_others(facts: Facts) -> Iterator[Finding]:
    """Rows and columns that the other width checks do not look at."""
    inventory = take(facts)
    if inventory is None or is_other_method(facts, inventory.headers):
        return
    yield from _left_out(facts, inventory)
    for name, expected in _expectations(facts, inventory).items():
        shape = inventory.shape(name)
        if shape is None:
            continue
        ranks = len(shape) == len(expected)
        if ranks and all(want is None or have == want for have, want in zip(shape, expected, strict=True)):
            continue
        wanted = ["?" if size is None else size for size in expected]
        yield error(
            inventory.file_name(name),
            f"{inventory.file_name(name)} is {shape}, needed {wanted}",
            actual=shape,
            needed=wanted,
            transposed=shape[::-1] == list(expected),
        )


def _left_out(facts: Facts, inventory: Inventory) -> Iterator[Finding]:
    """Sizes that config.json leaves to transformers' default, where the file has another one."""
    draft = draft_of(facts)
    if draft.layer.get("model_type") != "llama" or not inventory.whole:
        return
    for key, name in _ROWS_OF.items():
        default, shape = LLAMA_DEFAULTS[key], inventory.shape(name)
        if draft.layer.get(key, draft.config.get(key)) is None and shape and shape[0] != default:
            text = f"{key} is missing, llama takes {default}: {inventory.file_name(name)} has {shape[0]} rows"
            yield error(key, text, actual=None, needed=shape[0], fix=f'"{key}": {shape[0]} in config.json')


def _expectations(facts: Facts, inventory: Inventory) -> dict[str, tuple[int | None, ...]]:
    """Required shapes without the parts that other checks judge, fused and optional tensors."""
    draft, target = draft_of(facts), target_of(facts)
    expected = dict(inventory.required)
    expected.pop("fc.weight", None)
    for name in inventory.fused:
        parts = [inventory.required.get(part) for part in names.fused_parts(name)]
        rows = [part[0] for part in parts if part is not None and part[0] is not None]
        if parts[0] is not None:
            expected[name] = (sum(rows) if len(rows) == len(parts) else None, *parts[0][1:])
    for part in names.READS_BOTH:
        name = f"midlayer.self_attn.{part}.weight"
        if name in expected:
            expected[name] = (expected[name][0], None)
    if "lm_head.weight" in expected:
        expected["lm_head.weight"] = (None, draft.hidden)
    state = draft.target_hidden(target)
    expected["embed_tokens.weight"] = (draft.vocab, draft.hidden)
    expected["input_norm.weight"] = (draft.states * state if state else None,)
    norms = [*(f"fc_norm.{i}" for i in range(draft.states)), *names.LEGACY_NORMS]
    expected |= {f"{norm}.weight": (state,) for norm in norms}
    return expected
