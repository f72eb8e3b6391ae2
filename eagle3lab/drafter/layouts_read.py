"""`config.json` of a drafter, of this lab or of another trainer, read into a `DraftConfig`.

What a key means depends on the reader: ids on the target's model file, `norm_output` on the trainer, an absent flag on
the engine. Everything that is decided here is a note; what two engines would read differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3lab.core.errors import CheckpointError
from eagle3lab.drafter.config import DraftConfig
from eagle3lab.drafter.layouts import LAYOUTS, MAPS, Layout
from eagle3lab.drafter.layouts_write import BLOCK, IDS, REPLACEABLE, raw_form, speculators_form
from eagle3lab.points import captured, family_of
from eagle3lab.targets.config import read_config as read_target
from eagle3lab.targets.config import text_config

MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Place:
    """The target that ids belong to: number of blocks and family; see `eagle3lab.points`."""

    blocks: int
    family: str


@dataclass
class Parsed:
    """A config.json, read.

    layout: of the file; the raw layouts cannot be told apart and read as `sglang` unless the lab wrote them.
    carried: keys that `DraftConfig` has no field for, under `raw` and `speculators`, and `maps`.
    notes: everything that was decided on the way, one sentence each.
    """

    config: DraftConfig
    layout: Layout
    carried: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_json_config(folder: Path) -> dict[str, Any]:
    """The object in `folder`/config.json; `CheckpointError` when there is none."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(raw, allow_nan=False)  # Python reads NaN and infinity, no engine's JSON has them
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"no config.json in {folder}", rule="a drafter is a folder with config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})", fix=f"eagle3lab doctor {folder}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}", rule="config.json is an object")
    return raw


def parse_config(
    folder: Path, *, target: Path | None = None, family: str | None = None, blocks: int | None = None
) -> Parsed:
    """Read a drafter's config, of this lab or of another trainer.

    Args:
        target: folder (or config.json) of the target; its family and blocks decide what the ids mean.
        family, blocks: the same without a target. Needed only where the lab's own block is absent.

    Raises:
        CheckpointError: no config, a size that is missing or contradicts, or ids that two engines read differently.
    """
    raw = read_json_config(folder)
    path = folder / "config.json"
    try:
        return _Reader(path, raw, target, family, blocks).parsed()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the sizes together"
        raise CheckpointError(f"{path}: {where}: {first['msg']}", fix=f"eagle3lab doctor {folder}") from error


