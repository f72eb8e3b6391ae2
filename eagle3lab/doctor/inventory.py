"""Tensors of a draft file sorted into loaded, unknown and missing, as each engine's loader would. No findings here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3lab.doctor import tensor_names as names
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.launch import parse_args
from eagle3lab.doctor.views import Draft, Target, draft_of, target_of

NOT_EAGLE = ("DFLASH", "DSPARK", "UNO", "STANDALONE", "NGRAM")
"""SGLang's algorithms whose drafts are of another make."""


@dataclass(frozen=True)
class Inventory:
    """What is in the file.

    Fields:
        headers: as in the file. canonical: file name -> canonical name (`midlayer.` for the layer).
        required: canonical name -> shape, None for unknown sizes. mla: the file is of the MLA draft.
        unknown: file names that no loader knows and that no prefix explains, adapters and maps left out.
        adapters: low-rank adapter names.
        survivors: d2t and t2d under a prefix, which SGLang still finds.
        missing: canonical names that must be there and are not, behind the prefix neither.
        fused: fused tensors that stand for several.
        prefix: the prefix that hides most unknown names, "" when there is none. behind: file names that it hides.
        hidden: canonical names that must be there and stand behind the prefix.
        quantised: the config declares a quantisation, so that scales and packed weights are read.
        whole: the file is a drafter, not a piece of one, so that missing names mean something.
        layer_alias: number of tensors named layers.0.* instead of midlayer.*.
        lost: engine -> names in the file that it does not read and another judged engine does.
        unset: engine -> canonical names that it needs, another judged engine does not, and the file has not.
        layers: numbers of the decoder layers in the file.
    """

    headers: dict[str, Any]
    canonical: dict[str, str]
    required: dict[str, tuple[int | None, ...]]
    mla: bool
    unknown: list[str]
    adapters: list[str]
    survivors: list[str]
    missing: list[str]
    fused: list[str]
    prefix: str
    behind: list[str]
    hidden: list[str]
    quantised: bool
    whole: bool
    layer_alias: int
    lost: dict[str, list[str]]
    unset: dict[str, list[str]]
    layers: set[int]

    def shape(self, canonical: str) -> list[int] | None:
        """Shape of the tensor with this canonical name; None when it is absent, or packed and says nothing."""
        for name, known in self.canonical.items():
            if known == canonical:
                return None if names.is_packed(self.headers, name) else names.shape_of(self.headers, name)
        return None

    def file_name(self, canonical: str) -> str:
        """Its name in the file (the canonical one when it is not there)."""
        return next((name for name, known in self.canonical.items() if known == canonical), canonical)

    def all_quiet(self, file_names: list[str]) -> bool:
        """Whether vLLM drops all of these without a word, where it refuses what it does not know.

        It ignores a bias that a module it has was built without, and the map under its own inner name, unless d2t
        is there too.
        """
        tensors = set(self.canonical.values())
        mapped = any("d2t" in name for name in self.headers)
        return all(
            (name.endswith(".bias") and self.canonical[name].removesuffix("bias") + "weight" in tensors)
            or (names.is_unread_map(name) and not mapped)
            for name in file_names
        )


def is_mla(headers: dict[str, Any], draft: Draft) -> bool:
    """Whether the tensors are those of the MLA draft; without attention tensors the config's class decides."""
    if any("kv_a_proj" in name or "kv_b_proj" in name for name in headers):
        return True
    return draft.mla and not any(".q_proj." in name or ".k_proj." in name for name in headers)


def is_other_method(facts: Facts, headers: dict[str, Any]) -> bool:
    """Whether the file is a draft of another method, which other rules hold for.

    EAGLE-1/2 says so by its class. A draft that is launched as one of `NOT_EAGLE` and has no sign of EAGLE-3 beside a
    wide fc (DFlash has one too) is that.
    """
    draft = draft_of(facts)
    marks = any("hidden_norm" in name for name in headers)
    named = (draft.architecture or "").lower()
    if "eagle" in named and "eagle3" not in named:
        return not marks
    if marks or draft.eagle3_class or draft.nested_ids or draft.top_ids or not facts.has("launch_args"):
        return False
    if any(names.is_map(name) or name.startswith("midlayer.") for name in headers):
        return False
    algorithm = parse_args(facts["launch_args"]).value("speculative-algorithm")
    return algorithm is not None and algorithm.upper() in NOT_EAGLE


