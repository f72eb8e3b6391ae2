"""`manifest.json` of a folder of captured states: everything that decides what the numbers mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3lab.core.errors import StoreError
from eagle3lab.core.files import write_text

MANIFEST = "manifest.json"
SCHEMA: Final = "eagle3lab-states/1"


class Shard(BaseModel):
    """One `states-NNNNN.safetensors`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^states-\d{5,}\.safetensors$")
    sha256: str
    samples: int
    tokens: int


class StatesManifest(BaseModel):
    """The manifest. `planned_shards` fixes the split, so that a redone shard is the same shard."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal["eagle3lab-states/1"] = SCHEMA
    target_id: str
    target_revision: str | None = None
    target_weight_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    points: list[int] = Field(min_length=1)
    """`resid_pre` indices, ascending."""
    points_checkpoint: list[int]
    """The same points as written in a checkpoint for the target's own SGLang file."""
    blocks: int = Field(gt=0)
    family: str
    hidden_size: int = Field(gt=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    storage: Literal["plain", "int8"] = "plain"
    """`int8`: rounded, with one scale a row and point (`eagle3lab.capture.eight_bit`); samples are read in `dtype`."""
    last: Literal["post_norm", "pre_norm"]
    """Whether `last` was taken after or before the target's final norm."""
    engine: str
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    corpus_sha256: str
    greedy: bool
    """True when every reply is the target's own greedy text: then the next token is the target's choice."""
    seed: int
    planned_shards: int
    shards: list[Shard] = Field(default_factory=list)

    @property
    def width(self) -> int:
        """P * H, columns of `aux`."""
        return len(self.points) * self.hidden_size

    @property
    def samples(self) -> int:
        """Samples in finished shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in finished shards."""
        return sum(shard.tokens for shard in self.shards)

    def identity(self) -> dict[str, Any]:
        """All that must be equal for a resumed capture to be the same capture."""
        # Plain storage is left out: folders of the cache are named by this, and the field is younger than they are.
        return self.model_dump(exclude={"shards"} if self.storage == "int8" else {"shards", "storage"})

    def write(self, folder: Path) -> None:
        """Write atomically."""
        write_text(folder / MANIFEST, self.model_dump_json(indent=2) + "\n")


def read_manifest(folder: Path, name: str = MANIFEST) -> StatesManifest:
    """Read and check a manifest. `name`: of the file, another one beside states in a foreign form.

    Raises:
        StoreError: missing, not JSON, or a field that is unknown or of the wrong type (named).
    """
    path = folder / name
    try:
        return StatesManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise StoreError(
            f"no {name} in {folder}", rule="a folder of states has one", fix="eagle3lab capture"
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        reason = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(str(part) for part in reason["loc"]) or "the file"
        raise StoreError(
            f"{path}: {where}: {reason['msg']}", rule=f"schema {SCHEMA}", fix="capture into another folder"
        ) from error
