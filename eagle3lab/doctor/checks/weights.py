"""Tensor names of a draft: what a loader drops without a word, what it leaves uninitialised, what it renames."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.core.safetensors_header import STORED_AS
from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, could_not, error, info, warning
from eagle3lab.doctor.inventory import is_other_method, is_quantised, rename_hints, take
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import EAGLE3_LLAMA, EAGLE3_MLA, VLLM_CLASSES, draft_of

_ALSO = ("draft_config", "target", "target_config", "serve_with")
_SILENT = "accept length near 1.00: the engine runs on uninitialised weights and logs nothing"
SHOWN = 6


def _some(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


@check(
    code="weights-prefix",
    title="every key behind a prefix",
    reads=("draft_headers",),
    also=_ALSO,
    rule="loaders know fc.weight, midlayer.*, norm.weight, lm_head.weight, d2t, t2d (SGLang also behind model.)",
    fix="strip the prefix: eagle3lab convert SRC DST --to sglang",
    symptom=_SILENT,
)
def weights_prefix(facts: Facts) -> Iterator[Finding]:
    """A wrapper's prefix (module., draft_model.) hides the names; the missing keys have the same cause."""
    inventory = take(facts)
    if inventory is None or not inventory.prefix:
        return
    total, count, missing = len(inventory.headers), len(inventory.behind), len(inventory.hidden)
    who = "vLLM puts before every name itself" if inventory.prefix == "model." else "no loader knows"
    found = inventory.survivors and not _logged(facts)
    kept = f" ({_some(inventory.survivors)} are still found by substring)" if found else ""
    yield error(
        "draft weights",
        f"{count} of {total} keys stand behind the prefix {inventory.prefix!r}, which {who}{kept}; "
        + ("vLLM refuses them aloud" if _logged(facts) else f"{missing} tensors stay uninitialised"),
        fix=f"strip {inventory.prefix}",
        prefix=inventory.prefix,
        unmatched=f"{count} of {total}",
        keys_unmatched=count,
        keys=total,
        missing=missing,
        engine_logs_it=_logged(facts),
    )


def _logged(facts: Facts) -> bool:
    return facts.engine_names() in (("vllm",), ("vllm-v2",))


@check(
    code="weights-unknown",
    title="keys that the loader drops",
    reads=("draft_headers",),
    also=_ALSO,
    rule="SGLang drops unknown keys without a log line; vLLM raises a ValueError",
    fix="rename the keys: eagle3lab convert SRC DST --to sglang",
    symptom=_SILENT,
)
def weights_unknown(facts: Facts) -> Iterator[Finding]:
    """Renamed tensors with a hint; strays that were trained and are never applied. Of a prefix its own check tells."""
    inventory = take(facts)
    if inventory is None or is_other_method(facts, inventory.headers):
        return
    unknown = inventory.unknown
    if not (inventory.whole or draft_of(facts).eagle3_class):
        return
    for engine, lost in inventory.lost.items():
        if not lost:
            continue
        them = "it" if len(lost) == 1 else "them"
        other, who = ("vLLM", "SGLang") if engine == "sglang" else ("SGLang", "vLLM")
        loud = engine != "sglang" and not inventory.all_quiet(lost)
        does = f"refuses {them} aloud" if loud else f"drops {them} without a word"
        text = f"{_some(lost)}: {other} reads {them}, {who} {does}"
        own = engine == "sglang" and draft_of(facts).qwen3  # a class of vLLM's alone
        tell = info if loud or own else warning
        yield tell("draft weights", text, actual=lost[:50], engine=engine)
    if not unknown:
        return
    hints = rename_hints(inventory)
    told = f"; meant: {', '.join(f'{old} is {new}' for old, new in hints.items())}" if hints else ""
    quiet = inventory.all_quiet(unknown)
    logged = _logged(facts) and not quiet
    vllm = f"vLLM {'drops it without a word' if quiet else 'refuses it aloud'}"
    who = vllm if _logged(facts) else "SGLang drops it without a word"
    if not _logged(facts) and len(facts.engines) > 1:
        who = "SGLang and vLLM drop it without a word" if quiet else f"{who}, {vllm}"
    plural = "s" if len(unknown) > 1 else ""
    yield error(
        unknown[0] if len(unknown) == 1 else "draft weights",
        f"{len(unknown)} unknown key{plural} ({_some(unknown)}): {who}{told}",
        actual=unknown[:50],
        fix="; ".join(f"rename {old}* to {new}*" for old, new in hints.items()),
        count=len(unknown),
        unknown=unknown[:50] if len(unknown) <= SHOWN else len(unknown),
        name=unknown[0],
        suggest=hints,
        engine_logs_it=logged,
    )