def is_quantised(draft: Draft) -> bool:
    """Whether the config declares a quantisation (the reader puts hf_quant_config.json where engines put it)."""
    keys = ("quantization_config", "compression_config")
    return any(place.get(key) for place in (draft.config, draft.layer) for key in keys)


def take(facts: Facts) -> Inventory | None:
    """The inventory of `draft_headers`; None when no headers were given."""
    headers = facts.mapping("draft_headers")
    if not headers:
        return None
    draft, target = draft_of(facts), target_of(facts)
    mla = is_mla(headers, draft)
    # vLLM puts `model.` before every name itself: one that has it already is refused
    engines = {name.split("-")[0] for name in facts.engine_names()}
    quantised = is_quantised(draft)
    spelling = {"model_prefix": not mla and engines != {"vllm"}, "quantised": quantised}
    canonical = names.canonical_names(headers, **spelling)
    layers = {index for name in canonical.values() if (index := names.layer_index(name)) is not None}
    needs: dict[str, dict[str, tuple[int | None, ...]]] = {}
    knows: dict[str, set[str]] = {}
    for engine in sorted(engines):
        needs[engine], knows[engine] = _of_engine(draft, target, mla, engine, layers)
    needed_by_all = set.intersection(*map(set, needs.values()))
    required = {name: shape for one in needs.values() for name, shape in one.items() if name in needed_by_all}
    known = set().union(*knows.values())
    unread, adapters, survivors = _sort(headers, canonical, known, draft)
    present = {canonical[name] for name in headers} - {canonical[name] for name in unread}
    fused, covered = _fused(present)
    have = present | covered
    prefix = _prefix(unread, lambda rest: names.canonical_names([rest], **spelling)[rest] in known)
    behind = [name for name in unread if prefix and name.startswith(prefix)]
    stripped = names.canonical_names([name.removeprefix(prefix) for name in behind], **spelling)
    explained = {name for name in behind if stripped[name.removeprefix(prefix)] in known}
    found = {stripped[name.removeprefix(prefix)] for name in explained}
    found |= _fused(found)[1]
    return Inventory(
        headers=headers,
        canonical=canonical,
        required=required,
        mla=mla,
        unknown=[name for name in unread if name not in explained],
        adapters=adapters,
        survivors=survivors,
        missing=[name for name in required if name not in have | found],
        fused=fused,
        prefix=prefix,
        behind=behind,
        hidden=[name for name in required if name in found - have],
        quantised=quantised,
        whole=_is_whole(list(headers)),
        layer_alias=sum(name.removeprefix("model.").startswith("layers.0.") for name in headers),
        lost={engine: sorted(n for n in headers if canonical[n] in known - knows[engine]) for engine in knows},
        unset={engine: [n for n in needs[engine] if n not in needed_by_all | have | found] for engine in needs},
        layers=layers,
    )


def _of_engine(
    draft: Draft, target: Target | None, mla: bool, engine: str, layers: set[int]
) -> tuple[dict[str, tuple[int | None, ...]], set[str]]:
    """(what the engine's class needs, all names that its loader knows), for the layers that are in the file."""
    first = _required(draft, target, mla, engine) | names.bias_shapes(draft, engine, mla=mla)
    if draft.eagle3_class:
        first |= names.head_norms(draft, engine, mla=mla)
    optional = names.optional_names(draft, engine, mla=mla)
    required, known = dict(first), set(first) | optional
    count = 1 if mla and engine == "sglang" else (draft.size("num_hidden_layers") or 1)
    for index in sorted(layer for layer in layers if 0 < layer < count):
        required |= names.later_layer(first, index, draft, engine)
        known |= {f"layers.{index}.{inner}" for name in known if (inner := names.layer_name(name)) is not None}
    return required, known


def _fused(present: set[str]) -> tuple[list[str], set[str]]:
    """(fused tensors in the file, the tensors that they stand for), in every layer."""
    fused = [name for name in sorted(present) if names.fused_parts(name)]
    return fused, {part for name in fused for part in names.fused_parts(name)}


