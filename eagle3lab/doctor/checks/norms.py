"""Optional norms around fc: the flag in the config and the tensor in the file must agree."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.inventory import Inventory, take
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import draft_of, target_of

_UNUSED = "acceptance is low: the draft was trained with the norm and is served without it"


@check(
    code="norm-flag",
    title="optional norm: flag and tensor disagree",
    reads=("draft_config", "draft_headers"),
    also=("target", "target_config", "serve_with"),
    rule="norm_before_fc goes with input_norm.weight, fc_norm (use_aux_norm) with one fc_norm.i.weight a state",
    fix="set the flag as it was trained, or export the norm's tensor",
    symptom=_UNUSED,
)
def norm_flag(facts: Facts) -> Iterator[Finding]:
    """A tensor without its flag is dropped; a flag without its tensors runs on ones."""
    inventory, draft = take(facts), draft_of(facts)
    if inventory is None:
        return
    judged = facts.engine_names()
    state = draft.target_hidden(target_of(facts))
    refused = {inventory.canonical[name] for name in inventory.unknown}
    present = {name.removeprefix(inventory.prefix) for name in inventory.canonical.values() if name not in refused}
    one = {"input_norm.weight"} & present
    per_state = {n for n in present if n.startswith("fc_norm.") or n.removesuffix(".weight") in names.LEGACY_NORMS}
    needed = {f"fc_norm.{i}.weight" for i in range(draft.states)}
    if {n.removesuffix(".weight") for n in per_state} & set(names.LEGACY_NORMS):
        needed = {f"{n}.weight" for n in names.LEGACY_NORMS}
    pairs = (
        ("norm_before_fc", draft.written("norm_before_fc"), one, {"input_norm.weight"}),
        ("fc_norm", draft.written("fc_norm", "use_aux_norm"), per_state, needed),
    )
    legacy = {f"{n}.weight" for n in names.LEGACY_NORMS}
    for flag, written, found, wanted in pairs:
        switches = {engine: draft.reads(engine, flag, mla=inventory.mla) for engine in judged}
        on = [engine for engine, value in switches.items() if value]
        missing = sorted(wanted - found)
        value = next(iter(switches.values()), None)
        why, fix = _unread(flag, written, value, mla=inventory.mla)
        told_as_unknown = bool(refused & (wanted | legacy))
        if found and not on:
            yield _unused(inventory, flag, sorted(found), state, value, why, fix)
        elif on and missing:
            yield _starts_at_ones(flag, missing)
        elif written and not on and value is None and not told_as_unknown:
            yield error(flag, f"{why}; the file holds no {' nor '.join(missing)}", actual=value, fix=fix, flag=flag)
        elif found and len(on) < len(judged):
            yield info(
                flag, f"{written} is true: SGLang reads it, vLLM reads fc_norm only and refuses the norm's tensors"
            )


def _unused(
    inventory: Inventory, flag: str, found: list[str], state: int | None, value: bool | None, why: str, fix: str
) -> Finding:
    """Tensors of a norm that no judged engine switches on."""
    shape = inventory.shape(found[0]) or inventory.shape(inventory.prefix + found[0])
    reads_as = f"{shape[0] // state} x {state}" if shape and state and shape[0] % state == 0 else None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return error(
        found[0],
        f"{found[0]} {shape}{f' = {reads_as}' if reads_as else ''}{more} is not used: {why}",
        actual=value,
        fix=fix,
        shape=shape,
        reads_as=reads_as,
        flag=flag,
        tensors=found,
    )


def _starts_at_ones(flag: str, missing: list[str]) -> Finding:
    """A norm that is switched on and not in the file."""
    one = len(missing) == 1
    return error(
        flag,
        f"{flag} is set and {', '.join(missing)} {'is' if one else 'are'} missing: "
        + ("the norm stays at its initial ones" if one else "norms stay at their initial ones"),
        actual=True,
        missing=missing,
        effect="norms stay at their initial ones",
    )


def _unread(flag: str, written: str | None, value: bool | None, *, mla: bool) -> tuple[str, str]:
    """Why no judged engine applies the norm, and the fix."""
    if mla and flag == "norm_before_fc":
        return "the MLA draft has no norm_before_fc in SGLang nor vLLM", "train the MLA draft without norm_before_fc"
    fix = f'"{flag}": true in config.json'
    if written is None or written == flag:
        return f"{flag} is {'not set' if value is None else 'false'}", fix
    if written.startswith("eagle_config."):
        return f"{written} is true, and {flag} is read at top level only", f"{fix}, at top level"
    return f"{written} is true, which vLLM does not read: it reads {flag}", fix


@check(
    code="norm-eagle31",
    title="EAGLE-3.1 switches",
    reads=("draft_config",),
    rule="norm_output feeds the post-norm state to the next draft step; only engines with EAGLE-3.1 support do it",
    fix="serve with an engine that supports EAGLE-3.1",
    symptom="an engine without support feeds the pre-norm state: the first position is right, later ones are not",
)
def norm_eagle31(facts: Facts) -> Iterator[Finding]:
    """Told: the same key name means another thing in SpecForge's own configs."""
    draft = draft_of(facts)
    written = draft.written("norm_output")
    if written == "eagle_config.norm_output":
        yield warning(
            "norm_output",
            "eagle_config.norm_output is true, and both engines read norm_output at top level only: "
            "the pre-norm state is fed back",
            actual=True,
            fix='"norm_output": true at top level of config.json, if the draft was trained so',
        )
    elif written:
        both = bool(draft.reads("sglang", "fc_norm"))
        yield info(
            "norm_output",
            ("EAGLE-3.1 draft: " if both else "")
            + "norm_output: the engine must feed the post-norm state back, which needs EAGLE-3.1 support",
            actual=True,
            oldest_engine_known="EAGLE-3.1 support",
        )
