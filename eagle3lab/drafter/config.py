"""What an EAGLE-3 drafter is made of: sizes, capture points and variant flags."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DraftConfig(BaseModel):
    """Shape and flags of a drafter. H is its width, Ht the target's, P the number of points.

    The four norm flags are written out in every checkpoint, because the field uses one of the names
    (`norm_output`) with two meanings; ours is speculators', vLLM's and SGLang's: feed the post-norm state back.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    architecture: Literal["llama", "mla"] = "llama"
    hidden_size: int = Field(gt=0)
    target_hidden_size: int = Field(gt=0)
    points: list[int] = Field(min_length=1)
    """`resid_pre` indices that fc reads, ascending; see `eagle3lab.points`."""
    target_blocks: int = Field(gt=0)
    target_family: str
    """Model file of the target in the engines; decides how the ids are written."""
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    rope_theta: float = Field(default=10000.0, gt=0, allow_inf_nan=False)
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = Field(default=4096, gt=0)
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm per H-wide chunk before fc."""
    norm_before_fc: bool = False
    """One RMSNorm over all P*Ht inputs of fc."""
    norm_before_residual: bool = False
    """The residual takes the normed state. SGLang 0.5.23 never reads this flag."""
    norm_output: bool = False
    """Feed the post-norm state to the next step (EAGLE-3.1), not the pre-norm one."""
    mla: dict[str, int] | None = None
    """Latent-attention sizes (q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)."""

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads are not a multiple of {self.num_key_value_heads} key/value heads"
            )
        if sorted(set(self.points)) != self.points:
            raise ValueError(f"points {self.points} must ascend: fc's columns are low, mid, high")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} is larger than the target's {self.vocab_size}")
        if (self.architecture == "mla") != (self.mla is not None):
            raise ValueError("an mla drafter needs its latent sizes, a llama drafter has none")
        return self

    @property
    def fc_in(self) -> int:
        """P * Ht, columns of fc."""
        return len(self.points) * self.target_hidden_size