def _required(draft: Draft, target: Target | None, mla: bool, engine: str) -> dict[str, tuple[int | None, ...]]:
    required = names.expected_shapes(draft, target, mla=mla)
    borrows_head = "draft_vocab_size" in draft.config and draft.config["draft_vocab_size"] is None
    tied = bool(draft.config.get("tie_word_embeddings"))  # `config-tied-head`
    tied = tied and (_full(draft) or engine == "sglang")
    if borrows_head or tied:
        del required["lm_head.weight"]
    if mla and draft.size("q_lora_rank") is None and draft.config:
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj"):
            del required[f"midlayer.self_attn.{name}.weight"]
        required["midlayer.self_attn.q_proj.weight"] = (None, None)
    return required


def _full(draft: Draft) -> bool:
    """Whether the draft predicts the whole vocabulary, so that it needs no map."""
    return draft.draft_vocab in (None, draft.vocab)


def _sort(
    headers: dict[str, Any], canonical: dict[str, str], known: set[str], draft: Draft
) -> tuple[list[str], list[str], list[str]]:
    unknown: list[str] = []
    adapters: list[str] = []
    survivors: list[str] = []
    quantised, full = is_quantised(draft), _full(draft)
    for name in headers:
        if names.is_adapter(name):
            adapters.append(name)
        elif canonical[name] in known or names.is_buffer(name) or (quantised and names.is_scale(name)):
            continue
        elif full and names.is_unread_map(name):
            continue  # without a reduced vocabulary nobody needs it
        elif names.is_map(name) and not names.is_unread_map(name):
            survivors += [name] if "." in name else []
        else:
            unknown.append(name)
    return unknown, adapters, survivors


def _prefix(unread: list[str], is_known: Callable[[str], bool]) -> str:
    """The prefix whose removal makes most unread names known: at least half of them, and more than one.

    A prefix over the layer alone, with other names unknown beside it, is no wrapper's: all were renamed.
    """
    votes: Counter[str] = Counter()
    for name in unread:
        cuts = [cut + 1 for cut, letter in enumerate(name) if letter == "."]
        votes.update(name[:cut] for cut in cuts if is_known(name[cut:]))
    if not votes:
        return ""
    best = max(votes, key=lambda prefix: (votes[prefix], len(prefix)))
    behind = [name.removeprefix(best) for name in unread if name.startswith(best)]
    layer_only = all(names.layer_name(names.strip_prefix(name)) is not None for name in behind)
    if votes[best] < 2 or votes[best] * 2 < len(unread) or (layer_only and len(behind) < len(unread)):
        return ""
    return best


def _is_whole(file_names: list[str]) -> bool:
    """A piece (one matrix, the maps, fc alone) says nothing about what is missing; a layer or fc with a head does."""
    layer = any(part in name for name in file_names for part in ("self_attn", "mlp.", "layernorm", "attention."))
    ends = {name.rsplit(".", 2)[-2] for name in file_names if "." in name}
    return layer or ("fc" in ends and bool(ends & {"norm", "lm_head"}))


def rename_hints(inventory: Inventory) -> dict[str, str]:
    """Prefix in the file -> prefix that the loader knows, for unknown names that end like missing ones."""
    hints: Counter[tuple[str, str]] = Counter()
    free = set(inventory.missing)
    left: list[str] = []
    for name in inventory.unknown:
        parts = name.split(".")
        tails = (".".join(parts[cut:]) for cut in range(1, len(parts) - 1))
        found = next(((t, m) for t in tails for m in sorted(free) if m.endswith("." + t)), None)
        if found is None:
            left.append(name)
            continue
        tail, missing = found
        free.discard(missing)
        hints[(name.removesuffix(tail), missing.removesuffix(tail))] += 1
    for name in left:
        if names.is_unread_map(name):
            if not any("d2t" in other for other in inventory.headers):
                hints[(name, name.removesuffix(names.UNREAD_MAP) + "d2t")] += 1
            continue
        # a shape alone tells a weight; vectors beside one (a bias) are as long as many others
        shape = names.shape_of(inventory.headers, name) if name.endswith(".weight") else None
        same = [m for m in sorted(free) if shape and m.endswith(".weight") and list(inventory.required[m]) == shape]
        if len(same) == 1:
            free.discard(same[0])
            hints[(name.removesuffix("weight"), same[0].removesuffix("weight"))] += 1
    return {old: new for (old, new), _ in hints.most_common()}