@check(
    code="weights-adapter",
    title="low-rank adapter keys beside the weights",
    reads=("draft_headers",),
    also=_ALSO,
    rule="no loader applies adapter matrices of a draft; they must be merged into the weights",
    fix="merge the adapter first, then export",
    symptom="the draft behaves as before fine-tuning",
)
def weights_adapter(facts: Facts) -> Iterator[Finding]:
    """lora_A, lora_B and their kin."""
    inventory = take(facts)
    if inventory is None or not inventory.adapters:
        return
    count = len(inventory.adapters)
    yield error(
        "draft weights",
        f"{count} low-rank adapter keys ({_some(inventory.adapters)}) are never applied",
        actual=inventory.adapters[:50],
        keys=count,
        unknown=count,
        engine_logs_it=_logged(facts),
    )


@check(
    code="weights-missing",
    title="tensors that must be in the file and are not",
    reads=("draft_headers",),
    also=_ALSO,
    rule="missing keys are not checked by SGLang nor vLLM: the tensor keeps whatever was in memory",
    fix="export the draft again with all of its tensors",
    symptom=_SILENT,
)
def weights_missing(facts: Facts) -> Iterator[Finding]:
    """Names and shapes of what is not there, behind a prefix neither."""
    inventory = take(facts)
    if inventory is None:
        if facts.has("draft_headers"):
            yield error("draft weights", "the file holds no tensor", actual=0, count=0)
        return
    if is_other_method(facts, inventory.headers):
        return
    for engine, unset in inventory.unset.items():
        if unset and inventory.whole:
            which = "SGLang" if engine == "sglang" else "vLLM"
            text = f"{_some(unset)} {'is' if len(unset) == 1 else 'are'} missing: {which} needs what the file has not"
            yield warning("draft weights", text, actual=None, missing=unset[:50], engine=engine)
    if not inventory.missing:
        return
    if not inventory.whole:
        count = len(inventory.headers)
        yield could_not("missing tensors", f"the file holds {count} tensors, a piece of a drafter")
        return
    missing = inventory.missing
    shapes = {name: [size if size is not None else "?" for size in inventory.required[name]] for name in missing}
    one = f"missing key {missing[0]} {shapes[missing[0]]}"
    many = f"{len(missing)} missing keys ({_some(missing)})"
    effect = "keeps whatever was in memory"
    yield error(
        missing[0] if len(missing) == 1 else "draft weights",
        f"{one if len(missing) == 1 else many}: {effect}, with no message",
        actual=None,
        count=len(missing),
        missing=missing if len(missing) <= SHOWN else len(missing),
        name=missing[0],
        shape=shapes[missing[0]],
        shapes=shapes,
        effect=effect,
        engine_logs_it=False,
    )


_LAYERS_DEFAULT = {"llama": 32, "qwen2": 32, "qwen3": 32, "mistral": 32, "deepseek_v3": 61, "kimi_k2": 61}
"""num_hidden_layers that transformers 5 takes for these model types when the key is missing."""


@check(
    code="weights-layers",
    title="decoder layers in config.json against those in the file",
    reads=("draft_config", "draft_headers"),
    also=("target", "target_config", "serve_with", "launch_args"),
    rule="engines build num_hidden_layers layers (missing: transformers' default, 32 for llama) and miss none aloud",
    fix="write num_hidden_layers as it was trained, 1 in every public EAGLE-3 draft",
    symptom=_SILENT,
)
def weights_layers(facts: Facts) -> Iterator[Finding]:
    """A number copied from the target, or left to the default; SGLang's MLA draft takes 1 only."""
    inventory, draft = take(facts), draft_of(facts)
    if inventory is None or not inventory.whole or not inventory.layers or is_other_method(facts, inventory.headers):
        return
    settings = draft.layer if "num_hidden_layers" in draft.layer else draft.config
    written = "num_hidden_layers" in settings
    kind = draft.layer.get("model_type")
    default = _LAYERS_DEFAULT.get(kind) if isinstance(kind, str) else None
    built = draft.size("num_hidden_layers") if written else default
    if built is None or built < 1:
        return
    held = sum(index < built for index in inventory.layers)
    said = f"num_hidden_layers is {built}" if written else f"num_hidden_layers is missing, {kind} takes {built}"
    if inventory.mla and facts.chosen and "sglang" in facts.engine_names():
        if built != 1:
            text = f"{said}: SGLang's MLA draft takes 1 only and stops"
            yield error("num_hidden_layers", text, actual=built, needed=1, engine_logs_it=True)
    elif built > held and 0 in inventory.layers:
        yield error(
            "num_hidden_layers",
            f"{said} and the file holds {held} layer{'s' if held > 1 else ''}: the others keep whatever was in memory",
            actual=built if written else None,
            fix=f'"num_hidden_layers": {held} in config.json',
            needed=held,
            built=built,
            engine_logs_it=False,
        )


