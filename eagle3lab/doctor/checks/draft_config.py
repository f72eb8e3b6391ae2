"""Keys of a draft's config.json: what each engine reads, ignores or breaks on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import (
    EAGLE3_LLAMA,
    EAGLE3_MLA,
    VLLM_CLASSES,
    draft_of,
    mapping,
    real,
    target_of,
    text_of,
    whole,
)

_SIZES = (
    *(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    ),
    *("vocab_size", "draft_vocab_size", "target_hidden_size", "max_position_embeddings", "num_aux_hidden_states"),
)

_OF_TARGET = ("hidden_size", "vocab_size", "max_position_embeddings")

_SWITCHES = (
    *("tie_word_embeddings", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "norm_before_residual"),
    *("attention_bias", "mlp_bias", "bias"),
)
"""Keys that are true or false; `fc-bypass` tells the same of use_aux_hidden_state."""
_UNTIE = '"tie_word_embeddings": false in config.json, or leave lm_head.weight out'


def serves(facts: Facts, name: str) -> bool:
    """Whether this engine is judged."""
    return name in facts.engine_names()


@check(
    code="config-values",
    title="sizes in config.json are positive whole numbers",
    reads=("draft_config|target|target_config",),
    also=("draft_config", "target", "target_config"),
    rule="a size is a whole number above 0, rope_theta a number above 0; null only where a key may be null",
    fix="correct the value in config.json",
)
def config_values(facts: Facts) -> Iterator[Finding]:
    """A text, a fraction, NaN or a negative number where a size belongs."""
    draft = draft_of(facts)
    for key in _SIZES:
        value = draft.layer.get(key, draft.config.get(key))
        number = whole(value)
        if value is not None and (number is None or number < 1):
            yield error(key, f"{key} is {_shown(value)}, a whole number above 0 is needed", actual=value)
    flat, config = facts.mapping("target"), text_of(facts.mapping("target_config"))
    for part, keys in ((flat, ("blocks", *_OF_TARGET)), (config, ("num_hidden_layers", *_OF_TARGET))):
        for key, value in ((key, part.get(key)) for key in keys):
            if value is not None and (whole(value) or 0) < 1:
                text = f"{key} of the target is {repr(value)[:40]}, a whole number above 0 is needed"
                yield error(f"target {key}", text, actual=value, fix="correct the value in the target's config.json")
    epsilon = draft.layer.get("rms_norm_eps")
    if epsilon is not None and (real(epsilon) is None or not 0 < float(epsilon) < 1):
        yield error(
            "rms_norm_eps", f"rms_norm_eps is {_shown(epsilon)}, needed: a small positive number", actual=epsilon
        )
    for place, settings in (("", draft.layer), ("rope_parameters.", mapping(draft.layer.get("rope_parameters")))):
        theta = settings.get("rope_theta")
        base = real(theta)
        if theta is not None and (base is None or base <= 0):
            text = f"{place}rope_theta is {_shown(theta)}, a number above 0 is needed"
            yield error("rope_theta", text, actual=theta, fix="write rope_theta as a number, as the draft was trained")
    for key, value in ((key, draft.layer.get(key, draft.config.get(key))) for key in _SWITCHES):
        if isinstance(value, str):
            tell = warning if value.strip().lower() in ("true", "1", "yes") else error
            text = f"{key} is the text {value[:40]!r}, which counts as true"
            yield tell(key, text, actual=value, fix=f"write {key} as true or false, without quotes")


def _shown(value: Any) -> str:
    """The value for a message; a text in quotes, so that '3' is not taken for 3."""
    return (repr(value) if isinstance(value, str) else str(value))[:40]


@check(
    code="config-norm-before-residual",
    title="norm_before_residual and who reads it",
    reads=("draft_config",),
    also=("serve_with",),
    rule="SGLang never reads norm_before_residual; vLLM does, at top level only; speculators format: another default",
    fix="serve it with vLLM, or train with norm_before_residual false",
    symptom="acceptance is low: the draft is served with the un-normed residual that it was not trained on",
)
def norm_before_residual(facts: Facts) -> Iterator[Finding]:
    """True is lost in SGLang; absent means two things in the speculators format."""
    draft = draft_of(facts)
    key = "norm_before_residual"
    if draft.speculators:
        if draft.config.get(key) is None and (serves(facts, "vllm") or serves(facts, "vllm-v2")):
            yield warning(
                "norm_before_residual",
                "norm_before_residual is absent: vLLM takes true for the speculators format, the training class false",
                fix="write norm_before_residual explicitly, as it was trained",
                vllm_default=True,
                class_default=False,
            )
        return
    written = draft.written(key)
    tell = error if facts.chosen else warning
    if written and serves(facts, "sglang"):
        yield tell(
            "norm_before_residual",
            "norm_before_residual is true and SGLang never reads it: served with the un-normed residual",
            actual=True,
            value=True,
            engine_reads_it=False,
            effect="served with the un-normed residual",
        )
    elif written and written != key:
        yield tell(
            key,
            f"{written} is true, and vLLM reads {key} at top level only: served with the un-normed residual",
            actual=True,
            fix=f'"{key}": true at top level of config.json',
            value=True,
            engine_reads_it=False,
            effect="served with the un-normed residual",
        )


@check(
    code="config-format",
    title="config format that the engine cannot load",
    reads=("draft_config",),
    also=("serve_with", "launch_args"),
    rule="the speculators format is read by vLLM; SGLang needs architectures and flat keys",
    fix="eagle3lab convert SRC DST --to sglang",
)
def config_format(facts: Facts) -> Iterator[Finding]:
    """speculators format under SGLang; and the width it really stands for."""
    draft, target = draft_of(facts), target_of(facts)
    if not draft.speculators:
        return
    if facts.chosen and serves(facts, "sglang"):
        yield error(
            "speculators_model_type",
            "the config is in the speculators format, which SGLang cannot load",
            actual=draft.config.get("speculators_model_type"),
        )
    yield info(
        "target_hidden_size",
        f"speculators format: states are {draft.target_hidden(target)} wide",
        effective_target_hidden=draft.target_hidden(target),
    )


@check(
    code="config-class",
    title="class that the engine does not have",
    reads=("draft_config",),
    also=("serve_with", "launch_args"),
    rule="SGLang 0.5.23 has two EAGLE-3 classes: LlamaForCausalLMEagle3 and Eagle3DeepseekV2ForCausalLM",
    fix="write the class that SGLang has into architectures; vLLM knows both names too",
    symptom="SGLang falls back to the transformers backend, which has no EAGLE-3 draft, and stops",
)
def config_class(facts: Facts) -> Iterator[Finding]:
    """An EAGLE-3 class name that only vLLM knows, or none does."""
    draft = draft_of(facts)
    given = draft.architecture
    if draft.speculators or not given or "eagle3" not in given.lower() or given in (EAGLE3_LLAMA, EAGLE3_MLA):
        return
    strange = given not in VLLM_CLASSES
    if serves(facts, "sglang") or strange:
        needed = EAGLE3_MLA if "deepseek" in given.lower() else EAGLE3_LLAMA
        tell = error if facts.chosen or strange else info
        lacking = "SGLang 0.5.23" if serves(facts, "sglang") else "vLLM"
        lacking = "neither SGLang nor vLLM has" if strange and not facts.chosen else f"{lacking} does not have"
        text = f"architectures is {given}, which {lacking}: {needed} is needed"
        yield tell(
            "architectures", text, actual=given, fix=f'"architectures": ["{needed}"]', given=given, needed=needed
        )


@check(
    code="config-mla-rank",
    title="latent-attention draft without q_lora_rank",
    reads=("draft_config",),
    also=("serve_with", "launch_args"),
    rule="SGLang's Eagle3DeepseekV2ForCausalLM needs q_lora_rank; vLLM's also builds a plain q_proj",
    fix="write q_lora_rank, or serve with vLLM",
    symptom="a value error while the draft model is built",
)
def mla_rank(facts: Facts) -> Iterator[Finding]:
    """Only where the other rank is written: a few keys are no whole config."""
    draft = draft_of(facts)
    if draft.mla and draft.size("kv_lora_rank") and not draft.size("q_lora_rank") and serves(facts, "sglang"):
        tell = error if facts.chosen else warning
        yield tell("q_lora_rank", "q_lora_rank is not written: SGLang refuses the draft", actual=None)


@check(
    code="config-tied-head",
    title="head tied to the embedding",
    reads=("draft_config",),
    also=("draft_headers", "target", "target_config", "serve_with", "launch_args"),
    rule="with tie_word_embeddings true SGLang takes the embedding for a head and drops lm_head.weight; vLLM does not",
    fix='"tie_word_embeddings": false in config.json',
    symptom="logits come from rows 0.. of the embedding while d2t maps them to other tokens: zero acceptance",
)
def tied_head(facts: Facts) -> Iterator[Finding]:
    """A reduced vocabulary cannot be tied; a full one can, and its own head in the file is then not read."""
    draft, target = draft_of(facts), target_of(facts)
    if not draft.config.get("tie_word_embeddings") or draft.speculators or not serves(facts, "sglang"):
        return
    vocab, reduced = draft.vocab or (target.vocab if target else None), draft.draft_vocab
    headers = facts.mapping("draft_headers")
    head = next((name for name in headers if name.endswith("lm_head.weight")), None)
    told: dict[str, Any] = {"tie_word_embeddings": True, "draft_vocab_size": reduced, "vocab_size": vocab}
    if reduced and vocab and reduced < vocab:
        tell = error if facts.chosen or (headers and head is None) else warning
        dropped = f"{head} is dropped without a word, " if head else ""
        yield tell(
            "tie_word_embeddings",
            f"tie_word_embeddings is true with a draft vocabulary of {reduced} of {vocab}: in SGLang {dropped}logits "
            f"come from the first {reduced} rows of the embedding",
            actual=True,
            **told,
        )
    elif head and "draft_vocab_size" in draft.config:
        text = f"tie_word_embeddings is true: SGLang takes the embedding for a head and drops {head} without a word"
        yield warning("tie_word_embeddings", text, actual=True, fix=_UNTIE, **told)


@check(
    code="config-target-hidden-null",
    title="target_hidden_size is null",
    reads=("draft_config",),
    also=("serve_with",),
    rule="engines multiply target_hidden_size by the number of states whenever the key is there; leave it out",
    fix="delete target_hidden_size from config.json",
    symptom="a type error while the draft model is built",
)
def target_hidden_null(facts: Facts) -> Iterator[Finding]:
    """Null is not absent; in the speculators format null is right."""
    draft = draft_of(facts)
    null = "target_hidden_size" in draft.config and draft.config["target_hidden_size"] is None
    # SGLang's latent-attention draft alone takes hidden_size instead
    failing = [name for name in facts.engine_names() if not (draft.mla and name == "sglang")]
    if null and not draft.speculators and failing:
        tell = error if facts.chosen else warning
        who = " and ".join(dict.fromkeys("SGLang" if name == "sglang" else "vLLM" for name in failing))
        yield tell(
            "target_hidden_size",
            f"target_hidden_size is null: null times the number of states fails when {who} builds the model",
            value=None,
            effect="null times the number of states fails when the model is built; leave the key out",
        )


@check(
    code="config-draft-vocab-missing",
    title="draft_vocab_size is missing",
    reads=("draft_config",),
    also=("draft_headers", "serve_with", "launch_args", "target", "target_config"),
    rule="SGLang's Llama draft needs the key draft_vocab_size; null borrows the target's head, missing fails",
    fix="write draft_vocab_size into config.json",
    symptom="an attribute error while the draft model is built",
)
def draft_vocab_missing(facts: Facts) -> Iterator[Finding]:
    """Only for a whole Llama EAGLE-3 config; without weights beside it, it is a trainer's input."""
    draft = draft_of(facts)
    if draft.architecture != EAGLE3_LLAMA or "draft_vocab_size" in draft.config or not serves(facts, "sglang"):
        return
    head = next((e for n, e in facts.mapping("draft_headers").items() if n.endswith("lm_head.weight")), None)
    rows = head[1][0] if isinstance(head, list) and len(head) == 2 and head[1] else None
    size = rows or draft.vocab
    trainer_input = not any(facts.has(name) for name in ("draft_headers", "serve_with", "launch_args"))
    text = f"draft_vocab_size is missing; write {size}, or null to borrow the head of the target"
    if trainer_input:
        yield info("draft_vocab_size", f"{text} (a trainer's input: its exporter fills it in)", needed=size)
    else:
        tell = error if facts.chosen else warning
        yield tell("draft_vocab_size", text, needed=size)


