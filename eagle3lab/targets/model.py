"""A target in this process: loading with transformers, and forwards that return states instead of logits."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from eagle3lab.core.errors import FetchError, PointsError, UsageError, nearest
from eagle3lab.core.precision import slow_here
from eagle3lab.targets.slots import ATTENTION, SlotCache, causal_slot_mask, grouped_attention

COMPUTE_TYPES = ("float32", "bfloat16", "float16")
"""Types that a target can be loaded in."""


class Target:
    """A causal language model of transformers with the handles that EAGLE-3 needs.

    Attributes:
        model: the causal LM, in eval mode, gradients off.
        backbone: its decoder stack (text model for a multimodal one).
        blocks: n; hidden_size: H; vocab_size: V; context: positions it was made for, None = not said.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        backbone = model.model
        self.backbone: Any = getattr(backbone, "language_model", backbone)
        self.layers: nn.ModuleList = self.backbone.layers
        self.blocks = len(self.layers)
        self.head: nn.Linear = model.get_output_embeddings()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        text = model.config.get_text_config()  # not the head's shape: over several ranks each holds a part of it
        self.vocab_size, self.hidden_size = text.vocab_size, text.hidden_size
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        parameters = inspect.signature(self.backbone.forward).parameters
        self._forward = threading.Lock()
        # transformers 5.24 renamed the argument; the old name warns from then on
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that the forwards run in."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.weight.device

    @property
    def final_norm(self) -> Any:
        """The norm between the last block and the head."""
        return self.backbone.norm

    @property
    def eos_ids(self) -> list[int]:
        """Token ids that end a reply."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.model.config.get_text_config().eos_token_id if ids is None else ids
        return list(ids) if isinstance(ids, list | tuple) else [int(ids)]

    def limits(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
        """Most new tokens of every prompt: a reply also ends where prompt and reply fill the context.

        Raises:
            UsageError: an empty prompt, or one that leaves no room in the context.
        """
        room = [max_new_tokens if self.context is None else self.context - len(prompt) for prompt in prompts]
        for number, (prompt, left) in enumerate(zip(prompts, room, strict=True)):
            if not prompt or left < 1:
                raise UsageError(
                    f"prompt {number} has {len(prompt)} tokens",
                    rule=f"1 or more, and below the context of {self.context or 'unknown size'}",
                    fix="shorten or drop it",
                )
        return [min(max_new_tokens, left) for left in room]

    def release_blocks(self) -> None:
        """Let go of the blocks' memory; embedding, final norm and head stay. There are no forwards from then on."""
        self.backbone.layers = self.layers = nn.ModuleList()

    @torch.inference_mode()
    def states(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        cache: SlotCache | None = None,
        mask: Tensor | None = None,
        points: list[int] | None = None,
        pre_norm: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """One forward without logits.

        Args:
            input_ids: int64 [B, q].
            positions: int64 [B, q] rotary positions; None = 0..q-1 (no cache).
            cache: slots already placed by the caller, or None for a whole sequence at once.
            mask: bool [B, 1, q, visible] with a cache; None = plain causal over the q tokens.
            points: `resid_pre` indices to return.
            pre_norm: return the last state before the final norm instead of after it.

        Returns:
            last state [B, q, H], and one `resid_pre` [B, q, H] per point, in the order given.
        """
        wanted = points or []
        if any(not 0 <= point < self.blocks for point in wanted):
            raise PointsError(f"points {wanted} of a target with {self.blocks} blocks", rule="0 <= point < blocks")
        if not self.layers:
            raise UsageError("forward of a target whose blocks were released", fix="load_target(folder) loads it again")
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options[self._cache_name] = cache
        if mask is not None:
            options["attention_mask"] = mask
        if positions is not None:
            options["position_ids"] = positions
        # One at a time: a hook sees every forward of its module, so another thread's states would be taken for ours.
        with self._forward:
            seen: dict[int, Tensor] = {}
            handles = [
                self.layers[point].register_forward_pre_hook(_keeper(seen, point), with_kwargs=True) for point in wanted
            ]
            if pre_norm:
                keep = _keeper(seen, self.blocks)
                handles.append(self.final_norm.register_forward_pre_hook(keep, with_kwargs=True))
            try:
                output = self.backbone(input_ids=input_ids, **options)
            finally:
                for handle in handles:
                    handle.remove()
        return seen[self.blocks] if pre_norm else output.last_hidden_state, [seen[point] for point in wanted]

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Head of the target on post-norm states [..., H]: float32 logits [..., V]."""
        return self.head(last).float()

    def prefill(
        self,
        cache: SlotCache,
        input_ids: Tensor,
        start: Tensor,
        rows: Tensor | None = None,
        points: list[int] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run new tokens of some rows through the cache, causally.

        Args:
            input_ids: int64 [rows, q]; start: int64 [rows], position of each row's first new token.
            rows: slots of the cache, None = all.
        """
        positions = start[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        visible = int(positions.max()) + 1
        cache.place(positions, visible, rows)
        return self.states(input_ids, positions, cache, causal_slot_mask(positions, visible), points)


def _keeper(seen: dict[int, Tensor], point: int) -> Any:
    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[point] = args[0] if args else kwargs["hidden_states"]

    return keep


def load_target(
    folder: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    options: dict[str, Any] | None = None,
) -> Target:
    """Load a target from a local folder; the network is never asked.

    Args:
        options: more keywords for `from_pretrained`; with them the weights stay where it put them
            (`eagle3lab.targets.ranks` splits the target over processes this way).

    Raises:
        FetchError: the folder is missing or is not a transformers model.
        UsageError: a dtype that is none of `COMPUTE_TYPES`.
    """
    if dtype not in COMPUTE_TYPES:
        raise UsageError(f"'{dtype}' is no type to compute in", rule=nearest(dtype, COMPUTE_TYPES))
    if device == "cpu" and not options and (slow := slow_here(dtype)):
        warnings.warn(f"{slow}; float32 is there too", stacklevel=2)
    import transformers

    transformers.AttentionInterface.register(ATTENTION, grouped_attention)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        # A multimodal target such as Kimi-K2.5 is no "causal LM" to transformers; its language model is `backbone`.
        images = type(config) in transformers.AutoModelForImageTextToText._model_mapping
        kind = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
        model: Any = kind.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            local_files_only=True,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            **(options or {}),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise FetchError(
            f"{folder} cannot be loaded as a target: {str(error).splitlines()[0]}",
            fix="eagle3lab fetch --profile smollm2",
        ) from error
    return Target(model if options else model.to(device), tokenizer)