@check(
    code="weights-layout",
    title="names and fusions that load although they look odd",
    reads=("draft_headers",),
    also=_ALSO,
    rule="layers.0.* and midlayer.* are the same layer in SGLang 0.5.23 and vLLM 0.33.0; q, k, v may be fused",
    fix="nothing to do",
)
def weights_layout(facts: Facts) -> Iterator[Finding]:
    """Told so that nobody renames them."""
    inventory = take(facts)
    if inventory is None:
        return
    if inventory.layer_alias and not inventory.mla:
        count = inventory.layer_alias
        yield info(
            "draft weights",
            f"{count} keys are named layers.0.* instead of midlayer.*: both load in SGLang 0.5.23 and vLLM 0.33.0",
            keys=count,
            keys_renamed=count,
            loads_in=["SGLang 0.5.23", "vLLM 0.33.0"],
        )
    if inventory.fused:
        yield info("draft weights", f"fused projection: {_some(inventory.fused)}", fused=inventory.fused)
    if "embed_tokens.weight" not in inventory.canonical.values() and inventory.whole:
        total = len(inventory.headers)
        yield info("embed_tokens.weight", f"{total} keys, no embed_tokens: it comes from the target", keys=total)


@check(
    code="weights-twice",
    title="one parameter under two names",
    reads=("draft_headers",),
    also=_ALSO,
    rule="two names of one parameter (midlayer.* and layers.0.*, q_proj and qkv_proj) overwrite each other at loading",
    fix="leave one of them out of the file",
    symptom="the one that is read last stays, without a message",
)
def weights_twice(facts: Facts) -> Iterator[Finding]:
    """Spellings of one name, and a fused projection beside its parts."""
    inventory = take(facts)
    if inventory is None:
        return
    spellings: dict[str, list[str]] = {}
    for name, known in inventory.canonical.items():
        if not (names.is_map(name) or names.is_scale(name) or names.is_packed(inventory.headers, name)):
            spellings.setdefault(known, []).append(name)
    pairs = [found for found in spellings.values() if len(found) > 1]
    pairs += [[*spellings[whole], *spellings[part]] for whole in inventory.fused if whole in spellings
              for part in names.fused_parts(whole) if part in spellings]  # fmt: skip
    if pairs:
        text = f"{' and '.join(pairs[0])} name one parameter" + (f", and {len(pairs) - 1} more" if pairs[1:] else "")
        yield warning("draft weights", text, actual=[name for pair in pairs for name in pair][:50], count=len(pairs))


@check(
    code="weights-class",
    title="class named in the config against the keys in the file",
    reads=("draft_config", "draft_headers"),
    rule="an EAGLE-3 file needs LlamaForCausalLMEagle3, or Eagle3DeepseekV2ForCausalLM for low-rank projections",
    fix="correct architectures in config.json",
    symptom="a key error in the plain loader, or a model that has no fc at all",
)
def weights_class(facts: Facts) -> Iterator[Finding]:
    """The target's class, or the other attention's class, over EAGLE-3 keys."""
    inventory, draft = take(facts), draft_of(facts)
    given = draft.architecture
    if inventory is None or draft.speculators:
        return
    if given is None:
        if inventory.whole and draft.hidden and draft.vocab:
            needed = EAGLE3_MLA if inventory.mla else EAGLE3_LLAMA
            yield warning("architectures", f"architectures is missing, {needed} is needed", given=None, needed=needed)
        return
    plain = [name.removeprefix(inventory.prefix) for name in inventory.headers]
    attention = any("self_attn." in name for name in plain)
    needed = EAGLE3_MLA if inventory.mla else EAGLE3_LLAMA
    evidence = [
        label
        for label, there in (
            ("fc.weight", "fc.weight" in plain),
            ("midlayer.*", any(name.startswith("midlayer.") for name in plain)),
            ("hidden_norm", any(name.endswith("hidden_norm.weight") for name in plain)),
            ("d2t", "d2t" in plain),
        )
        if there
    ]
    eagle3 = len(evidence) > 1 or "hidden_norm" in evidence
    # vLLM puts Eagle3 before the target's own class
    prefixed = f"Eagle3{given}" in VLLM_CLASSES and set(facts.engine_names()) <= {"vllm", "vllm-v2"}
    wrong_class = not draft.eagle3_class and eagle3 and not prefixed
    wrong_attention = draft.eagle3_class and attention and given in (EAGLE3_LLAMA, EAGLE3_MLA) and given != needed
    if wrong_class or wrong_attention:
        yield error(
            "architectures",
            f"architectures is {given}, the keys ({', '.join(evidence)}) are those of {needed}",
            actual=given,
            fix=f'"architectures": ["{needed}"]',
            given=given,
            needed=needed,
            evidence=evidence,
        )


