"""Optional norms around fc: the flag in the config and the tensor in the file must agree."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info
from eagle3lab.doctor.inventory import take
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
    state = draft.target_hidden(target_of(facts))
    present = {name.removeprefix(inventory.prefix) for name in inventory.canonical.values()}
    one = {"input_norm.weight"} & present
    per_state = {n for n in present if n.startswith("fc_norm.") or n.removesuffix(".weight") in names.LEGACY_NORMS}
    needed = {f"fc_norm.{i}.weight" for i in range(draft.states)}
    if {n.removesuffix(".weight") for n in per_state} >= set(names.LEGACY_NORMS):
        needed = {f"{n}.weight" for n in names.LEGACY_NORMS}
    pairs = (
        ("norm_before_fc", draft.flag("norm_before_fc"), one, {"input_norm.weight"}),
        ("fc_norm", draft.flag("fc_norm", "use_aux_norm"), per_state, needed),
    )
    for flag, on, found, wanted in pairs:
        if found and not on:
            name = sorted(found)[0]
            shape = inventory.shape(name)
            reads_as = f"{shape[0] // state} x {state}" if shape and state and shape[0] % state == 0 else None
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            yield error(
                name,
                f"{name} {shape}{f' = {reads_as}' if reads_as else ''}{more} is not used: {flag} is "
                + ("not set" if on is None else "false"),
                actual=on,
                fix=f'"{flag}": true in config.json',
                shape=shape,
                reads_as=reads_as,
                flag=flag,
                tensors=sorted(found),
            )
        elif on and (missing := sorted(wanted - found)):
            yield error(
                flag,
                f"{flag} is set and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
                + ("the norm stays at its initial ones" if len(missing) == 1 else "norms stay at their initial ones"),
                actual=True,
                missing=missing,
                effect="norms stay at their initial ones",
            )


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
    if draft.flag("norm_output"):
        both = bool(draft.flag("fc_norm", "use_aux_norm"))
        yield info(
            "norm_output",
            ("EAGLE-3.1 draft: " if both else "")
            + "norm_output: the engine must feed the post-norm state back, which needs EAGLE-3.1 support",
            actual=True,
            oldest_engine_known="EAGLE-3.1 support",
        )