@check(
    code="config-vocabulary",
    title="draft built for another target vocabulary",
    reads=("draft_config", "target|target_config"),
    rule="vocab_size of the draft is the target's; no engine checks it",
    fix="take the draft that was trained for this target",
    symptom="drafted ids mean other tokens: zero acceptance, nothing logged",
)
def vocabulary(facts: Facts) -> Iterator[Finding]:
    """A small difference can be padding; a large one is another tokenizer."""
    draft, target = draft_of(facts).vocab, (target := target_of(facts)) and target.vocab
    if not draft or not target or draft == target:
        return
    tell = error if abs(draft - target) > 0.02 * target else warning
    yield tell(
        "vocab_size",
        f"vocab_size of the draft is {draft}, of the target {target}",
        actual=draft,
        draft=draft,
        target=target,
        difference=draft - target,
    )


@check(
    code="config-oddities",
    title="odd and right: head widths, norm epsilon, the target's text settings",
    reads=("draft_config|target|target_config",),
    also=("draft_config", "target", "target_config"),
    rule="heads x head_dim need not be hidden_size, and a draft's epsilon need not be the target's",
    fix="nothing to do",
)
def oddities(facts: Facts) -> Iterator[Finding]:
    """Values worth knowing that are no faults."""
    draft, target = draft_of(facts), target_of(facts)
    heads, dim, hidden = draft.size("num_attention_heads"), draft.head_dim, draft.hidden
    if heads and dim and hidden and not draft.mla and heads * dim != hidden:
        yield info(
            "head_dim",
            f"{heads} heads x {dim} = {heads * dim}, hidden_size {hidden}: right, o_proj is {[hidden, heads * dim]}",
            heads_times_head_dim=heads * dim,
            hidden_size=hidden,
            o_proj=[hidden, heads * dim],
        )
    eps = real(draft.layer.get("rms_norm_eps"))
    if eps and target and target.eps and eps != target.eps:
        yield info(
            "rms_norm_eps",
            f"rms_norm_eps of the draft is {eps:g}, of the target {target.eps:g}: each norm uses its own",
            draft=eps,
            target=target.eps,
        )
    if facts.has("target_config") and target and target.blocks:
        nested = " (from text_config)" if mapping(facts.mapping("target_config").get("text_config")) else ""
        yield info(
            "target",
            f"target: {target.blocks} blocks, hidden {target.hidden}, vocabulary {target.vocab}{nested}",
            blocks=target.blocks,
            hidden_size=target.hidden,
            vocab_size=target.vocab,
            family=target.family or "unknown",
        )