@check(
    code="weights-dtype",
    title="stored dtype against the config",
    reads=("draft_config", "draft_headers"),
    rule="weights are cast when they are loaded; the config's dtype need not be the stored one",
    fix="write the stored dtype into config.json",
)
def weights_dtype(facts: Facts) -> Iterator[Finding]:
    """Told, never judged, except for integer weights without a quantization_config."""
    draft, headers = draft_of(facts), facts.mapping("draft_headers")
    said = draft.config.get("torch_dtype", draft.config.get("dtype", draft.layer.get("torch_dtype")))
    stored = sorted({d for n in headers if not names.is_map(n) and (d := names.dtype_of(headers, n))})
    name = str(said).removeprefix("torch.")
    if isinstance(said, str) and name in STORED_AS and stored and stored != [STORED_AS[name]]:
        told = ", ".join(stored)
        yield info("torch_dtype", f"stored {told}, config says {name}", actual=name, stored=stored, config=name)
    odd = sorted({d for d in stored if d[:1] in "IU" and not d.startswith("F")})
    if odd and not is_quantised(draft):
        yield warning(
            "draft weights",
            f"weights are stored as {', '.join(odd)} and config.json has no quantization_config",
            actual=odd,
            fix="export the draft in bf16",
        )
    bare = [name for name in headers if SMALL.match(str(names.dtype_of(headers, name))) and not _scales(name, headers)]
    if bare:
        kinds = ", ".join(sorted({str(names.dtype_of(headers, name)) for name in bare}))
        text = (
            f"{len(bare)} weights are stored as {kinds} without a scale beside them ({_some(bare)}): they are read as"
        )
        text += " they stand, with three bits or less behind the point"
        yield warning("draft weights", text, actual=bare[:20], fix="export the draft in bf16, or with its scales")


SMALL = re.compile(r"F[468](?:_|$)")
"""Dtypes of so few bits that weights fit them only over a scale."""


def _scales(name: str, headers: Mapping[str, Any]) -> bool:
    """Whether a scale stands beside the tensor, under any of its usual names, or it is one itself."""
    stem = name.removesuffix("weight").removesuffix("weight_packed")
    return "scale" in name or any(other.startswith(stem) and "scale" in other[len(stem) :] for other in headers)


@check(
    code="weights-fc-quantised",
    title="a quantised fc",
    reads=("draft_config", "draft_headers"),
    also=("target", "target_config", "serve_with"),
    rule="the fc of SGLang's LlamaForCausalLMEagle3 is a plain linear layer: no packed numbers and no scale are read",
    fix="leave fc out of the quantisation (ignore: fc) and export it in bf16",
    symptom=_SILENT,
)
def weights_fc_quantised(facts: Facts) -> Iterator[Finding]:
    """Packed: the key is dropped, fc stays as it was drawn; fp8: the numbers are taken without their scale."""
    inventory, draft = take(facts), draft_of(facts)
    if inventory is None or inventory.mla or not is_quantised(draft) or "sglang" not in facts.engine_names():
        return
    own = {name: names.strip_prefix(name) for name in inventory.headers}
    beside = sorted(
        name for name, bare in own.items() if bare.startswith("fc.") and bare not in ("fc.weight", "fc.bias")
    )
    if not beside:
        return
    kept = "fc.weight" in own.values()
    does = "takes its numbers without the scale" if kept else "finds no fc.weight and leaves fc as it was drawn"
    tell = error if facts.engine_names() == ("sglang",) else warning
    yield tell(
        "fc.weight", f"fc is quantised ({_some(beside)}): SGLang {does}, without a word", actual=beside, engine="sglang"
    )
