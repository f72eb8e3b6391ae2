"""A target with random weights in a true architecture: `kind = "random"` in a profile's `[source]`.

The `[config]` section is the text config that transformers and engines read. Weights come from the profile's seed alone
and are written under the names of the public checkpoint.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.core.errors import ProfileError
from eagle3lab.core.files import require_space
from eagle3lab.targets.fetch import write_target_manifest
from eagle3lab.targets.profiles import Profile

if TYPE_CHECKING:
    import transformers

    from eagle3lab.targets.model import Target

CHAT_TEMPLATE = Path(__file__).with_name("templates") / "kimi_k25.jinja"
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
"""Names of Kimi-K2.5's control tokens; their ids here follow the 256 bytes."""
THINK_TOKENS = ("<think>", "</think>")


def build_random_target(profile: Profile, folder: Path, note: Callable[[str], None] = print) -> None:
    """Write config, tokenizer, weights and target manifest into `folder`.

    Raises:
        ProfileError: no `[config]`, no seed, a vocabulary smaller than the tokenizer, or a family without a builder.
    """
    import torch
    import transformers

    numbers, tokenizer = _parts(profile)
    with torch.device("meta"):
        config = kimi_config(numbers, tokenizer)
        count = sum(p.numel() for p in transformers.Kimi_K25ForConditionalGeneration(config).parameters())
    require_space(folder, count * getattr(torch, profile.model.dtype).itemsize, f"building {profile.name}")
    note(f"drawing {count / 1e6:.0f} M random parameters with seed {profile.source.seed}")
    model = _draw(profile, numbers, tokenizer, profile.model.dtype)
    model.save_pretrained(folder, max_shard_size="1GB")
    del model
    for path in folder.glob("*.safetensors"):
        _public_names(path)
    tokenizer.save_pretrained(folder)
    _for_engines(folder / "config.json", profile.config or {})
    write_target_manifest(folder, profile, {"parameters": count})
    note(f"target ready: {profile.model.id}, {count / 1e6:.0f} M parameters")


def draw_target(profile: Profile, **thinner: int) -> Target:
    """The same target in memory, in float32, nothing written; `thinner` replaces numbers of its `[config]`.

    Raises:
        ProfileError: as `build_random_target`.
    """
    import transformers

    from eagle3lab.targets.model import Target
    from eagle3lab.targets.slots import ATTENTION, grouped_attention

    numbers, tokenizer = _parts(profile)
    transformers.AttentionInterface.register(ATTENTION, grouped_attention)
    return Target(_draw(profile, numbers | thinner, tokenizer, "float32", ATTENTION), tokenizer)


def _parts(profile: Profile) -> tuple[dict[str, Any], Any]:
    """`[config]` of a profile that can be drawn, and its tokenizer."""
    if profile.config is None or profile.source.seed is None:
        raise ProfileError(f"profile '{profile.name}' needs [config] and source.seed", rule="kind = 'random'")
    if profile.model.family != "kimi_k25":
        raise ProfileError(f"family '{profile.model.family}' has no random builder", rule="known: kimi_k25")
    tokenizer = kimi_tokenizer(profile.model.context)
    if len(tokenizer) > profile.model.vocab_size:
        raise ProfileError(
            f"vocab_size {profile.model.vocab_size} of '{profile.name}'",
            rule=f"the tokenizer has {len(tokenizer)} tokens",
        )
    return profile.config, tokenizer


def _draw(profile: Profile, numbers: dict[str, Any], tokenizer: Any, dtype: str, attention: str | None = None) -> Any:
    """A fresh model, calmed, with the tokenizer's end token. The seed of the profile alone decides its weights."""
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(profile.source.seed or 0)
        model = transformers.Kimi_K25ForConditionalGeneration._from_config(
            kimi_config(numbers, tokenizer), dtype=getattr(torch, dtype), attn_implementation=attention
        )
    _calm(model.model.language_model, numbers)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    return model


def kimi_config(numbers: dict[str, Any], tokenizer: Any) -> transformers.Kimi_K25Config:
    """transformers' config of Kimi-K2.5 from a profile's `[config]`: text numbers flat, `vision_config` nested."""
    import transformers

    text = copy.deepcopy(numbers)  # transformers writes into what it is given
    vision = text.pop("vision_config")
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return transformers.Kimi_K25Config(
        text_config={**text, **ends, "pad_token_id": tokenizer.pad_token_id},
        vision_config=vision,
        projection_hidden_size=vision["hidden_size"],
        image_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        video_token_id=numbers["vocab_size"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|media_begin|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|media_end|>"),
        tie_word_embeddings=False,
        dtype=numbers["dtype"],
        **ends,
    )


def kimi_tokenizer(context: int) -> Any:
    """A byte-level tokenizer with Kimi-K2.5's control tokens, think tokens and chat turns: every text can be written.

    Ids 0 to 255 are the bytes, then `SPECIAL_TOKENS`, then `THINK_TOKENS`.
    """
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    # As in the true tokenizer, think tokens survive decoding without special tokens.
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in THINK_TOKENS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        unk_token="[UNK]",
        pad_token="[PAD]",
        model_max_length=context,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def _calm(text: Any, numbers: dict[str, Any]) -> None:
    """Scale a fresh model so that 61 random blocks keep a residual stream near 1 instead of amplifying rounding.

    Embeddings of standard deviation 1, and what a block adds divided by sqrt(2n) (as GPT-2 starts). Plain random
    weights turn the last bit of fp32 into differences of 4e-4 at block 58: enough to hide a wrong rank.
    """
    import torch

    with torch.no_grad():
        text.embed_tokens.weight.div_(numbers["initializer_range"])
        for name, weight in text.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight.mul_((2 * numbers["num_hidden_layers"]) ** -0.5)


def _public_names(path: Path) -> None:
    """Give the text model's blocks their public name again, `layers`.

    transformers 5.24 reads `blocks` of the vision tower as `layers`, and turns every `layers` into `blocks` when it
    writes. It reads both; engines read `layers` in the text model.
    """
    from safetensors.torch import load_file, save_file

    wrong, right = "language_model.model.blocks.", "language_model.model.layers."
    tensors = load_file(path)
    if any(name.startswith(wrong) for name in tensors):
        renamed = {name.replace(wrong, right, 1): tensor for name, tensor in tensors.items()}
        temporary = path.with_suffix(".renamed")
        save_file(renamed, temporary, metadata={"format": "pt"})
        temporary.replace(path)


def _for_engines(path: Path, numbers: dict[str, Any]) -> None:
    """Add the keys and names that engines read in the public checkpoint's config and transformers does not write."""
    config = json.loads(path.read_text(encoding="utf-8"))
    text, vision = config["text_config"], config["vision_config"]
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["media_placeholder_token_id"] = config["image_token_id"]
    text.update({name: numbers.get(name) for name in ("rope_theta", "rope_scaling")})
    text["architectures"] = ["DeepseekV3ForCausalLM"]
    names = {
        "vt_hidden_size": "hidden_size",
        "vt_intermediate_size": "intermediate_size",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_num_hidden_layers": "num_hidden_layers",
        "mm_hidden_size": "hidden_size",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    }
    vision.update({theirs: vision[ours] for theirs, ours in names.items()})
    vision["text_hidden_size"] = text["hidden_size"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