@check(
    code="fc-bypass",
    title="aux capture is off, or fc is stepped over",
    reads=("draft_config|draft_config_ids",),
    also=("draft_config", "draft_config_ids", "draft_headers", "target", "target_config", "launch_args"),
    rule="fc runs only when the captured width differs from the embedding width",
    fix="set eagle_config.use_aux_hidden_state to true and capture three layers",
    symptom="accept length near 1.00, nothing logged",
)
def fc_bypass(facts: Facts) -> Iterator[Finding]:
    """use_aux_hidden_state false, or one state exactly as wide as the embedding."""
    draft, target = draft_of(facts), target_of(facts)
    if "eagle" in (draft.architecture or "").lower() and not draft.eagle3_class:
        return  # EAGLE-1 and 2 read one state and have no such switch
    head = next((e for n, e in facts.mapping("draft_headers").items() if n.endswith("fc.weight")), None)
    shape = head[1] if isinstance(head, list) and len(head) == 2 and isinstance(head[1], list) else []
    fc_in = whole(shape[1]) if len(shape) == 2 else None
    hidden = draft.hidden or (whole(shape[0]) if fc_in else None)
    state = draft.target_hidden(target)
    if "use_aux_hidden_state" in draft.eagle:
        value = draft.eagle["use_aux_hidden_state"]
        if not value:
            yield error(
                "eagle_config.use_aux_hidden_state",
                f"eagle_config.use_aux_hidden_state is {str(value).lower()}: one {state}-wide state reaches the draft, "
                f"fc ({fc_in or draft.states * (state or 0)} columns) is not applied",
                actual=value,
                value=value,
                effect=f"one {state}-wide state reaches the draft, fc is not applied",
                captured_width=state,
                fc_in=fc_in,
            )
            return
        if isinstance(value, str):
            yield warning(
                "eagle_config.use_aux_hidden_state",
                f"eagle_config.use_aux_hidden_state is the text {value!r}, which counts as true",
                actual=value,
                fix="write true or false without quotes",
            )
    ids = draft.nested_ids if draft.nested_ids is not None else draft.given_ids
    if ids is None and "vllm" in facts.engine_names():
        ids = draft.top_ids
    if ids is None or len(set(ids)) != 1 or not state or not hidden or not serves(facts, "sglang"):
        return
    if state == hidden:
        tell = error if facts.chosen else warning
        yield tell(
            "fc.weight",
            f"a single {state}-wide state (ids {ids}) equals the embedding width, so SGLang steps over fc",
            actual=ids,
            fix="capture at least two layers, three is what every trainer does",
            ids=ids,
            captured_width=state,
            fc_in=fc_in,
            embed_width=hidden,
        )
    else:
        yield info(
            "fc.weight",
            f"one {state}-wide state is not the embedding width {hidden}: fc runs",
            ids=ids,
            captured_width=state,
            fc_in=fc_in,
            embed_width=hidden,
        )