class _Reader:
    def __init__(
        self, path: Path, raw: dict[str, Any], target: Path | None, family: str | None, blocks: int | None
    ) -> None:
        self.path, self.raw = path, raw
        self.notes: list[str] = []
        self.speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
        self.block = self._object(raw, BLOCK)
        self.eagle = self._object(raw, "eagle_config")
        self.layer = self._object(raw, "transformer_layer_config") if self.speculators else raw
        self.place = self._place(target, family, blocks)

    def parsed(self) -> Parsed:
        raw, layer = self.raw, self.layer
        self._refuse_unknown_forms()
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if layer.get(name) is None:
                raise self._error(f"has no {name}", rule="sizes are not guessed")
        width, vocabulary = self._size(layer, "hidden_size", 0), self._size(layer, "vocab_size", 0)
        mla = self._mla()
        heads, theta, scaling = self._size(layer, "num_attention_heads", 0), *self._rope()
        head_dim = self._size(layer, "head_dim", width // heads)
        marks = self._flags()
        config = DraftConfig(
            architecture="llama" if mla is None else "mla",
            hidden_size=width,
            target_hidden_size=self._size(raw, "target_hidden_size", width),
            points=self._points(),
            target_blocks=self.place.blocks,
            target_family=self.place.family,
            intermediate_size=self._size(layer, "intermediate_size", 0),
            num_attention_heads=heads,
            num_key_value_heads=self._size(layer, "num_key_value_heads", heads),
            head_dim=head_dim if mla is None else mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
            vocab_size=vocabulary,
            draft_vocab_size=self._size(raw, "draft_vocab_size", vocabulary),
            rms_norm_eps=self._default("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=self._default("max_position_embeddings", 2048 if mla is None else 4096),
            mla=mla,
            **marks,
        )
        if raw.get("num_aux_hidden_states") not in (None, len(config.points)):
            raise self._error(
                f"has num_aux_hidden_states {raw['num_aux_hidden_states']}", rule=f"its ids are {len(config.points)}"
            )
        noted = self.block.get("layout")
        layout: Layout = "speculators" if self.speculators else noted if noted in LAYOUTS else "sglang"
        return Parsed(config, layout, self._carried(config), self.notes)

    def _refuse_unknown_forms(self) -> None:
        layers = self.layer.get("num_hidden_layers", 1)
        if layers != 1:
            raise self._error(f"has num_hidden_layers {layers}", rule="this lab holds drafters of one layer")
        if not self._flag(self.eagle, "use_aux_hidden_state", True):
            raise self._error("has use_aux_hidden_state false", rule="engines then skip fc: not an EAGLE-3 drafter")
        for name in ("bias", "attention_bias", "mlp_bias"):
            if self._flag(self.layer, name):
                raise self._error(f"has {name} true", rule="this lab holds drafters without biases")
        kind = self.layer.get("model_type", "llama")
        if self.speculators and kind != "llama":
            raise self._error(f"has a {kind} layer", rule="only llama layers are read (qwen3 adds q_norm and k_norm)")
        if self.speculators and self.raw.get("speculators_model_type", "eagle3") != "eagle3":
            raise self._error(f"is a {self.raw['speculators_model_type']} speculator", rule="eagle3 is read")
        if self.layer.get("hidden_act", "silu") != "silu":
            raise self._error(f"has hidden_act {self.layer['hidden_act']!r}", rule="drafters use silu")

    def _mla(self) -> dict[str, int] | None:
        classes = self.raw.get("architectures") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self._error(f"has architectures {str(classes)[:40]!r}", rule="a list of class names")
        named = any(name.startswith("Eagle3Deepseek") for name in classes)
        if not named and "kv_lora_rank" not in self.layer:
            return None
        if missing := [name for name in MLA_SIZES if self.layer.get(name) is None]:
            raise self._error(f"is an MLA drafter without {', '.join(missing)}", rule="SGLang needs all of them")
        return {name: self._size(self.layer, name, 0) for name in MLA_SIZES}

    def _rope(self) -> tuple[float, dict[str, Any] | None]:
        layer = self.layer
        parameters = dict(self._object(layer, "rope_parameters"))
        inner, outer = parameters.pop("rope_theta", None), layer.get("rope_theta")
        if inner is not None and outer is not None and inner != outer:
            raise self._error(f"has rope_theta {outer} and {inner}", rule="rope_parameters and rope_theta must agree")
        theta = inner if inner is not None else outer
        if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float)):
            raise self._error(f"has rope_theta {theta!r}", rule="a number")
        if theta is None:
            theta = 10000.0
            self.notes.append("no rope_theta: 10000, the default of transformers, which engines use")
        scaling = self._object(layer, "rope_scaling") or parameters or None
        if scaling is not None and scaling.get("rope_type", scaling.get("type", "default")) == "default":
            scaling = None
        return float(theta), None if scaling is None else {k: v for k, v in scaling.items() if k != "rope_theta"}

    def _flags(self) -> dict[str, bool]:
        raw = self.raw
        if self.speculators and "norm_before_residual" not in raw:
            raise self._error(
                "has no norm_before_residual", rule="vLLM then takes true and speculators false: write the one you mean"
            )
        output = self._flag(self.block, "norm_output", self._flag(raw, "norm_output"))
        if output and not self.block and not self.speculators and "kv_lora_rank" not in self.layer:
            self.notes.append(
                "norm_output true is read as SGLang and vLLM do (the post-norm state is fed back); "
                "in a SpecForge config it only means the final norm before the head"
            )
        return {
            "fc_norm": self._flag(raw, "fc_norm") or self._flag(raw, "use_aux_norm"),
            "norm_before_fc": self._flag(self.eagle, "norm_before_fc", self._flag(raw, "norm_before_fc")),
            "norm_before_residual": self._flag(raw, "norm_before_residual"),
            "norm_output": output,
        }

    def _place(self, target: Path | None, family: str | None, blocks: int | None) -> Place:
        found: dict[str, tuple[Any, Any]] = {}
        if target is not None:
            config = read_target(target)
            found["the target"] = (text_config(config).get("num_hidden_layers"), family_of(config))
        found["the config"] = (self.block.get("target_blocks"), self.block.get("target_family"))
        for source, (n, name) in found.items():
            if blocks is not None and n is not None and blocks != n:
                raise self._error(f"belongs to a target of {blocks} blocks, {source} says {n}", rule="the two agree")
            blocks, family = (n if blocks is None else blocks), (name if family is None else family)
        if family is not None and not isinstance(family, str):
            raise self._error(f"has target_family {str(family)[:40]!r}", rule="a name, such as llama")
        if blocks is None or family is None:
            raise self._error(
                "does not say which target its ids belong to",
                rule="ids mean different layers in different targets",
                fix="add --target DIR, or --family NAME --blocks N",
            )
        return Place(blocks, family)

    def _points(self) -> list[int]:
        lists = {"vllm": self.raw.get(IDS)}
        if not self.speculators:
            lists["sglang"] = self.eagle.get(IDS)
        readings: dict[str, list[int]] = {}
        for engine, ids in lists.items():
            if ids is None:
                continue
            if not isinstance(ids, list):
                raise self._error(f"has ids {ids!r}", rule="a list of layer numbers")
            found = captured(ids, blocks=self.place.blocks, engine=engine, family=self.place.family)
            if found.refused or len(found.resid_pre) != len(ids):
                raise self._error(f"has ids {ids}", rule=found.notes[-1] if found.notes else f"{engine} refuses them")
            readings[engine] = found.resid_pre
            if found.ambiguous:
                self.notes.append(f"ids {ids}: {found.notes[-1]}")
        if not readings:
            found = captured(None, blocks=self.place.blocks, engine="vllm", family=self.place.family)
            readings["default"] = found.resid_pre
            self.notes.append(f"no ids: the engines' default points {found.resid_pre}")
        if (noted := self.block.get("resid_pre")) is not None:
            if not isinstance(noted, list) or not all(type(point) is int for point in noted):
                raise self._error(f"has resid_pre {str(noted)[:40]!r}", rule="a list of layer numbers")
            readings["its own record"] = noted
        if len({tuple(points) for points in readings.values()}) > 1:
            text = ", ".join(f"{name} {points}" for name, points in readings.items())
            raise self._error(f"has ids that mean different points: {text}", rule="both engines capture the same")
        return list(next(iter(readings.values())))

    def _default(self, name: str, value: Any) -> Any:
        if self.layer.get(name) is None:
            self.notes.append(f"no {name}: {value}, the default of transformers, which engines use")
            return value
        return self.layer[name]

    def _carried(self, config: DraftConfig) -> dict[str, Any]:
        """Keys of the source that its own writer would not produce from `config`."""
        skip = {BLOCK, IDS, "eagle_config", "dtype", "torch_dtype", "use_aux_norm", "head_dim"}
        if self.speculators:
            ours = speculators_form(config, None, "")
            own = {k: v for k, v in self.raw.items() if k not in ours and k not in skip}
            inner = ours["transformer_layer_config"]
            layer = {k: v for k, v in self.layer.items() if k not in inner and k not in skip}
            own |= {"transformer_layer_config": layer} if layer else {}
            if outer := self._object(self.raw, "speculators_config"):
                self._object(outer, "verifier")
                own |= {"speculators_config": outer}
        else:
            ours = raw_form(config, "sglang", "")
            own = {k: v for k, v in self.raw.items() if k not in ours and k not in skip}
            replaceable = REPLACEABLE if config.architecture == "mla" else REPLACEABLE[:2]
            own |= {k: self.raw[k] for k in replaceable if self.raw.get(k) not in (None, ours[k])}
            eagle = {k: v for k, v in self.eagle.items() if k not in ("use_aux_hidden_state", "norm_before_fc", IDS)}
            own |= {"eagle_config": eagle} if eagle else {}
        earlier = self._object(self.block, "carried")
        for name in ("raw", "speculators"):
            self._object(earlier, name)
        maps = earlier.get("maps", [])
        if not isinstance(maps, list) or not all(str(name) in MAPS for name in maps):
            raise self._error(f"has carried maps {str(maps)[:40]!r}", rule=f"a list of {', '.join(MAPS)}")
        return {**earlier, **({("speculators" if self.speculators else "raw"): own} if own else {})}

    def _size(self, source: Mapping[str, Any], name: str, otherwise: int) -> int:
        """The size `name` of `source`, or `otherwise` when it is absent or null."""
        value = source.get(name)
        if value is None:
            return otherwise
        if type(value) is not int or value < 1:
            raise self._error(f"has {name} {str(value)[:40]!r}", rule="a whole number above 0")
        return value

    def _flag(self, source: Mapping[str, Any], name: str, otherwise: bool = False) -> bool:
        """The flag `name` of `source`, or `otherwise` when it is absent or null. Text is refused: "false" is true."""
        value = source.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self._error(f"has {name} {str(value)[:40]!r}", rule="true or false")
        return value

    def _object(self, source: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = source.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._error(f"has {name} {str(value)[:40]!r}", rule="an object")
        return value

    def _error(self, what: str, *, rule: str = "", fix: str = "") -> CheckpointError:
        return CheckpointError(f"{self.path} {what}", rule=rule, fix=fix)
